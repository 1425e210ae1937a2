"""FP8 all-gather under FSDP2: ranks send each other weights as their GEMMs read them, in 8 bits.

FSDP2 shards each parameter along its first dimension and gathers it before its layer runs, in high precision: 4 bytes a
value, or 2 under a BF16 mixed precision policy. Here each rank quantizes its own rows, in 128×128 blocks, and FSDP2
gathers the encoded values, 1 byte each, and the scales. These are the bits that quantizing the whole weight gives: the
largest magnitudes of blocks whose rows several ranks hold are reduced over the ranks before. dgrad reads the same
encoded values transposed.

The extension point is FSDP2's own: `fsdp_pre_all_gather` and `fsdp_post_all_gather` of a shard, which torch tests with
methods that are set on a plain tensor, as here. Parameters, optimizers and checkpoints stay in high precision.

Source: torch's `FSDPParam`; float8 all-gather in torchao.  Shapes: E experts, N outputs, K inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from octile.formats import BLOCK
from octile.kernels.memory_layout import VECTOR
from octile.nn.conversion_summary import gemm_weights, log_or_print, recipe_of
from octile.nn.gathered_weight import GatheredWeight
from octile.recipe import OperandFormat, Recipe
from octile.scaled import ScaledTensor, quantize

ONE_RANK = "on one rank, which gathers nothing"


class AllGatherSummary(NamedTuple):
    """Which of the weights that octile's layers quantize are gathered in FP8.

    Attributes:
        quantized: their names.
        high_precision: name → why it is gathered in high precision.
    """

    quantized: tuple[str, ...]
    high_precision: dict[str, str]

    def __str__(self) -> str:
        text = f"FSDP2 gathers {len(self.quantized)} of {len(self.quantized) + len(self.high_precision)} weights in FP8"
        reasons = Counter(self.high_precision.values()).most_common()
        return text + (f", in high precision {', '.join(f'{n} × {why}' for why, n in reasons)}" if reasons else "")


def use_fp8_all_gather(model: nn.Module) -> AllGatherSummary:
    """Have FSDP2 gather in FP8 the weights of octile's layers and experts.

    Call it on every rank, after `octile.convert` and `fully_shard`, when the parameters have their values' memory
    (`to_empty`, `load_state_dict(assign=True)` and `model.to` replace it), and before the first forward pass. Rank 0
    prints the summary, through the logger `octile` if logging is set up, else to stderr.

    Args:
        model: a module that `fully_shard` has sharded, or that contains such modules.

    Returns:
        Which weights are gathered in FP8, and why the others are not.

    Raises:
        ValueError: FSDP2 shards none of the weights that octile quantizes; several ranks can gather none of them in
            FP8; FSDP2 has gathered one before; or the parameters are on the meta device.
    """
    names = {module: name for name, module in model.named_modules()}
    quantized, high_precision = dict[str, _Fp8Shard](), dict[str, str]()
    for sharded in _sharded_parameters(model):
        module, name = sharded._module_info.module, sharded._module_info.param_name
        recipe = recipe_of(module)
        if (
            recipe is None
            or recipe.formats is None
            or not any(p is sharded.sharded_param for p in gemm_weights(module))
        ):
            continue
        name = f"{names[module]}.{name}" if names[module] else name
        shard = sharded._sharded_local_tensor  # the object that FSDP2 asks for its methods; to_local may return another
        if sharded.all_gather_outputs:
            raise ValueError(f"FSDP2 has gathered {name}: call use_fp8_all_gather before the first forward pass")
        if shard.is_meta:
            raise ValueError(f"{name} is on the meta device: call use_fp8_all_gather after to_empty")
        reason = _why_high_precision(recipe, sharded)
        if reason is None:
            quantized[name] = _Fp8Shard(shard, recipe.formats.w, sharded.shard_mesh)
        else:
            high_precision[name] = reason
    summary = AllGatherSummary(tuple(quantized), high_precision)
    if not quantized and set(high_precision.values()) != {ONE_RANK}:
        none = "model must have layers that octile.convert has converted and then fully_shard has sharded, but has none"
        raise ValueError(f"no weight can be gathered in FP8: {summary}" if high_precision else none)
    for extension in quantized.values():
        for method in (extension.fsdp_pre_all_gather, extension.fsdp_post_all_gather):
            setattr(extension.shard, method.__name__, method)
    if dist.get_rank() == 0:
        log_or_print(str(summary))
    return summary


class _Fp8Shard:
    """FSDP2's all-gather of a shard in FP8; the names, arguments and results of its methods are FSDP2's.

    Args:
        shard: [n, K] or [e, N, K] in high precision, of as many rows on each rank.
        operand_format: format of the weight.
        mesh: mesh of the ranks.
    """

    def __init__(self, shard: Tensor, operand_format: OperandFormat, mesh: DeviceMesh):
        self.shard, self.operand_format = shard, operand_format
        self.order: Tensor | None = None
        if shard.dim() == 2 and len(shard) % BLOCK[0]:
            self.order = torch.tensor(scale_order(len(shard), mesh.size()), device=shard.device)

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        """Return what is gathered: encoded values and scales."""
        if self.order is None:
            q = _quantize(self.shard, self.operand_format)
            return (q.data, q.scale), None
        amax = boundary_amax(self.shard, mesh.get_local_rank(), mesh.size())
        dist.all_reduce(amax, dist.ReduceOp.MAX, mesh.get_group())
        return quantize_rows(self.shard, mesh.get_local_rank(), mesh.size(), amax, self.operand_format), None

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the whole weight, or write it to out, whose encoded values have the gathered memory already."""
        data, scale = gathered
        if self.order is not None:
            scale = scale[self.order]
        if out is None:
            return GatheredWeight(data, scale, dtype), ()
        if self.order is not None:
            out.scale.data.copy_(scale)  # not counted: it is what a backward pass has saved
        return None


def boundary_amax(shard: Tensor, rank: int, ranks: int) -> Tensor:
    """Return the amax of a rank's rows in those blocks of the whole weight that other ranks have rows of, too.

    Args:
        shard: [n, K], the rows n · rank … of the weight [n · ranks, K].

    Returns:
        bits of float32 as int32 [⌈n · ranks/128⌉, ⌈K/128⌉], 0 for other blocks. Positive floats are ordered as their
        bits are, and NaN is the largest of these; communication libraries do not say what their maximum of NaN is.
    """
    n, k = shard.shape
    amax = shard.new_zeros(-(-n * ranks // BLOCK[0]), -(-k // BLOCK[1]), dtype=torch.float32)
    for block, rows in _boundary_blocks(n, rank):
        columns = nn.functional.pad(shard[rows].abs().amax(0).float(), (0, -k % BLOCK[1]))
        amax[block] = columns.view(-1, BLOCK[1]).amax(1)
    return amax.abs_().view(torch.int32)


def quantize_rows(
    shard: Tensor, rank: int, ranks: int, amax: Tensor, operand_format: OperandFormat
) -> tuple[Tensor, Tensor]:
    """Quantize a rank's rows as a part of the whole weight.

    The rows are put at their offset in whole blocks; a row that another rank has gets the amax of its blocks.

    Args:
        shard, rank, ranks: as in `boundary_amax`.
        amax: the maximum of all ranks' `boundary_amax`, int32.

    Returns:
        data [n, K], and scale [S, ⌈K/128⌉] with one S for all ranks: of the rank's blocks, then of no block.
    """
    n, k = shard.shape
    blocks = _blocks(n, rank)
    first = n * rank - BLOCK[0] * blocks.start
    whole = shard.new_zeros(BLOCK[0] * len(blocks), k)
    whole[first : first + n] = shard
    for block, rows in _boundary_blocks(n, rank):
        other = 0 if n * rank + rows.start > BLOCK[0] * block else -1  # a row of the block that is not the rank's
        whole[BLOCK[0] * (block - blocks.start) :][: BLOCK[0]][other, :: BLOCK[1]] = (
            amax[block].view(torch.float32).to(shard.dtype)
        )
    q = _quantize(whole, operand_format)
    most = max(len(_blocks(n, r)) for r in range(ranks))
    return q.data[first : first + n], nn.functional.pad(q.scale, (0, 0, 0, most - len(blocks)))


def scale_order(n: int, ranks: int) -> list[int]:
    """Return where each block of the whole weight is among the scales that `quantize_rows` gives on all ranks."""
    most = max(len(_blocks(n, r)) for r in range(ranks))
    owners = [BLOCK[0] * block // n for block in range(-(-n * ranks // BLOCK[0]))]  # the rank of its first row
    return [most * rank + block - _blocks(n, rank).start for block, rank in enumerate(owners)]


def _blocks(n: int, rank: int) -> range:
    """Return the blocks that the rows n · rank … n · (rank + 1) are in."""
    return range(n * rank // BLOCK[0], -(-n * (rank + 1) // BLOCK[0]))


def _boundary_blocks(n: int, rank: int) -> Iterator[tuple[int, slice]]:
    """Yield the blocks of which a rank has not all rows, each with the rows among the rank's own that are in it."""
    blocks = _blocks(n, rank)
    for block in sorted({blocks.start, blocks.stop - 1}):
        start, stop = BLOCK[0] * block - n * rank, BLOCK[0] * (block + 1) - n * rank
        if start < 0 or stop > n:
            yield block, slice(max(start, 0), min(stop, n))


def _quantize(t: Tensor, operand_format: OperandFormat) -> ScaledTensor:
    return quantize(t, operand_format.block, operand_format.fmt, operand_format.scale)


def _sharded_parameters(model: nn.Module) -> Iterator[Any]:
    """Yield torch's `FSDPParam` of each parameter that FSDP2 shards."""
    from torch.distributed.fsdp import FSDPModule  # whose import takes a second

    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:  # torch before 2.12 has one
                groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
            for group in groups:
                yield from group.fsdp_params


def _why_high_precision(recipe: Recipe, sharded: Any) -> str | None:
    """Return why a weight is not gathered in FP8, or None."""
    assert recipe.formats is not None
    if recipe.formats.w.block != BLOCK or recipe.has_smooth_swiglu:
        return f"recipe {recipe.name} without weights in 128×128 blocks"
    if recipe.high_precision & {"fprop", "dgrad"}:
        return "in high precision in a GEMM"
    if sharded.is_dtensor:
        return "sharded by tensor parallelism, too"
    if sharded.offload_to_cpu:
        return "offloaded to the CPU"
    if sharded.post_forward_mesh_info not in (None, sharded.mesh_info):
        return "resharded to fewer ranks after forward"
    if sharded.fsdp_placement.dim != 0:
        return f"sharded along dimension {sharded.fsdp_placement.dim}"
    ranks, shape = sharded.shard_mesh.size(), sharded.sharded_param.shape
    if ranks == 1:
        return ONE_RANK
    rows = "experts" if len(shape) == 3 else "rows"
    if shape[0] % ranks:
        return f"with {shape[0]} {rows}, which {ranks} ranks do not divide"
    if shape[-1] % VECTOR:
        return f"with {shape[-1]} columns, no multiple of {VECTOR}"
    return None
