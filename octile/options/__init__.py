"""The command line's options: the fields of a dataclass, read from words, explained, and named in messages.

fields.py   a dataclass as a list of options, and the markers of its annotations
parse.py    from words to `Given`, and from there to the dataclass
values.py   a word as the value of an annotation
names.py    the fields that a message names, as options
help.py     the help of a command
command.py  a command, and a group of commands

No other package is used. argparse is not, because it gives errors as text alone, takes a value such as -1e-3 for an
option, and fails on an option between two positional arguments where the second may be left out.
"""

from octile.options.command import Command, CommandGroup
from octile.options.fields import Hidden, Named, Positional, Refused
from octile.options.help import Section
from octile.options.parse import Given
from octile.options.values import OptionError

__all__ = ["Command", "CommandGroup", "Given", "Hidden", "Named", "OptionError", "Positional", "Refused", "Section"]
