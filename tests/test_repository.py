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


COMPILERS = ("torch.compile", "torch.export.export", "compiled_autograd._enable")


def compiles(node: ast.AST) -> bool:
    """Whether a node calls torch's compiler, or is a module's own `compile`, which takes the options of torch's."""
    if not isinstance(node, ast.Call):
        return False
    options = {keyword.arg for keyword in node.keywords}
    is_method = isinstance(node.func, ast.Attribute) and node.func.attr == "compile"
    return ast.unparse(node.func) in COMPILERS or (is_method and bool(options & {"backend", "fullgraph"}))


def unmarked_tests_that_compile(source: str) -> set[str]:
    """Return the tests that compile, also by a function of their file, and are not marked `oldest_torch`."""
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    names = {name: {n.id for n in ast.walk(f) if isinstance(n, ast.Name)} for name, f in functions.items()}
    compiling = {name for name, f in functions.items() if any(map(compiles, ast.walk(f)))}
    while further := {name for name in functions.keys() - compiling if names[name] & compiling}:
        compiling |= further
    marked = {name for name, f in functions.items() if "oldest_torch" in map(last_name, f.decorator_list)}
    return {name for name in compiling - marked if name.startswith("test")}


def last_name(decorator: ast.expr) -> str:
    return ast.unparse(decorator).rpartition(".")[2]


def test_what_compiles_runs_with_the_oldest_torch_too():
    files = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    found = {
        f"{path.relative_to(ROOT)}::{name}"
        for path, source in files.items()
        if "compile" in source or "torch.export" in source  # others need not be parsed
        if "gpu" not in path.parts  # which CI skips
        for name in unmarked_tests_that_compile(source)
    }
    assert not found, "mark them oldest_torch: CI would run them with the newest torch alone"


def test_a_test_that_compiles_through_a_function_is_found():
    source = """
def call(model): return torch.compile(model)
def test_found(): call(model)
def test_own(): model.compile(backend="eager")
@pytest.mark.oldest_torch
def test_marked(): torch.export.export(model, ())
def test_other(): re.compile("a")
"""
    assert unmarked_tests_that_compile(source) == {"test_found", "test_own"}
