"""Messages name fields as Python spells them, and options as they are typed; a command shows fields as its options."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import octile
from octile import cli
from octile.options import CommandGroup, Given
from octile.options.names import option_names, with_options

PACKAGE = Path(octile.__file__).parent
OTHERS = {
    "--nnodes",
    "--nproc-per-node",
    "--max-restarts",
    "--help",
    "--help-all",
    "--version",
    "--local-dir",
}  # the first three: torchrun's; the last: hf's
OWN_OPTIONS = (  # vLLM's, NVRTC's, git's, …
    "bench/serve/peer/vllm.py", "kernels", "lab/probe", "lab/promotion.py", "report/machine.py", "report/svg.py",
)  # fmt: skip
OPTION = re.compile(r"(?<![\w-])--[a-z][\w.-]*\w(?!\w|\.\{)")
CONFIGS = ("engine", "cache", "parallel", "processes", "limits", "optim")
FIELD = re.compile(rf"(?<![\w./-])(?:{'|'.join(CONFIGS)})\.[a-z][\w-]*")


@cache
def forms() -> dict[str, type]:
    """The options of each command."""
    groups = {name: group for name, group in cli.COMMANDS.items() if isinstance(group, CommandGroup)}
    commands = {f"{name} {each}": command for name, group in groups.items() for each, command in group.commands.items()}
    commands |= {name: command for name, command in cli.COMMANDS.items() if name not in groups}
    return {name: command.load().Options for name, command in commands.items()}


@cache
def known() -> tuple[set[str], set[str]]:
    """The options, and the fields, of all commands."""
    pairs = [pair for form in forms().values() for pair in option_names(form).items()]
    return {option for _, option in pairs}, {field for field, _ in pairs}


class Found(NamedTuple):
    """What is looked at in the package: where a string is, and the string."""

    texts: list[tuple[str, str]]
    """Strings that are no docstrings, with {} for what is inserted, outside of `OWN_OPTIONS`."""
    raised: list[tuple[str, str]]
    """First arguments of what is raised, as they are written."""


@cache
def found() -> Found:
    """Those of all modules, whose trees are not stored: each garbage collection would look at them."""
    found = Found([], [])
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        skipped, strings = set[int](), list[ast.JoinedStr | ast.Constant]()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                skipped.update(map(id, node.values))
                strings.append(node)
            elif isinstance(node, ast.Constant):
                if isinstance(node.value, str):
                    strings.append(node)
            elif isinstance(node, ast.Expr):
                skipped.add(id(node.value))
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "attach":
                skipped.update(map(id, ast.walk(node)))  # names of modules
            elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                found.raised.append((f"{name}:{node.lineno}", ast.unparse(node.exc.args[0])))
        if not name.startswith(OWN_OPTIONS):
            found.texts.extend((f"{name}:{node.lineno}", text_of(node)) for node in strings if id(node) not in skipped)
    return found


def text_of(node: ast.JoinedStr | ast.Constant) -> str:
    if isinstance(node, ast.Constant):
        return node.value
    return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)


def test_options_in_messages_exist() -> None:
    options = known()[0] | OTHERS
    unknown = [(where, o) for where, text in found().texts for o in OPTION.findall(text) if o not in options]
    assert not unknown


def test_fields_in_messages_exist() -> None:
    unknown = [
        (where, field) for where, text in found().texts for field in FIELD.findall(text) if field not in known()[1]
    ]
    assert not unknown


def test_no_message_of_the_library_begins_with_an_option() -> None:
    assert not [(where, text) for where, text in found().raised if text.lstrip("f'\"").startswith("--")]


@pytest.mark.parametrize("name", forms())
def test_every_field_of_a_command_is_shown_as_its_option(name: str) -> None:
    form = forms()[name]
    for field, option in option_names(form).items():
        assert with_options(f"{field} must be 1, not 2", form)[0] == f"{option} must be 1, not 2"


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("out must end in .safetensors, not 'a/config.json'", "--out must end in .safetensors, not 'a/config.json'"),
        ("run/config.json is damaged: steps must be 1", "run/config.json is damaged: steps must be 1"),
    ],
)
def test_a_message_that_quotes_a_settings_file_begins_with_its_option(message: str, shown: str) -> None:
    form = forms()["lab capture"]
    with pytest.raises(ValueError, match=f"^{re.escape(shown)}$"), Given(form, "", {}).naming_options():
        raise ValueError(message)


@pytest.mark.parametrize(
    ("command", "prefix", "message", "shown"),
    [
        ("serve", "", "parallel.ep 2 and engine.max_batch 3", "--parallel.ep 2 and --engine.max-batch 3"),
        ("train", "model.", "index_topk needs q_lora_rank", "--model.index-topk needs --model.q-lora-rank"),
        ("train", "", "out 'run' is a file: choose another --out", "--out 'run' is a file: choose another --out"),
        ("train", "", "out of memory at step 3: the data ended", "out of memory at step 3: the data ended"),
        ("train", "", "a run of seed 3 and --batch-size 4", "a run of seed 3 and --batch-size 4"),
        ("bench", "", "shape and minutes are options of tune", "--shape and --minutes are options of tune"),
        ("convert", "", "src must be a folder with safetensors", "SRC must be a folder with safetensors"),
        ("train", "", "runs/batch_size/x has no parallel.epilogue", "runs/batch_size/x has no parallel.epilogue"),
    ],
)
def test_what_a_command_shows(command: str, prefix: str, message: str, shown: str) -> None:
    assert with_options(message, forms()[command], prefix)[0] == shown
