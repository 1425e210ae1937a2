"""The Python in README.md and docs/ does what the text beside it says, and their links lead somewhere."""

import doctest
import gzip
import importlib.util
import re
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import octile
from octile.checkpoint.hugging_face import save
from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import DeepseekV3
from tests.fresh_python import run_python
from tests.train_commands import config_of

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [*(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")), *sorted(DOCS.rglob("*.md"))]
SLOW_PAGE = "schedules.md"  # whose schedules are simulated
CUDA = ROOT / "octile" / "kernels" / "cuda"
MAX_CODE = 110  # characters of a line that fit the site at 1280 pixels: docs/stylesheets/site.css
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
TRAIN = re.compile(r"torchrun [^\n`]*--nproc-per-node (\d+) -m octile train ([^\n`]*)")
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def python_of(page: Path) -> list[tuple[int, str]]:
    """The Python blocks of a page, each with the number of the line before it."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, found.start(1)), found[1]) for found in BLOCK.finditer(text)]


def assumptions(page: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Make what the text around a page's Python assumes: files and variables; return the names that it assumes."""
    if page.name in ("expert_parallel.md", "schedules.md", "serving_ranks.md"):  # torchrun with one process
        of_torchrun = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": 0}
        for variable, value in of_torchrun.items():
            monkeypatch.setenv(variable, str(value))
    if page.name == "train_on_a_laptop.md":
        save(DeepseekV3(ModelConfig.tiny()), "runs/tiny-deepseek_v3")
    if page.name == "look_inside_a_run.md":
        with tarfile.open(ROOT / "experiments" / "inside" / "run.tar.gz") as recorded:
            # Python 3.11.0 to 3.11.3 have no filters
            recorded.extractall("runs", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    if page.name == "parallel.md":
        for run in ("one", "two", "eight"):
            Path("runs", run).mkdir(parents=True)
            metrics = gzip.decompress((ROOT / "experiments" / "ranks" / f"{run}.jsonl.gz").read_bytes())
            Path("runs", run, "metrics.jsonl").write_bytes(metrics)
    if page.name == "telemetry.md":
        model = octile.convert(DeepseekV3(ModelConfig.tiny()), octile.Recipe.deepseek_v3())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return {"octile": octile, "model": model, "optimizer": optimizer, "batches": [torch.arange(32).view(2, 16)]}
    return {}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@contextmanager
def no_deep_gemm_left() -> Iterator[None]:
    """Remove what `compat.deep_gemm.install()` adds to sys.modules. torch's stay: they cannot be loaded twice."""
    before = set(sys.modules)
    try:
        yield
    finally:
        for name in sys.modules.keys() - before:
            if name.partition(".")[0] == "deep_gemm":
                del sys.modules[name]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if page.name == SLOW_PAGE else (), id=name_of(page))
        for page in PAGES
        if python_of(page)
    ],
)
def test_python_of_a_page_does_what_it_says(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the blocks in order, in one namespace. A block with prompts must print what it shows."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = assumptions(page, monkeypatch)
    with no_deep_gemm_left():
        for line, block in python_of(page):
            if ">>> " not in block:
                exec(compile("\n" * line + block, page.name, "exec"), names)
                continue
            example = doctest.DocTestParser().get_doctest(block, names, page.name, str(page), line)
            report: list[str] = []
            doctest.DocTestRunner().run(example, out=report.append, clear_globs=False)
            assert not report, "".join(report)
            names |= example.globs


def train_commands(page: Path) -> Iterator[tuple[int, list[str]]]:
    """The ranks and the arguments of each `torchrun … octile train …` of a page."""
    text = re.sub(r"\\\n\s*", "", page.read_text(encoding="utf-8"))
    options = re.search(r'OPTIONS="(.*)"', text)
    for n_ranks, arguments in TRAIN.findall(text):
        yield int(n_ranks), arguments.replace("$OPTIONS", options[1] if options else "").split()


WITH_COMMANDS = [page for page in PAGES if any(train_commands(page))]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name_of)
def test_the_ranks_of_a_page_s_commands_can_train(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n_ranks, arguments in train_commands(page):
        config_of(arguments, n_ranks, monkeypatch)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    links = LINK.findall(page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def code_of(page: Path) -> Iterator[str]:
    """The lines of the code of a page: those in fences, and indented ones that do not continue a list."""
    in_fence = in_list = False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            in_fence = not in_fence
        elif in_fence:
            yield line
        elif line.startswith("    ") and not in_list:
            yield line[4:]
        elif line and not line.startswith(" "):
            in_list = re.match(r"[-*]|\d+\.", line) is not None


@pytest.mark.parametrize("page", [page for page in PAGES if page.is_relative_to(DOCS)], ids=name_of)
def test_code_of_a_page_is_not_wrapped_on_the_site(page: Path) -> None:
    assert not [line for line in code_of(page) if len(line) > MAX_CODE]


def test_the_first_engine_of_the_page_generates_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(python_of(DOCS / "serving.md")[0][1], names)
    assert all(names["texts"].values())


def test_the_index_names_every_page() -> None:
    index = DOCS / "README.md"
    named = {(index.parent / link).resolve() for link in LINK.findall(index.read_text(encoding="utf-8"))}
    assert named >= {page for page in PAGES if page.is_relative_to(DOCS)} - {index}


def test_the_site_shows_every_page() -> None:
    shown = re.findall(r"(?:: |- )(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(shown) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES if page.is_relative_to(DOCS))


def pictures_of_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    return pictures


def words(picture: Path) -> list[str | None]:
    return [text.text for text in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]


def test_a_picture_is_a_file_that_contains_its_colors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = pictures_of_docs()
    monkeypatch.setattr(pictures, "IMAGES", tmp_path)
    pictures.write("one_step", pictures.drawn("one_step", 560, pictures.draw_one_step))
    svg = (tmp_path / "one_step.svg").read_text(encoding="utf-8")
    ElementTree.fromstring(svg)
    assert set(re.findall(r"var\((--\w+)\)", svg)) <= set(re.findall(r"(--\w+):", svg))


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["roofline", "split_kv", "steps", "whole_step"])
def test_the_pictures_of_decoding_are_those_of_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.syspath_prepend(DOCS)
    decoding, pictures = (importlib.import_module(module) for module in ("decoding_pictures", "pictures"))
    monkeypatch.setattr(pictures, "IMAGES", tmp_path)
    draw, height = decoding.PICTURES[f"decode_{name}"]
    pictures.write(f"decode_{name}", pictures.drawn(f"decode_{name}", height, draw))
    both = [words(folder / f"decode_{name}.svg") for folder in (tmp_path, DOCS / "images")]
    assert both[0] == both[1], "call `python docs/decoding_pictures.py`"


def rooms() -> set[str]:
    """Return the packages of octile, and the folders of `octile.serve`."""
    found = [*(ROOT / "octile").glob("*/__init__.py"), *(ROOT / "octile" / "serve").glob("*/__init__.py")]
    return {file.parent.relative_to(ROOT / "octile").as_posix() for file in found}


def test_the_tour_links_every_room() -> None:
    page = (DOCS / "tour.md").read_text(encoding="utf-8")
    table = page.partition("| room |")[2].partition("\n\n")[0]
    assert {f"../octile/{room}" for room in rooms()} <= set(LINK.findall(table))


def test_the_tour_lists_rooms_in_the_order_of_the_import_contract() -> None:
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    layers = [layer.removeprefix("octile.") for layer in reversed(contract[0]["layers"])]
    page = (DOCS / "tour.md").read_text(encoding="utf-8")
    rows = page.partition("| room |")[2].partition("\n\n")[0].splitlines()[2:]
    listed = [room for row in rows for room in re.findall(r"`(\w+)(?:\.py|/)`", row.split(" | ")[0])]
    assert listed == layers


def test_the_picture_of_the_tour_shows_every_room() -> None:
    drawn = {room for _, _, band in pictures_of_docs().ROOMS for room, _ in band}
    assert rooms() - {"serve"} <= drawn  # whose folders are drawn


def test_the_picture_of_the_tour_is_drawn_from_its_rooms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = pictures_of_docs()
    monkeypatch.setattr(pictures, "IMAGES", tmp_path)
    pictures.write("layout", pictures.drawn("layout", pictures.LAYOUT_HEIGHT, pictures.draw_layout))
    assert words(tmp_path / "layout.svg") == words(DOCS / "images" / "layout.svg"), "call `python docs/pictures.py`"


def test_the_page_lists_the_files_of_the_kernel() -> None:
    kernel = (CUDA / "gemm" / "gemm.cu").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "hopper_product.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+\.cuh)`", page, re.MULTILINE) == re.findall(r'#include "(.*)"', kernel)


@pytest.mark.slow
def test_the_tour_shows_the_walk_that_a_gemm_takes() -> None:
    """Compare the frames in docs/tour.md with those that `python -m tools.count_frames` prints."""
    pytest.importorskip("cuda.bindings")
    process = run_python("import runpy; runpy.run_module('tools.count_frames', run_name='__main__')")
    assert process.returncode == 0, process.stderr
    printed = process.stdout
    shown = (DOCS / "tour.md").read_text(encoding="utf-8").partition("```text\n")[2].partition("```")[0]

    def frames(output: str) -> list[str]:
        """Return the number of frames and files of each walk, and the walks, without the files that were entered."""
        return [re.sub(r" +\d+$", "", line) for line in output.partition("\nentered by")[0].splitlines()]

    assert frames(shown) == frames(printed), "copy the output of `python -m tools.count_frames` to docs/tour.md"
