"""Make a model expert parallel: each rank keeps the weights of its own, and gets a dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, get_args

from torch import Tensor, nn

from octile.nn.dispatcher import LocalDispatcher
from octile.nn.moe import Experts, MoE
from octile.parallel.experts import (
    Across,
    ExpertDispatcher,
    Ranks,
    check_agreement,
    check_divisible,
    experts_of,
    groups_of,
    rank_among,
)
from octile.parallel.links import ALL_TO_ALL
from octile.parallel.nodes import choose_dispatcher


class ExpertShare(NamedTuple):
    """What `shard_experts` left on a rank, in all mixtures together.

    Attributes:
        mixtures: number of mixtures that were cut.
        local: number of experts on this rank.
        total: number of experts on all ranks.
        exchange: what sends the rows: "all_to_all_single" or "kernels on symmetric memory", on a mesh of nodes inside
            a node and across, and why not the other.
    """

    mixtures: int
    local: int
    total: int
    exchange: str

    def __str__(self) -> str:
        share = f"mixtures: {self.mixtures}; experts on this rank: {self.local} of {self.total}"
        return f"{share}{' in all of them' if self.mixtures > 1 else ''}; exchange: {self.exchange}"


def shard_experts(
    model: nn.Module,
    ranks: Ranks = None,
    max_tokens: int | None = None,
    max_rows: int | None = None,
    num_sms: int | None = None,
    too_many_rows: Tensor | None = None,
    across: Across = "auto",
) -> ExpertShare:
    """Shard the experts of a model's mixtures over ranks, of which each has the whole model before, and own tokens.

    Each rank keeps the weights of E/W consecutive experts, as new parameters: make the optimizer afterwards. Gate and
    shared experts stay whole. `last_load_E` of a mixture then counts the tokens of all these ranks.

    All ranks must call this, with the same model, and then run the same forward and backward passes; a rank may have
    any number of tokens, also none. Losses must be scaled for the whole batch: the gradients of a rank's experts are
    sums over the tokens of all ranks, while those of other parameters are of its own tokens. A recipe with one scale
    for a tensor has one for each rank.

    Args:
        model: holds `octile.nn.MoE` layers, or is one; with all experts, or made in `octile.nn.moe.share_of_experts`.
        ranks: as in `ExpertDispatcher`.
        max_tokens: the most tokens that a rank has in a forward pass, the same on all ranks. If the ranks are GPUs of
            one host that can write to each other's memory, kernels on symmetric memory then exchange the rows, and the
            host waits for nothing (`octile.parallel.symmetric_memory`). On a mesh of nodes they do so inside each node,
            and `across` says what does between nodes. None, or other ranks: `all_to_all_single`.
        max_rows: how many rows the tensors of a rank's experts have for these kernels, the same on all ranks. No token
            is dropped: more rows are a RuntimeError. None: as many as if all tokens of all ranks went to one rank.
        num_sms: how many SMs these kernels use, at least 2; None: a number that suits NVLink, and a smaller one
            where GEMMs overlap, which then use the others; no more than the GPU has. Blocks of these kernels wait for
            other ranks, but only for blocks that a GPU begins before those that wait, so one free SM suffices. Where
            NCCL's blocks, which wait too, run at the same time, the GPU must have more SMs than these: up to 32.
        too_many_rows: float32 [] on the ranks' devices. If it is given, more rows than max_rows set it to 1 on their
            rank, without an error; results and gradients of all ranks are then to be discarded.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        TypeError: a mixture has experts of another class than `octile.nn.Experts`.
        ValueError: there is no mixture, one is sharded already, W does not divide its experts, or the ranks disagree
            about the mixtures, their sizes or the numbers. max_tokens or max_rows is less than 1, or num_sms less
            than 2. across is "nvshmem", and the ranks cannot use it. All ranks raise the same error, and none is
            changed.
    """
    for name, value, least in (("max_tokens", max_tokens, 1), ("max_rows", max_rows, 1), ("num_sms", num_sms, 2)):
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}")
    if across not in get_args(Across):
        raise ValueError(f"across must be one of {', '.join(get_args(Across))}, not {across!r}")
    if across == "nvshmem" and max_tokens is None:
        raise ValueError("across nvshmem needs max_tokens, for which its memory has room")
    groups = groups_of(ranks)
    check_agreement("max_tokens, max_rows and num_sms", f"{max_tokens}, {max_rows} and {num_sms}", groups)
    check_agreement("across", across, groups)
    mixtures = {name: m for name, m in model.named_modules() if isinstance(m, MoE)}
    check_agreement("the model's mixtures", "; ".join(_describe(*item) for item in mixtures.items()), groups)
    if not mixtures:
        raise ValueError("model has no octile.nn.MoE")
    for name, moe in mixtures.items():
        if not isinstance(moe.experts, Experts):
            raise TypeError(f"{name}.experts must be octile.nn.Experts, not {type(moe.experts).__name__}")
        n_experts = len(moe.gate.weight)
        check_divisible(n_experts, groups)
        has_own = moe.experts.here in (slice(0, n_experts), experts_of(n_experts, *rank_among(groups)))
        if not has_own or type(moe.dispatcher) is not LocalDispatcher:
            raise ValueError(f"{name or 'model'} is sharded already, or has a dispatcher of its own")
    exchange = ALL_TO_ALL
    make_dispatcher: Callable[[int, int, int], ExpertDispatcher] = partial(ExpertDispatcher, ranks=ranks)
    if max_tokens is not None:
        exchange, make_dispatcher = choose_dispatcher(
            ranks, groups, across, num_sms, max_tokens=max_tokens, max_rows=max_rows, too_many_rows=too_many_rows
        )
    for moe in mixtures.values():
        moe.dispatcher = make_dispatcher(len(moe.gate.weight), moe.gate.n_chosen, moe.gate.weight.shape[1])
        if moe.experts.here != moe.dispatcher.local_experts:
            for weight in ("gate_up", "down"):
                setattr(moe.experts, weight, _cut(getattr(moe.experts, weight), moe.dispatcher.local_experts))
            moe.experts.here = moe.dispatcher.local_experts
            moe.experts.use_recipe(moe.experts.recipe)
    local = sum(len(moe.experts.down) for moe in mixtures.values())
    return ExpertShare(len(mixtures), local, sum(len(moe.gate.weight) for moe in mixtures.values()), exchange)


def _describe(name: str, moe: MoE) -> str:
    """Describe what ranks must agree about."""
    n_experts = len(moe.gate.weight)
    sizes = [tuple(weight.shape) for weight in moe.experts.parameters()]
    return f"{name} with {n_experts} experts, {moe.gate.n_chosen} of them chosen, weights {sizes}"


def _cut(weight: nn.Parameter, experts: slice) -> nn.Parameter:
    """Return the experts of a stacked weight as a parameter of its own, with their main_grad if there is one."""
    cut = nn.Parameter(weight.detach()[experts].clone(), weight.requires_grad)
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is not None:
        cut.main_grad = main_grad[experts].clone()  # type: ignore[attr-defined]
    return cut
