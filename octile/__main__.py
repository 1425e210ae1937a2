"""The entry point of `python -m octile`."""

from octile.cli import main

main()
