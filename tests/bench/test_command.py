"""What `octile bench NAME` measures."""

import pytest

from octile.bench import command
from octile.cli import main


@pytest.mark.parametrize(("name", "measured"), [("dispatch", "dispatch"), ("comm", "dispatch"), ("gemm", "gemm")])
def test_a_name_is_that_of_a_benchmark_or_another_name_for_it(monkeypatch, name, measured):
    runs = []
    monkeypatch.setattr(command, "run_benchmark", lambda *arguments: runs.append(arguments))
    main(["bench", name])
    assert runs == [(measured, None, None, None, None)]
