"""The Hopper kernel of the expert gate, with its launcher and the catalog of its shapes."""
