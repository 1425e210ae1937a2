"""How long a decode step with drafts takes, relative to one without: a model of its passes, not a measurement.

A step of n requests with k drafts has a pass of all layers with n · (1 + k) rows, which verifies the drafts of the step
before. Then the layer of multi-token prediction makes new ones in k passes: the first has as many rows, the others have
n, and each ends with the head for n rows. With T rows the layers and the head of a pass take

    layers · latency + (dense + chosen(T) · routed) / bandwidth     to launch kernels, and to read weights
    + T · (dense + chosen(1) · routed) · row / bandwidth            to compute the rows

where `dense` are the bytes of the weights by which every row is multiplied, and `routed` those of all routed experts.
Rows that choose K of E experts at random choose together a share of chosen(T) = 1 − (1 − K/E)ᵀ of them. A step and each
draft pass take a fixed time besides. The cache, whose bytes depend on the texts, is left out, and so are the rows that
pad a step to the next CUDA graph.

The costs depend on the model and on the number of requests, and neither on the device nor on what steps take in fact.
So a request that is alone takes the same steps each time, and ranks that share their requests agree.

The constants are fitted to 55 steps of an H100: of the preset `small` and of V2-Lite's shape, with 1 to 32 requests and
up to four drafts. The times differ from these by 4.1% on average and 15.2% at most, the costs by 1.9% and 6.5%
(benchmarks/history/serve/README.md).
"""

from __future__ import annotations

from collections.abc import Mapping

from octile.models.config import ModelConfig
from octile.scaled import ScaledTensor
from octile.serve.model.forward import Forward
from octile.serve.model.small_batch import max_rows
from octile.serve.weights.weight_bytes import EMBEDDING, HEAD, ROUTED, weight_bytes

STEP, DRAFT_PASS = 430e-6, 80e-6  # seconds of a step and of a draft pass besides layers and head: host, sampling, …
SMALL_BATCH_LATENCY, LATENCY = 4e-6, 22e-6  # seconds of a layer in the small-batch pass, and in the general one
BANDWIDTH = 2.5e12  # bytes of weights per second
ROW = 1 / 135  # of the time to read a weight, in which it is multiplied by one row


class StepCosts:
    """The times of a model's decode steps, relative to each other.

    Args:
        config: configuration of the model, which has a multi-token prediction layer.
        fp8: whether the weights of linear layers are in FP8; otherwise in BF16.
        small_batch: rows that a pass has at most to be a small-batch one (`octile.serve.model.small_batch`).
        ranks: how many ranks share the routed experts.
        groups: groups of these ranks; each has requests of its own, and is taken to have as many as this one.
    """

    def __init__(self, config: ModelConfig, fp8: bool, small_batch: int, ranks: int = 1, groups: int = 1):
        self._n_layers, self._small_batch = config.num_hidden_layers, small_batch
        self._ranks, self._groups = ranks, groups
        self._weights, self._chosen = weight_bytes(config, fp8), config.num_experts_per_tok / config.n_routed_experts
        self._relative: dict[tuple[int, int], tuple[float, ...]] = {}

    @classmethod
    def of(cls, forward: Forward) -> StepCosts:
        """Return the costs of a forward pass; on a CPU they are those of a GPU."""
        weights, expert_parallel = forward.weights, forward.feed_forward.expert_parallel
        fp8 = isinstance(weights.blocks[0].attention.o, ScaledTensor)
        takes_small_batches = fp8 and expert_parallel is None and forward.attention.index is None
        small_batch = max_rows(forward.gemms.batch_invariant) if takes_small_batches else 0
        ranks = 1 if expert_parallel is None else expert_parallel.dispatcher.n_ranks
        return cls(weights.config, fp8, small_batch, ranks, ranks // forward.tp.size)

    def relative(self, n_requests: int, n_drafts: int) -> tuple[float, ...]:
        """Return the times of steps with 0, 1, … n_drafts drafts of each request, relative to one without drafts."""
        key = n_requests, n_drafts
        if key not in self._relative:
            times = [self.seconds(n_requests, k) for k in range(n_drafts + 1)]
            self._relative[key] = tuple(time / times[0] for time in times)
        return self._relative[key]

    def seconds(self, n_requests: int, n_drafts: int) -> float:
        """Return the time of a step, as on an H100."""
        rows, weights = n_requests * (1 + n_drafts), self._weights
        total = STEP + self._layers(weights.main, self._n_layers, rows)
        for draft in range(n_drafts):
            total += DRAFT_PASS + self._layers(weights.mtp, 1, n_requests if draft else rows)
            total += weights.main[HEAD] * (1 + n_requests * ROW) / BANDWIDTH
        return total

    def _layers(self, weights: Mapping[str, int], n_layers: int, rows: int) -> float:
        latency = SMALL_BATCH_LATENCY if rows <= self._small_batch else LATENCY
        dense = sum(n for kind, n in weights.items() if kind not in (ROUTED, EMBEDDING))
        routed, expert_rows = weights.get(ROUTED, 0) / self._ranks, rows * self._groups
        chosen = 1 - (1 - self._chosen) ** expert_rows
        read = dense * (1 + rows * ROW) + routed * (chosen + expert_rows * self._chosen * ROW)
        return n_layers * latency + read / BANDWIDTH
