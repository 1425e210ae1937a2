"""The weights of a model as serving reads them: FP8 weights as stored, and attention's matrices for decoding.

    FP8 weight              E4M3 and one scale per 128×128 block, as in the checkpoint; never dequantized,
    but kv_b_proj           also dequantized once: W_UK and W_UV, which the absorbed form of attention multiplies by
    other weights           in the dtype of the activations; norms, gates and their biases as stored

Source: DeepSeek-V2 (arXiv 2405.04434) §2.1.2, DeepSeek-V3 (arXiv 2412.19437) §3.3.2.
Shapes: D model, H heads of this rank, C latent, R rotary key, N the rest of a head's key, V a head's value, E experts,
I intermediate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octile.checkpoint.fp8_layout import SCALE_SUFFIX, is_fp8, quantize_weight
from octile.checkpoint.hugging_face import OpenFolder, open_folder
from octile.checkpoint.packed import PackedTensors
from octile.checkpoint.shards import Shards
from octile.checkpoint.tensor_file import TensorSpec
from octile.formats import BLOCK, E4M3, TILE
from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import DeepseekV3
from octile.models.names import to_hf
from octile.nn.linear import Linear
from octile.nn.moe import Experts
from octile.recipe import OperandFormat, Recipe
from octile.scaled import ScaledTensor
from octile.serve.weights.block_weights import (
    AttentionWeights,
    BlockWeights,
    IndexerWeights,
    MLPWeights,
    MoEWeights,
    MTPWeights,
    Part,
    Weight,
    join,
    stack,
    tensors_of,
)
from octile.serve.weights.head_share import HeadShare, check_heads, is_of_heads
from octile.serve.weights.routed_shared_experts import divide_shared

ReadWeight = Callable[[str], Weight]
ALL_HEADS = HeadShare()
EXPERT_LAYERS = ("gate_proj", "up_proj", "down_proj")
ACTIVATION_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class ServedWeights:
    """All weights of a model.

    Attributes:
        config: configuration of the model.
        dtype: dtype of activations, bfloat16 or float32.
        power_of_2: whether the scales of activations are powers of two.
        mtp: None where the model has no multi-token prediction, or does not draft.
        heads: which heads of attention are here.
    """

    config: ModelConfig
    dtype: torch.dtype
    power_of_2: bool
    embedding: Tensor
    blocks: tuple[BlockWeights, ...]
    norm: Tensor
    head: Tensor
    mtp: MTPWeights | None
    heads: HeadShare = ALL_HEADS

    @property
    def n_heads(self) -> int:
        """How many heads of attention are here."""
        return self.heads.n_heads(self.config)

    @property
    def device(self) -> torch.device:
        """The device of all weights."""
        return self.head.device

    @property
    def parts(self) -> tuple[Any, ...]:
        """All weights in the order of `read_parts`."""
        return self.embedding, *self.blocks, self.norm, self.head, self.mtp

    @classmethod
    def of_model(cls, model: DeepseekV3, heads: HeadShare = ALL_HEADS) -> ServedWeights:
        """Take the weights of a model, on its device. FP8 layers' weights are quantized once, as the model does it.

        Blocks that have not changed since they were read from a checkpoint keep their encoded values and scales. The
        activations have the dtype of the model's head.

        Args:
            model: the model.
            heads: which heads of attention to take.

        Raises:
            TypeError: model is not a DeepseekV3, or its parameters are float16.
            ValueError: a layer has another recipe than those of DeepSeek-V3's formats, or a weight is NaN or Inf; or as
                `check_heads`.
        """
        recipes = served_recipes(model)
        tensors = to_hf(model.state_dict(), model.config)
        power_of_2 = has_power_of_2_scales(recipes)
        head_recipes = [recipe for name, recipe in recipes.items() if is_of_heads(name)]
        check_heads(model.config, heads.size, any(recipe is not None and recipe.formats for recipe in head_recipes))

        def read(name: str) -> Weight:
            tensor = tensors[name].detach()
            recipe = recipes.get(name.removesuffix(".weight"))
            if recipe is None or recipe.formats is None:
                return heads.take(name, tensor)
            scale, stored = recipe.formats.w.scale, model.stored_scales.get(name)
            return heads.take(name, quantize_weight(name, tensor, scale, stored))

        return assemble(model.config, model.lm_head.weight.dtype, power_of_2, read, heads=heads)

    @classmethod
    def read(
        cls,
        path: str | Path,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        experts: Mapping[int, Sequence[int]] | None = None,
        heads: HeadShare = ALL_HEADS,
        drafts: bool = True,
    ) -> ServedWeights:
        """Read the weights of a folder that `octile.load` reads, one tensor at a time: FP8 weights as stored.

        Args:
            path: a Hugging Face folder or a run.
            dtype: dtype of the activations and of other weights: bfloat16 or float32.
            device: device of the weights.
            experts: the routed experts to read, in this order, of each layer that has some; shared experts, which are
                read in any case, have the numbers after those of the last routed one, to be among them, too. The
                multi-token prediction layer has the number after the last layer's. None: all routed experts.
            heads: which heads of attention to read.
            drafts: whether to read the multi-token prediction layer, if the model has one.

        Raises:
            TypeError: dtype is another one.
            FileNotFoundError, ValueError: as in `octile.load`, or `check_heads`.
        """
        return cls.of_folder(open_folder(path), dtype, device, experts, heads, drafts)

    @classmethod
    def of_folder(
        cls,
        folder: OpenFolder,
        dtype: torch.dtype,
        device: torch.device | str,
        experts: Mapping[int, Sequence[int]] | None = None,
        heads: HeadShare = ALL_HEADS,
        drafts: bool = True,
    ) -> ServedWeights:
        """Read the weights of an open folder as `read` does."""
        model = folder.meta_model()
        formats = Recipe.deepseek_v3().formats
        assert formats is not None
        check_heads(model.config, heads.size, has_fp8(folder.shards.specs, is_of_heads))
        read = stored_weights(folder.shards, device, heads)
        return assemble(model.config, dtype, formats.x.scale == "power_of_2", read, experts, heads, drafts)


def has_fp8(specs: Mapping[str, TensorSpec], is_one: Callable[[str], bool]) -> bool:
    """Whether one of some weights is stored in FP8, by the specs of a folder's tensors; is_one says which, by name."""
    return any(is_one(name) and is_fp8(spec) for name, spec in specs.items())


def is_of_shared(name: str) -> bool:
    """Whether a weight is one of shared experts, by its name in a checkpoint."""
    return ".mlp.shared_experts." in name


def is_of_routed(name: str) -> bool:
    """Whether a weight is one of routed experts, by its name in a checkpoint."""
    return ".mlp.experts." in name


def stored_weights(shards: Shards | PackedTensors, device: torch.device | str, heads: HeadShare) -> ReadWeight:
    """Return what reads a stored weight by its name, on a device, or some heads' part of it."""
    specs = shards.specs

    def read(name: str) -> Weight:
        part = heads.part_of(name, specs[name].shape)
        tensor = _read_part(shards, name, part).to(device)
        if not is_fp8(specs[name]):
            return tensor
        scale = _read_part(shards, name + SCALE_SUFFIX, part and part.blocks())
        return ScaledTensor(tensor, scale.float().to(device), BLOCK)

    return read


def _read_part(shards: Shards | PackedTensors, name: str, part: Part | None) -> Tensor:
    if part is None:
        return shards.read(name)
    assert isinstance(shards, Shards)  # weights in memory have all heads
    return (shards.columns if part.dim else shards.rows)(name, part.start, part.stop)


def served_recipes(model: DeepseekV3) -> dict[str, Recipe | None]:
    """Return the recipe of each linear layer, and of each expert's layers, by the layer's name in a checkpoint.

    Raises:
        TypeError: model is not a DeepseekV3.
        ValueError: a layer has another recipe than those of DeepSeek-V3's formats.
    """
    if not isinstance(model, DeepseekV3):
        raise TypeError(f"model must be a DeepseekV3, not {type(model).__name__}")
    recipes: dict[str, Recipe | None] = {}
    for name, module in model.named_modules():
        recipe = module.recipe if isinstance(module, Linear | Experts) else None
        if recipe is not None and (why := _why_not_serve(recipe)):
            raise ValueError(f"{name} has the recipe {recipe.name!r}, which serving does not compute: {why}")
        if isinstance(module, Experts):
            recipes |= {f"{name}.{e}.{layer}": recipe for e in range(module.n_experts) for layer in EXPERT_LAYERS}
        elif isinstance(module, nn.Linear):
            recipes[name] = recipe
    return recipes


def has_power_of_2_scales(recipes: Mapping[str, Recipe | None]) -> bool:
    """Whether the scales of activations are powers of two, by the recipes of `served_recipes`.

    Raises:
        ValueError: the layers have two rules.
    """
    scales = {recipe.formats.x.scale for recipe in recipes.values() if recipe is not None and recipe.formats}
    if len(scales) > 1:
        raise ValueError("model must have one rule for the scales of its FP8 layers' inputs, but has two")
    return scales == {"power_of_2"}


def _why_not_serve(recipe: Recipe) -> str | None:
    """Return why a recipe's products are not computed here; None: they are."""
    if recipe.formats is None or "fprop" in recipe.high_precision:
        return None if recipe.formats is None else "its fprop is in high precision"
    if recipe.formats.w not in (OperandFormat(E4M3, BLOCK), OperandFormat(E4M3, BLOCK, "power_of_2")):
        return "its weights are not E4M3 in 128×128 blocks"
    x = recipe.formats.x
    return None if (x.fmt, x.block, x.amax) == (E4M3, TILE, "current") else "its inputs are not E4M3 in 1×128 tiles"


def assemble(
    config: ModelConfig,
    dtype: torch.dtype,
    power_of_2: bool,
    read: ReadWeight,
    experts: Mapping[int, Sequence[int]] | None = None,
    heads: HeadShare = ALL_HEADS,
    drafts: bool = True,
    read_experts: ReadWeight | None = None,
) -> ServedWeights:
    """Read all weights of a model.

    Args:
        config: configuration of the model.
        dtype: dtype of the activations.
        power_of_2: whether the scales of activations are powers of two.
        read: returns a weight by its name in a checkpoint.
        experts, drafts: arguments of `ServedWeights.read`.
        heads: heads of attention, whose parts of weights `read` returns.
        read_experts: argument of `WeightReader`.

    Raises:
        TypeError: dtype is neither bfloat16 nor float32.
        ValueError: a norm, a gate, the embedding or the head is in FP8, or some experts of a layer are and others not.
    """
    if dtype not in ACTIVATION_DTYPES:
        raise TypeError(f"activations must be bfloat16 or float32, not {dtype}")
    reader = WeightReader(config, dtype, read, experts, heads, read_experts)
    embedding, *blocks, norm, head, mtp = read_parts(reader, drafts)
    return ServedWeights(config, dtype, power_of_2, embedding, tuple(blocks), norm, head, mtp, heads)


def write_parts(written: ServedWeights, reader: WeightReader) -> None:
    """Write weights in place, one part after the other.

    Args:
        written: their tensors have the same addresses afterwards.
        reader: reads the new weights, of the same model and formats.
    """
    for served, part in zip(written.parts, read_parts(reader, written.mtp is not None), strict=True):
        for tensor, new in zip(tensors_of(served), tensors_of(part), strict=True):
            tensor.copy_(new)


def read_parts(reader: WeightReader, drafts: bool = True) -> Iterator[Any]:
    """Read all weights of a model, one part after the other.

    Args:
        reader: reads them.
        drafts: argument of `ServedWeights.read`.

    Returns:
        the embedding, the `BlockWeights` of each layer, the last norm, the head, and `MTPWeights` or None.
    """
    n = reader.config.num_hidden_layers
    yield reader.values("model.embed_tokens.weight")
    for layer in range(n):
        yield reader.block(layer)
    yield reader.tensor("model.norm.weight")
    yield reader.values("lm_head.weight")
    yield reader.mtp(n) if reader.config.num_nextn_predict_layers and drafts else None


class WeightReader:
    """Reads the weights of a model by name.

    Args:
        config, dtype, read, experts, heads: arguments of `assemble`.
        read_experts: returns the stacked weights [E, N, K] of all experts of a layer, by a name such as
            "model.layers.3.mlp.experts.gate_proj.weight"; None: they are read one by one.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        read: ReadWeight,
        experts: Mapping[int, Sequence[int]] | None = None,
        heads: HeadShare = ALL_HEADS,
        read_experts: ReadWeight | None = None,
    ):
        self.config, self.dtype, self.read, self.experts, self.heads = config, dtype, read, experts or {}, heads
        self.read_experts = read_experts

    def tensor(self, name: str) -> Tensor:
        """Read a tensor that is never in FP8, as stored."""
        tensor = self.read(name)
        if isinstance(tensor, ScaledTensor):
            raise ValueError(f"{name} must not be in FP8")
        return tensor

    def values(self, name: str) -> Tensor:
        """Read a tensor that is never in FP8, in the activations' dtype."""
        return self.tensor(name).to(self.dtype)

    def linear(self, name: str) -> Weight:
        """Read a layer's weight: in FP8 as stored, else in the activations' dtype."""
        return self._in_dtype(self.read(f"{name}.weight"))

    def _in_dtype(self, weight: Weight) -> Weight:
        return weight if isinstance(weight, ScaledTensor) else weight.to(self.dtype)

    def mtp(self, layer: int) -> MTPWeights:
        """Read the multi-token prediction layer, which has this number."""
        name = f"model.layers.{layer}"
        return MTPWeights(
            self.tensor(f"{name}.enorm.weight"),
            self.tensor(f"{name}.hnorm.weight"),
            self.linear(f"{name}.eh_proj"),
            self.tensor(f"{name}.shared_head.norm.weight"),
            self.block(layer),
        )

    def block(self, layer: int) -> BlockWeights:
        """Read a layer's block."""
        name = f"model.layers.{layer}"
        return BlockWeights(
            self.tensor(f"{name}.input_layernorm.weight"),
            self._attention(f"{name}.self_attn", self.config.has_own_indexer(layer)),
            self.tensor(f"{name}.post_attention_layernorm.weight"),
            self._mixture(f"{name}.mlp", layer) if self.config.is_moe(layer) else self._mlp(f"{name}.mlp"),
        )

    def _attention(self, name: str, has_indexer: bool) -> AttentionWeights:
        c = self.config
        compressed = c.q_lora_rank is not None
        first = self.linear(f"{name}.{'q_a_proj' if compressed else 'q_proj'}")
        latent = self.linear(f"{name}.kv_a_proj_with_mqa")
        kv_up = self.linear(f"{name}.kv_b_proj")
        values = kv_up.dequantize(self.dtype) if isinstance(kv_up, ScaledTensor) else kv_up
        kv_HXC = values.unflatten(0, (self.heads.n_heads(c), -1))
        w_k_HNC, w_v_HVC = kv_HXC.split([c.qk_nope_head_dim, c.v_head_dim], dim=1)
        return AttentionWeights(
            join([first, latent], [[first.shape[0]], [c.kv_lora_rank, c.qk_rope_head_dim]]),
            self.tensor(f"{name}.q_a_layernorm.weight") if compressed else None,
            self.linear(f"{name}.q_b_proj") if compressed else None,
            self.tensor(f"{name}.kv_a_layernorm.weight"),
            kv_up,
            w_k_HNC.mT.contiguous(),
            w_v_HVC.contiguous(),
            self.linear(f"{name}.o_proj"),
            self._indexer(f"{name}.indexer") if has_indexer else None,
        )

    def _indexer(self, name: str) -> IndexerWeights:
        return IndexerWeights(
            self.linear(f"{name}.wq_b"),
            self.linear(f"{name}.wk"),
            self.tensor(f"{name}.k_norm.weight").float(),
            self.tensor(f"{name}.k_norm.bias").float(),
            self.tensor(f"{name}.weights_proj.weight").float(),
        )

    def _mlp(self, name: str) -> MLPWeights:
        gate, up = self.linear(f"{name}.gate_proj"), self.linear(f"{name}.up_proj")
        return MLPWeights(join([gate, up], [[gate.shape[0]], [up.shape[0]]]), self.linear(f"{name}.down_proj"))

    def _mixture(self, name: str, layer: int) -> MoEWeights:
        n_routed, n_shared = self.config.n_routed_experts, self.config.n_shared_experts
        shared = self._mlp(f"{name}.shared_experts")
        numbers = self.experts.get(layer, range(n_routed))
        among_routed = divide_shared(shared, n_shared) if max(numbers) >= n_routed else []

        def read(expert: int) -> tuple[Weight, Weight, Weight]:
            if expert >= n_routed:
                return among_routed[expert - n_routed]
            gate, up, down = (self.linear(f"{name}.experts.{expert}.{part}") for part in EXPERT_LAYERS)
            return gate, up, down

        if self.read_experts is None:
            gate, up, down = (stack(weights) for weights in zip(*map(read, numbers), strict=True))
        else:
            stacked = (self.read_experts(f"{name}.experts.{part}.weight") for part in EXPERT_LAYERS)
            gate, up, down = map(self._in_dtype, stacked)
        has_bias = self.config.topk_method == "noaux_tc"
        return MoEWeights(
            self.tensor(f"{name}.gate.weight"),
            self.tensor(f"{name}.gate.e_score_correction_bias") if has_bias else None,
            join([gate, up], [[gate.shape[1]], [up.shape[1]]]),
            down,
            shared,
        )
