"""What was published or measured, compared with what the model of a cluster predicts.

No efficiency is fitted to these figures: see `efficiencies.toml`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from octile.models.config import PRESETS, ModelConfig
from octile.plan.durations import seconds
from octile.plan.exchange import exchange
from octile.plan.hardware import read_cluster
from octile.plan.layout import Layout
from octile.plan.serving import (
    Decode,
    Prefill,
    decode_step_seconds,
    decode_tokens_per_second,
    prefill_tokens_per_second,
)
from octile.plan.step import StepPlan, overlapped, plan_step
from octile.plan.work import Work, attention_work, mixture_work


@dataclass(frozen=True)
class Comparison:
    """A figure with its prediction.

    Attributes:
        case: what ran.
        what: the figure.
        unit: unit of the figure and its prediction.
        value: published or measured.
        predicted: by the model.
        source: where `value` was published, or the record of this repository that has it.
    """

    case: str
    what: str
    unit: str
    value: float
    predicted: float
    source: str

    @property
    def is_own(self) -> bool:
        """Whether the value was measured for octile, not published by others."""
        return self.source.startswith("benchmarks/")

    @property
    def error(self) -> float:
        """How far the prediction is off, as a share of the value."""
        return self.predicted / self.value - 1


@cache
def published_run() -> StepPlan:
    """DeepSeek-V3 on 2,048 H800, as published."""
    cluster = read_cluster("h800_2048")
    layout = cluster.published("v3_671b")
    assert layout is not None
    return plan_step(PRESETS["v3_671b"](), layout, cluster)


def compare_published() -> Iterator[Comparison]:
    """The published training run of DeepSeek-V3."""
    plan = published_run()
    case = "DeepSeek-V3 on 2,048 H800, PP16 × EP64"
    yield Comparison(
        case, "GPU hours per 10¹² tokens", "h", 180_000, plan.gpu_hours_per_trillion_tokens, "arXiv 2412.19437 §1"
    )
    insights = "arXiv 2505.09343 table 4"
    yield Comparison(case, "a step", "s", 19.926, plan.seconds, insights)
    yield Comparison(case, "share of the BF16 peak, causal", "%", 38.94, 100 * plan.causal_mfu, insights)
    balanced = plan_step(plan.model, replace(plan.layout, is_balanced=True), plan.cluster)
    stage = next(stage for stage in balanced.stages if stage.mixtures == len(stage.parts) == 4)
    yield Comparison(
        case, "an overlapped pair of 4 layers with experts", "ms", 129, 1e3 * overlapped(stage, stage), "profile-data"
    )


def compare_serving() -> Iterator[Comparison]:
    """Prefill and decode units, in tokens per second of a node.

    DeepSeek's profile of a prefill unit and SGLang's measurement of one have work all the time and equal loads of
    experts; SGLang's authors published the tokens per second of both. SGLang's GEMMs are DeepGEMM's of 2025, which are
    as fast as octile's (benchmarks/results/h200_gemm.txt). The figures of the online service are means over
    a day. Of decode the requests of a GPU are those that two of them mean, 14,800 tokens per second of 8 GPUs at 21
    tokens per second and request.
    """
    cluster, model = read_cluster("h800_2048"), PRESETS["v3_671b"]()
    full_load = prefill_tokens_per_second(model, Prefill(prompt=4096, cached=0.0, is_balanced=True), cluster)
    what, blog = "prefill at full load, EP32, prompts of 4,096 tokens, per node", "LMSYS, large-scale EP, 2025-05-05"
    yield Comparison("DeepSeek's profile", what, "tokens/s", 62_713, full_load, f"profile-data; {blog}")
    h100 = replace(cluster, name="h100", nvlink=replace(cluster.nvlink, bandwidth=450e9), efficiencies={})
    full_load = prefill_tokens_per_second(model, Prefill(prompt=4096, cached=0.0, is_balanced=True), h100)
    yield Comparison("SGLang on H100, simulated balance", what, "tokens/s", 59_337, full_load, blog)
    source = "DeepSeek, open-infra-index, inference system overview"
    requests = round(14_800 / 8 / 21)
    decode = decode_tokens_per_second(model, Decode(requests=requests), cluster)
    what = f"decode, EP144, {requests} requests a GPU, per node"
    yield Comparison("DeepSeek online", what, "tokens/s", 14_800, decode, source)
    speed = 1 / decode_step_seconds(model, Decode(requests=128), cluster)
    yield Comparison("DeepSeek online", "decode, 128 requests a GPU, per request", "tokens/s", 21, speed, source)
    prefill = prefill_tokens_per_second(model, Prefill(), cluster)
    what = "prefill, EP32, 56.3% cached, mean of a day vs. full load, per node"
    yield Comparison("DeepSeek online", what, "tokens/s", 73_700, prefill, source)


@dataclass(frozen=True)
class MeasuredRun:
    """A training run of octile on H200, in FP8.

    Attributes:
        name, gpus, how: what ran.
        model: its shape.
        batch_size, micro_batch_size, sequence_length: as in `Layout`.
        ep: ranks of expert parallelism.
        milliseconds: duration of a step.
        source: its record.
        peak: memory of its tensors in GiB; None: not recorded.
        peak_source: the record of `peak`.
        reserved: memory that torch's allocator had reserved at the end, in GiB; None: not recorded.
    """

    name: str
    gpus: int
    how: str
    model: ModelConfig
    batch_size: int
    micro_batch_size: int
    sequence_length: int
    ep: int
    milliseconds: float
    source: str
    peak: float | None = None
    peak_source: str = "benchmarks/history/ranks"
    reserved: float | None = None

    def plan(self) -> StepPlan:
        """What the model predicts for it.

        Masters are replicated and nothing is recomputed. On symmetric memory the tensors of a rank's experts have rows
        for the tokens of all ranks.
        """
        layout = Layout(
            ep=self.ep,
            batch_size=self.batch_size,
            micro_batch_size=self.micro_batch_size,
            sequence_length=self.sequence_length,
            recompute=False,
            masters="replicated",
            spare_rows=self.ep - 1,
        )
        return plan_step(self.model, layout, replace(read_cluster("h200_8"), gpus=self.gpus))


V3_LAYERS = replace(  # those of DeepSeek-V3 that one GPU trains
    PRESETS["v3_671b"](),
    n_routed_experts=16,
    vocab_size=4096,
    num_hidden_layers=2,
    first_k_dense_replace=0,
    num_nextn_predict_layers=0,
    bos_token_id=0,
    eos_token_id=1,
    rope_scaling=None,
    max_position_embeddings=4096,
)
SMALL, MEDIUM = PRESETS["small"](), PRESETS["medium"]()
SMALL_WITHOUT_MTP, MEDIUM_WITHOUT_MTP = (
    replace(model, num_nextn_predict_layers=0, aux_loss_alpha=0.0) for model in (SMALL, MEDIUM)
)
TRAIN, RANKS, PLAN = "benchmarks/results/h200_train.json", "benchmarks/history/ranks", "benchmarks/history/plan"
MEASURED = (
    MeasuredRun("small", 1, "", SMALL, 32, 32, 1024, 1, 38.55, TRAIN, 8.54, PLAN, 9.678),
    MeasuredRun("medium", 1, "", MEDIUM, 32, 8, 4096, 1, 907.4, TRAIN, 51.72, PLAN, 64.06),
    MeasuredRun("small", 1, " without MTP", SMALL_WITHOUT_MTP, 32, 32, 1024, 1, 31.07, TRAIN, reserved=8.021),
    MeasuredRun("medium", 1, " without MTP", MEDIUM_WITHOUT_MTP, 32, 8, 4096, 1, 732.2, TRAIN, reserved=51.30),
    MeasuredRun("2 layers of DeepSeek-V3 with 16 experts", 1, "", V3_LAYERS, 4, 1, 4096, 1, 209.9, PLAN),
    MeasuredRun("medium", 2, ", the same tokens per GPU", MEDIUM, 64, 8, 4096, 1, 963.5, RANKS, 46.7),
    MeasuredRun("medium", 2, ", the same batch", MEDIUM, 32, 4, 4096, 1, 523.8, RANKS, 35.8),
    MeasuredRun(
        "medium", 2, ", experts over both, the same tokens per GPU", MEDIUM, 64, 8, 4096, 2, 1118.1, RANKS, 42.8
    ),
    MeasuredRun("medium", 2, ", experts over both, the same batch", MEDIUM, 32, 4, 4096, 2, 586.0, RANKS, 29.7),
)
PAIRS = {  # ms of both ranks, in sequence: benchmarks/history/pair
    "DeepSeek-V3": (replace(PRESETS["v3_671b"](), n_routed_experts=32), (110.85, 110.44)),
    "DeepSeek-V2-Lite": (PRESETS["v2_lite_16b"](), (20.25, 20.23)),
}


def work_on_two(model: ModelConfig) -> list[Work]:
    """The work of a layer with experts, expert parallel over two ranks, in both passes of 4,096 tokens.

    As measured in benchmarks/history/pair: weights are quantized once more for the backward pass, transposed, and a
    rank's experts have a quarter more rows than tokens go to them.
    """
    tokens, ep = 4096, 2
    work = [
        *attention_work(model, tokens, tokens, saved=False),
        *mixture_work(model, tokens, ep, saved=False, spare_rows=0.25),
    ]
    weights = sum(piece.weights for piece in work if piece.unit == "fp8_wgrad")
    return [*work, Work("quantize", "input_gradient", bytes=(4 + 1) * weights, calls=8)]


def passes_on_two(model: ModelConfig) -> float:
    """Seconds of a forward pass of 4 layers with experts and a backward pass of 4 others on two H200."""
    cluster, layers = replace(read_cluster("h200_8"), gpus=2), 4
    computed = sum(seconds(piece, cluster) for piece in work_on_two(model))
    return layers * (computed + 2 * exchange(model, 4096, 2, cluster, is_balanced=True).total)


def compare_measured() -> Iterator[Comparison]:
    """Training steps of octile on one and two H200 with their peak memory, and passes through layers with experts."""
    for name, (model, measured) in PAIRS.items():
        what, found = "4 layers forward and 4 backward", sum(measured) / len(measured)
        predicted = 1e3 * passes_on_two(model)
        yield Comparison(f"{name}'s layers on 2 H200", what, "ms", found, predicted, "benchmarks/history/pair")
    for run in MEASURED:
        plan, case = run.plan(), f"{run.name} on {run.gpus} H200{run.how}"
        yield Comparison(case, "a step", "ms", run.milliseconds, 1e3 * plan.seconds, run.source)
        if run.peak is not None:
            predicted = sum(plan.memory.values()) / 2**30
            yield Comparison(case, "peak memory of tensors", "GiB", run.peak, predicted, run.peak_source)
        if run.reserved is not None:
            yield Comparison(case, "memory that torch reserves", "GiB", run.reserved, plan.reserved / 2**30, run.source)
