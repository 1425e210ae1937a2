"""Runs that go from two ranks to one process and back: of data parallelism, and of a pipeline."""

from pathlib import Path

import pytest

from octile.cli import main
from tests.train.strategy.test_bad_ranks import train
from tests.train.strategy.test_torchrun import PIPELINE, arguments, losses, straight

__all__ = ["arguments", "straight"]  # fixtures


def printed(folder: Path) -> str:
    """What two ranks have printed."""
    return "".join((folder / f"{rank}.out").read_text() for rank in range(2))


@pytest.mark.slow
def test_a_run_goes_from_two_processes_to_one_and_back(arguments, straight, tmp_path, capsys):
    run = tmp_path / "run"
    begun = train(tmp_path, *arguments, "--parallel.ep=2", f"--out={run}")
    assert begun.statuses == [0, 0], begun.lines
    assert printed(tmp_path).count("run folder:") == 1
    main(["train", "--resume", "--out", str(run), "--steps=6", "--parallel.dp=1", "--parallel.ep=1"])
    assert "gradients are summed in another order" in " ".join(capsys.readouterr().out.split())
    again = train(tmp_path, "--resume", f"--out={run}", "--steps=8", "--parallel.dp=2")
    assert again.statuses == [0, 0], again.lines
    assert losses(run) == pytest.approx(straight, rel=1e-5)
    assert (run / "model" / "config.json").exists()
    assert len(list((run / "checkpoints" / "step_00000008").glob("tensors-*-of-00002.safetensors"))) == 2


@pytest.mark.slow
def test_a_run_goes_from_a_pipeline_to_one_process_and_back(arguments, straight, tmp_path, capsys):
    run, schedule = tmp_path / "run", "--parallel.schedule=zb1p"
    begun = train(tmp_path, *arguments, *PIPELINE, schedule, f"--out={run}")
    assert begun.statuses == [0, 0], begun.lines
    assert "pipeline: ZB1P, 2 stages of 2 and 0 layers on 2 ranks, 2 micro-batches; idle for" in printed(tmp_path)
    main(["train", "--resume", "--out", str(run), "--steps=6", "--parallel.pp=1"])
    assert "parallel.pp: 2 before, 1 now: gradients are summed" in " ".join(capsys.readouterr().out.split())
    again = train(tmp_path, "--resume", f"--out={run}", "--steps=8", "--parallel.pp=2")
    assert again.statuses == [0, 0], again.lines
    assert losses(run) == pytest.approx(straight, rel=1e-5)
    main(["generate", str(run), "--max-new-tokens=4"])
    assert capsys.readouterr().out.startswith("def ")
