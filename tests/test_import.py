"""Tests of `import octile`: it is cheap, needs no optional package, and every public name exists and is documented."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from graphlib import TopologicalSorter
from importlib.resources import files
from pathlib import Path

import pytest

import octile
from octile.extras import EXTRAS, require
from octile.models.config import ModelConfig
from octile.tokenizer import Tokenizer
from tests.fresh_python import run_python
from tests.serve.models import save_untrained

STATEMENTS = ("body", "orelse", "finalbody", "handlers", "cases")  # fields that hold statements, or what holds them
HEAVY = (
    "torch",
    "numpy",
    "matplotlib",
    "jinja2",
    "tensorboard",
    "triton",
    "transformers",
    "tokenizers",
    "rich",
)

OPTIONAL = (
    *("matplotlib", "jinja2", "tensorboard", "tokenizers", "rich", "filelock"),
    *("fastapi", "uvicorn", "prometheus_client", "openai", "httpx", "playwright"),
    *("transformers", "triton", "cuda", "datasets"),
)
WITHOUT_OPTIONAL = f"""
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
for name in list(sys.modules):  # torch may have imported them
    if name.partition(".")[0] in {OPTIONAL}:
        del sys.modules[name]
"""


def loaded_by(statement: str) -> set[str]:
    """Return the modules that are loaded in a new interpreter, in which torch is, after a statement."""
    ended = run_python(f"import sys; {statement}; print(*sys.modules)")
    ended.check_returncode()
    return set(ended.stdout.split())


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    program = "import sys, octile; octile.__version__; dir(octile); print(*sys.modules)"
    return set(
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    )


@pytest.mark.parametrize("module", HEAVY)
def test_importing_octile_does_not_load(loaded, module):
    assert module not in loaded


def test_quantizing_loads_no_drawing_and_no_training():
    loaded = loaded_by("import octile; octile.quantize, octile.Recipe, octile.convert")
    late = {"matplotlib", "jinja2", "tensorboard", "transformers", "tokenizers", "octile.report", "octile.train"}
    assert loaded & late == set()


def test_serving_loads_no_training_and_no_compiler(tmp_path):
    folder = save_untrained(replace(ModelConfig.tiny(), vocab_size=320), Tokenizer.train(["one two"], 258), tmp_path)
    loaded = loaded_by(
        "import octile.parallel.device, octile.serve.http.serve_folder\n"
        "from octile.serve.generate import generate_from\n"
        f"list(generate_from({str(folder)!r}, 'one', octile.serve.engine.request.Sampling(2, ignore_eos=True)))"
    )
    assert loaded & {"octile.train", "torch._dynamo", "sympy"} == set()


def test_training_loads_no_compiler():
    loaded = loaded_by("import octile.train.command, octile.train.loop, octile.plan.layout")
    assert loaded & {"torch._dynamo", "torch._inductor", "sympy", "torch.distributed.pipelining"} == set()


def without_optional(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The program in a fresh interpreter in which no optional package is installed."""
    command = [sys.executable, "-c", WITHOUT_OPTIONAL + program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_core_needs_no_optional_package(tmp_path):
    program = """
import torch
import octile, octile.optim
from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import DeepseekV3
octile.dequantize(octile.quantize(torch.randn(128, 256), block=(1, 128)))
layer = octile.convert(torch.nn.Sequential(torch.nn.Linear(256, 128)), recipe=octile.Recipe.deepseek_v3())
layer(torch.randn(128, 256)).sum().backward()
tiny = ModelConfig.tiny()
octile.save(DeepseekV3(tiny), sys.argv[1], weights="fp8")
octile.load(sys.argv[1])(torch.zeros(1, 8, dtype=torch.int64))
"""
    ended = run_python(WITHOUT_OPTIONAL + program, str(tmp_path / "model"))
    assert (ended.returncode, "skipped 0" in ended.stderr, "Error" in ended.stderr) == (0, True, False)


@pytest.mark.parametrize(
    ("program", "line"),
    [
        (
            "octile.report.page.render('run.html.jinja')",
            'octile\'s reports need jinja2: pip install "octile[report]"',
        ),
        (
            "octile.report.style.save_drawing('a.svg', 1, 1, None)",
            'octile\'s reports need matplotlib: pip install "octile[report]"',
        ),
        (
            "octile.tokenizer.Tokenizer.train([], 512)",
            'octile\'s training and command line need tokenizers: pip install "octile[train]"',
        ),
        (
            "octile.report.console",
            'octile\'s training and command line need rich: pip install "octile[train]"',
        ),
    ],
)
def test_a_missing_package_is_reported_with_its_extra(program, line):
    module = program.partition("(")[0].rpartition(".")[0] if "(" in program else program
    module = "octile.tokenizer" if "tokenizer" in module else module
    ended = without_optional(f"import {module}; {program}")
    assert ended.returncode != 0
    assert ended.stderr.splitlines()[-1] == f"ImportError: {line}"


@pytest.mark.parametrize("command", ["train", "compare", "generate", "convert", "bench", "doctor"])
def test_a_command_without_its_packages_ends_with_one_line(command):
    ended = without_optional("from octile.cli import main; main(sys.argv[1:])", command)
    line = 'octile: octile\'s training and command line need rich: pip install "octile[train]"\n'
    assert (ended.stdout, ended.stderr, ended.returncode) == ("", line, 2)


def test_the_lab_without_its_packages_ends_with_one_line():
    ended = without_optional("from octile.cli import main; main(sys.argv[1:])", "lab")
    assert ended.stderr == 'octile: octile\'s numerics lab needs rich: pip install "octile[lab]"\n'
    assert ended.returncode == 2


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_need_no_optional_package(option):
    ended = without_optional("from octile.cli import main; main(sys.argv[1:])", option)
    assert (ended.stderr, ended.returncode) == ("", 0)


@pytest.mark.parametrize("extra", EXTRAS)
def test_what_is_installed_is_not_reported_as_missing(extra):
    require("torch", "torch.nn", extra=extra)
    with pytest.raises(ImportError, match=rf'no_such_package, torch\.none\.sub: pip install "octile\[{extra}\]"'):
        require("no_such_package", "torch", "torch.none.sub", extra=extra)


@pytest.mark.parametrize("name", octile.__all__)
def test_every_public_name_is_there_and_documented(name):
    assert getattr(octile, name).__doc__


ROOMS = (
    *("formats", "recipe", "ops", "scaled", "nn", "models", "optim", "checkpoint", "parallel"),
    *("report", "train", "serve", "lab", "plan", "bench", "compat", "integrations"),
)


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_are_attributes(room):
    assert octile.__getattr__(room).__name__ == f"octile.{room}"  # also where nothing else has imported the room


def test_names_of_rooms_are_found_after_import_octile():
    loaded = loaded_by("import octile; octile.serve.rebalance_experts, octile.parallel.shard_experts, octile.plan")
    assert "octile.serve.ranks.placement" in loaded


@pytest.mark.parametrize("package", [octile, octile.checkpoint, octile.parallel, octile.report, octile.serve])
def test_public_names_can_be_listed(package):
    assert set(package.__all__) <= set(dir(package))


def test_the_modules_of_nn_are_not_hidden_by_functions():
    for name in ("functional", "linear", "conversion"):
        assert getattr(octile.nn, name).__name__ == f"octile.nn.{name}"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'octile' has no attribute 'quantise'"):
        _ = octile.quantise


def test_the_package_says_that_it_is_typed():
    assert files("octile").joinpath("py.typed").is_file()


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """The module and all statements in it, without their expressions, which are most nodes and import nothing."""
    found: list[ast.AST] = [tree]
    for node in found:
        yield node
        found.extend(inner for field in STATEMENTS for inner in getattr(node, field, ()) if isinstance(inner, ast.AST))


def imports_of_modules() -> dict[str, set[str]]:
    """The modules of octile that each module of octile imports: at once, in a function, or for its annotations."""
    package = Path(octile.__file__).parent
    paths = {".".join(p.relative_to(package.parent).with_suffix("").parts): p for p in package.rglob("*.py")}
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    imported: dict[str, set[str]] = {name: set() for name in paths}
    for name, path in paths.items():  # one tree at a time: garbage collections would look at all
        for node in statements(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                imported[name] |= {alias.name for alias in node.names} & paths.keys()
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules = {f"{node.module}.{alias.name}" for alias in node.names}
                imported[name] |= {module if module in paths else node.module for module in modules} & paths.keys()
    return imported


def test_no_module_imports_itself_through_others():
    imported = imports_of_modules()
    assert sum(map(len, imported.values())) > 1000
    TopologicalSorter(imported).prepare()  # raises CycleError, which names the modules
