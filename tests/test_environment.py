"""docs/environment.md is the page that the tool writes, with every variable that octile reads and no others."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tools import write_environment as tool

ROOT = Path(__file__).parent.parent


def is_environ(node: ast.expr) -> bool:
    return ast.unparse(node) == "os.environ"


def arguments(tree: ast.AST) -> Iterator[ast.expr]:
    """The expressions by which a module reads variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            reads = node.func.attr in ("get", "pop", "setdefault") and is_environ(node.func.value)
            if reads or ast.unparse(node.func) == "os.getenv":
                yield node.args[0]
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and is_environ(node.value):
            yield node.slice
        elif isinstance(node, ast.Compare) and any(map(is_environ, node.comparators)):
            yield node.left


def pattern(argument: ast.expr, constants: dict[str, str]) -> str | None:
    """A regular expression of the names that an expression has; None if it is the argument of a function."""
    if isinstance(argument, ast.Name):
        return re.escape(constants[argument.id]) if argument.id in constants else None
    if isinstance(argument, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else r"\w+" for part in argument.values)
        return "".join(map(str, parts))
    assert isinstance(argument, ast.Constant), f"the test does not know what {ast.unparse(argument)} names"
    return re.escape(argument.value)


def patterns_of(source: str) -> set[str]:
    tree = ast.parse(source)
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, str)
    }
    return {found for argument in arguments(tree) if (found := pattern(argument, constants)) is not None}


def test_the_tool_lists_the_variables_that_octile_reads_and_no_others():
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "octile").rglob("*.py"))
    read = set().union(*(patterns_of(source) for source in sources if "environ" in source or "getenv" in source))
    listed = tool.names()
    missing = {name for name in read if not any(re.fullmatch(name, one) for one in listed)}
    assert not missing, "tools/write_environment.py must have an entry for each"
    assert not {one for one in listed if not any(re.fullmatch(name, one) for name in read)}, "octile does not read them"


def test_the_page_is_up_to_date():
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(), "call `python -m tools.write_environment`"


def test_variables_are_found_in_every_form():
    source = """
import os
NAME = "BY_A_CONSTANT"
os.environ.get("BY_GET"), os.environ["BY_INDEX"], os.environ.setdefault("BY_DEFAULT", "1"), os.getenv("BY_GETENV")
os.environ.get(NAME), "BY_IN" in os.environ, os.environ.get(f"BY_PART_{part}")
os.environ["SET"] = "1"
"""
    found = {"BY_GET", "BY_INDEX", "BY_DEFAULT", "BY_GETENV", "BY_A_CONSTANT", "BY_IN", r"BY_PART_\w+"}
    assert patterns_of(source) == found
