"""The page of all command-line options is the one that the tool writes."""

import pytest

from octile.options.fields import options_of
from tools import write_options as tool


def test_the_page_is_up_to_date():
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(), "call `python -m tools.write_options`"


@pytest.mark.parametrize("name", [name for name, _ in tool.commands()])
def test_the_page_has_every_option_of_a_command(name):
    part = tool.page().partition(f"## octile {name}\n")[2].partition("\n## ")[0]
    options = options_of(dict(tool.commands())[name].load().Options)
    assert [option.path for option in options if f"| `{option.usage}` |" not in part] == []
