"""`python -m octile`."""

from octile.cli import main

main()
