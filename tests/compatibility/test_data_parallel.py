"""Converted models under DDP and FSDP2, with torch's AdamW and octile's, checkpoints by DCP."""

import copy
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from octile.nn import MLP, Linear, eager_kernels
from octile.nn.conversion import apply_recipe, convert
from octile.nn.eager_kernels import use_fused_kernels
from octile.optim import AdamW, Muon, clip_grad_norm_, muon_groups
from octile.optim.gradient import gradient_norm
from octile.recipe import OptimizerFormats
from tests.compatibility.processes import (
    RANKS,
    assert_same_training,
    batches,
    model,
    optimizer_of,
    train,
    trained_alone,
)
from tests.models_of_transformers import small_model
from tests.worlds import Outcomes, Work

pytestmark = pytest.mark.slow  # two ranks start for all of them


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    works = [ddp, fsdp_torch, fsdp_octile, bf16, saved_torch, saved_octile, frozen, too_late, inside, scaled, norms]
    further = [parallelized_first, fsdp_muon, saved_muon, columns, clipped, broken]
    return Outcomes(tmp_path_factory, "data-parallel", [*works, *further])


def sharded() -> nn.Module:
    module = model()
    for layer in module:
        if isinstance(layer, Linear):
            fully_shard(layer)
    return fully_shard(module)


def whole(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.full_tensor() for name, parameter in module.named_parameters()}


def ddp(rank: int, folder: Path) -> None:
    module = DistributedDataParallel(model())
    train(module, optimizer_of("octile", module), rank)
    assert_same_training(dict(module.module.named_parameters()), trained_alone("octile"))


def test_ddp_trains_as_one_process_does(outcomes: Outcomes):
    outcomes.assert_passed(ddp)


def _fsdp(rank: int, kind: str) -> None:
    module = sharded()
    train(module, optimizer_of(kind, module), rank)
    assert_same_training(whole(module), trained_alone(kind))


def fsdp_torch(rank: int, folder: Path) -> None:
    _fsdp(rank, "torch")


def fsdp_octile(rank: int, folder: Path) -> None:
    _fsdp(rank, "octile")


def fsdp_muon(rank: int, folder: Path) -> None:
    """Of the 192 rows each process has 96; of a matrix of one row the second one has none."""
    _fsdp(rank, "muon")


@pytest.mark.parametrize("work", [fsdp_torch, fsdp_octile, fsdp_muon])
def test_fsdp2_trains_as_one_process_does(work: Work, outcomes: Outcomes):
    outcomes.assert_passed(work)


def bf16(rank: int, folder: Path) -> None:
    module = model().bfloat16()
    fully_shard(module)
    optimizer = AdamW(module.parameters(), lr=1e-3)
    (module(torch.randn(4, 128, dtype=torch.bfloat16)) - 1).square().mean().backward()
    optimizer.step()
    for parameter in module.parameters():
        state = optimizer.state[parameter]
        assert torch.equal(parameter.to_local(), state["master"].to_local().bfloat16())
        assert state["exp_avg"].shape == parameter.shape


def test_masters_and_moments_of_bf16_parameters_are_sharded_as_they_are(outcomes: Outcomes):
    outcomes.assert_passed(bf16)


def _gradients(module: nn.Module, rank: int | None) -> None:
    for x in batches(1)[0] if rank is None else batches(1)[0, rank : rank + 1]:
        ((module(x) - 1).square().mean() / (RANKS if rank is None else 1)).backward()


def clipped(rank: int, folder: Path) -> None:
    """Half of the rows are on each rank, but for those of the layer of one output."""
    module, alone = sharded(), model()
    _gradients(module, rank)
    _gradients(alone, None)
    found, expected = (clip_grad_norm_(m.parameters(), 0.01) for m in (module, alone))
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)  # its gradients are summed in another order
    assert expected > 0.1
    gradients = torch.cat([p.grad.full_tensor().flatten() for p in module.parameters()])
    torch.testing.assert_close(gradients.norm(), torch.tensor(0.01), rtol=1e-4, atol=0)
    norms = [torch.empty(()) for _ in range(RANKS)]
    dist.all_gather(norms, found)
    assert norms[0] == norms[1]


def test_the_norm_of_clipped_gradients_is_that_of_all_shards(outcomes: Outcomes):
    outcomes.assert_passed(clipped)


def broken(rank: int, folder: Path) -> None:
    """Only the second process has the NaN."""
    module = sharded()
    _gradients(module, rank)
    if rank == 1:
        module[2].weight.grad.to_local()[0, 0] = torch.nan
    before = [p.grad.to_local().clone() for p in module.parameters()]
    assert clip_grad_norm_(module.parameters(), 0.01).isnan()
    for parameter, gradient in zip(module.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.grad.to_local(), gradient, rtol=0, atol=0, equal_nan=True)
    names = [name for name, _ in module.named_parameters()]
    assert gradient_norm(list(module.parameters())).last_non_finite == names.index("2.weight")


def test_a_gradient_that_one_rank_finds_not_finite_is_not_finite_on_all(outcomes: Outcomes):
    outcomes.assert_passed(broken)


def _saved(rank: int, kind: str, folder: Path) -> None:
    module = sharded()
    optimizer = optimizer_of(kind, module)
    train(module, optimizer, rank, steps=2)
    states = get_state_dict(module, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=folder / kind)
    train(module, optimizer, rank)
    expected = whole(module)

    again = sharded()
    optimizer = optimizer_of(kind, again)
    train(again, optimizer, rank, steps=1)  # other values, which loading must replace
    loaded = dict(zip(("model", "optimizer"), get_state_dict(again, optimizer), strict=True))
    dcp.load(loaded, checkpoint_id=folder / kind)
    set_state_dict(again, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    train(again, optimizer, rank)
    assert all(torch.equal(found, expected[name]) for name, found in whole(again).items())


def saved_torch(rank: int, folder: Path) -> None:
    _saved(rank, "torch", folder)


def saved_octile(rank: int, folder: Path) -> None:
    _saved(rank, "octile", folder)


def saved_muon(rank: int, folder: Path) -> None:
    _saved(rank, "muon", folder)


@pytest.mark.parametrize("work", [saved_torch, saved_octile, saved_muon])
def test_dcp_restores_model_and_optimizer_bit_for_bit(work: Work, outcomes: Outcomes):
    outcomes.assert_passed(work)


def norms(rank: int, folder: Path) -> None:
    """A Qwen3 whose blocks are sharded, on the same tokens in both processes."""
    torch.manual_seed(0)
    alone, tokens = small_model("qwen3"), torch.randint(3, 160, (2, 8))
    module = copy.deepcopy(alone)
    use_fused_kernels(module)
    for layer in module.model.layers:
        fully_shard(layer)
    fully_shard(module)
    with patch.object(eager_kernels, "rms_norm", wraps=eager_kernels.rms_norm) as called:
        losses = [each(input_ids=tokens, labels=tokens).loss for each in (module, alone)]
    assert called.call_count == 9
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for (name, found), expected in zip(module.named_parameters(), alone.parameters(), strict=True):
        assert (found.grad.full_tensor() - expected.grad).norm() <= 1e-4 * expected.grad.norm(), name


def test_fsdp2_shards_modules_with_fused_kernels(outcomes: Outcomes):
    outcomes.assert_passed(norms)


def frozen(rank: int, folder: Path) -> None:
    """What FSDP2 gathers is written without counting, so that a cached weight would not follow a new one."""
    module = model().requires_grad_(False)
    fully_shard(module)
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(2))
    module(x)
    replaced = apply_recipe(nn.Sequential(*(type(m)() if isinstance(m, nn.SiLU) else m for m in model())))
    with torch.no_grad():
        for parameter, other in zip(module.parameters(), replaced.parameters(), strict=True):
            other.mul_(2)
            parameter.mul_(2)
    assert torch.equal(module(x), replaced(x))


def test_frozen_weights_that_fsdp2_gathers_follow_their_shards(outcomes: Outcomes):
    outcomes.assert_passed(frozen)


def inside(rank: int, folder: Path) -> None:
    torch.manual_seed(0)
    mlp = apply_recipe(MLP(128, 256))
    x = torch.randn(4, 128)
    with torch.no_grad():
        expected = mlp(x)
        fully_shard(mlp.down_proj)
        torch.testing.assert_close(mlp(x), expected, rtol=0, atol=0)


def test_a_single_layer_of_a_fused_block_is_sharded(outcomes: Outcomes):
    outcomes.assert_passed(inside)


# Refusals


def too_late(rank: int, folder: Path) -> None:
    module = fully_shard(nn.Sequential(nn.Linear(128, 128)))
    with pytest.raises(ValueError, match=r"model has the DTensor 0\.weight: convert the model before fully_shard"):
        convert(module)


def test_a_sharded_model_is_not_converted(outcomes: Outcomes):
    outcomes.assert_passed(too_late)


def scaled(rank: int, folder: Path) -> None:
    module = fully_shard(model())
    with pytest.raises(ValueError, match=r"formats must be float32 or bfloat16 for a parameter .* that is a DTensor"):
        AdamW(module.parameters(), lr=1e-3, formats=OptimizerFormats(exp_avg="float8_e4m3fn"))


def test_moments_with_a_scale_are_not_sharded(outcomes: Outcomes):
    outcomes.assert_passed(scaled)


def columns(rank: int, folder: Path) -> None:
    module = fully_shard(nn.Linear(128, 128), shard_placement_fn=lambda p: Shard(p.dim() - 1))
    with pytest.raises(
        ValueError, match=r"a parameter \[128, 128\] must be sharded along dimension 0, by one .* \[Shard"
    ):
        Muon(muon_groups(module, 0.1), lr=1e-2)


def test_muon_refuses_matrices_whose_columns_are_sharded(outcomes: Outcomes):
    outcomes.assert_passed(columns)


PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def parallelized_first(rank: int, folder: Path) -> None:
    module = nn.Sequential(nn.Linear(128, 192), nn.SiLU(), nn.Linear(192, 128))
    parallelize_module(module, init_device_mesh("cpu", (2,)), PLAN)
    with pytest.raises(
        ValueError, match=r"model has the DTensor .*: convert the model before fully_shard or parallelize"
    ):
        convert(module)


def test_a_model_under_tensor_parallelism_is_not_converted(outcomes: Outcomes):
    outcomes.assert_passed(parallelized_first)
