"""What is computed: `octile::` operators, each with its CPU reference (the specification), fake and GPU kernel."""
