"""What ranks under FSDP2 check of weights that they gather in FP8, on gloo (test_fsdp.py) and on GPUs (tests/gpu)."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import octile
from octile.nn import MLA, MLP, Gate, Linear, MoE
from octile.nn.conversion import apply_recipe
from octile.nn.gathered_weight import GatheredWeight, gathered, gathered_transposed
from octile.nn.indexer import Indexer
from octile.nn.rope import Rope
from octile.optim import AdamW
from octile.parallel import use_fp8_all_gather
from tests.compatibility.processes import RANKS

D, E = 256, 4
WEIGHTS = ("dense", "narrow", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "moe.experts")


class Block(nn.Module):
    """Dense layers, a fused SwiGLU and a mixture; ranks share blocks of `narrow`, and `odd` has another row on one."""

    def __init__(self):
        super().__init__()
        self.dense, self.narrow, self.odd = nn.Linear(D, D), nn.Linear(D, 192, bias=False), nn.Linear(192, 255)
        self.mlp, self.moe = MLP(D, D), MoE(Gate(D, E, 2), D, 128, alpha=0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(self.dense(x))
        x = x + self.moe(x)
        return x + nn.functional.pad(self.odd(self.narrow(x)), (0, 1))


def whole(recipe: octile.Recipe | None = None) -> nn.Module:
    torch.manual_seed(0)
    return apply_recipe(nn.Sequential(Block(), Block()), recipe)


def sharded(model: nn.Module, **settings: object) -> nn.Module:
    for block in model:
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    use_fp8_all_gather(model)
    return model


def batches(steps: int = 2) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(steps, RANKS, 1, 24, D)


def check_training(alone: nn.Module, model: nn.Module, rank: int) -> None:
    """Train both; the gradient of one process is the mean of the ranks', whose sum of two has one order."""
    optimizers = [AdamW(m.parameters(), lr=1e-3) for m in (alone, model)]
    for x in batches():
        expected = [(alone(rows) - 1).square().mean() for rows in x]
        (sum(expected) / RANKS).backward()
        loss = (model(x[rank]) - 1).square().mean()
        loss.backward()
        assert torch.equal(loss, expected[rank])
        for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert torch.equal(p.grad.full_tensor(), q.grad), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def bits(rank: int, folder: Path) -> None:
    alone, model = whole(), sharded(whole())
    model[0].unshard()
    assert type(model[0].odd.weight) is nn.Parameter
    for name, expected in alone[0].named_parameters():
        found = model[0].get_parameter(name)
        if name.startswith(WEIGHTS) and expected.dim() > 1:
            q = octile.quantize(expected, block=(128, 128))
            assert torch.equal(gathered(found).data.view(torch.uint8), q.data.view(torch.uint8)), name
            assert torch.equal(gathered(found).scale, q.scale), name
            assert torch.equal(
                gathered_transposed(found, expected.detach()).data.contiguous().view(torch.uint8),
                q.data.mT.contiguous().view(torch.uint8),
            ), name
        else:
            assert torch.equal(found, expected), name


def values(rank: int, folder: Path) -> None:
    model = sharded(whole())
    model[0].unshard()
    weight = model[0].dense.weight
    assert torch.equal(weight + 0, gathered(weight).dequantize())
    assert (weight.dtype, weight.shape, weight.requires_grad) == (torch.float32, (D, D), True)
    with torch.no_grad(), pytest.raises(TypeError, match=r"copy_.* would write to a weight that FSDP2 has gathered"):
        weight.copy_(torch.zeros(D, D))


def training(rank: int, folder: Path) -> None:
    check_training(whole(), sharded(whole()), rank)


def bf16(rank: int, folder: Path) -> None:
    """The codes come from the FP32 shards, not from their BF16 roundings."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(whole(), mp_policy=policy)
    model[0].unshard()
    q = octile.quantize(whole()[0].dense.weight, block=(128, 128))
    assert torch.equal(gathered(model[0].dense.weight).data.view(torch.uint8), q.data.view(torch.uint8))
    assert model[0].dense.weight.dtype == torch.bfloat16
    model[0].reshard()
    model(batches()[0, rank]).float().square().mean().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.full_tensor().isfinite().all() for p in model.parameters())


def accumulated(rank: int, folder: Path) -> None:
    """Two micro-batches, with the weights gathered once: no memory of the first pass is read in the second."""
    alone, model = whole(), sharded(whole(), reshard_after_forward=False)
    for i, x in enumerate(batches()):
        for rows in x:
            alone(rows).square().sum().backward()
        model.set_is_last_backward(i == 1)
        model(x[rank]).square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(RANKS * p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-4, msg=name)


def recomputed(rank: int, folder: Path) -> None:
    recipe = octile.Recipe.parse('recipe = "deepseek_v3"\nswiglu_inputs = "recomputed"\n', "recipe")
    check_training(whole(recipe), sharded(whole(recipe)), rank)


def unfused(rank: int, folder: Path) -> None:
    models = whole(), whole()
    for module in (m for model in models for m in model.modules()):
        if isinstance(module, Linear):
            module.register_forward_hook(lambda *_: None)
    check_training(models[0], sharded(models[1]), rank)


class SparseAttention(nn.Module):
    """Attention to the top-k keys of an indexer."""

    def __init__(self):
        super().__init__()
        dims = {"kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 16, "v_head_dim": 64}
        self.attention = MLA(D, 2, q_lora_rank=128, **dims, indexer=Indexer(D, 128, 2, 16, 5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention(x, Rope(16).cos_sin(torch.arange(x.shape[1])))
        return x + y + self.attention.indexer.pop_alignment_loss()


def sparse_attention(rank: int, folder: Path) -> None:
    """Attention reads the weight of its layer for keys and values, gathered in FP8 or in high precision."""
    for recipe in (None, octile.Recipe.bf16()):
        torch.manual_seed(0)
        alone = apply_recipe(nn.Sequential(SparseAttention(), SparseAttention()), recipe)
        model = copy.deepcopy(alone)
        if recipe is None:
            model = sharded(model)
        else:
            for part in (*model, model):
                fully_shard(part)
        check_training(alone, model, rank)
        model[0].unshard()
        assert isinstance(model[0].attention.kv_b_proj.weight, GatheredWeight) == (recipe is None)


def compiled(rank: int, folder: Path) -> None:
    torch.manual_seed(0)
    alone, model = (apply_recipe(nn.Sequential(MLP(D, D))) for _ in range(2))
    model.load_state_dict(alone.state_dict())
    model[0].compile(fullgraph=True, backend="aot_eager")
    check_training(alone, sharded(model), rank)


class Counted:
    """torch's all-gather, which counts the bytes that a rank sends."""

    def __init__(self):
        self.bytes = 0

    def allocate(self, size: object, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: object, async_op: bool = False) -> object:
        self.bytes += input_tensor.nbytes
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def fewer_bytes(rank: int, folder: Path) -> None:
    def sent(fp8: bool, **settings: object) -> int:
        torch.manual_seed(0)
        model = apply_recipe(nn.Sequential(MLP(D, 512)))
        fully_shard(model[0], **settings)
        fully_shard(model, **settings)
        if fp8:
            use_fp8_all_gather(model)
        model[0].set_custom_all_gather(counted := Counted())
        model(batches()[0, rank]).float().sum().backward()
        return counted.bytes

    values = 3 * 512 * D // RANKS
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    assert sent(False) == 2 * 4 * values  # forward and backward
    assert sent(False, mp_policy=bf16) == 2 * 2 * values
    scales = 2 * (512 // 128) * (D // 128) + (D // 128) * (512 // 128)
    assert sent(True) == sent(True, mp_policy=bf16) == 2 * (values + 4 * scales // RANKS)


def saved(rank: int, folder: Path) -> None:
    model, again = sharded(whole()), sharded(whole())
    with torch.no_grad():
        for p in again.parameters():
            p.zero_()
    dcp.save(get_model_state_dict(model), checkpoint_id=folder / "saved")
    state = get_model_state_dict(again)
    dcp.load(state, checkpoint_id=folder / "saved")
    again.load_state_dict(state)
    for (name, p), expected in zip(again.named_parameters(), whole().parameters(), strict=True):
        assert torch.equal(p.full_tensor(), expected), name
    x = batches()[0, rank]
    assert torch.equal(again(x), model(x))
    again[0].unshard()
    assert isinstance(again[0].dense.weight, GatheredWeight)


def summary(rank: int, folder: Path) -> None:
    model = fully_shard(whole())
    found = use_fp8_all_gather(model)
    assert len(found.quantized) == 2 * (len(WEIGHTS) + 1)
    assert found.high_precision == {f"{i}.odd.weight": "with 255 rows, which 2 ranks do not divide" for i in range(2)}
    reasons = "in high precision 2 × with 255 rows, which 2 ranks do not divide"
    assert str(found) == f"FSDP2 gathers 14 of 16 weights in FP8, {reasons}"


def refused(rank: int, folder: Path) -> None:
    def check(message: str, model: nn.Module, **settings: object) -> None:
        with pytest.raises(ValueError, match=message):
            use_fp8_all_gather(fully_shard(model, **settings) if settings is not None else model)

    def layer(rows: int = D, recipe: octile.Recipe | None = None) -> nn.Module:
        return nn.Sequential(Linear(D, rows, recipe=recipe))

    check("converted and then fully_shard has sharded, but has none", nn.Sequential(nn.Linear(D, D)))
    check("FP8: .* recipe per_tensor without weights in 128×128 blocks", layer(recipe=octile.Recipe.per_tensor()))
    check("in high precision in a GEMM", layer(recipe=octile.Recipe.deepseek_v3().without("dgrad")))
    check("with 255 rows, which 2 ranks do not divide", layer(255))
    check("sharded along dimension 1", layer(), shard_placement_fn=lambda _: Shard(0) if _.dim() == 1 else Shard(1))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("one", "two"))
    assert not use_fp8_all_gather(fully_shard(layer(), mesh=mesh["one"])).quantized  # a script may run on one rank, too
    check(
        "sharded by tensor parallelism, too",
        parallelize_module(layer(), mesh["two"], {"0": ColwiseParallel()}),
        mesh=mesh["one"],
    )
    with torch.device("meta"):
        model = layer()
    check("is on the meta device: call use_fp8_all_gather after to_empty", model)
    model = fully_shard(layer())
    model(torch.randn(2, D))
    model.reshard()
    with pytest.raises(ValueError, match=r"FSDP2 has gathered 0\.weight: call use_fp8_all_gather before the first"):
        use_fp8_all_gather(model)
    with pytest.raises(ValueError, match="has sharded, but has none"):
        use_fp8_all_gather(layer())
