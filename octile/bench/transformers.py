"""`octile bench transformers`: models of Hugging Face transformers converted to FP8, vs. BF16 and torchao.

    Llama 8B         8 layers, 2 × 4096 tokens
    Qwen3 30B-A3B    4 layers, 8 × 4096 and 2 × 4096 tokens, with transformers' grouped GEMMs (grouped_mm) for the
                     experts in BF16
    Llama 8B         4 layers with embedding, head and loss, 2 × 4096 tokens

The layers are those of the published models. A step is a forward and a backward pass, without an optimizer: of the
layers alone, or from tokens to the loss that transformers computes. Steps of the models are interleaved. A model's peak
memory is that of one step, with its weights and gradients and without what other models hold. Without a GPU the models
are small ones of the same architectures, 2 × 64 tokens, and no memory is measured.

"Compiled" is each layer compiled alone. The model with its head is also compiled whole, in one graph. There, with torch
before 2.14, a model of transformers makes a mask of causal attention, with which attention takes three times as long on
an H200, in BF16 as in FP8. `octile.convert` has it leave the mask out (`octile.integrations.transformers_masks`). Here
the BF16 model that is compiled whole has none, either, so that the ratio is that of the formats.

torchao converts linear layers, with a scale for each tensor. For stacked experts it has a prototype in 0.18, a grouped
FP8 GEMM with a scale for each row, whose groups are multiples of 16 rows: Qwen3's experts are padded to that.

With 2 × 4096 tokens an expert of Qwen3 gets 512, and weights and gradients are 9 of the 10 GiB of BF16's peak. With
8 × 4096 it gets as many as in training.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from octile.bench.goals import (
    BF16,
    COMPILED,
    EAGER,
    LLAMA,
    LLAMA_WITH_HEAD,
    OCTILE,
    PEAK,
    QUANTIZED_PARAMETERS,
    QWEN,
    STEP,
    WHOLE,
    WHOLE_BF16,
    transformers_verdicts,
)
from octile.bench.rows import LEGEND, Row, compare, table_with
from octile.bench.step.models import torchao
from octile.bench.timing import seconds
from octile.nn.conversion import apply_recipe, skip_causal_masks
from octile.nn.conversion_summary import quantized_shares

ROUNDS = 9
TORCHAO, TORCHAO_EXPERTS = "torchao tensorwise", "torchao tensorwise, experts rowwise"
COMPILATION = {EAGER: "none", OCTILE: "none", WHOLE_BF16: "whole", WHOLE: "whole"}  # all others: layers
PAIRS = (  # ours, theirs
    *((COMPILED, peer) for peer in (BF16, TORCHAO, TORCHAO_EXPERTS)),
    *((OCTILE, peer) for peer in (EAGER, BF16, COMPILED)),
    *((WHOLE, peer) for peer in (WHOLE_BF16, OCTILE, COMPILED)),
    *((WHOLE_BF16, peer) for peer in (EAGER, BF16)),
)
TORCHAO_GROUP = 16  # rows: the groups of torchao's grouped GEMM are multiples of it


@dataclass(frozen=True)
class Case:
    """A model and its batch.

    Attributes:
        name: case of the rows.
        config: the name of its configuration's class in transformers.
        sizes: the arguments of that class.
        batch: sequences.
        has_experts: whether it has stacked experts, which torchao converts by a prototype.
        has_head: whether embedding, head and loss are measured, and models compiled whole; torchao is not measured.
    """

    name: str
    config: str
    sizes: dict[str, Any]
    batch: int
    has_experts: bool = False
    has_head: bool = False


QWEN_SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
LLAMA_SIZES = {
    "num_hidden_layers": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
CASES = (
    Case(LLAMA, "LlamaConfig", LLAMA_SIZES, 2),
    Case(QWEN, "Qwen3MoeConfig", QWEN_SIZES, 8, has_experts=True),
    Case("Qwen3 30B-A3B, 4 layers, 2 × 4096 tokens", "Qwen3MoeConfig", QWEN_SIZES, 2, has_experts=True),
    Case(
        LLAMA_WITH_HEAD, "LlamaConfig", {**LLAMA_SIZES, "num_hidden_layers": 4, "vocab_size": 128256}, 2, has_head=True
    ),
)
TINY = {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
CPU_CASES = (
    Case("Llama, 2 layers of width 128", "LlamaConfig", {**TINY, "intermediate_size": 256}, 2),
    Case(
        "Qwen3-MoE, 2 layers of width 128, 8 experts",
        "Qwen3MoeConfig",
        {**TINY, "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2},
        2,
        has_experts=True,
    ),
    Case(
        "Llama, 1 layer of width 128 with head and loss",
        "LlamaConfig",
        {**TINY, "num_hidden_layers": 1, "intermediate_size": 256},
        2,
        has_head=True,
    ),
)


@dataclass
class Candidate:
    """A model and its batch.

    Attributes:
        x: int64 [B, S], the tokens and the labels of the loss; or [B, S, D] in place of embedded tokens.
        dy: the gradient of the result; None: that of the loss is 1.
        peak: peak memory of a step in bytes; 0 if it was not measured.
    """

    model: nn.Module
    x: Tensor
    dy: Tensor | None
    peak: int = 0

    def step(self) -> None:
        """Compute all gradients."""
        self.forget_gradients()
        if self.dy is None:
            self.model(input_ids=self.x, labels=self.x, use_cache=False).loss.backward()
        else:
            self.model(inputs_embeds=self.x, use_cache=False).last_hidden_state.backward(self.dy)

    def step_and_forget(self) -> None:
        """Compute all gradients, and leave their memory to the other models."""
        self.step()
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """Set all gradients to None."""
        self.x.grad = None
        for p in self.model.parameters():
            p.grad = None


def rows() -> Iterator[Row]:
    """Measure time and memory of a step of each model.

    Raises:
        ModuleNotFoundError: transformers is not installed.
    """
    for case in CASES if torch.cuda.is_available() else CPU_CASES:
        yield from _measure(case)


def show(rows: Sequence[Row]) -> str:
    """Format the table, the meaning of its columns, and the verdicts on the goals."""
    return "\n\n".join(filter(None, (table_with(LEGEND, rows), transformers_verdicts(rows))))


def _measure(case: Case) -> Iterator[Row]:
    candidates: dict[str, Candidate] = {}
    makers: dict[str, Callable[[nn.Module], nn.Module]] = {
        BF16: lambda model: model,
        EAGER: lambda model: model,
        COMPILED: apply_recipe,
        OCTILE: apply_recipe,
    }
    if case.has_head:
        makers |= {WHOLE_BF16: _without_causal_masks, WHOLE: apply_recipe}
    elif case.has_experts:
        makers[TORCHAO_EXPERTS] = _convert_experts_with_torchao
    else:
        makers[TORCHAO] = _convert_with_torchao
    for name, convert in makers.items():
        try:
            candidates[name] = _prepare(case, convert, COMPILATION.get(name, "layers"))
        except Exception as error:
            print(f"{case.name}: left out: {name}: {type(error).__name__}: {error}"[:300], file=sys.stderr, flush=True)
            _clean()
    if OCTILE in candidates:
        shares = quantized_shares(candidates[OCTILE].model)
        yield Row(case.name, QUANTIZED_PARAMETERS, 100 * shares.parameters, "%")
        yield Row(case.name, "quantized FLOPs", 100 * shares.flops, "%")
    with torch._dynamo.config.patch(recompile_limit=64):
        times = seconds({name: candidate.step_and_forget for name, candidate in candidates.items()}, ROUNDS)
    tokens = next(iter(candidates.values())).x.shape[:2].numel() if candidates else 0
    for name, took in times.items():
        yield Row(case.name, f"{STEP}, {name}", took * 1e3, "ms")
    for ours, theirs in PAIRS:
        if ours not in times or theirs not in times:
            continue
        speeds = [tokens / times[name] for name in (ours, theirs)]
        yield compare(case.name, f"{STEP}, {ours}", speeds[0], "tokens/s", theirs, speeds[1])
        peaks = [candidates[name].peak / 2**30 for name in (ours, theirs)]
        if all(peaks):  # measured on a GPU only
            yield compare(case.name, f"{PEAK}, {ours}", peaks[0], "GiB", theirs, peaks[1])
    candidates.clear()
    _clean()


def _without_causal_masks(model: nn.Module) -> nn.Module:
    skip_causal_masks(model)
    return model


def _convert_with_torchao(model: nn.Module) -> nn.Module:
    torchao("tensorwise")(model)
    return model


def _convert_experts_with_torchao(model: nn.Module) -> nn.Module:
    """Convert linear layers, and stacked experts with torchao's prototype.

    Raises:
        ImportError: torchao is not installed, or lacks the prototype.
    """
    try:
        grouped_mm = import_module("torchao.prototype.moe_training")._to_fp8_rowwise_then_scaled_grouped_mm
    except AttributeError as error:
        raise ImportError("torchao has no grouped FP8 GEMM with a scale for each row") from error

    def forward(experts: Any, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return _apply_padded_experts(experts, grouped_mm, x_TD, experts_TK, weights_TK)

    for module in model.modules():
        if hasattr(module, "gate_up_proj") and hasattr(module, "down_proj"):
            module.forward = MethodType(forward, module)
    return _convert_with_torchao(model)


def _apply_padded_experts(
    experts: Any, grouped_mm: Callable[..., Tensor], x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Apply the chosen experts, as transformers' `grouped_mm` does, with each expert's rows padded by rows of zeros.

    Args:
        experts: a module of transformers with stacked experts.
        grouped_mm: multiplies x [rows, K] by weights [E, K, N]; the third argument is where each expert's rows end.
        x_TD: the tokens.
        experts_TK: each token's experts.
        weights_TK: their weights.

    Returns:
        [T, D]
    """
    (T, D), K, E = x_TD.shape, experts_TK.shape[1], experts.num_experts
    expert, order = experts_TK.flatten().sort()
    ends_E = torch.searchsorted(expert, torch.arange(E, device=expert.device), right=True)
    counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    padded_E = (counts_E + TORCHAO_GROUP - 1) // TORCHAO_GROUP * TORCHAO_GROUP
    padded_ends_E = padded_E.cumsum(0)
    moved_E = (padded_ends_E - padded_E) - (ends_E - counts_E)
    rows = torch.arange(T * K, device=expert.device) + moved_E[expert]
    offsets = padded_ends_E.to(torch.int32)

    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        return grouped_mm(x, weight.transpose(1, 2), offsets, pad_token_groups_for_grouped_mm=False)

    x = x_TD.new_zeros(T * K + TORCHAO_GROUP * E, D).index_copy(0, rows, x_TD[order // K])
    gate, up = multiply(x, experts.gate_up_proj).chunk(2, dim=-1)
    y = multiply(experts.act_fn(gate) * up, experts.down_proj)[rows] * weights_TK.flatten()[order, None]
    return torch.zeros_like(y).index_copy(0, order, y).view(T, K, D).sum(1).to(x_TD.dtype)


def _prepare(case: Case, convert: Callable[[nn.Module], nn.Module], compilation: str) -> Candidate:
    """Make a model with its batch, run its first steps, and measure the peak memory of another.

    Args:
        compilation: "none", "layers" or "whole".
    """
    import transformers

    on_gpu = torch.cuda.is_available()
    device, (batch, sequence) = ("cuda", (case.batch, 4096)) if on_gpu else ("cpu", (case.batch, 64))
    before = torch.cuda.memory_allocated() if on_gpu else 0
    config = getattr(transformers, case.config)(**{"vocab_size": 128} | case.sizes)
    kind = transformers.AutoModelForCausalLM if case.has_head else transformers.AutoModel
    torch.manual_seed(0)
    with torch.device(device):
        model = convert(kind.from_config(config, dtype=torch.bfloat16).train())
        if case.has_head:
            candidate = Candidate(model, torch.randint(config.vocab_size, (batch, sequence)), None)
        else:
            x, dy = (torch.randn(batch, sequence, config.hidden_size, dtype=torch.bfloat16) for _ in range(2))
            candidate = Candidate(model, x.requires_grad_(), dy)
    if compilation == "layers":
        for layer in model.get_submodule("model.layers" if case.has_head else "layers").children():
            layer.compile()
    elif compilation == "whole":
        model.compile()
    with torch._dynamo.config.patch(recompile_limit=64):
        for _ in range(3):
            candidate.step()
    if on_gpu:
        candidate.forget_gradients()
        _clean()
        torch.cuda.reset_peak_memory_stats()
        candidate.step()
        torch.cuda.synchronize()
        candidate.peak = torch.cuda.max_memory_allocated() - before
        candidate.forget_gradients()
    return candidate


def _clean() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
