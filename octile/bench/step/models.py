"""The models that `octile bench step` trains: blocks at the sizes of published models, in BF16, octile and torchao.

    dense decoder    4 blocks of attention and SwiGLU, 2 × 4096 tokens, hidden 4096
    V3 rank slice    one of DeepSeek-V3's blocks as one of 32 ranks computes it: attention, gate and shared expert for
                     its own 4096 tokens, 8 of the 256 experts for the rows that all ranks send them

Shapes: B batch, S sequence, D model, T tokens, K chosen experts, E experts.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import Block
from octile.nn import MHA, MLP, Experts, MoE, RMSNorm, pre_norm
from octile.nn.dispatcher import LocalDispatcher, RoutingPlan
from octile.nn.rope import CosSin, Rope


@dataclass(frozen=True)
class Sizes:
    """The sizes of a dense decoder and its batch."""

    layers: int = 4
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    batch: int = 2
    sequence: int = 4096


class Decoder(nn.Module):
    """Blocks with multi-head attention, without embedding and head: [B, S, D] → [B, S, D]."""

    def __init__(self, s: Sizes):
        super().__init__()
        self.blocks = nn.ModuleList(DecoderBlock(s) for _ in range(s.layers))

    def forward(self, x_BSD: Tensor, cos_sin: CosSin) -> Tensor:
        """Return the output of all blocks, [B, S, D], for x [B, S, D] and the cosines and sines of its positions."""
        for block in self.blocks:
            x_BSD = block(x_BSD, cos_sin)
        return x_BSD


class DecoderBlock(nn.Module):
    """A dense transformer block: multi-head attention and SwiGLU, each after its norm and with its residual."""

    def __init__(self, s: Sizes):
        super().__init__()
        self.input_layernorm = RMSNorm(s.hidden)
        self.self_attn = MHA(s.hidden, s.heads)
        self.post_attention_layernorm = RMSNorm(s.hidden)
        self.mlp = MLP(s.hidden, s.intermediate)

    def forward(self, x_BSD: Tensor, cos_sin: CosSin) -> Tensor:
        """Return the block's output, [B, S, D], for x [B, S, D] and the cosines and sines of its positions."""
        x_BSD, normed = pre_norm(x_BSD, self.input_layernorm, self.self_attn)
        x_BSD = x_BSD + self.self_attn(normed, cos_sin)
        x_BSD, normed = pre_norm(x_BSD, self.post_attention_layernorm, self.mlp)
        return x_BSD + self.mlp(normed)


class RankDispatcher(LocalDispatcher):
    """The dispatcher of one rank of expert parallelism, simulated alone.

    Rows for an expert of any rank go to the expert of the same index on this rank. If all ranks have similar batches of
    the same size, this rank then gets as many rows as it would from all of them, distributed as unevenly.
    """

    def __init__(self, local_experts: int):
        self.local_experts = local_experts

    def plan(self, experts_TK: Tensor, load_E: Tensor) -> RoutingPlan:
        """Plan the routing of all tokens to the experts of one rank: expert e becomes e modulo the local experts."""
        return super().plan(experts_TK % self.local_experts, load_E.view(-1, self.local_experts).sum(0))


@dataclass
class Work:
    """A model with one batch. A step is its forward and backward pass, and the optimizer's step if there is one.

    Attributes:
        model: the model.
        call: the model, or its compiled form.
        x, dy: the batch and the gradient of its output.
        cos_sin: rotary embeddings of the positions.
        autocast: whether to autocast to BF16, for a model whose parameters are FP32.
        optimizer: or None.
        mixtures: the model's MoE layers.
        graph: the forward and backward pass as a CUDA graph, which a step replays, or None.
        gradients: the parameters' gradients in the graph's memory.
    """

    model: nn.Module
    call: Callable[..., Tensor]
    x: Tensor
    dy: Tensor
    cos_sin: CosSin
    autocast: bool = False
    optimizer: torch.optim.Optimizer | None = None
    mixtures: list[MoE] = field(default_factory=list)
    graph: torch.cuda.CUDAGraph | None = None
    gradients: list[Tensor | None] = field(default_factory=list)

    def forward(self) -> Tensor:
        """Return the model's output for the batch, under BF16 autocast where the work asks for it."""
        with torch.autocast(self.x.device.type, torch.bfloat16, enabled=self.autocast, cache_enabled=False):
            return self.call(self.x, self.cos_sin)

    def forget_gradients(self) -> None:
        """Set the gradients of the input and of all parameters to None."""
        self.x.grad = None
        for p in self.model.parameters():
            p.grad = None

    def pop_losses(self) -> list[Tensor]:
        """Return the balance losses of the MoE layers, which hold their gates' graph until they are popped."""
        return [loss for moe in self.mixtures if isinstance(loss := moe.pop_balance_loss(), Tensor)]

    def forward_and_backward(self) -> None:
        """Compute all gradients of the batch, from the output gradient `dy` and the balance losses."""
        for p in self.model.parameters():
            if getattr(p, "main_grad", None) is not None:
                p.main_grad.zero_()  # type: ignore[attr-defined]
        y = self.forward()
        losses = self.pop_losses()
        torch.autograd.backward([y, *losses], [self.dy, *[None] * len(losses)])

    def step(self) -> None:
        """Compute the gradients, from the captured graph if there is one, and update the weights with the optimizer."""
        if self.graph is not None:
            self.graph.replay()
            for p, gradient in zip(self.model.parameters(), self.gradients, strict=True):
                p.grad = gradient
        else:
            self.forget_gradients()
            self.forward_and_backward()
        if self.optimizer is not None:
            self.optimizer.step()


def decoder(s: Sizes, device: str, dtype: torch.dtype = torch.bfloat16) -> Work:
    """Make the dense decoder, with the same values at each call."""
    with torch.device("meta"):
        model = Decoder(s)
    return _work(model, s.hidden // s.heads, (s.batch, s.sequence, s.hidden), device, dtype)


def rank_slice(config: ModelConfig, ranks: int, sequence: int, device: str) -> Work:
    """Make the first block with experts, with one rank's share of them.

    Args:
        config: configuration of the whole model.
        ranks: number of ranks that share the experts.
        sequence: tokens of the batch.
        device: "cuda" or "cpu".
    """
    local = config.n_routed_experts // ranks
    with torch.device("meta"):
        block = Block(config, config.first_k_dense_replace)
        block.mlp.experts = Experts(local, config.hidden_size, config.moe_intermediate_size)
    block.mlp.dispatcher = RankDispatcher(local)
    shape = (1, sequence, config.hidden_size)
    return _work(block, config.qk_rope_head_dim, shape, device, torch.bfloat16)


def compiled(work: Work) -> Work:
    """Compile the model of a work with torch.compile; returns the same work."""
    work.call = torch.compile(work.model)
    return work


def captured(work: Work, pool: Any) -> Work:
    """Capture the forward and backward pass of a model in a CUDA graph.

    Args:
        work: the model and its batch.
        pool: from `torch.cuda.graph_pool_handle`. Graphs with the same pool overwrite each other's activations.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work.forget_gradients()
            work.forward_and_backward()
    torch.cuda.current_stream().wait_stream(side)
    work.forget_gradients()
    gc.collect()  # an earlier graph that ended while this one is captured would end the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        work.forward_and_backward()
    return replace(work, graph=graph, gradients=[p.grad for p in work.model.parameters()])


def torchao(recipe: str) -> Callable[[nn.Module], object]:
    """Return torchao's in-place conversion of linear layers.

    Args:
        recipe: "tensorwise", "rowwise" or "blockwise".

    Raises:
        ImportError: torchao is not installed, or has no prototype of blockwise training.
    """
    if recipe == "blockwise":
        quantize = import_module("torchao.quantization").quantize_
        prototype = import_module("torchao.prototype.blockwise_fp8_training.linear")
        return lambda model: quantize(model, prototype.Float8BlockwiseLinearConfig())
    float8: Any = import_module("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    return lambda model: float8.convert_to_float8_training(model, config=config)


def _work(model: nn.Module, rope_dim: int, shape: tuple[int, int, int], device: str, dtype: torch.dtype) -> Work:
    model.to(dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(std=p.shape[-1] ** -0.5, generator=generator)
            else:
                p.fill_(1.0)
        for buffer in model.buffers():
            buffer.zero_()
    x, dy = (torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator) for _ in range(2))
    cos_sin = Rope(rope_dim).cos_sin(torch.arange(shape[1], device=device))
    mixtures = [module for module in model.modules() if isinstance(module, MoE)]
    return Work(model, model, x.requires_grad_(), dy, cos_sin, dtype == torch.float32, None, mixtures)
