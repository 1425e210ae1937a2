"""The entry point of the command `octile`, and of `python -m octile`."""

from octile.signals import end_at_signals


def main() -> None:
    """Run a command, whose imports signals can interrupt, too."""
    end_at_signals()
    from octile.cli import main as run

    run()


if __name__ == "__main__":
    main()
