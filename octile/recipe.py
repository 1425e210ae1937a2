"""Recipes. A recipe says which operand of which GEMM gets which 8-bit format, block and scale rule.

A linear layer has three GEMMs:

    fprop   y  = x · wᵀ          x [T, K]  w [N, K]
    dgrad   dx = dy · w          dy [T, N]
    wgrad   dw = dyᵀ · x         sums over the tokens T

Each operand is described by an `OperandFormat`; a recipe without formats runs its GEMMs in its `compute` dtype.
`deepseek_v3` is the recipe that this library exists for, `wgrad_x_blocks` a variation of it with a cheaper wgrad. The
others are published recipes that it is compared with.

A recipe also says what a block saves for backward besides the inputs of its linear layers, which are saved in their
quantized form (`docs/data_flow.md`).

Source: DeepSeek-V3 (arXiv 2412.19437) §3.3; FP8-LM (arXiv 2310.18313) and its code, MS-AMP; Smooth-SwiGLU (arXiv
2409.12517); NVIDIA's hybrid formats (arXiv 2209.05433), delayed scaling as in Transformer Engine, and MXFP8 (arXiv
2506.08027).
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import torch

from octile.atomic_files import write_text
from octile.formats import (
    BLOCK,
    COLUMN_TILE,
    E4M3,
    E5M2,
    E5M6,
    GEMM_FORMATS,
    INT8,
    MX_COLUMN_TILE,
    MX_TILE,
    TILE,
    FloatFormat,
    IntFormat,
    by_name,
)
from octile.validation import Range, annotations_of, check, check_fields, read_text

Extent = Annotated[int, Range(at_least=1)] | None  # of a block along one dimension of a matrix; None: all of it
ScaleRule = Literal["float32", "power_of_2"]
GemmName = Literal["fprop", "dgrad", "wgrad"]
Amax = Literal["current", "delayed", "unscaled"]

TENSOR: tuple[Extent, Extent] = (None, None)
FILE_KEYS = (
    "recipe",
    "swiglu_inputs",
    "transposed_weights",
    "wgrad_x_block",
    "latents",
    "formats",
    "keep",
)  # a file's
KEEP_KEYS = ("layers", "products")  # of a [[keep]] in it
WHOLE_SIDE = "all"  # in a file, the side of a block that has no length
LATENTS = ("activations", "fp8")


@dataclass(frozen=True)
class OperandFormat:
    """How one operand is quantized.

    Attributes:
        fmt: format of the encoded values.
        block: the elements that share a scale.
        scale: how a scale is rounded: not at all beyond FP32, or up to a power of two.
        amax: where a block's largest magnitude comes from: the block itself (`current`); the largest of the last
            `window` steps (`delayed`, whole tensors only); or nowhere, the scale is 1 (`unscaled`).
        window: steps in the amax history of a delayed scale.
        warm_up: how long a delayed scale comes from the current amax: until one past step has an amax (`until_first`),
            or until every step of the window has one (`until_full`). A step with a NaN or an Inf has none.

    Raises:
        TypeError: a field has another type, such as the name of a format.
        ValueError: it is none of those above; a side of the block or the window is below 1; or a block or a scale rule
            has no meaning with this amax.
    """

    fmt: FloatFormat | IntFormat = E4M3
    block: tuple[Extent, Extent] = TILE
    scale: ScaleRule = "float32"
    amax: Amax = "current"
    window: Annotated[int, Range(at_least=1)] = 16
    warm_up: Literal["until_first", "until_full"] = "until_first"

    def __post_init__(self) -> None:
        if not isinstance(self.fmt, FloatFormat | IntFormat):
            raise TypeError(f"fmt must be a format such as octile.E4M3, not {self.fmt!r}")
        check_fields(self)
        if self.amax != "current" and self.block != TENSOR:
            raise ValueError(f"amax={self.amax!r} needs one scale for the whole tensor, but block is {self.block}")
        if self.amax == "unscaled" and self.scale != "float32":
            raise ValueError(f"scale={self.scale!r} has no meaning with amax='unscaled'")


OPERAND_KEYS = tuple(field.name for field in fields(OperandFormat))  # of a [formats.x] in a file
GEMMS: tuple[GemmName, ...] = ("fprop", "dgrad", "wgrad")
OPERANDS = ("x", "w", "dy", "wgrad_x", "wgrad_dy")  # the fields of `GemmFormats` that are one


@dataclass(frozen=True)
class OptimizerFormats:
    """The formats of the optimizer's state for each parameter, and of the gradient that it reads.

    Raises:
        TypeError, ValueError: a field is none of its formats.
    """

    master: Literal["float32", "float16"] = "float32"
    gradient: Literal["float32", "float8_e4m3fn"] = "float32"
    exp_avg: Literal["float32", "bfloat16", "float8_e4m3fn"] = "bfloat16"
    exp_avg_sq: Literal["float32", "bfloat16", "float16"] = "bfloat16"

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class GemmFormats:
    """The formats of the operands of a layer's three GEMMs.

    Attributes:
        x, w: operands of fprop. The quantized x is what is saved for backward.
        dy: the gradient operand of dgrad. Its other operand is fprop's `w`, transposed; if the blocks of `w` have one
            row, it is the transposed weight, quantized from the original in such blocks, too.
        wgrad_x, wgrad_dy: operands of wgrad.
        requantizes_x: whether `wgrad_x` is requantized in backward from the saved `x`; otherwise it is quantized in
            forward from the original, and saved instead of `x`.

    Raises:
        TypeError: an operand is no OperandFormat, or requantizes_x no bool.
        ValueError: a delayed scale where wgrad's formats differ: a layer has no amax history for them.
    """

    x: OperandFormat
    w: OperandFormat
    dy: OperandFormat
    wgrad_x: OperandFormat
    wgrad_dy: OperandFormat
    requantizes_x: bool = True

    @cached_property
    def routed_dy(self) -> tuple[OperandFormat, OperandFormat]:
        """dy and wgrad_dy of experts, scaled as x is: their rows are dispatched in 8 bits and then requantized."""
        return replace(self.dy, scale=self.x.scale), replace(self.wgrad_dy, scale=self.wgrad_x.scale)

    def __post_init__(self) -> None:
        for name in OPERANDS:
            if not isinstance(operand := getattr(self, name), OperandFormat):
                raise TypeError(f"{name} must be an OperandFormat, not {operand!r}")
        check("requantizes_x", self.requantizes_x, bool)
        assert self.routed_dy  # computed now: the compiler of torch 2.11 cannot construct an OperandFormat
        if self.is_delayed and (self.wgrad_x, self.wgrad_dy) != (self.x, self.dy):
            raise ValueError(
                "wgrad_x and wgrad_dy must be x and dy where a scale is delayed: the amax history has no others"
            )

    @property
    def is_tiled(self) -> bool:
        """Whether inputs and gradients have tiles of 128: along the tokens for wgrad, along the channels otherwise.

        wgrad's x may have 128×128 blocks instead.
        """
        return (
            (self.x.block, self.dy.block, self.wgrad_dy.block) == (TILE, TILE, COLUMN_TILE)
            and self.wgrad_x.block in (COLUMN_TILE, BLOCK)
            and self.x.fmt == self.wgrad_x.fmt
            and (self.dy.fmt, self.dy.scale) == (self.wgrad_dy.fmt, self.wgrad_dy.scale)
        )

    @property
    def is_delayed(self) -> bool:
        """Whether scales come from past steps, so that a layer needs an amax history."""
        return self.window > 0

    @property
    def window(self) -> int:
        """Steps in a layer's amax history: as many as the operand with the longest needs, 0 if none is delayed."""
        operands = [getattr(self, name) for name in OPERANDS]
        return max([0, *(operand.window for operand in operands if operand.amax == "delayed")])

    @classmethod
    def per_tensor(cls, forward: OperandFormat, backward: OperandFormat) -> GemmFormats:
        """One scale a tensor is the same for both layouts, so wgrad reads the tensors of fprop and dgrad transposed."""
        return cls(x=forward, w=forward, dy=backward, wgrad_x=forward, wgrad_dy=backward)


@dataclass(frozen=True)
class Recipe:
    """The formats of the three GEMMs of a linear layer, and what else a published recipe changes.

    Attributes:
        name: by which `octile compare --recipes` and a run's configuration name it.
        formats: formats of the GEMMs' operands; None: they are in `compute`.
        compute: dtype of the GEMMs that are not quantized; in training on a GPU, autocast's dtype.
        high_precision: the GEMMs that run in `compute` although the recipe has formats.
        exceptions: further GEMMs in high precision of single layers: (pattern of layer names as of file names, GEMMs).
        loss_scale: "dynamic" multiplies the loss by a power of two that backs off on overflow.
        has_smooth_swiglu: whether SwiGLU's output is divided by each channel's largest value before it is quantized.
        optimizer: the formats of the optimizer's state.
        attention_output: how attention's output is saved, once, for its own backward and for wgrad of the layer that
            follows. None: autograd saves all of attention in high precision.
        attention_inputs: whether queries, keys and values that come straight from the block's input are saved in BF16
            ("kept") or "recomputed".
        latent_attention_inputs: the same for those that come from a compression (MLA), wherever `attention_output` is
            given.
        norms: whether the quantized outputs of fused norms are "recomputed", or saved in addition to their inputs
            ("kept").
        transposed_weights: what becomes of the transposed form, which dgrad reads, of weights in 128×128 blocks.
            "recomputed": it is quantized from the weight in the backward pass, and nothing of it is held in between.
            "cached": it is quantized and cached with the weight, which takes a byte per weight. None: "recomputed", but
            "cached" where micro-batches read it several times a step: in `octile train`, and in torchtitan unless
            weights are sharded. A weight without a gradient that the weight cache holds is quantized once for all
            steps, in both forms, whatever is set here.
        swiglu_inputs: how SwiGLU's inputs are saved, its output being recomputed; or "recomputed": they are recomputed,
            too. None: autograd saves them in high precision, and the quantized output.
        batch_invariant: whether a token's forward pass has the bits that `octile serve` gives it in exact mode,
            whatever else is in the batch (`docs/exact.md`).
        latents: how latents are rounded before attention reads them, as serving caches them: to the dtype of
            activations, or to FP8. Only of a batch-invariant recipe.

    Raises:
        TypeError, ValueError: a field is none of these, or serving does not compute a batch-invariant recipe.
    """

    name: str
    formats: GemmFormats | None = None
    compute: torch.dtype = torch.bfloat16
    loss_scale: Literal["dynamic"] | None = None
    has_smooth_swiglu: bool = False
    optimizer: OptimizerFormats = field(default_factory=OptimizerFormats)
    high_precision: frozenset[GemmName] = frozenset()
    exceptions: tuple[tuple[str, frozenset[GemmName]], ...] = ()
    attention_output: OperandFormat | None = None
    attention_inputs: Literal["kept", "recomputed"] = "kept"
    latent_attention_inputs: Literal["kept", "recomputed"] = "recomputed"
    norms: Literal["kept", "recomputed"] = "recomputed"
    swiglu_inputs: OperandFormat | Literal["recomputed"] | None = None
    transposed_weights: Literal["cached", "recomputed"] | None = None
    batch_invariant: bool = False
    latents: Literal["activations", "fp8"] = "activations"

    def __post_init__(self) -> None:
        for name, annotation in CHOICES.items():
            check(name, getattr(self, name), annotation)
        for name, kind in (("formats", GemmFormats), ("attention_output", OperandFormat)):
            if not isinstance(value := getattr(self, name), kind | None):
                raise TypeError(f"{name} must be None or {kind.__name__}, not {value!r}")
        if self.swiglu_inputs not in ("recomputed", None) and not isinstance(self.swiglu_inputs, OperandFormat):
            raise TypeError(f"swiglu_inputs must be None, 'recomputed' or an OperandFormat, not {self.swiglu_inputs!r}")
        if not isinstance(self.compute, torch.dtype) or not self.compute.is_floating_point:
            raise TypeError(f"compute must be a floating-point dtype such as torch.bfloat16, not {self.compute!r}")
        if unknown := [*self.high_precision.union(*(gemms for _, gemms in self.exceptions)) - {*GEMMS}]:
            raise ValueError(f"high_precision and exceptions must have GEMMs of {', '.join(GEMMS)}, not {unknown[0]!r}")
        assert self.smoothed  # computed now, as `GemmFormats.routed_dy`
        if self.latents != "activations" and not self.batch_invariant:
            raise ValueError(f"latents must be 'activations', not {self.latents!r}, without batch_invariant")
        if self.batch_invariant and (why := self._why_not_served()):
            raise ValueError(f"batch_invariant must be False, since serving does not compute {why}")

    def _why_not_served(self) -> str | None:
        """Return what of this recipe serving does not compute; None: it computes all."""
        if self.formats is None or not (self.can_fuse_attention and self.can_fuse_swiglu):
            return "layers that are not fused, or in high precision"
        x, w = self.formats.x, self.formats.w
        if (x.fmt, x.block, w.fmt, w.block) != (E4M3, TILE, E4M3, BLOCK):
            return "other formats than E4M3 in 1×128 tiles and 128×128 blocks"
        return f"exceptions such as {self.exceptions[0][0]!r}" if self.exceptions else None

    @cached_property
    def smoothed(self) -> Recipe:
        """This recipe for the layer that reads smoothed SwiGLU: with the current amax for its weight.

        The weight's columns are multiplied by the channels' scales, which change with every micro-batch, so that the
        amax of past steps is not that of the product.
        """
        if not self.has_smooth_swiglu or self.formats is None or self.formats.w.amax != "delayed":
            return self
        return replace(self, formats=replace(self.formats, w=replace(self.formats.w, amax="current")))

    @property
    def can_fuse_attention(self) -> bool:
        """Whether attention and the layers around it can be one function that saves `attention_output`."""
        return self._can_fuse and self.attention_output is not None

    @property
    def can_fuse_swiglu(self) -> bool:
        """Whether a feed-forward layer can be one function that saves `swiglu_inputs`."""
        return self._can_fuse and self.swiglu_inputs is not None and not self.has_smooth_swiglu

    @property
    def can_fuse_projections(self) -> bool:
        """Whether layers that read one input can be one function that saves the quantized input."""
        return self._can_fuse

    @property
    def recomputes_transposed_weights(self) -> bool:
        """Whether the backward pass transposes weights, which have blocks that allow it."""
        return self.transposed_weights != "cached" and self.formats is not None and self.formats.w.block == BLOCK

    @property
    def _can_fuse(self) -> bool:
        return self.formats is not None and self.formats.is_tiled and not self.high_precision

    @property
    def has_delayed_scaling(self) -> bool:
        """Whether a layer needs an amax history."""
        return self.formats is not None and self.formats.is_delayed

    def without(self, gemm: GemmName) -> Recipe:
        """Return this recipe with one GEMM in `compute` instead of in 8 bits.

        Raises:
            ValueError: there is no such GEMM, or the recipe quantizes nothing.
        """
        if gemm not in GEMMS:
            raise ValueError(f"gemm must be one of {', '.join(GEMMS)}, not {gemm!r}")
        if self.formats is None:
            raise ValueError(f"recipe {self.name!r} quantizes nothing, so there is no {gemm} in 8 bits to leave out")
        if gemm in self.high_precision:
            return self
        return replace(self, name=f"{self.name} without {gemm}", high_precision=self.high_precision | {gemm})

    def with_weight_scale(self, scale: ScaleRule) -> Recipe:
        """Return this recipe with another scale rule for weights, if it quantizes them in 128×128 blocks of E4M3."""
        if self.formats is None or replace(self.formats.w, scale=scale) != OperandFormat(E4M3, BLOCK, scale):
            return self
        return replace(self, formats=replace(self.formats, w=OperandFormat(E4M3, BLOCK, scale)))

    def for_layer(self, name: str) -> Recipe:
        """Return this recipe for the layer of that name: with the exceptions that match it applied, and no others."""
        recipe = replace(self, exceptions=())
        matching = [gemms for pattern, gemms in self.exceptions if fnmatchcase(name, pattern)]
        for gemm in GEMMS:
            if any(gemm in gemms for gemms in matching):
                recipe = recipe.without(gemm)
        return recipe

    @classmethod
    def read(cls, path: Path) -> Recipe:
        """Read a recipe with other formats or exceptions from a TOML file:

            recipe = "deepseek_v3"                      # what the file does not say is as in this recipe
            swiglu_inputs = "recomputed"                # if the recipe saves them ("kept")
            transposed_weights = "recomputed"           # if the recipe has weights in blocks; or "cached"
            wgrad_x_block = [128, 128]                  # wgrad's x in blocks or in tiles ([128, 1])
            latents = "fp8"                             # of the recipe exact: served with an FP8 cache
            [formats]
            requantizes_x = true                        # see `GemmFormats`
            [formats.dy]                                # fields of an operand's `OperandFormat`
            fmt = "e5m2"                                # or "e4m3", "int8"
            block = [1, "all"]                          # "all": all of the matrix along this dimension
            scale = "power_of_2"
            [[keep]]                                    # these GEMMs run in `compute` instead of 8 bits
            layers = "model.layers.1.mlp.down_proj"     # a pattern of layer names, as of file names
            products = ["fprop", "wgrad"]

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: its text describes no recipe.
        """
        if not path.is_file():
            raise FileNotFoundError(f"there is no recipe file {str(path)!r}")
        return cls.parse(read_text(path), str(path))

    @classmethod
    def parse(cls, text: str, where: str) -> Recipe:
        """Parse the text of such a file; `where` it comes from begins the error messages.

        Raises:
            ValueError: the text describes no recipe.
        """
        try:
            content = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{where}: {error}") from None
        if unknown := [key for key in content if key not in FILE_KEYS]:
            raise ValueError(f"{where}: {unknown[0]} is unknown: there are {', '.join(FILE_KEYS)}")
        if not isinstance(content.get("recipe"), str):
            raise ValueError(f'{where} must say recipe = "deepseek_v3" or another name, and [[keep]] for exceptions')
        if content["recipe"] not in cls.names():
            raise ValueError(f"{where}: unknown recipe {content['recipe']!r}; there are {', '.join(cls.names())}")
        recipe = cls.named(content["recipe"])
        formats = _formats(where, content, recipe)
        try:
            recipe = replace(recipe, formats=formats)
        except ValueError:
            raise ValueError(
                f"{where}: recipe {recipe.name!r} has its own formats: serving computes no others"
            ) from None
        keeps = content.get("keep", [])
        if not isinstance(keeps, list):
            raise ValueError(f"{where}: keep must be a list, [[keep]], not {keeps!r}")
        exceptions = tuple(_exception(f"{where}: keep {number}", keep) for number, keep in enumerate(keeps, 1))
        if exceptions and recipe.formats is None:
            raise ValueError(f"{where}: recipe {recipe.name!r} quantizes nothing, so there is nothing to keep")
        if exceptions and recipe.batch_invariant:
            raise ValueError(f"{where}: recipe {recipe.name!r} keeps nothing: serving has all these layers in FP8")
        return replace(
            recipe,
            exceptions=exceptions,
            swiglu_inputs=_swiglu_inputs(where, content, recipe),
            transposed_weights=_transposed_weights(where, content, recipe),
            latents=_latents(where, content, recipe),
        )

    def write(self, path: Path) -> Path:
        """Write the file that `read` reads, and return its path. A folder that does not exist is created.

        Raises:
            ValueError: a file cannot say all of the recipe: its name is none of `names`, or it has another field than
                the recipe of that name that no key of a file stands for.
        """
        if self.name not in Recipe.names():
            raise ValueError(f"recipe {self.name!r} must have one of the names {', '.join(Recipe.names())} in a file")
        lines = [f'recipe = "{self.name}"']
        lines += ['swiglu_inputs = "recomputed"'] if self.swiglu_inputs == "recomputed" else []
        lines += [f'transposed_weights = "{self.transposed_weights}"'] if self.transposed_weights else []
        lines += [f'latents = "{self.latents}"'] if self.latents != "activations" else []
        usual = Recipe.named(self.name).formats
        lines += _lines_of_formats(self.formats, usual) if self.formats and usual else []
        for layers, gemms in self.exceptions:
            named = ", ".join(f'"{gemm}"' for gemm in GEMMS if gemm in gemms)
            lines += ["", "[[keep]]", f"layers = {json.dumps(layers)}", f"products = [{named}]"]
        text = "\n".join(lines) + "\n"
        if (found := Recipe.parse(text, str(path))) != self:
            different = [f.name for f in fields(self) if getattr(found, f.name) != getattr(self, f.name)]
            raise ValueError(f"recipe {self.name!r} has other {', '.join(different)} than a file can give it")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
        return path

    @classmethod
    def deepseek_v3(cls) -> Recipe:
        """E4M3 everywhere: 1×128 tiles for activations and gradients, 128×128 blocks for weights, 128×1 for wgrad.

        The input's scales are powers of two because it is saved in 1×128 and requantized to 128×1 in backward: the
        values are then only shifted, and bits are lost only below the normal range of a new tile. The scales of
        attention's output are powers of two for the same reason; it is saved in E5M6, since its own backward reads it.
        """
        return cls("deepseek_v3", _fine_grained(), **_saved())

    @classmethod
    def bf16(cls) -> Recipe:
        """The baseline: GEMMs of BF16 operands."""
        return cls("bf16")

    @classmethod
    def float32(cls) -> Recipe:
        """GEMMs of FP32 operands, on a GPU without autocast: the reference that all other recipes approximate."""
        return cls("float32", compute=torch.float32)

    @classmethod
    def per_tensor(cls) -> Recipe:
        """E4M3 with one scale a tensor, from the tensor itself: one outlier sets the scale of the whole tensor."""
        return cls("per_tensor", GemmFormats.per_tensor(OperandFormat(block=TENSOR), OperandFormat(block=TENSOR)))

    @classmethod
    def delayed(cls) -> Recipe:
        """E4M3 with one scale a tensor, from the amax of past steps: a new outlier saturates."""
        operand = OperandFormat(block=TENSOR, amax="delayed")
        return cls("delayed", GemmFormats.per_tensor(operand, operand))

    @classmethod
    def hybrid_delayed(cls) -> Recipe:
        """NVIDIA's recipe for Hopper: one scale a tensor, from the largest amax of 1024 past steps; gradients in E5M2.

        These are the defaults of Transformer Engine's `DelayedScaling`: HYBRID formats, `amax_history_len=1024`,
        `amax_compute_algo="max"`, `margin=0`. There a tensor's first scale is 1; here it comes from the tensor.
        """
        forward = OperandFormat(block=TENSOR, amax="delayed", window=1024)
        return cls("hybrid_delayed", GemmFormats.per_tensor(forward, replace(forward, fmt=E5M2)))

    @classmethod
    def hybrid_e5m2(cls) -> Recipe:
        """`deepseek_v3` with E5M2 for output gradients: a wider range, one bit of precision less."""
        return cls("hybrid_e5m2", _fine_grained(gradient=E5M2), **_saved())

    @classmethod
    def global_scale(cls) -> Recipe:
        """E4M3 forward and E5M2 backward with no scale but the loss scale, as in FP16 training."""
        forward, backward = OperandFormat(block=TENSOR, amax="unscaled"), OperandFormat(E5M2, TENSOR, amax="unscaled")
        return cls("global_scale", GemmFormats.per_tensor(forward, backward), loss_scale="dynamic")

    @classmethod
    def fp16_loss_scaling(cls) -> Recipe:
        """GEMMs of FP16 operands with a dynamic loss scale; on a GPU all that autocast reaches is in FP16."""
        return cls("fp16_loss_scaling", compute=torch.float16, loss_scale="dynamic")

    @classmethod
    def fp8_lm(cls) -> Recipe:
        """FP8-LM: per-tensor E4M3 and E5M2 GEMMs, FP8 gradients, FP16 master weights, FP8 and FP16 moments.

        All scales are powers of two. Those of inputs and output gradients come from the largest amax of 16 past steps,
        and from the tensor itself until these 16 steps are over, as in the paper's reference code, MS-AMP. Those of
        weights and of the optimizer's state come from the tensor itself.

        The paper's methods for several GPUs are not part of it: sums of FP8 gradients over GPUs with a factor μ, whole
        tensors instead of shards in ZeRO, and activations that tensor parallelism sends in FP8. The factor halves when
        more than 0.001% of a gradient's values reach the largest FP8 value, and otherwise doubles within 1000 steps.
        Without such a sum a factor that is a power of two would change the scale of a stored gradient and none of its
        bits.
        """
        optimizer = OptimizerFormats("float16", "float8_e4m3fn", "float8_e4m3fn", "float16")
        w = OperandFormat(block=TENSOR, scale="power_of_2")
        x = replace(w, amax="delayed", warm_up="until_full")
        dy = replace(x, fmt=E5M2)
        return cls("fp8_lm", GemmFormats(x=x, w=w, dy=dy, wgrad_x=x, wgrad_dy=dy), optimizer=optimizer)

    @classmethod
    def smooth_swiglu(cls) -> Recipe:
        """`delayed`, with each channel of SwiGLU's output smoothed before it is quantized."""
        return cls("smooth_swiglu", cls.delayed().formats, has_smooth_swiglu=True)

    @classmethod
    def mxfp8(cls) -> Recipe:
        """NVIDIA's recipe for Blackwell: E4M3 in OCP's MXFP8, 32 values with a UE8M0 scale, which is rounded up.

        The 32 values of every operand lie along the dimension that its GEMM sums over. What two GEMMs read in two
        directions, inputs, weights and output gradients, is quantized twice from the original. Hopper's tensor cores do
        not read these scales, so that the GEMMs are emulated in FP16 with FP32 sums, which is slower than BF16.

        Source: OCP Microscaling Formats v1.0; "Recipes for pre-training LLMs with MXFP8" (arXiv 2506.08027).
        """
        row, column = OperandFormat(E4M3, MX_TILE, "power_of_2"), OperandFormat(E4M3, MX_COLUMN_TILE, "power_of_2")
        formats = GemmFormats(x=row, w=row, dy=row, wgrad_x=column, wgrad_dy=column, requantizes_x=False)
        return cls("mxfp8", formats)

    @classmethod
    def int8_tiles(cls) -> Recipe:
        """`deepseek_v3` in INT8: the same tiles, evenly spaced values."""
        return cls("int8_tiles", _fine_grained(INT8, INT8), **_saved(INT8))

    @classmethod
    def wgrad_x_blocks(cls) -> Recipe:
        """`deepseek_v3` with wgrad's x in 128×128 blocks instead of 128×1 tiles, a deviation from the paper.

        One operand of wgrad has a scale for 128 of its rows, as weights in fprop, and Hopper's GEMM has fewer scales to
        multiply by. x is requantized from its saved 1×128 tiles, in which it was rounded, to powers of two: its values
        are shifted, and only those that fall below the normal range of their block are rounded again.
        `experiments/wgrad_blocks` measures the loss.
        """
        return cls("wgrad_x_blocks", _fine_grained(wgrad_x_block=BLOCK), **_saved())

    @classmethod
    def exact(cls) -> Recipe:
        """`deepseek_v3` with the forward pass of serving: `octile serve` in exact mode reports the same probabilities.

        Each token's results have the same bits in a prompt, decoded alone, in any batch, and in training. Attention is
        in the absorbed form, and the gradient that of the usual form: both are the same function but for rounding.
        """
        return replace(cls.deepseek_v3(), name="exact", batch_invariant=True)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names that `named` accepts, the library's own recipe first."""
        return (
            "deepseek_v3",
            "bf16",
            "float32",
            "per_tensor",
            "delayed",
            "hybrid_delayed",
            "hybrid_e5m2",
            "global_scale",
            "fp16_loss_scaling",
            "fp8_lm",
            "smooth_swiglu",
            "mxfp8",
            "int8_tiles",
            "wgrad_x_blocks",
            "exact",
        )

    @classmethod
    def named(cls, name: str) -> Recipe:
        """Return the recipe of that name; a name that ends in .toml is that of a file (see `read`).

        Raises:
            ValueError: there is no such recipe, or the file describes none.
            FileNotFoundError: there is no such file.
        """
        if name.endswith(".toml"):
            return cls.read(Path(name))
        if name not in cls.names():
            known = ", ".join(cls.names())
            raise ValueError(f"unknown recipe {name!r}; there are {known}, and files, whose names end in .toml")
        return getattr(cls, name)()


def check_recipe(recipe: Any) -> None:
    """Refuse what is neither a recipe nor None.

    Raises:
        TypeError: recipe is something else.
    """
    if recipe is not None and not isinstance(recipe, Recipe):
        what, see = type(recipe).__name__, "see Recipe.named"
        if isinstance(recipe, str):
            see = f"see Recipe.named({recipe!r})"
        elif getattr(recipe, "__self__", None) is Recipe and recipe.__name__ in Recipe.names():
            see = f"call it, Recipe.{recipe.__name__}()"
        raise TypeError(f"recipe must be an octile.Recipe, not {what}: {see}")


def _fine_grained(
    fmt: FloatFormat | IntFormat = E4M3,
    gradient: FloatFormat | IntFormat = E4M3,
    wgrad_x_block: tuple[Extent, Extent] = COLUMN_TILE,
) -> GemmFormats:
    return GemmFormats(
        x=OperandFormat(fmt, TILE, "power_of_2"),
        w=OperandFormat(fmt, BLOCK),
        dy=OperandFormat(gradient, TILE),
        wgrad_x=OperandFormat(fmt, wgrad_x_block, "power_of_2"),
        wgrad_dy=OperandFormat(gradient, COLUMN_TILE),
    )


def _saved(fmt: FloatFormat | IntFormat = E4M3) -> dict[str, Any]:
    """Return the fields that say what a fine-grained recipe saves besides the inputs of linear layers."""
    return {"attention_output": OperandFormat(E5M6, TILE, "power_of_2"), "swiglu_inputs": OperandFormat(fmt, TILE)}


def _swiglu_inputs(where: str, content: dict[str, Any], recipe: Recipe) -> OperandFormat | Literal["recomputed"] | None:
    """Read `swiglu_inputs` from a file's content."""
    asked = content.get("swiglu_inputs", "kept")
    if asked not in ("kept", "recomputed"):
        raise ValueError(f'{where}: swiglu_inputs must be "kept" or "recomputed", not {asked!r}')
    if asked == "recomputed" and recipe.swiglu_inputs is None:
        raise ValueError(
            f"{where}: recipe {recipe.name!r} saves SwiGLU's inputs in high precision, so it cannot recompute them"
        )
    return "recomputed" if asked == "recomputed" else recipe.swiglu_inputs


def _transposed_weights(where: str, content: dict[str, Any], recipe: Recipe) -> Literal["cached", "recomputed"] | None:
    """Read `transposed_weights` from a file's content."""
    asked: Literal["cached", "recomputed"] | None = content.get("transposed_weights")
    if asked not in ("cached", "recomputed", None):
        raise ValueError(f'{where}: transposed_weights must be "cached" or "recomputed", not {asked!r}')
    if asked == "recomputed" and (recipe.formats is None or recipe.formats.w.block != BLOCK):
        raise ValueError(
            f"{where}: recipe {recipe.name!r} has no weights in 128×128 blocks, so it cannot recompute their transposes"
        )
    return asked


def _formats(where: str, content: dict[str, Any], recipe: Recipe) -> GemmFormats | None:
    """Read `wgrad_x_block` and `formats` from a file's content.

    Raises:
        ValueError: they describe no formats, or the recipe has none.
    """
    tables, formats = content.get("formats", {}), recipe.formats
    block = content.get("wgrad_x_block")
    known = (*OPERANDS, "requantizes_x")
    if not isinstance(tables, dict):
        raise ValueError(f"{where}: formats must be tables such as [formats.x], not {tables!r}")
    if unknown := [key for key in tables if key not in known]:
        raise ValueError(f"{where}: formats.{unknown[0]} is unknown: there are {', '.join(known)}")
    if block is not None:
        if block not in (list(COLUMN_TILE), list(BLOCK)):
            raise ValueError(f"{where}: wgrad_x_block must be [128, 1] or [128, 128], not {block!r}")
        if formats is None or not formats.is_tiled:
            raise ValueError(
                f"{where}: recipe {recipe.name!r} has no tiles of 128 tokens, so it takes no wgrad_x_block"
            )
        if "wgrad_x" in tables:
            raise ValueError(f"{where}: wgrad_x_block must be left out with [formats.wgrad_x], which has the key block")
        tables = {**tables, "wgrad_x": {"block": block}}
    if formats is None and tables:
        raise ValueError(f"{where}: recipe {recipe.name!r} quantizes nothing, so it takes no formats")
    if formats is None:
        return None
    operands = {
        name: _operand(f"{where}: formats.{name}", table, getattr(formats, name))
        for name, table in tables.items()
        if name in OPERANDS
    }
    try:
        return replace(formats, **operands, requantizes_x=tables.get("requantizes_x", formats.requantizes_x))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: formats.{error}") from None


def _operand(where: str, table: Any, operand: OperandFormat) -> OperandFormat:
    """Read a table of a file, such as [formats.x]: the fields in which an operand differs from that of the recipe."""
    if not isinstance(table, dict):
        raise ValueError(f"{where} must be a table with some of {', '.join(OPERAND_KEYS)}, not {table!r}")
    if unknown := [key for key in table if key not in OPERAND_KEYS]:
        raise ValueError(f"{where}.{unknown[0]} is unknown: there are {', '.join(OPERAND_KEYS)}")
    changes = dict(table)
    if "fmt" in table:
        if table["fmt"] not in GEMM_FORMATS:
            raise ValueError(f"{where}.fmt must be one of {', '.join(GEMM_FORMATS)}, not {table['fmt']!r}")
        changes["fmt"] = by_name[table["fmt"]]
    if "block" in table:
        sides = table["block"]
        is_block = isinstance(sides, list) and len(sides) == 2
        if not is_block or any(type(side) is not int and side != WHOLE_SIDE for side in sides):
            raise ValueError(f'{where}.block must be a list of 2, each a whole number or "{WHOLE_SIDE}", not {sides!r}')
        changes["block"] = tuple(None if side == WHOLE_SIDE else side for side in sides)
    try:
        return replace(operand, **changes)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}.{error}") from None


def _lines_of_formats(formats: GemmFormats, usual: GemmFormats) -> list[str]:
    """Return the lines of a file that say in what formats differ from those of the recipe that the file names."""
    lines = []
    if formats.requantizes_x != usual.requantizes_x:
        lines += ["", "[formats]", f"requantizes_x = {json.dumps(formats.requantizes_x)}"]
    for name in OPERANDS:
        operand, other = getattr(formats, name), getattr(usual, name)
        changed = [key for key in OPERAND_KEYS if getattr(operand, key) != getattr(other, key)]
        values = [f"{key} = {json.dumps(_file_value(getattr(operand, key)))}" for key in changed]
        lines += ["", f"[formats.{name}]", *values] if changed else []
    return lines


def _file_value(value: Any) -> Any:
    """Return a field of an `OperandFormat` as it is in a file."""
    if isinstance(value, FloatFormat | IntFormat):
        return value.name
    return [WHOLE_SIDE if side is None else side for side in value] if isinstance(value, tuple) else value


def _latents(where: str, content: dict[str, Any], recipe: Recipe) -> Literal["activations", "fp8"]:
    """Read `latents` from a file's content."""
    asked: Literal["activations", "fp8"] = content.get("latents", recipe.latents)
    if asked not in LATENTS:
        raise ValueError(f'{where}: latents must be "activations" or "fp8", not {asked!r}')
    if "latents" in content and not recipe.batch_invariant:
        raise ValueError(
            f"{where}: recipe {recipe.name!r} does not round latents as serving does, so it takes no latents"
        )
    return asked


def _exception(where: str, keep: Any) -> tuple[str, frozenset[GemmName]]:
    """Read one [[keep]] of a file: a pattern of layer names, and GEMMs."""
    if not isinstance(keep, dict):
        raise ValueError(f"{where} must say layers, a pattern, and products, a list")
    if unknown := [key for key in keep if key not in KEEP_KEYS]:
        raise ValueError(f"{where}: {unknown[0]} is unknown: there are {', '.join(KEEP_KEYS)}")
    if keep.keys() != set(KEEP_KEYS) or not isinstance(keep["layers"], str):
        raise ValueError(f"{where} must say layers, a pattern, and products, a list")
    gemms = keep["products"]
    if not isinstance(gemms, list) or not gemms or any(gemm not in GEMMS for gemm in gemms):
        raise ValueError(f"{where}: products must be some of {list(GEMMS)}, not {gemms!r}")
    return keep["layers"], frozenset(gemms)


CHOICES = {  # fields of a recipe that are words, or bools
    name: annotation
    for name, annotation in annotations_of(Recipe).items()
    if annotation is bool or any(get_origin(part) is Literal for part in (annotation, *get_args(annotation)))
    if name != "swiglu_inputs"
}
