"""What two gloo ranks check of torchtitan's trainer with octile's converter; its experts are spread over both ranks."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from tests.torchtitan_on_cpu import octile, train

SHARDED = ("--parallelism.data_parallel_shard_degree", "2", "--parallelism.expert_parallel_degree", "2")


@cache
def losses(folder: Path, *arguments: str) -> Sequence[float]:
    return train(folder / "plain", *SHARDED, *arguments)


def check_close(found: Sequence[float], expected: Sequence[float], rtol: float) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=rtol, atol=0)


def losses_are_near_those_in_bf16(rank: int, folder: Path) -> None:
    in_bf16, found = losses(folder), losses(folder, *octile())
    assert found != in_bf16
    check_close(found, in_bf16, rtol=0.005)
    assert in_bf16[-1] < 0.9 * in_bf16[0]  # many times the tolerance


def activation_checkpointing_changes_no_bit(rank: int, folder: Path) -> None:
    for mode in ("full", "selective"):
        assert losses(folder, *octile("--activation_checkpoint.mode", mode)) == losses(folder, *octile())


def a_run_resumes_from_a_checkpoint_with_the_same_bits(rank: int, folder: Path) -> None:
    arguments = octile("--checkpoint.enable", "--checkpoint.interval", "2", "--job.dump_folder", str(folder / "saved"))
    expected = train(folder, *SHARDED, *arguments)
    assert expected == losses(folder, *octile())
    assert train(folder, *SHARDED, *arguments, "--checkpoint.load_step", "2") == expected[2:]


def a_checkpoint_in_bf16_is_trained_on_in_fp8(rank: int, folder: Path) -> None:
    arguments = ("--checkpoint.enable", "--checkpoint.interval", "2", "--job.dump_folder", str(folder / "bf16"))
    expected = train(folder, *SHARDED, *arguments)
    check_close(train(folder, *SHARDED, *octile(*arguments, "--checkpoint.load_step", "2")), expected[2:], rtol=0.005)


def compiled_blocks_have_nearly_the_same_losses(rank: int, folder: Path) -> None:
    compiled = ("--compile.enable", "--compile.backend", "aot_eager", "--activation_checkpoint.mode", "selective")
    check_close(losses(folder, *octile(*compiled)), losses(folder, *octile()), rtol=0.005)


def a_pipeline_has_losses_near_those_in_bf16(rank: int, folder: Path) -> None:
    """The last rank knows them."""
    parallel = ("--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_schedule", "1F1B")
    check_close(train(folder, *parallel, *octile()), train(folder, *parallel), rtol=0.005)


def ddp_has_losses_near_those_in_bf16(rank: int, folder: Path) -> None:
    parallel = ("--parallelism.data_parallel_replicate_degree", "2", "--parallelism.data_parallel_shard_degree", "1")
    check_close(train(folder, *parallel, *octile()), train(folder, *parallel), rtol=0.005)


def experts_are_divided_by_tensor_parallelism(rank: int, folder: Path) -> None:
    """Each rank has half of the channels of every expert; 256 channels are two blocks."""
    parallel = ("--parallelism.tensor_parallel_degree", "2", "--parallelism.disable_loss_parallel")
    found = train(folder, *parallel, *octile())
    check_close(found, train(folder, *parallel), rtol=0.005)
