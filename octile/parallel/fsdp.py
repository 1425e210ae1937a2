"""FP8 all-gather under FSDP2: ranks send each other weights as their GEMMs read them, in 8 bits.

FSDP2 shards each parameter along its first dimension and gathers it before its layer runs, in high precision: 4 bytes a
value, or 2 under a BF16 mixed precision policy. Here each rank quantizes its own rows, in 128×128 blocks, and FSDP2
gathers the encoded values, 1 byte each, and the scales. Where a rank's rows are whole blocks, these are the bits that
quantizing the whole weight gives; weights for which they are not are gathered in high precision. dgrad reads the same
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

from octile.formats import BLOCK
from octile.kernels.memory_layout import VECTOR
from octile.nn.conversion_summary import gemm_weights, log_or_print, recipe_of
from octile.nn.gathered_weight import GatheredWeight
from octile.recipe import OperandFormat, Recipe
from octile.scaled import quantize

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
    quantized, high_precision = dict[str, tuple[Tensor, OperandFormat]](), dict[str, str]()
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
            quantized[name] = shard, recipe.formats.w
        else:
            high_precision[name] = reason
    summary = AllGatherSummary(tuple(quantized), high_precision)
    if not quantized and set(high_precision.values()) != {ONE_RANK}:
        none = "model must have layers that octile.convert has converted and then fully_shard has sharded, but has none"
        raise ValueError(f"no weight can be gathered in FP8: {summary}" if high_precision else none)
    for shard, operand_format in quantized.values():
        extension = _Fp8Shard(shard, operand_format)
        for method in (extension.fsdp_pre_all_gather, extension.fsdp_post_all_gather):
            setattr(shard, method.__name__, method)
    if dist.get_rank() == 0:
        log_or_print(str(summary))
    return summary


class _Fp8Shard:
    """FSDP2's all-gather of a shard in FP8; the names, arguments and results are FSDP2's.

    Args:
        shard: [n, K] or [e, N, K] in high precision: whole blocks of a rank.
        operand_format: of the weight.
    """

    def __init__(self, shard: Tensor, operand_format: OperandFormat):
        self.shard, self.operand_format = shard, operand_format

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        """Return what is gathered."""
        q = quantize(self.shard, self.operand_format.block, self.operand_format.fmt, self.operand_format.scale)
        return (q.data, q.scale), None

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the whole weight, whose memory FSDP2 frees and fills again; out, if given, has this memory."""
        data, scale = gathered
        return None if out is not None else (GatheredWeight(data, scale, dtype), ())


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
    if len(shape) == 2 and shape[0] // ranks % BLOCK[0]:
        return f"with {shape[0] // ranks} rows a rank, no multiple of {BLOCK[0]}"
    if shape[-1] % VECTOR:
        return f"with {shape[-1]} columns, no multiple of {VECTOR}"
    return None
