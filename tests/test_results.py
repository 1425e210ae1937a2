"""Tests that the figures of the documents are those of the records that they cite."""

import gzip
import json
import re
import tarfile
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest

from experiments.loss.look import verdict
from experiments.loss.noise import pairs_of
from experiments.loss.plans import PLANS
from experiments.loss.power import LOOKS, interval_after, pairs_needed, power
from experiments.loss.report import BAR, Results, gap
from experiments.loss.runs import read_runs
from octile.report.compare.intervals import student_interval
from octile.text import format_percent
from tools.write_results import planned_gaps

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "results"


@cache
def page(name: str) -> str:
    """A document's text with single spaces."""
    return " ".join((ROOT / name).read_text().split())


def record(path: Path) -> dict:
    return json.loads(path.read_text())


@cache
def loss(folder: str) -> Results:
    return Results.read(ROOT / "experiments" / "loss" / folder)


def percent(gap: float) -> str:
    return f"{gap:+.2%}".replace("-", "−")


def span(gaps: Sequence[float]) -> str:
    """The 95% interval over seeds, as the tables of the loss print it."""
    interval = student_interval(np.array(gaps))
    assert interval is not None
    return f"{percent(interval.low).removesuffix('%')} to {percent(interval.high)}"


def test_tensor_core_outputs_are_counted_once():
    first, second = (record(RECORDS / f"h200_tensor_core{name}.json")["cases"] for name in ("", "_40"))
    new = sum(case["outputs"] for name, case in second.items() if name not in first)
    old = sum(case["outputs"] for case in first.values())
    assert f"| {old:,} | 0 |" in page("docs/results/kernels.md")
    assert f"| {new:,} | 0 |" in page("docs/results/kernels.md")
    assert f"{(old + new) / 1e9:.2f} · 10⁹ distinct outputs" in page("docs/hopper_product.md")


def test_the_cost_of_telemetry():
    step, every_100th = (row for row in record(RECORDS / "lab.json")["rows"] if "telemetry" in row["what"])
    text = f"takes {step['against']['ratio']:.2f} times as long as another, so measuring every 100th adds"
    assert f"{text} {every_100th['value']:.2f}%" in page("docs/telemetry.md")


def test_serving_on_an_h200():
    rows = {(row["case"], row["what"]): row for row in record(RECORDS / "h200_serve.json")["rows"]}
    decode, prefill = rows["V2-Lite shape, decode, batch 32", "decode"], "V2-Lite shape, prefill, 8 × 1,024 tokens"
    peer, text = decode["against"], page("docs/results/serve.md")
    assert f"| `generate` | {decode['value']:,.0f} | {peer['value']:,.0f} | {peer['ratio']:.2f}× |" in text
    overhead = rows["V2-Lite shape, decode, batch 256", "overhead of the engine"]["value"]
    assert f"| {overhead:.2f} |".replace("-", "−") in text
    speed, share = (rows[prefill, what]["value"] for what in ("throughput", "share of the FP8 peak"))
    assert f"Prompts are prefilled at {speed:,.0f} tokens/s, {share:.1f}% of the FP8 peak." in text
    drafts = [rows[f"1 client, 256 tokens, {n}", "throughput"]["against"]["ratio"] for n in ("1 draft", "2 drafts")]
    assert all(f" | {ratio:.2f}× |" in text for ratio in drafts)


def test_serving_on_an_h100():
    rows = {(row["case"], row["what"]): row for row in record(RECORDS / "h100_serve.json")["rows"]}
    text, prefill = page("docs/results/serve.md"), "V2-Lite shape, prefill, 8 × 1,024 tokens"
    speed, share = (rows[prefill, what]["value"] for what in ("throughput", "share of the FP8 peak"))
    assert f"Prompts are prefilled at {speed:,.0f} tokens/s, {share:.1f}% of the FP8 peak." in text
    one, many = (rows[f"V2-Lite shape, decode, batch {n}", "decode"]["against"]["ratio"] for n in (1, 32))
    assert f"With 1 and 32 requests octile is {one:.2f}× and {many:.2f}× as fast as `generate`." in text
    speeds = [record(RECORDS / f"{chip}_serve.json")["rows"] for chip in ("h100", "h200")]
    copies = [row["value"] / 1e3 for rows in speeds for row in rows if row["what"] == "copy"]
    assert "A copy moves {:.2f} TB/s on this H100 and {:.2f} on that H200.".format(*copies) in text
    half, last = (rows["64 clients", f"between tokens, {what}"]["value"] for what in ("p50", "p99"))
    assert f"longer than {half:.1f} ms, and one in a hundred is longer than {last:.1f} ms. Of" in text


@pytest.mark.parametrize("chip", ["h100", "h200"])
def test_a_step_with_a_draft_vs_one_without(chip: str):
    rows = {(row["case"], row["what"]): row for row in record(RECORDS / f"{chip}_serve.json")["rows"]}
    case, text = "1 client, 256 tokens, 1 draft", page("docs/results/serve.md")
    accepted, ratio = rows[case, "drafts accepted"]["value"], rows[case, "throughput"]["against"]["ratio"]
    assert f"| answers of 256 tokens, 1 draft | {accepted:.0f} |" in text
    assert f"a step with one draft takes {(1 + accepted / 100) / ratio:.2f} times as long as one without" in text


@pytest.mark.parametrize("chip", ["h200", "h100"])
@pytest.mark.parametrize("batch", [1, 32, 256])
def test_decoding_is_compared_with_the_fastest_of_vllms_settings(chip: str, batch: int):
    case = f"V2-Lite shape, FP8 weights, decode, batch {batch}"
    rows = [r for r in record(RECORDS / f"{chip}_vllm.json")["rows"] if r["case"] == case and r["against"]]
    worst = min(rows, key=lambda row: row["against"]["ratio"])
    ours, theirs = f"{worst['value']:,.0f}", f"{worst['against']['value']:,.0f}"
    times = f"{worst['against']['ratio']:.2f}×"
    setting = worst["against"]["peer"].removeprefix("vLLM 0.26.0, ")
    start, end = rf"\| {batch} requests? \| {ours} \| {theirs} \| {times} \|", rf"\| `{re.escape(setting)}` \|"
    assert re.search(f"{start}[^`]*{end}", page("docs/results/serve.md"))
    if batch == 32:
        assert f"[{times}](benchmarks/results/{chip}_vllm.txt)" in page("README.md")


def test_a_row_of_the_readme_has_the_day_of_its_record():
    text = (ROOT / "README.md").read_text()
    rows = re.findall(r"\(benchmarks/results/(h200_\w+)\.txt\) \| [^|]* \| (\d+ \w+) \|$", text, re.MULTILINE)
    assert {name for name, _ in rows} == set(re.findall(r"benchmarks/results/(h200_\w+)\.txt", text))
    for name, day in rows:
        measured = datetime.strptime(f"{day} 2026", "%d %b %Y").date()
        assert record(RECORDS / f"{name}.json")["machine"]["date"] == measured.isoformat()


def test_every_floor_that_a_record_misses_stands_in_the_table():
    table = page("docs/results.md").split("## Floors that are missed")[1].split("##")[0]
    verdicts = [
        line
        for path in sorted(RECORDS.glob("h200_*.txt"))
        for line in path.read_text().splitlines()
        if re.search(r"floor [^,]*MISSED", line)
    ]
    assert verdicts
    for line in verdicts:
        found = re.findall(r"(?:: |smallest |at most )([\d.]+)(?=[×: ])", line.split(": floor")[0] + ":")[-1]
        assert re.search(rf"\| [^|]*{re.escape(found)}(×| µs| )", table)
    (row,) = [
        row
        for row in record(ROOT / "benchmarks/history/serve-ranks/second.json")["rows"]
        if row["case"] == "V2-Lite shape, decode, batch 128 on each of 2 ranks" and row["what"] == "decode"
    ]
    assert f"decode {row['against']['ratio']:.2f}× as fast as on one, by the engine; the floor is 1.5×" in table
    assert "0.694  GB/s" in (RECORDS / "h200_dispatch.txt").read_text()


def test_whole_decode_steps_and_their_rooflines():
    rows = {(row["case"], row["what"]): row["value"] for row in record(RECORDS / "h200_serve.json")["rows"]}
    for batch in (1, 32, 256):
        cells, steps = [], []
        for weights in ("", "BF16 weights, "):
            case = f"V2-Lite shape, {weights}decode, batch {batch}"
            steps.append(rows[case, "step"])
            share = rows[case, "share of the roofline"]
            cells.append(f"{rows[case, 'roofline']:.2f} ms | {steps[-1]:.2f} ms, {share:.0f}%")
        assert f"| {batch} | {' | '.join(cells)} |" in page("docs/mla_decoding.md")
        assert f"{steps[1] / steps[0]:.2f}" in page("docs/mla_decoding.md")


def test_the_default_run():
    with tarfile.open(ROOT / "experiments/tiny/run.tar.gz") as run:
        lines = [json.loads(line) for line in run.extractfile("tiny/metrics.jsonl")]
    first = next(line["main_loss"] for line in lines if "loss" in line)
    last = [line["val_loss"] for line in lines if "val_loss" in line][-1]
    text = f"The loss falls from {first:.2f} nats per token. On held-out text it ends at {last:.2f} "
    assert text in page("docs/tutorials/train_on_a_laptop.md")
    assert f"| held-out loss at the end, FP8 | {last:.4f} | 4.6488 |" in page("experiments/tiny/README.md")


def test_the_runs_on_one_two_and_eight_processes():
    folder, found = ROOT / "experiments" / "ranks", {}
    for run in ("one", "two", "eight", "two_again", "one_fp32", "two_fp32", "eight_fp32"):
        lines = [json.loads(line) for line in gzip.decompress((folder / f"{run}.jsonl.gz").read_bytes()).splitlines()]
        train = [line["loss"] for line in lines if "loss" in line]
        found[run] = train, [line["val_loss"] for line in lines if "val_loss" in line]
    assert found["two"] == found["two_again"]
    for suffix, column in (("", ""), ("_fp32", ", FP32")):
        one, held_out = found[f"one{suffix}"]
        for name, ranks in (("two", 2), ("eight", 8)):
            train, after = found[f"{name}{suffix}"]
            apart = [abs(a / b - 1) for a, b in zip(train, one, strict=True)]
            parts = [max(part) for part in (apart[:1], apart[1:2], apart[2:10], apart[10:50], apart[50:])]
            row = " | ".join("0" if part == 0 else f"{part:.1e}" for part in parts)
            assert f"| {ranks}{column} | {row} |" in page("experiments/ranks/README.md")
            gap = f"{after[-1] / held_out[-1] - 1:+.2%}".replace("-", "−")
            row = f"{train[0]:.6f} | {train[-1]:.4f} | {after[-1]:.4f} | {gap} |"
            assert row in page("experiments/ranks/README.md")
            if not suffix:
                row = f"| {ranks} | {train[0]:.6f} | {after[-1]:.4f} | {gap} |"
                assert row in page("docs/parallel.md")


@pytest.mark.parametrize(
    ("path", "run"),
    [("benchmarks/history/training-step/small_preset.json", "hopper"), ("experiments/small/train.json", "deepseek_v3")],
)
def test_the_small_preset_is_compared_with_bf16_of_the_same_record(path, run):
    runs = record(ROOT / path)["runs"]
    fp8, bf16 = (runs[name]["tokens_per_s"] for name in (run, "bf16"))
    row = f"| {bf16:,.0f} | {fp8:,.0f} ({fp8 / bf16:.2f}×) |"
    assert row in page("benchmarks/history/training-step/README.md")


PIPELINES = {"medium": "h200_medium_4bf774e2.txt", "small": "h200_small.txt"}


def pipeline_speed(preset: str, phase: str = "1f1b") -> str:
    """How many times as fast as one GPU two train a preset in a phase of `tools.measure_pipeline`."""
    text = (ROOT / "benchmarks" / "history" / "pipeline" / PIPELINES[preset]).read_text()
    speeds = defaultdict[str, list[int]](list)
    for of, speed in re.findall(rf"^{preset} (\S+), rank .*? × alone, .*?([\d,]+) tokens/s", text, re.MULTILINE):
        speeds[of].append(int(speed.replace(",", "")))
    return f"{fmean(speeds[phase]) / fmean(speeds['alone']):.2f}"


@pytest.mark.parametrize("name", ["docs/schedules.md", "docs/parallel.md"])
def test_the_speed_of_a_pipeline_stands_beside_that_of_one_gpu(name):
    assert f"train `medium` {pipeline_speed('medium')} times as fast as one" in page(name)


def test_the_speed_of_a_pipeline_of_a_small_model_stands_beside_that_of_one_gpu():
    slowest, fastest = pipeline_speed("small"), pipeline_speed("small", "dualpipev")
    assert f"`small` {slowest} to {fastest} times" in page("docs/parallel.md")


def test_the_speed_of_other_pipelines_stands_beside_that_of_one_gpu():
    found = {phase: pipeline_speed("medium", phase) for phase in ("dualpipev", "zb1p", "torch-1f1b", "torch-dualpipev")}
    own = f"{found['dualpipev']} with DualPipeV and {found['zb1p']} with ZB1P"
    assert own in page("docs/parallel.md")
    assert f"`medium` {found['torch-1f1b']} and {found['torch-dualpipev']} times as fast" in page("docs/parallel.md")
    small = f"`small` {pipeline_speed('small', 'torch-1f1b')} and {pipeline_speed('small', 'torch-dualpipev')} times"
    assert small in page("docs/parallel.md")


@pytest.mark.parametrize(
    ("folders", "bound"),
    [(("runs",), "0.025%"), (("one-rounding/runs", "one-rounding/branches-ab04a43"), "0.03%")],
)
def test_weights_rounded_once_stay_within_the_bound(folders, bound):
    ends = []
    for folder in folders:
        runs = loss(folder).all
        nudged = [run for run in runs.values() if run["job"]["recipe"] == "nudged"]
        ends += [(run, runs[run["job"]["name"].replace("nudged", "bf16")]) for run in nudged]
    gap = max(abs(run["val_loss"][-1] / base["val_loss"][-1] - 1) for run, base in ends)
    assert f"{100 * gap:.{len(bound) - 3}f}%" == bound
    assert re.search(f"rounded once end(s|ed) within {bound} of BF16", page("docs/results/loss.md"))


def test_the_gaps_of_muon_by_seed_before_the_plan_stand_in_their_record():
    folders = {name: loss(f"noise/{name}") for name in ("runs", "h200", "h200-4bf774e2")}
    pairs = [
        (name, design, base["job"]["seed"], gap(run, base)[0])
        for name, r in folders.items()
        for design in ("muon", "muon-to-zero")
        for run, base in pairs_of(r, design)
    ]
    assert len(pairs) == 10
    seeds = [fmean(found for *_, of, found in pairs if of == seed) for seed in range(4)]
    record = page("experiments/loss/noise/README.md")
    assert span(seeds) in record
    assert percent(fmean(seeds)).removeprefix("+") in record
    assert f"{', '.join(percent(one).removesuffix('%') for one in seeds[:3])} and {percent(seeds[3])}" in record
    four = [found for name, design, _, found in pairs if design == "muon" and name != "runs"]
    assert f"| **{100 * stdev(four):.3f}%** | 0.15% |" in record


def test_an_interval_that_was_looked_at_before_its_last_pair_allows_for_that():
    gaps = loss("one-rounding/runs").gaps("core", "80m", "deepseek_v3")
    looks = LOOKS["core", "80m", len(gaps)]
    interval = interval_after(gaps, len(looks))
    assert interval is not None
    low, high = percent(interval.low).removesuffix("%"), percent(interval.high)
    assert max(-interval.low, interval.high) < BAR
    assert f"reaches from {low} to {high}, within the bar" in page("docs/results/loss.md")
    assert f"*81M: shown*, by a [plan written before the last ten of {len(gaps)} pairs ran]" in page("README.md")
    assert f"is {span(gaps)}, and {low} to {high} corrected for six looks" in page("README.md")


@pytest.mark.parametrize(
    ("row", "seeds", "looks"),
    [
        ("**seeds 0 to 23, the planned statistic** | 24 | {mean} | {deviation} | {interval}", range(24), 1),
        ("the same, allowing for six looks (99.17%) | 24 | | | {interval}", range(24), 6),
        ("seeds 14 to 23 alone | 10 | {mean} | {deviation} | {interval}", range(14, 24), 1),
        ("all but 19 and 21 | 22 | {mean} | {interval}", {*range(24)} - {19, 21}, 1),
        ("an H200 for both runs | 18 | {mean} | {interval}", range(18), 1),
        ("an H100 for both runs | 4 | {mean} | {interval}", (18, 20, 22, 23), 1),
    ],
)
def test_the_result_of_the_plan_at_81m_is_that_of_its_files(row, seeds, looks):
    every = loss("one-rounding/runs").gaps("core", "80m", "deepseek_v3")
    gaps = [every[seed] for seed in seeds]
    found = interval_after(gaps, looks)
    assert found is not None
    mean, deviation, low, high = (
        f"{100 * value:+.3f}%".replace("-", "−") for value in (fmean(gaps), stdev(gaps), found.low, found.high)
    )
    interval = f"{low.removesuffix('%')} … {high}"
    text = row.format(mean=mean, deviation=deviation.removeprefix("+"), interval=interval)
    assert f"| {text} |" in page("experiments/loss/planned/README.md")


@pytest.mark.parametrize(
    ("plan", "recipe", "row", "below"),
    [
        ("planned-30m", "deepseek_v3", "**`deepseek_v3`**", "FP8 is below BF16 in"),
        ("planned-30m", "e5m2", "the control `e5m2`", "E5M2 in"),
        ("planned-30m-muon", "deepseek_v3", "**`deepseek_v3`**", "FP8 is below BF16 in"),
        ("planned-30m-muon", "without_fprop", "the control `without_fprop`", "`without_fprop` in"),
        ("planned-80m-muon", "deepseek_v3", "**`deepseek_v3`**", "FP8 is below BF16 in"),
        ("planned-150m", "deepseek_v3", "**`deepseek_v3`**", "FP8 is below BF16 in"),
    ],
)
def test_the_result_of_a_plan_is_that_of_its_files(plan, recipe, row, below):
    gaps = planned_gaps(plan, recipe)
    found = student_interval(np.array(gaps))
    assert found is not None
    mean, deviation, low, high = (
        f"{100 * value:+.3f}%".replace("-", "−") for value in (fmean(gaps), stdev(gaps), found.low, found.high)
    )
    interval = f"{low.removesuffix('%')} … {high}"
    text = f"| {row} | {len(gaps)} | {mean} | {deviation.removeprefix('+')} | {interval} | **{verdict(found)}** |"
    record = page("experiments/loss/planned/README.md")
    assert text in record
    assert f"{below} {sum(one < 0 for one in gaps)}" in record
    assert span(gaps) in page("README.md")


@pytest.mark.parametrize(
    ("plan", "recipe"), [(plan, of) for plan in ("planned-30m-muon", "planned-80m-muon") for of in PLANS[plan].recipes]
)
def test_the_intervals_with_muon_stand_on_all_pages(plan, recipe):
    for name in ("README.md", "docs/results/loss.md", "docs/muon.md"):
        assert span(planned_gaps(plan, recipe)) in page(name)


def test_the_losses_of_both_optimizers_at_35m_are_those_of_their_runs():
    runs = read_runs(ROOT / "experiments" / "loss" / "planned" / "runs")
    muon, adamw = (
        fmean(
            found["val_loss"][-1]
            for found in runs
            if found["job"]["name"] in {name for recipe, _, name in PLANS[plan].runs if recipe == of}
        )
        for plan, of in (("planned-30m-muon", "deepseek_v3"), ("planned-30m", "bf16"))
    )
    assert f"end at {muon:.2f} nats a token, in BF16 with AdamW at {adamw:.2f}" in page("docs/muon.md")


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        *(("planned-30m", f"docs/{name}.md") for name in ("results/loss", "faq", "muon")),
        *(("planned-150m", f"docs/{name}.md") for name in ("results/loss", "faq")),
    ],
)
def test_the_intervals_with_adamw_stand_on_all_pages(plan, name):
    assert span(planned_gaps(plan, "deepseek_v3")) in page(name)


def test_the_deviation_of_a_pair_at_35m_stands_on_all_pages():
    deviation = f"{100 * stdev(planned_gaps('planned-30m', 'deepseek_v3')):.2f}%"
    for name in ("docs/compare.md", "benchmarks/LOG.md", "experiments/loss/noise/README.md"):
        assert deviation in page(name)


def test_two_pairs_at_81m_had_one_run_on_each_kind_of_machine():
    runs = loss("one-rounding/runs")
    pairs = [[runs.get("core", "80m", recipe, seed) for recipe in ("bf16", "deepseek_v3")] for seed in range(24)]
    gpus = [{run["facts"]["device"].split()[1] for run in pair if run} for pair in pairs]
    assert [seed for seed in range(24) if gpus[seed] == {"H100", "H200"}] == [19, 21]
    assert [seed for seed in range(24) if gpus[seed] == {"H100"}] == [18, 20, 22, 23]


def test_the_control_near_the_bar_is_found_by_the_text_alone():
    r = loss("one-rounding/runs")
    over_seeds = student_interval(np.array(r.gaps("branch", "30m", "e5m2")))
    assert over_seeds is not None
    assert over_seeds.low < BAR
    text = "found by the bootstrap over held-out text only, +0.38 to +0.48% and +0.35 to +0.43%"
    assert text in page("docs/results/loss.md")
    assert "+0.38% … +0.48%" in page("experiments/loss/one-rounding/README.md")


def test_the_pairs_from_scratch_of_the_largest_size():
    gaps = loss("one-rounding/runs").gaps("core", "150m", "deepseek_v3")
    first, second = map(percent, gaps)
    text = f"Two seeds with the usual rate, {first} and {second}, say nothing about the bar"
    assert text in page("docs/results/loss.md")


def test_the_pairs_that_the_deviation_at_143m_asks_for():
    deviation = stdev(planned_gaps("planned-150m", "deepseek_v3"))
    pairs = pairs_needed(0.0, deviation)
    shown = f"{pairs} pairs show the bar with a probability of 80% if FP8 costs nothing."
    assert f"With this deviation, {100 * deviation:.2f}% a pair, {shown}" in page("docs/results/loss.md")
    record = page("experiments/loss/planned/README.md")
    assert f"nine pairs show the bar with a probability of {power(9, 0.0, deviation):.0%}" in record


@pytest.mark.parametrize(
    ("folder", "group", "size", "seed"),
    [
        ("../wgrad_blocks/loss/runs", "branch", "30m", 0),
        ("../wgrad_blocks/loss/runs", "branch", "30m", 1),
        ("one-rounding/runs", "branch", "80m", 0),
        ("../wgrad_blocks/loss/runs", "branch", "80m", 1),
        ("one-rounding/runs", "core", "30m", 3),
        ("one-rounding/runs", "core", "30m", 4),
        ("one-rounding/runs", "core", "80m", 0),
        ("one-rounding/runs", "core", "80m", 1),
    ],
)
def test_wgrad_in_blocks_is_compared_with_tiles(folder, group, size, seed):
    runs = [loss(folder).get(group, size, recipe, seed) for recipe in ("bf16", "deepseek_v3", "wgrad_x_blocks")]
    bf16, tiles, blocks = (run["val_loss"][-1] for run in runs if run)
    difference = format_percent((blocks - tiles) / bf16).removesuffix("%")
    row = f"| {seed} | {percent(tiles / bf16 - 1)} | {percent(blocks / bf16 - 1)} | {difference} |"
    assert row in page("experiments/wgrad_blocks/README.md")


def test_the_pairs_from_scratch_of_the_smallest_size_whose_files_are_kept():
    gaps = loss("one-rounding/runs").gaps("core", "30m", "deepseek_v3")
    assert min(gaps) > 0
    assert len(gaps) == 7
    interval = f"95% interval over the seeds {span(gaps)}"
    text = f"FP8 ended higher in each of the last seven of ten pairs ({percent(fmean(gaps))}, {interval})"
    assert text in page("docs/results/loss.md")


def test_the_gap_over_a_billion_tokens():
    (gap,) = loss("one-rounding/runs").gaps("billion", "30m", "deepseek_v3")
    assert f"| 35M | 1B | all steps, a longer text | 1 | {percent(gap)} | |" in page("docs/results/loss.md")
    assert f"In FP8 one run over 1B tokens ends at {percent(gap)}" in page("README.md")
