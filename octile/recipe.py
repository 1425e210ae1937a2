"""A recipe says which operand of which product becomes which 8-bit number, and by which scale.

A linear layer multiplies three times:

    fprop   y  = x · wᵀ          x [T, K]  w [N, K]
    dgrad   dx = dy · w          dy [T, N]
    wgrad   dw = dyᵀ · x         both operands lie along the tokens T, which are summed over

Each operand is described by an `OperandFormat` (or None: it stays in the recipe's `compute` dtype).  `deepseek_v3` is
the recipe that this library exists for; the others are what it is compared with, each one published and each one
different in one thing that can be named.

A recipe also says what a block keeps for its backward pass besides the inputs of its linear layers, which are kept as
they are cast (`docs/data_flow.md`).

Source: DeepSeek-V3 (arXiv 2412.19437) §3.3; FP8-LM (arXiv 2310.18313); Smooth-SwiGLU (arXiv 2409.12517);
NVIDIA's hybrid and delayed scaling (arXiv 2209.05433).
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from octile.formats import BLOCK, COLUMN_TILE, E4M3, E5M2, E5M6, INT8, TILE, FloatFormat, IntFormat

Extent = int | None  # of a block along one side of a matrix; None is the whole side
ScaleRule = Literal["float32", "power_of_2"]
GemmName = Literal["fprop", "dgrad", "wgrad"]
Amax = Literal["current", "delayed", "unscaled"]

TENSOR: tuple[Extent, Extent] = (None, None)


@dataclass(frozen=True)
class OperandFormat:
    """How one operand becomes 8-bit numbers.

    `amax` says where a block's largest magnitude comes from: the block itself (`current`), the largest one of the
    last `AMAX_HISTORY` steps (`delayed`, whole tensors only), or nowhere: the scale is 1 (`unscaled`).
    """

    fmt: FloatFormat | IntFormat = E4M3
    block: tuple[Extent, Extent] = TILE
    scale: ScaleRule = "float32"
    amax: Amax = "current"

    def __post_init__(self) -> None:
        if self.amax != "current" and self.block != TENSOR:
            raise ValueError(f"amax={self.amax!r} needs one scale for the whole tensor, but block is {self.block}")
        if self.amax != "current" and self.scale != "float32":
            raise ValueError(f"scale={self.scale!r} has no meaning with amax={self.amax!r}")


GEMMS: tuple[GemmName, ...] = ("fprop", "dgrad", "wgrad")
AMAX_HISTORY = 16  # steps that delayed scaling looks back


@dataclass(frozen=True)
class OptimizerFormats:
    """What the optimizer keeps for each parameter, and the form in which a gradient reaches it."""

    master: Literal["float32", "float16"] = "float32"
    gradient: Literal["float32", "float8_e4m3fn"] = "float32"
    exp_avg: Literal["float32", "bfloat16", "float8_e4m3fn"] = "bfloat16"
    exp_avg_sq: Literal["float32", "bfloat16", "float16"] = "bfloat16"


@dataclass(frozen=True)
class GemmFormats:
    """How the operands of the three products become 8-bit numbers.

    Attributes:
        x, w: operands of fprop. The input is kept for the backward pass as this cast leaves it.
        dy: the gradient operand of dgrad; dgrad's other operand is fprop's `w`.
        wgrad_x, wgrad_dy: operands of wgrad. `wgrad_x` is made from the kept `x`, not from the original.
    """

    x: OperandFormat
    w: OperandFormat
    dy: OperandFormat
    wgrad_x: OperandFormat
    wgrad_dy: OperandFormat

    @cached_property
    def routed_dy(self) -> tuple[OperandFormat, OperandFormat]:
        """dy and wgrad_dy of experts, whose rows travel in 8 bits and are cast again: scaled as x is."""
        return replace(self.dy, scale=self.x.scale), replace(self.wgrad_dy, scale=self.wgrad_x.scale)

    def __post_init__(self) -> None:
        assert self.routed_dy  # made now: the compiler of torch 2.11 cannot make a cast
        if self.is_delayed and (self.wgrad_x, self.wgrad_dy) != (self.x, self.dy):
            raise ValueError("wgrad_x and wgrad_dy must be x and dy where a scale is delayed: a history has no others")

    @property
    def is_tiled(self) -> bool:
        """Whether inputs and gradients are cut in tiles of 128, for wgrad along the tokens and else along channels."""
        blocks = (self.x.block, self.dy.block, self.wgrad_x.block, self.wgrad_dy.block)
        return (
            blocks == (TILE, TILE, COLUMN_TILE, COLUMN_TILE)
            and self.x.fmt == self.wgrad_x.fmt
            and (self.dy.fmt, self.dy.scale) == (self.wgrad_dy.fmt, self.wgrad_dy.scale)
        )

    @property
    def is_delayed(self) -> bool:
        """Whether scales come from past steps, so that a layer must remember what it saw."""
        return any(cast.amax == "delayed" for cast in (self.x, self.w, self.dy, self.wgrad_x, self.wgrad_dy))

    @classmethod
    def per_tensor(cls, forward: OperandFormat, backward: OperandFormat) -> GemmFormats:
        """One scale a tensor serves both layouts, so wgrad takes the same 8-bit tensors as fprop and dgrad."""
        return cls(x=forward, w=forward, dy=backward, wgrad_x=forward, wgrad_dy=backward)


@dataclass(frozen=True)
class Recipe:
    """The casts of the three products of a linear layer, and what else a published recipe changes.

    Attributes:
        name: under which `octile compare --recipes` and a run's configuration know it.
        formats: of the products' operands; None leaves them in `compute`.
        compute: type of the products that have no casts.
        high_precision: products that are made in `compute` although the recipe has casts.
        exceptions: of single layers, what else is uncast: (pattern of names as of files, products).
        loss_scale: "dynamic" multiplies the loss by a power of two that backs off on overflow.
        has_smooth_swiglu: divides SwiGLU's output by its channels' largest values before it is quantised.
        optimizer: the formats of the optimizer's state.
        attention_output: how attention's output is kept, once, for its own backward pass and for wgrad of the layer
            that follows. None: autograd keeps all of attention as it is.
        attention_inputs: whether queries, keys and values are kept in BF16 or made again where they come straight from
            the block's input; those that come from a compression (MLA) are made again where `attention_output` is kept.
        swiglu_inputs: how SwiGLU's inputs are kept, its output being made again; or "recomputed": they are made again
            too. None: autograd keeps them as they are, and the output's cast.
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
    swiglu_inputs: OperandFormat | Literal["recomputed"] | None = None

    @property
    def can_fuse_attention(self) -> bool:
        """Whether attention and the layers around it are one function that keeps `attention_output`."""
        return self._fuses and self.attention_output is not None

    @property
    def can_fuse_swiglu(self) -> bool:
        """Whether a feed-forward layer is one function that keeps `swiglu_inputs`."""
        return self._fuses and self.swiglu_inputs is not None and not self.has_smooth_swiglu

    @property
    def _fuses(self) -> bool:
        return self.formats is not None and self.formats.is_tiled and not self.high_precision

    @property
    def has_delayed_scaling(self) -> bool:
        """Whether a layer must remember what it saw."""
        return self.formats is not None and self.formats.is_delayed

    def without(self, product: GemmName) -> Recipe:
        """This recipe with one product made in `compute` instead of in 8 bits.

        Raises:
            ValueError: there is no such product, or the recipe casts nothing.
        """
        if product not in GEMMS:
            raise ValueError(f"product must be one of {', '.join(GEMMS)}, not {product!r}")
        if self.formats is None:
            raise ValueError(f"recipe {self.name!r} casts nothing, so there is no {product} in 8 bits to leave out")
        if product in self.high_precision:
            return self
        return replace(self, name=f"{self.name} without {product}", high_precision=self.high_precision | {product})

    def for_layer(self, name: str) -> Recipe:
        """This recipe as it holds for one layer: with its exceptions, and no one else's."""
        recipe = replace(self, exceptions=())
        mine = [products for pattern, products in self.exceptions if fnmatchcase(name, pattern)]
        for product in GEMMS:
            if any(product in products for products in mine):
                recipe = recipe.without(product)
        return recipe

    @classmethod
    def read(cls, path: Path) -> Recipe:
        """A recipe with exceptions, from a TOML file:

            recipe = "deepseek_v3"
            swiglu_inputs = "recomputed"                # if the recipe keeps them ("kept")
            [[keep]]                                    # in `compute` instead of 8 bits
            layers = "model.layers.1.mlp.down_proj"     # a pattern of names, as of files
            products = ["fprop", "wgrad"]

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is no such text.
        """
        if not path.is_file():
            raise FileNotFoundError(f"there is no recipe file {str(path)!r}")
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: {error}") from None
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, where: str) -> Recipe:
        """The recipe that the text of such a file describes; errors say where it comes from.

        Raises:
            ValueError: it is no such text.
        """
        try:
            content = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{where}: {error}") from None
        if not isinstance(content.get("recipe"), str) or content.keys() - {"recipe", "swiglu_inputs", "keep"}:
            raise ValueError(f'{where} must say recipe = "deepseek_v3" or another name, and [[keep]] for exceptions')
        if content["recipe"] not in cls.names():
            raise ValueError(f"{where}: unknown recipe {content['recipe']!r}; there are {', '.join(cls.names())}")
        recipe = cls.named(content["recipe"])
        keeps = content.get("keep", [])
        if not isinstance(keeps, list):
            raise ValueError(f"{where}: keep must be a list, [[keep]], not {keeps!r}")
        exceptions = tuple(_exception(f"{where}: keep {number}", keep) for number, keep in enumerate(keeps, 1))
        if exceptions and recipe.formats is None:
            raise ValueError(f"{where}: recipe {recipe.name!r} casts nothing, so there is nothing to keep")
        return replace(recipe, exceptions=exceptions, swiglu_inputs=_swiglu_inputs(where, content, recipe))

    def write(self, path: Path) -> Path:
        """Writes what `read` reads; name must be one that `named` knows. Its folder is made if it is not there."""
        lines = [f'recipe = "{self.name}"']
        lines += ['swiglu_inputs = "recomputed"'] if self.swiglu_inputs == "recomputed" else []
        for layers, products in self.exceptions:
            named = ", ".join(f'"{product}"' for product in GEMMS if product in products)
            lines += ["", "[[keep]]", f"layers = {json.dumps(layers)}", f"products = [{named}]"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    @classmethod
    def deepseek_v3(cls) -> Recipe:
        """E4M3 everywhere: 1×128 tiles for activations and gradients, 128×128 blocks for weights, 128×1 for wgrad.

        The input's scales are powers of two because it is kept as 1×128 and requantised to 128×1 in the backward
        pass: the values are then only shifted, and bits are lost only below the normal range of a new tile. So are
        those of the attention's output, which is kept in E5M6 since its own backward pass reads it.
        """
        return cls("deepseek_v3", _fine_grained(), **_kept())

    @classmethod
    def bf16(cls) -> Recipe:
        """The baseline: products of BF16 operands."""
        return cls("bf16")

    @classmethod
    def float32(cls) -> Recipe:
        """Nothing is rounded: what the other formats are an approximation of."""
        return cls("float32", compute=torch.float32)

    @classmethod
    def per_tensor(cls) -> Recipe:
        """E4M3 with one scale a tensor, from the tensor itself: one outlier sets the scale of everything."""
        return cls("per_tensor", GemmFormats.per_tensor(OperandFormat(block=TENSOR), OperandFormat(block=TENSOR)))

    @classmethod
    def delayed(cls) -> Recipe:
        """E4M3 with one scale a tensor, from the largest values of the past steps: a new outlier saturates."""
        cast = OperandFormat(block=TENSOR, amax="delayed")
        return cls("delayed", GemmFormats.per_tensor(cast, cast))

    @classmethod
    def hybrid_e5m2(cls) -> Recipe:
        """`deepseek_v3` with E5M2 for the gradients of the output: a wider range, one bit of precision less."""
        return cls("hybrid_e5m2", _fine_grained(gradient=E5M2), **_kept())

    @classmethod
    def global_scale(cls) -> Recipe:
        """E4M3 forward and E5M2 backward without any scale but the loss's, as FP16 training does it."""
        forward, backward = OperandFormat(block=TENSOR, amax="unscaled"), OperandFormat(E5M2, TENSOR, amax="unscaled")
        return cls("global_scale", GemmFormats.per_tensor(forward, backward), loss_scale="dynamic")

    @classmethod
    def fp16_loss_scaling(cls) -> Recipe:
        """Products of FP16 operands under a dynamic loss scale."""
        return cls("fp16_loss_scaling", compute=torch.float16, loss_scale="dynamic")

    @classmethod
    def fp8_lm(cls) -> Recipe:
        """FP8-LM: per-tensor E4M3 and E5M2 products, FP8 gradients, FP16 masters, FP8 and FP16 moments."""
        optimizer = OptimizerFormats("float16", "float8_e4m3fn", "float8_e4m3fn", "float16")
        formats = GemmFormats.per_tensor(OperandFormat(block=TENSOR), OperandFormat(E5M2, TENSOR))
        return cls("fp8_lm", formats, optimizer=optimizer)

    @classmethod
    def smooth_swiglu(cls) -> Recipe:
        """`delayed`, with SwiGLU's output smoothed channel by channel before it is quantised."""
        return cls("smooth_swiglu", cls.delayed().formats, has_smooth_swiglu=True)

    @classmethod
    def int8_tiles(cls) -> Recipe:
        """`deepseek_v3` in INT8: the same tiles, evenly spaced values."""
        return cls("int8_tiles", _fine_grained(INT8, INT8), **_kept(INT8))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The recipes that `named` knows, the library's own first."""
        return (
            "deepseek_v3",
            "bf16",
            "float32",
            "per_tensor",
            "delayed",
            "hybrid_e5m2",
            "global_scale",
            "fp16_loss_scaling",
            "fp8_lm",
            "smooth_swiglu",
            "int8_tiles",
        )

    @classmethod
    def named(cls, name: str) -> Recipe:
        """The recipe of that name; a name that ends in .toml is a file's (`read`).

        Raises:
            ValueError: there is none.
            FileNotFoundError: there is no such file.
        """
        if name.endswith(".toml"):
            return cls.read(Path(name))
        if name not in cls.names():
            raise ValueError(f"unknown recipe {name!r}; there are {', '.join(cls.names())}")
        return getattr(cls, name)()


def _fine_grained(fmt: FloatFormat | IntFormat = E4M3, gradient: FloatFormat | IntFormat = E4M3) -> GemmFormats:
    return GemmFormats(
        x=OperandFormat(fmt, TILE, "power_of_2"),
        w=OperandFormat(fmt, BLOCK),
        dy=OperandFormat(gradient, TILE),
        wgrad_x=OperandFormat(fmt, COLUMN_TILE, "power_of_2"),
        wgrad_dy=OperandFormat(gradient, COLUMN_TILE),
    )


def _kept(fmt: FloatFormat | IntFormat = E4M3) -> dict[str, Any]:
    """What a fine-grained recipe keeps besides the inputs of linear layers."""
    return {"attention_output": OperandFormat(E5M6, TILE, "power_of_2"), "swiglu_inputs": OperandFormat(fmt, TILE)}


def _swiglu_inputs(where: str, content: dict[str, Any], recipe: Recipe) -> OperandFormat | Literal["recomputed"] | None:
    """What a file says of SwiGLU's inputs."""
    asked = content.get("swiglu_inputs", "kept")
    if asked not in ("kept", "recomputed"):
        raise ValueError(f'{where}: swiglu_inputs must be "kept" or "recomputed", not {asked!r}')
    if asked == "recomputed" and recipe.swiglu_inputs is None:
        raise ValueError(f"{where}: recipe {recipe.name!r} keeps SwiGLU's inputs as they are, so none are recomputed")
    return "recomputed" if asked == "recomputed" else recipe.swiglu_inputs


def _exception(where: str, keep: Any) -> tuple[str, frozenset[GemmName]]:
    """One [[keep]] of a file."""
    if not isinstance(keep, dict) or keep.keys() != {"layers", "products"} or not isinstance(keep["layers"], str):
        raise ValueError(f"{where} must say layers, a pattern, and products, a list")
    products = keep["products"]
    if not isinstance(products, list) or not products or any(product not in GEMMS for product in products):
        raise ValueError(f"{where}: products must be some of {list(GEMMS)}, not {products!r}")
    return keep["layers"], frozenset(products)
