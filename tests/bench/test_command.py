"""What `octile bench NAME` measures."""

import json
from pathlib import Path

import pytest

from octile.bench import command, run
from octile.bench.rows import Row
from octile.bench.serve.peer import Peer
from octile.cli import main


@pytest.mark.parametrize(("name", "measured"), [("dispatch", "dispatch"), ("comm", "dispatch"), ("gemm", "gemm")])
def test_a_name_is_that_of_a_benchmark_or_another_name_for_it(monkeypatch, name, measured):
    runs = []
    monkeypatch.setattr(command, "run_benchmark", lambda *arguments: runs.append(arguments))
    main(["bench", name])
    assert runs == [(measured, None, None, None, None)]


def test_a_peer_is_compared_in_place_of_the_rest(monkeypatch):
    runs = []
    monkeypatch.setattr(command, "run_benchmark", lambda *arguments, **more: runs.append((arguments, more)))
    main(["bench", "serve", "--peer", "vllm", "--json", "x.json", "--run", "m", "--peer-setting", "triton"])
    path = Path("x.json")
    assert runs == [(("serve.peer", path, Path("m")), {"peer": Peer(path, None, ("triton",), None)})]


def test_a_peer_has_a_file_for_its_rows(monkeypatch):
    files = []
    monkeypatch.setattr(command, "run_benchmark", lambda what, json, run, peer: files.append(json))
    main(["bench", "serve", "--peer", "vllm"])
    assert files[0].name == "vllm.json"
    assert not files[0].parent.exists()  # nothing was written


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["gemm", "--peer", "vllm"], "--peer is an option of serve, not of gemm"),
        (["step", "--seed", "3"], "--seed is an option of gemm, not of step"),
        (["serve", "--part", "http"], "--part is an option of serve with a peer: add --peer vllm"),
        (["serve", "--peer-setting", "triton"], "--peer-setting is an option of serve with a peer"),
        (["serve", "--peer-python", "python3"], "--peer-python is an option of serve with a peer"),
        (["serve", "--peer", "sglang"], "--peer"),
    ],
)
def test_options_without_an_effect_are_refused(words, why, capsys):
    with pytest.raises(SystemExit):
        main(["bench", *words])
    assert why in capsys.readouterr().err


def test_rows_are_written_as_they_come(monkeypatch, tmp_path):
    seen, path = [], tmp_path / "rows.json"

    def rows():
        yield Row("a", "speed", 1.0, "x")
        seen.append(json.loads(path.read_text())["rows"])
        yield Row("b", "speed", 2.0, "x")

    monkeypatch.setattr("octile.bench.lab.rows", rows)
    monkeypatch.setattr("octile.bench.lab.show", lambda rows: "table")
    run("lab", path)
    assert [[row["case"] for row in rows] for rows in seen] == [["a"]]
    assert [row["case"] for row in json.loads(path.read_text())["rows"]] == ["a", "b"]
