"""Tests of `octile lab …` on the command line."""

import json
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from octile.lab.accumulate import accumulate
from octile.lab.pages import accumulate as pages_accumulate
from octile.lab.pages import formats as pages_formats
from octile.lab.pages.formats import formats_table
from octile.lab_options import COMMANDS
from octile.report.table import screen_table
from tests.report.conftest import leave_empty, read_page
from tests.test_cli import call, refused


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_a_command_the_commands_are_listed(capsys):
    code, out, _ = call(capsys, "lab")
    assert code == 0
    assert all(name in out for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(capsys, command):
    code, out, _ = call(capsys, "lab", command, "--help")
    assert code == 0
    assert "usage: octile lab " + command in out


@pytest.mark.parametrize("command", ["--help", *COMMANDS])
def test_help_fits_a_narrow_terminal(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "40")
    out = call(capsys, "lab", command, "--help")[1]
    assert [line for line in out.splitlines() if len(line) > 40] == []


def test_an_unknown_command_is_refused(capsys):
    assert "unknown lab command 'format'; there are formats, accumulate" in refused(capsys, "lab", "format")


@pytest.mark.slow
def test_formats_prints_a_table_and_leaves_a_page(capsys, folder, monkeypatch):
    leave_empty(monkeypatch, pages_formats)
    code, out, _ = call(capsys, "lab", "formats")
    assert code == 0
    assert all(name in out for name in ("FP32", "BF16", "E4M3", "E5M2", "E2M1", "INT8", "448", "57,344"))
    assert "pictures: lab/formats.html" in out
    assert (folder / "lab" / "formats.html").exists()


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_no_table_is_truncated(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    content = formats_table()
    Console().print(screen_table(content))
    lines = capsys.readouterr().out.splitlines()
    assert all(cell_len(line) <= columns for line in lines)
    assert not any(line.endswith("…") or "… " in line for line in lines)
    if columns >= 80:  # each row in one line, with all of its words
        words = [" ".join(cells) for cells in (content.columns, *content.rows)]
        assert [" ".join(line.split()) for line in lines] == words


def test_formats_as_json(capsys, folder):
    code, out, _ = call(capsys, "lab", "formats", "--json")
    assert code == 0
    by_name = {row["name"]: row for row in json.loads(out)}
    assert by_name["e4m3"]["largest"] == 448
    assert not list(folder.iterdir())


def test_formats_of_a_missing_run_is_refused(capsys, folder):
    assert "holds no run" in refused(capsys, "lab", "formats", "nowhere")


def test_accumulate_prints_a_table_and_leaves_a_page(capsys, folder):
    code, out, _ = call(capsys, "lab", "accumulate", "--k", "128,256", "--promote", "128,never", "--data", "normal")
    assert code == 0
    assert "every 128" in out
    assert "picture: lab/accumulate.html" in out
    assert "Errors are relative to the RMS of the exact results; the worst is that of 256×256 sums." in out
    page = folder / "lab" / "accumulate.html"
    assert all(address.startswith("#") for address in read_page(page).loads)
    assert "checked on an H200" in page.read_text(encoding="utf-8")


def test_the_json_of_accumulate_equals_the_experiment(capsys, folder):
    code, out, _ = call(capsys, "lab", "accumulate", "--k", "256", "--promote", "64", "--data", "positive", "--json")
    assert code == 0
    (row,) = accumulate([256], ["positive"], [64])
    assert json.loads(out) == [vars(row)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--k", "3.5"), "k must be whole numbers of at least 1, separated by commas, not '3.5'"),
        (("--k", "0"), "k must be whole numbers of at least 1"),
        (("--data", "negative"), "data must be 'normal' or 'positive', not 'negative'"),
        (("--promote", "33"), "promote must be multiples of 32, the products of a step, not 33"),
        (
            ("--promote", "128,nevr"),
            "promote must be never or whole numbers of at least 1, separated by commas, not 'nevr'",
        ),
        (("--arch", "sm_70"), "sm_70"),
        (("--arch", "sm_80"), "arch 'sm_80' has no instruction for E4M3: choose another"),
        (
            ("--arch", "sm_90_mma"),
            "promote must be never for sm_90_mma: its mma.sync.m16n8k32 itself adds every 32 products in FP32",
        ),
    ],
)
def test_accumulate_refuses(capsys, folder, options, message):
    assert message in refused(capsys, "lab", "accumulate", *options)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("k", ["100000000000", "256,9" + "0" * 40])
def test_k_too_large_for_the_memory_is_refused_before_any_work(capsys, folder, k):
    said = refused(capsys, "lab", "accumulate", "--k", k)
    assert f"k is {int(k.split(',')[-1]):,}, whose operands of 256 rows need about" in said
    assert "k can be at most" in said
    assert not list(folder.iterdir())


def test_the_k_that_the_message_advises_is_not_refused(monkeypatch):
    monkeypatch.setattr(pages_accumulate, "device_memory", lambda device: 1 << 30)
    with pytest.raises(
        ValueError, match=r"k is 90,000, .* need about 1\.11 GB, but the machine has 1\.07 GB .* 87,381"
    ):
        pages_accumulate._check_memory(90_000)
    pages_accumulate._check_memory(87_381)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("run", "--write", "x.html", "--out", "x.html"), "out 'x.html' and write are the same file: name another one"),
        (("run.html", "--out", "run.html"), "out 'run.html' and model are the same file"),
        (("run", "--write", "x.toml", "--recipe", "x.toml", "--json"), "write 'x.toml' and recipe are the same file"),
    ],
)
def test_an_output_that_is_another_file_of_the_command_is_refused(capsys, folder, options, message):
    assert message in refused(capsys, "lab", "preflight", *options)
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("command", "option", "message"),
    [
        ("formats", "--out", "out must end in .html, not 'notes.txt'"),
        ("preflight", "--write", "write must end in .toml, not 'notes.txt'"),
    ],
)
def test_a_file_of_another_kind_is_not_replaced(capsys, folder, command, option, message):
    Path("notes.txt").write_text("notes")
    assert message in refused(capsys, "lab", command, *["run"] * (command == "preflight"), option, "notes.txt")
    assert Path("notes.txt").read_text() == "notes"


@pytest.mark.parametrize("out", ["b.html", "./b.html", "x/../b.html"])
def test_what_if_does_not_write_its_page_over_one_of_its_captures(capsys, folder, out):
    message = f"out {str(Path(out))!r} and captures are the same file: name another one"
    assert message in refused(capsys, "lab", "what-if", "a", "b.html", "--out", out)


def test_plan_does_not_write_its_trace_over_the_cluster(capsys, folder):
    line = refused(capsys, "plan", "cluster", "--cluster", "c.json", "--trace", "c.json")
    assert "trace 'c.json' and cluster are the same file" in line


@pytest.mark.parametrize(
    ("command", "option"),
    [(("schedule", "--out", "file/s.svg"), "--out"), (("cluster", "--trace", "file/t.json"), "--trace")],
)
def test_plan_names_the_option_of_an_output_that_cannot_be_written(capsys, folder, command, option):
    (folder / "file").touch()
    assert refused(capsys, "plan", *command).startswith(f"octile: {option} 'file/")


def test_the_help_of_preflight_lists_every_kind_of_text(capsys):
    assert "hf:NAME, stdlib or packages" in " ".join(
        call(capsys, "lab", "preflight", "--help")[1].replace("│", "").split()
    )


def test_the_help_of_what_if_says_that_a_capture_is_required(capsys):
    shown = call(capsys, "lab", "what-if", "--help")[1]
    assert "octile lab what-if [-h] CAPTURES... [OPTIONS]\n" in shown
    assert "(required)" in shown
    assert "(default: )" not in shown


def test_capture_refuses_unknown_gemms(capsys, folder):
    assert "products must be some of fprop, dgrad, wgrad" in refused(capsys, "lab", "capture", "x", "--products", "y")


@pytest.mark.parametrize("command", ["formats", "accumulate", "what-if", "hardware", "preflight", "capture"])
def test_an_unwritable_output_is_refused_before_any_work(capsys, folder, command):
    (folder / "there").mkdir()
    (folder / "file").write_text("")
    named = [] if command in ("formats", "accumulate") else ["nowhere"]  # checked later
    assert "out 'there' is a folder: name a file" in refused(capsys, "lab", command, *named, "--out", "there")
    said = refused(capsys, "lab", command, *named, "--out", "file/x/page.html")
    assert "out 'file/x/page.html' cannot be written: 'file' is not a folder" in said


def test_an_unwritable_folder_is_refused_before_any_work(capsys, folder, monkeypatch):
    monkeypatch.setattr("octile.checkpoint.files.os.access", lambda path, mode: False)  # root may write everywhere
    assert "out 'x/page.html' cannot be written: no write permission for '.'" in refused(
        capsys, "lab", "formats", "--out", "x/page.html"
    )


def test_an_unwritable_recipe_is_refused_even_with_json(capsys, folder):
    (folder / "there").mkdir()
    assert "write 'there' is a folder" in refused(capsys, "lab", "preflight", "x", "--json", "--write", "there")


@pytest.mark.parametrize("command", ["what-if", "hardware", "preflight"])
@pytest.mark.parametrize(("seed", "needed"), [("-1", "at least 0"), (str(2**63), "at most 9,223,372,036,854,775,807")])
def test_an_invalid_seed_is_refused(capsys, folder, command, seed, needed):
    assert f"seed must be {needed}, not {seed}" in refused(capsys, "lab", command, "x", "--seed", seed)


@pytest.mark.parametrize("command", ["what-if", "hardware"])
def test_a_file_without_a_capture_is_refused(capsys, folder, command):
    assert "the capture nowhere does not exist: write one with octile lab capture" in refused(
        capsys, "lab", command, "nowhere"
    )
    (folder / "there").mkdir()
    assert "there is a folder, not a capture" in refused(capsys, "lab", command, "there")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("capture", "x", "--step", "two"), "--step must be a whole number, not 'two'"),
        (("hardware", "x", "--sample", "0"), "sample must be at least 1, not 0"),
        (("preflight", "nowhere"), "no checkpoint at nowhere"),
        (
            ("preflight", "nowhere", "--recipe", "exact"),
            "recipe 'exact' has all linear layers in FP8, so that",
        ),
        (("preflight", "x", "--least-snr", "nan"), "--least-snr must be finite, not nan"),
        (("preflight", "x", "--least-snr", "-4000"), "--least-snr must be from -200 to 200 dB, not -4000.0"),
    ],
)
def test_a_refusal_names_its_reason(capsys, folder, arguments, message):
    assert message in refused(capsys, "lab", *arguments)


def test_train_refuses_an_invalid_rule_before_anything_is_written(capsys, folder):
    (folder / "rules.toml").write_text('[[rule]]\nwhen = "flushed > 5%"\nthen = "stop"\n')
    said = refused(capsys, "train", "--telemetry-every", "10", "--guards", "rules.toml", "--out", "run")
    assert "rules.toml: rule 1: then must be one of warn, capture, bf16, not 'stop'" in said
    assert not (folder / "run").exists()


def test_train_refuses_guards_without_telemetry(capsys, folder):
    (folder / "rules.toml").write_text('[[rule]]\nwhen = "flushed > 5%"\nthen = "warn"\n')
    assert "add --telemetry-every N" in refused(capsys, "train", "--guards", "rules.toml", "--out", "run")
