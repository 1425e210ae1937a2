"""The plan's times and memory of pipelines that ran on two H100s and on two H200s, compared with the records."""

import re
from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import pytest

from octile.plan.hardware import read_cluster
from octile.plan.layout import Layout
from octile.plan.memory import memory_of_rank
from octile.plan.stages import stage_layers
from octile.plan.step import plan_step
from octile.train.config import preset

RECORD = Path(__file__).parents[2] / "benchmarks/history/pipeline"
LINE = re.compile(
    r"^(?P<preset>\w+) (?P<phase>\w+), rank (?P<rank>\d): [\d.]+ × alone, "
    r"(?:stages of \[(?P<layers>[\d, ]+)\] layers, )?.* (?P<ms>[\d.]+) ms a step .* peak (?P<peak>[\d.]+) GiB, "
    r"(?P<before>[\d.]+) of them of phases before, activations saved (?P<saved>\w+);",
    re.MULTILINE,
)
TITLES = {
    "alone": "one GPU", "both": "both stages on one GPU", "1f1b": "1F1B", "zb1p": "ZB1P", "dualpipev": "DualPipeV",
}  # fmt: skip
SCHEDULES = {"alone": "1f1b", "both": "dualpipev"}
RECORDS = {  # and which of their phases
    "by_time_small.txt": ("h100", TITLES),
    "by_time_medium.txt": ("h100", TITLES),
    "h200_small.txt": ("h200", TITLES),
    "h200_medium_1a106755.txt": ("h200", ["both"]),
    "h200_medium_4bf774e2.txt": ("h200", TITLES),
}
MICRO_BATCHES = 16


class Phase(NamedTuple):
    """A phase of a run: milliseconds a step and GiB at the peak of each rank, measured and planned."""

    title: str
    ms: list[float]
    planned_ms: float
    peaks: list[float]
    planned_peaks: list[float]


@cache
def phases() -> dict[str, Phase]:
    lines = defaultdict[str, list[dict[str, str]]](list)
    for record, (gpu, names) in RECORDS.items():
        for match in LINE.finditer((RECORD / record).read_text()):
            if match["phase"] in names:
                lines[f"{gpu} {match['preset']} {match['phase']}"].append({"gpu": gpu, **match.groupdict()})
    return {name: read_phase(sorted(ranks, key=lambda line: line["rank"])) for name, ranks in lines.items()}


def read_phase(ranks: list[dict[str, str]]) -> Phase:
    config, phase = preset(ranks[0]["preset"]), ranks[0]["phase"]
    pp = 1 if phase in SCHEDULES else 2
    layout = Layout(
        pp=pp,
        schedule=SCHEDULES.get(phase, phase),
        batch_size=MICRO_BATCHES * config.micro_batch_size,
        micro_batch_size=config.micro_batch_size,
        sequence_length=config.sequence_length,
        recompute=ranks[0]["saved"] == "False",
        masters="replicated",
        is_balanced=True,
    )
    cluster = replace(read_cluster(f"{ranks[0]['gpu']}_8"), gpus=pp)
    given = ranks[0]["layers"]
    layers = None if given is None else [*accumulate(map(int, given.split(",")), initial=0)]
    plan = plan_step(config.model, layout, cluster, layers and [range(begin, end) for begin, end in pairwise(layers)])
    if pp == 2:  # octile train divides by the times of an H200
        of_trainer = stage_layers(config.model, layout, replace(read_cluster("h200_8"), gpus=2))
        assert [len(own) for own in of_trainer] == [int(n) for n in given.split(",")]
    schedule = layout.make_schedule(cluster)
    planned = [
        sum(memory_of_rank(config.model, layout, cluster, schedule, plan.stages, rank).values()) / 2**30
        for rank in range(schedule.n_ranks)
    ]
    of_rank = [[line for line in ranks if line["rank"] == str(rank)] for rank in range(2)]  # in one or two commands
    peaks = [max(float(line["peak"]) - float(line["before"]) for line in own) for own in of_rank]
    title = f"`{ranks[0]['preset']}`, {TITLES[phase]}"
    return Phase(title, [float(line["ms"]) for line in ranks], 1e3 * plan.seconds, peaks, planned * (3 - pp))


PHASES = (
    "h100 small alone", "h100 small both", "h100 small 1f1b", "h100 small zb1p", "h100 small dualpipev",
    "h100 medium alone", "h100 medium both", "h100 medium 1f1b", "h100 medium dualpipev",
    "h200 small alone", "h200 small 1f1b", "h200 small zb1p", "h200 small dualpipev",
    "h200 medium alone", "h200 medium both", "h200 medium 1f1b", "h200 medium zb1p", "h200 medium dualpipev",
)  # fmt: skip


def test_all_phases_of_the_record_are_compared():
    assert sorted(phases()) == sorted(PHASES)


@pytest.mark.parametrize("name", PHASES)
def test_the_time_of_a_step_is_planned_within_10_percent(name):
    phase = phases()[name]
    assert phase.planned_ms == pytest.approx(fmean(phase.ms), rel=0.1)


@pytest.mark.parametrize("name", PHASES)
def test_the_memory_of_each_rank_is_planned_within_10_percent(name):
    phase = phases()[name]
    assert phase.planned_peaks == pytest.approx(phase.peaks, rel=0.1)


@pytest.mark.parametrize("name", PHASES)
def test_the_page_of_the_record_has_the_comparison(name):
    page = (RECORD / "README.md").read_text()
    title, ms, planned_ms, peaks, planned_peaks = phases()[name]
    measured = f"{fmean(ms):,.1f}" if fmean(ms) < 1000 else f"{fmean(ms):,.0f}"
    planned = f"{planned_ms:,.1f}" if planned_ms < 1000 else f"{planned_ms:,.0f}"
    found = " · ".join(f"{peak:.2f}" for peak in peaks), " · ".join(f"{peak:.2f}" for peak in planned_peaks)
    errors = " · ".join(percent(plan / peak) for plan, peak in zip(planned_peaks, peaks, strict=True))
    row = (
        f"| {title} | {measured} | {planned} | {percent(planned_ms / fmean(ms))} | {found[0]} | {found[1]} | {errors} |"
    )
    assert row in page


def percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f}%".replace("-", "−")
