"""`octile lab …` as a script calls it."""

import json

import pytest

from octile.lab.accumulate import accumulate
from octile.lab.commands import COMMANDS
from tests.report.conftest import read_page
from tests.test_cli import call, refused


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_a_command_they_are_listed(capsys):
    code, out, _ = call(capsys, "lab")
    assert code == 0
    assert all(name in out for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(capsys, command):
    code, out, _ = call(capsys, "lab", command, "--help")
    assert code == 0
    assert "usage: octile lab " + command in out


def test_an_unknown_command_is_refused(capsys):
    assert "unknown lab command 'format'; there are formats, accumulate" in refused(capsys, "lab", "format")


def test_formats_prints_a_table_and_leaves_a_page(capsys, folder):
    code, out, _ = call(capsys, "lab", "formats")
    assert code == 0
    assert all(name in out for name in ("FP32", "BF16", "E4M3", "E5M2", "INT8", "448", "57,344"))
    assert "pictures: lab/formats.html" in out
    assert (folder / "lab" / "formats.html").exists()


def test_formats_as_json(capsys, folder):
    code, out, _ = call(capsys, "lab", "formats", "--json")
    assert code == 0
    by_name = {row["name"]: row for row in json.loads(out)}
    assert by_name["e4m3"]["largest"] == 448
    assert not list(folder.iterdir())


def test_formats_of_no_run_is_refused(capsys, folder):
    assert "holds no run" in refused(capsys, "lab", "formats", "nowhere")


def test_accumulate_prints_a_table_and_leaves_a_page(capsys, folder):
    code, out, _ = call(capsys, "lab", "accumulate", "--k", "128,256", "--promote", "128,never", "--data", "normal")
    assert code == 0
    assert "every 128" in out
    assert "picture: lab/accumulate.html" in out
    page = folder / "lab" / "accumulate.html"
    assert all(address.startswith("#") for address in read_page(page).loads)
    assert "checked on an H200" in page.read_text(encoding="utf-8")


def test_accumulates_json_is_the_experiments(capsys, folder):
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
        (("--promote", "33"), "promote_every must be a multiple of the 32 products a step, not 33"),
        (("--arch", "sm_70"), "sm_70"),
        (("--arch", "sm_80"), "arch 'sm_80' multiplies no E4M3"),
    ],
)
def test_accumulate_refuses(capsys, folder, options, message):
    assert message in refused(capsys, "lab", "accumulate", *options)
    assert not list(folder.iterdir())


def test_capture_refuses_products_that_do_not_exist(capsys, folder):
    assert "products must be some of fprop, dgrad, wgrad" in refused(capsys, "lab", "capture", "x", "--products", "y")


def test_train_refuses_a_bad_rule_before_anything_is_written(capsys, folder):
    (folder / "rules.toml").write_text('[[rule]]\nwhen = "flushed > 5%"\nthen = "stop"\n')
    said = refused(capsys, "train", "--telemetry-every", "10", "--guards", "rules.toml", "--out", "run")
    assert "rules.toml: rule 1: then must be one of warn, capture, bf16, not 'stop'" in said
    assert not (folder / "run").exists()


def test_train_refuses_guards_without_telemetry(capsys, folder):
    (folder / "rules.toml").write_text('[[rule]]\nwhen = "flushed > 5%"\nthen = "warn"\n')
    assert "add --telemetry-every N" in refused(capsys, "train", "--guards", "rules.toml", "--out", "run")
