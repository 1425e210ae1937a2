"""Tests of what is tracked, and of what is packed into the sdist."""

import ast
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_nothing_that_a_command_writes_again_is_tracked():
    command = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not tracked, "git rm --cached them, or write in .gitignore that they are no command's output"


def test_the_sdist_holds_the_package_its_readme_and_its_license():
    build = PYPROJECT["tool"]["hatch"]["build"]["targets"]
    assert sorted(build["sdist"]["only-include"]) == ["LICENSE", "README.md", *build["wheel"]["packages"]]


def test_the_version_to_cite_is_that_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], citation["license"]) == (
        PYPROJECT["project"]["version"],
        PYPROJECT["project"]["license"],
    )


def test_the_classifiers_are_what_the_workflow_tests():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    job = workflow["jobs"]["test"]
    prefixes = ("Programming Language :: Python :: 3.", "Operating System :: ")
    claimed = {name for name in PYPROJECT["project"]["classifiers"] if name.startswith(prefixes)}
    pythons = {f"Programming Language :: Python :: {version}" for version in job["strategy"]["matrix"]["python"]}
    assert job["runs-on"] == "ubuntu-latest"
    assert claimed == {*pythons, "Operating System :: POSIX :: Linux"}


def names_no_encoding(call: ast.Call) -> bool:
    """Whether a call reads or writes text in the encoding of the user's locale."""
    if any(keyword.arg == "encoding" for keyword in call.keywords):
        return False
    is_method = isinstance(call.func, ast.Attribute)
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in ("read_text", "write_text"):  # of a Path; the functions of these names write UTF-8
        return is_method and len(call.args) < (1 if name == "read_text" else 2)
    modes = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
    if name == "open" and is_method:
        return any(mode in ("r", "w", "a", "x") for mode in modes)
    return name in ("open", "fdopen") and not any("b" in str(mode) for mode in modes)


@pytest.mark.parametrize("folder", ["octile", "tools", "examples"])
def test_text_is_read_and_written_in_utf_8_whatever_the_locale(folder):
    sources = {path: path.read_text("utf-8") for path in (ROOT / folder).rglob("*.py")}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, source in sources.items()
        if "open" in source or "_text" in source  # others call nothing of these names, and need not be parsed
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and names_no_encoding(node)
    ]
    assert not found
