"""Running out of GPU memory, and that the settings which the message advises fit."""

import io
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from octile.train.loop import train
from octile.train.run.console import RunConsole
from octile.train.run.folder import RunFolder
from tests.train.conftest import micro

LIMIT = 2**30  # bytes


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Limit the process to 1 GiB of GPU memory."""
    before = torch.cuda.get_per_process_memory_fraction()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(LIMIT / total)
    yield
    torch.cuda.set_per_process_memory_fraction(before)
    torch.cuda.empty_cache()


def quiet() -> RunConsole:
    return RunConsole(Console(file=io.StringIO(), width=400))


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("recipe", ["deepseek_v3", "bf16"])
def test_a_run_out_of_memory_advises_settings_that_fit(text, tmp_path, recipe):
    out = tmp_path / "run"
    config = micro(data=str(text), out=out, device="cuda", recipe=recipe, batch_size=8192, steps=2, val_sequences=4)
    with pytest.raises(
        MemoryError, match=r"out of memory at step 1 on the cuda: a sequence of 32 tokens takes"
    ) as caught:
        train(config, False, quiet())
    advised = re.search(r"use --micro-batches (\d+) \(now 1\)", str(caught.value))
    assert advised, str(caught.value)
    saved = RunFolder.open(out).read_config()
    train(replace(saved, micro_batches=int(advised[1])), True, quiet())
    assert (out / "model" / "config.json").exists()
