"""Write the tables of README.md, docs/results.md and docs/results/: `python -m tools.write_results`.

A table stands in a page between `<!-- table: NAME -->` and `<!-- end -->`; NAME is a function in this file. The records
are files of benchmarks/results/, and of experiments/ for the loss.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from functools import cache
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from experiments.loss import fall
from experiments.loss.look import pair_gaps, verdict
from experiments.loss.plans import PLANS
from experiments.loss.power import LOOKS, interval_after
from experiments.loss.report import Results, gaps_by_evaluation, scratch_table
from experiments.loss.runs import read_runs
from octile.bench.goals import DEEP_GEMM_CLEAN
from octile.bench.transformers import TORCHAO_EXPERTS
from octile.report.compare.intervals import Interval

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "benchmarks" / "results"
LOSS = ROOT / "experiments" / "loss"
PAGES = (ROOT / "README.md", ROOT / "docs" / "results.md", *sorted((ROOT / "docs" / "results").glob("*.md")))
TABLE = re.compile(r"(?<=<!-- table: )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)

Rows = list[list[str]]
Row = dict[str, Any]


def write(text: str) -> str:
    """Return a page with its tables written anew."""
    return TABLE.sub(lambda found: f"{found[1]}{found[2]}\n{format_table(TABLES[found[1]]())}\n", text)


def format_table(rows: Rows) -> str:
    """Format a table in Markdown. Columns whose cells are numbers stand to the right."""
    head, *rest = rows
    numeric = [all(re.fullmatch(r"[\d,.+−×%]*[MB]?", row[i]) for row in rest) for i in range(len(head))]
    lines = [head, ["---:" if right else "---" for right in numeric], *rest]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def number(value: float, digits: int = 0) -> str:
    return f"{value:,.{digits}f}".replace("-", "−")


def ratio(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}×"


def percent(gap: float) -> str:
    return f"{gap:+.2%}".replace("-", "−").replace("+0.00%", "0.00%")


class Record:
    """benchmarks/results/NAME.json.

    Attributes:
        name: the file's name, without its ending.
        date: day of the measurement, as YYYY-MM-DD.
        rows: what was measured, each row with a case, what, a value, its unit, and a peer's value or None.
    """

    def __init__(self, name: str):
        content = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))
        self.name, self.date, self.rows = name, content["machine"]["date"], content["rows"]

    def row(self, case: str, what: str, peer: str | None = None, unit: str | None = None) -> Row:
        """Return the only row of this case, what, peer (if any is given) and unit (if any is given)."""
        found = [
            row
            for row in self.rows
            if (row["case"], row["what"]) == (case, what)
            and (peer is None or (row["against"] or {}).get("peer") == peer)
            and unit in (None, row["unit"])
        ]
        if len(found) != 1:
            raise KeyError(f"{len(found)} rows have case {case!r}, what {what!r}, peer {peer!r}, unit {unit!r}")
        return found[0]

    def value(self, case: str, what: str, unit: str | None = None) -> float:
        return self.row(case, what, unit=unit)["value"]

    def ratio(self, case: str, what: str, peer: str) -> float:
        return self.row(case, what, peer)["against"]["ratio"]


record = cache(Record)


# README.md


def readme() -> Rows:
    """The table of the README, one number in a cell; each ratio links to its record. The H100's record may be older."""
    rows = [["metric", "octile", "peer", "peer's", "ratio", "ratio on an H100", "measured, 2026"]]

    def add(
        metric: str, r: Record, ours: float, peer: str, theirs: float, found: str, h100: str = "", digits: int = 0
    ) -> None:
        links = [_linked(found, r.name), _linked(h100, r.name.replace("h200_", "h100_")) if h100 else "–"]
        day = f"{date.fromisoformat(r.date):%d %b}".lstrip("0")
        rows.append([metric, number(ours, digits), peer, number(theirs, digits), *links, day])

    train, what = record("h200_train"), "train FP8 without MTP"
    for peer, name in (("torchtitan BF16", "torchtitan 0.2.2, compiled BF16"), ("BF16", "octile's BF16")):
        speeds, times = train.row("small", what, peer), ratio(train.ratio("small", what, peer))
        metric = "`octile train`, preset `small`, FP8, without multi-token prediction, tokens/s"
        ours, theirs = (round(speed, -3) for speed in (speeds["value"], speeds["against"]["value"]))
        add(metric, train, ours, name, theirs, times, ratio(record("h100_train").ratio("small", what, peer)))
    models = record("h200_transformers")
    for case, text in [*TRANSFORMERS.items()][1:]:
        ours, theirs = (models.value(case, f"forward + backward, {who}", "ms") for who in ("octile, compiled", BF16))
        metric = f"Converted {text}, forward and backward, ms"
        found = [
            r.ratio(case, "forward + backward, octile, compiled", BF16) for r in (models, record("h100_transformers"))
        ]
        add(metric, models, ours, BF16, theirs, *map(ratio, found), digits=1)
    steps, case, graph = record("h200_step"), "dense decoder", ", in a CUDA graph"
    torchao = "torchao 0.18, one scale per tensor, q and k without gradients"
    for r, peer, name in ((steps, BF16, BF16), (record("h200_step_torchao"), "torchao tensorwise", torchao)):
        ours, theirs = (r.value(case, f"forward + backward, {who}{graph}") for who in ("octile, compiled", peer))
        times = ratio(r.ratio(case, "forward + backward", peer), 2 if peer == BF16 else 3)
        metric = "Dense decoder of 4 blocks, hidden 4096, forward and backward in a CUDA graph, ms"
        add(metric, r, ours, name, theirs, times, digits=1)  # the H100's record lacks gradients of compiled BF16
    saved = steps.row(case, "saved, octile")
    metric = "Bytes that it saves for backward, per token and layer, not compiled"
    h100 = record("h100_step").row(case, "saved, octile")["against"]["ratio"]
    add(metric, steps, saved["value"], BF16, saved["against"]["value"], ratio(saved["against"]["ratio"]), ratio(h100))
    metric = "`octile serve`'s engine, V2-Lite's shape in FP8, decoding 32 requests, tokens/s"
    case = f"{SHAPE}, FP8 weights, decode, batch 32"
    found, h100 = (fastest_vllm(chip, case, "decode") for chip in ("h200", "h100"))
    ours, peer, times = found["value"], found["against"], ratio(found["against"]["ratio"])
    add(metric, record("h200_vllm"), ours, "vLLM 0.26.0", peer["value"], times, ratio(h100["against"]["ratio"]))
    metric = "The same in exact mode, whose log-probabilities are those of training in all bits"
    speeds = {name: exact_decoding(name) for name in ("cost_6_h200", "cost_4")}
    links = [f"[{ratio(a / b, 3)}](benchmarks/history/exact/{name}.txt)" for name, (a, b) in speeds.items()]
    exact, default = (number(speed, 0) for speed in speeds["cost_6_h200"])
    rows.append([metric, exact, "octile's default mode", default, *links, "28 Nov"])
    means = [
        [geometric_mean(speeds) for speeds in zip(*_gemms("FP8", "DeepGEMM", lambda m: m >= 4096, name), strict=True)]
        for name in ("h200_gemm", "h100_gemm")
    ]
    metric = "FP8 GEMM, mean of 8 large shapes of DeepSeek-V3, TFLOP/s"
    times, h100 = (ratio(ours / theirs, 3) for ours, theirs in means)
    add(metric, record("h200_gemm"), means[0][0], "DeepGEMM 2.6.1", means[0][1], times, h100)
    r, group = runs("one-rounding/runs"), ("core", "80m")
    base = r.bf16(*group)
    fp8 = [r.get(*group, "deepseek_v3", one["job"]["seed"]) for one in base]
    losses = [number(fmean(one["val_loss"][-1] for one in found if one), 4) for found in (fp8, base)]
    found = f"[{percent(fmean(r.gaps(*group, 'deepseek_v3')))}](docs/results/loss.md)"
    metric = "Held-out loss, 81M active parameters, 100M tokens in FP8 from the first step"
    rows.append([metric, losses[0], "BF16", losses[1], found, "–", "27 Nov"])
    return rows


def exact_decoding(name: str) -> tuple[float, float]:
    """Tokens/s of 32 requests in exact mode and in the default mode, of a record of `tools.measure_exact`."""
    text = (ROOT / "benchmarks" / "history" / "exact" / f"{name}.txt").read_text("utf-8")
    exact, default = (
        re.search(rf"^V2-Lite shape, 32 requests, {mode}: ([\d,]+) tokens/s$", text, re.M)
        for mode in ("exact", "default")
    )
    assert exact is not None
    assert default is not None
    return _float(exact[1]), _float(default[1])


def _linked(times: str, name: str) -> str:
    return f"[{times}](benchmarks/results/{name}.txt)"


def _float(cell: str) -> float:
    return float(cell.replace(",", ""))


# docs/results/train.md


def step() -> Rows:
    """Forward and backward pass compared with each peer, in CUDA graphs."""
    graph = ", in a CUDA graph"
    rows = [["case", "peer", "octile, ms", "peer, ms", "octile's speed / the peer's"]]
    for name, case, peers in (
        ("h200_step", "dense decoder", ("compiled BF16",)),
        ("h200_step", "V3 rank slice", ("BF16", "compiled BF16")),
        ("h200_step_torchao", "dense decoder", ("torchao tensorwise", "torchao blockwise", "torchao rowwise")),
    ):
        r = record(name)
        for peer in peers:
            times = (r.value(case, f"forward + backward, {who}{graph}") for who in ("octile, compiled", peer))
            speed = r.ratio(case, "forward + backward", peer)
            rows.append([case, peer, *(number(time, 2) for time in times), ratio(speed, 3)])
    return rows


VARIANTS = {  # of octile, by their names in the record
    "octile": "default",
    "octile, q k v recomputed": "q, k and v recomputed",
    "octile, gate and up recomputed": "gate and up recomputed",
    "octile, compiled": "compiled",
}
DENSE_ONLY = {"octile, q k v recomputed"}  # a rank's slice has no attention with q, k and v


def saved_bytes() -> Rows:
    """Bytes saved for backward, and the step's time with them."""
    r = record("h200_step")
    rows = [["case", "octile", "bytes a token and layer", "bytes / compiled BF16's", "step, ms"]]
    for case, left_out in (("dense decoder", set()), ("V3 rank slice", DENSE_ONLY)):
        for name in (name for name in VARIANTS if name not in left_out):
            saved = r.row(case, f"saved, {name}")
            time = r.value(case, f"forward + backward, {name}, in a CUDA graph")
            share = ratio(saved["against"]["ratio"], 3)
            rows.append([case, VARIANTS[name], number(saved["value"]), share, number(time, 2)])
    return rows


TRANSFORMERS = {
    "Llama 8B, 8 layers": "Llama 8B, 8 layers, 2 × 4096 tokens",
    "Qwen3 30B-A3B, 4 layers": "Qwen3-30B-A3B, 4 layers, 8 × 4096 tokens",
    "Qwen3 30B-A3B, 4 layers, 2 × 4096 tokens": "Qwen3-30B-A3B, 4 layers, 2 × 4096 tokens",
}
BF16 = "compiled BF16"


def _converted(r: Record, cases: Sequence[str], trainers: Sequence[str]) -> Rows:
    rows = [["model", "", "step, ms", "peak, GiB", "speed / compiled BF16's", "peak / compiled BF16's"]]
    for case in cases:
        base = r.value(case, f"forward + backward, {BF16}", "ms")
        most = r.row(case, "peak memory, octile, compiled", BF16)["against"]["value"]
        for name in trainers:
            if not any(row["case"] == case and row["what"] == f"forward + backward, {name}" for row in r.rows):
                continue
            time = r.value(case, f"forward + backward, {name}", "ms")
            if name.startswith("octile"):
                peak = r.row(case, f"peak memory, {name}", BF16)["value"]
            else:
                peak = r.row(case, "peak memory, octile, compiled", name)["against"]["value"]
            found = [number(time, 1), number(peak, 1), ratio(base / time), ratio(peak / most)]
            rows.append([TRANSFORMERS[case], name, *found])
    return rows


def converted() -> Rows:
    """Converted models of transformers."""
    return _converted(
        record("h200_transformers"), [*TRANSFORMERS], [BF16, "octile, compiled", "octile", "torchao tensorwise"]
    )


def torchao_experts() -> Rows:
    """Converted experts beside torchao's prototype."""
    return _converted(record("h200_transformers"), [*TRANSFORMERS][1:], [BF16, "octile, compiled", TORCHAO_EXPERTS])


def trainers() -> Rows:
    """Each trainer of the presets `small` and `medium`."""
    r = record("h200_train")
    rows = [["preset", "trainer", "tokens/s", "step, ms", "MFU, %", "GPU idle, %", "peak, GiB"]]
    for preset in ("small", "medium"):
        speeds = {}
        for row in r.rows:
            if row["case"] == preset and row["what"].startswith("train FP8") and row["against"]:
                variant = row["what"].removeprefix("train FP8")
                speeds |= {f"FP8{variant}": row["value"], row["against"]["peer"] + variant: row["against"]["value"]}
        for what in [row["what"] for row in r.rows if row["case"] == preset and row["what"].startswith("step, ")]:
            name = what.removeprefix("step, ").split(", compiled")[0]
            values = (r.value(preset, f"{part}, {name}") for part in ("MFU", "the GPU idles", "peak memory"))
            trainer = name.replace("torchtitan", "torchtitan 0.2.2,").replace(" without MTP", ", without MTP")
            found = [number(speeds[name]), number(r.value(preset, what), 1), *(number(value, 1) for value in values)]
            rows.append([f"`{preset}`", trainer, *found])
    return rows


def fp8_speed() -> Rows:
    """The speed and the peak memory of FP8 compared with the other trainers'."""
    r = record("h200_train")
    rows = [["preset", "FP8 vs.", "speed", "peak memory"]]
    for row in r.rows:
        if row["what"].startswith("train FP8") and row["against"]:
            variant = row["what"].removeprefix("train FP8")
            peak = r.row(row["case"], f"peak memory, FP8{variant}")
            peer = row["against"]["peer"] + variant
            other = r.value(row["case"], f"peak memory, {peer}")
            found = [ratio(row["against"]["ratio"]), ratio(peak["value"] / other)]
            rows.append([f"`{row['case']}`", peer.replace(" without MTP", ", without MTP"), *found])
    return rows


def cpu_training() -> Rows:
    """Training on a CPU."""
    r = record("step")
    rows = [["what", "octile, FP8", "peer", "peer's", "ratio"]]
    for case, what, text, digits in (
        ("tiny", "train deepseek_v3", "`octile train`, tokens/s", 0),
        ("8 Linear 1024", "saved for backward", "saved for backward by 8 linear layers of 1024, MiB", 1),
        ("tiny, saved", "quantized weights", "a quantized weight on disk, with its scales, bytes", 0),
    ):
        row = r.row(case, what)
        peer = {"float32": "FP32", "bf16": "BF16"}[row["against"]["peer"]]
        found = [number(row["value"], digits), peer, number(row["against"]["value"], digits)]
        rows.append([text, *found, ratio(row["against"]["ratio"], 3)])
    return rows


# docs/results/kernels.md


def _gemms(
    what: str, peer: str, has_rows: Callable[[int], bool] = lambda m: True, name: str = "h200_gemm"
) -> list[tuple[float, float]]:
    """Return the speeds of octile and of a peer in each case whose number of rows is asked for."""
    return [
        (row["value"], row["against"]["value"])
        for row in record(name).rows
        if row["what"] == what and row["against"] and row["against"]["peer"] == peer
        if has_rows(int(row["case"].split("×")[0]))
    ]


def gemms() -> Rows:
    """GEMMs compared with DeepGEMM's and cuBLASLt's: geometric means over shapes."""
    rows = [["GEMMs", "peer", "shapes", "mean", "smallest"]]
    for text, what, peer, has_rows in (
        ("large", "FP8", "DeepGEMM", lambda m: m >= 4096),
        ("M = 128", "FP8", "DeepGEMM", lambda m: m == 128),
        ("M = 1 to 64", "FP8", "DeepGEMM", lambda m: m <= 64),
        ("M = 128", "FP8", DEEP_GEMM_CLEAN, lambda m: m == 128),
        ("M = 1 to 64", "FP8", DEEP_GEMM_CLEAN, lambda m: m <= 64),
        ("1×128 tiles on both sides, accumulated in FP32", "FP8 1D1D +=", "DeepGEMM", lambda m: True),
        ("grouped", "FP8, grouped", "DeepGEMM", lambda m: True),
        ("masked grouped", "FP8, masked", "DeepGEMM", lambda m: True),
        ("weight gradient, grouped", "FP8, wgrad +=", "DeepGEMM", lambda m: True),
        ("large", "FP8", "cuBLASLt fast", lambda m: m >= 4096),
    ):
        found = [ours / theirs for ours, theirs in _gemms(what, peer, has_rows)]
        rows.append([text, peer, str(len(found)), ratio(geometric_mean(found), 3), ratio(min(found), 3)])
    return rows


def interleaved_gemms() -> Rows:
    """GEMMs interleaved with DeepGEMM's, in processes of their own."""
    text = (RECORDS / "h200_gemm_few_rows.txt").read_text(encoding="utf-8")
    section = text.split("== 3:")[1].split("\n== ")[0]
    rows = [["GEMMs", "shapes", "mean"]]
    for name, shapes in (
        ("large", r"(?:4096|8192)×\S+\s+FP8 {2}"),
        ("weight gradient, grouped", r"\S+\s+FP8, wgrad \+="),
        ("128 rows", r"128×\S+\s+FP8 {2}"),
        ("192 rows", r"192×\S+\s+FP8 {2}"),
        ("256 rows", r"256×\S+\s+FP8 {2}"),
    ):
        pairs = re.findall(rf"^{shapes}.*1:repo +([\d.]+).*DeepGEMM +([\d.]+)", section, re.MULTILINE)
        found = [float(peer) / float(ours) for ours, peer in pairs]
        rows.append([name, str(len(found)), ratio(geometric_mean(found), 3)])
    return rows


MEMORY_BOUND = (  # text, names in the record
    ("quantize in 1×128 blocks", ("quantize 1×128", "quantize, scale given")),
    (
        "quantize in 128×1 and 128×128 blocks and E5M6; dequantize",
        ("quantize 128×1", "quantize 128×128", "quantize 1×128 E5M6", "dequantize 1×128", "dequantize 128×1",
         "dequantize 128×128", "dequantize all×all", "dequantize 1×128 E5M6"),
    ),
    ("quantize with one scale per tensor, which reads twice", ("quantize all×all",)),
    ("quantize with a transposed second output", ("1×128 and transposed", "128×128 and transposed")),
    ("requantize a transposed 1×128 matrix", ("requantize 1×128, transposed",)),
    ("SwiGLU with quantization", ("SwiGLU, 1×128", "SwiGLU, 1×128, inputs saved")),
    ("SwiGLU backward, both orientations", ("SwiGLU backward, 1×128 and transposed",)),
    ("RMSNorm with quantization", ("RMSNorm, 1×128", "RMSNorm, 1×128 and high precision")),
    ("SwiGLU, SwiGLU backward and RMSNorm in BF16", ("SwiGLU", "SwiGLU backward", "RMSNorm")),
    ("RMSNorm backward", ("RMSNorm backward",)),
    ("permute to 8 experts", ("permute to 8 experts", "permute to 8 places")),
    ("unpermute, weighted or not", ("unpermute, sums of 8", "weighted sums of 8")),
    ("gradients of weighted sums", ("weighted sums of 8, backward",)),
    ("rotary embedding in place", ("rotate in place",)),
    ("assembly of MLA's keys", ("latent keys",)),
    ("its gradient", ("latent keys backward",)),
    ("AdamW with BF16 moments", ("AdamW, BF16 moments",)),
    ("norms of gradients", ("norms of gradients",)),
)  # fmt: skip


def memory_bound() -> Rows:
    """Kernels bound by memory compared with a copy of as many bytes."""
    rows = [["kernels", "7168 columns: smallest", "largest", "128 to 1024 columns: smallest", "largest"]]
    for text, names in MEMORY_BOUND:
        cells = []
        for columns in ({"7168"}, {"128", "256", "512", "1024"}):
            found = [
                row["against"]["ratio"]
                for row in record("h200_casts").rows
                if row["what"] in names and row["against"]["peer"] == "copy"
                if row["case"].rpartition("×")[2] in columns
            ]
            cells += [ratio(min(found)), ratio(max(found))] if found else ["", ""]
        rows.append([text, *cells])
    return rows


def cross_entropy() -> Rows:
    """Cross-entropy of logits compared with a copy of as many bytes."""
    r = record("h200_casts")
    rows = [["cross-entropy of logits", "forward", "backward"]]
    for case in ("65536×8192", "32768×32768"):
        found = (r.ratio(case, what, "copy") for what in ("cross-entropy", "cross-entropy backward"))
        rows.append([case, *map(ratio, found)])
    return rows


def gates() -> Rows:
    """Gates compared with their bound."""
    rows = [["gate", "", "share of the bound", "bound"]]
    for case, text in (
        ("32768×16 of 4", "16 experts, width 768"),
        ("32768×64 of 6", "64 experts, width 2048"),
        ("16384×256 of 8", "256 experts, width 7168"),
    ):
        for what, direction in (("gate", "forward"), ("gate backward", "backward")):
            (row,) = (
                row
                for row in record("h200_casts").rows
                if (row["case"], row["what"]) == (case, what) and row["against"]["peer"].startswith("bound: ")
            )
            against = row["against"]
            rows.append([text, direction, number(against["ratio"], 2), against["peer"].removeprefix("bound: ")])
    return rows


def tensor_core() -> Rows:
    """The lab's model of the tensor core compared with an H200."""
    first, second, bits = (
        json.loads((RECORDS / f"h200_{name}.json").read_text(encoding="utf-8"))["cases"]
        for name in ("tensor_core", "tensor_core_40", "bits")
    )
    new = {name: case for name, case in second.items() if name not in first}

    def counts(cases: Iterable[Row]) -> list[str]:
        found = [(case["outputs"], case["mismatches"]["as in the table"]) for case in cases]
        return [number(sum(column)) for column in zip(*found, strict=True)]

    gemms = [sum(case[what] for case in bits.values()) for what in ("outputs", "differ")]
    return [
        ["compared", "values", "differ"],
        ["single instructions and chains of four", *counts(first.values())],
        ["the same with FP16 accumulators", *counts(new.values())],
        [f"{len(bits)} whole GEMMs of octile's kernels", *map(number, gemms)],
    ]


# docs/results/serve.md

SHAPE = "V2-Lite shape"
BATCHES = (1, 32, 256)


def vllm_on_h200() -> Rows:
    """Decoding and prompts on one H200 compared with the faster of vLLM's settings."""
    return _vs_vllm("h200")


def vllm_on_h100() -> Rows:
    """The same on one H100."""
    return _vs_vllm("h100")


def _vs_vllm(chip: str) -> Rows:
    head = ["octile, tokens/s", "vLLM, tokens/s", "ratio"]
    rows = [["", *(f"{weights}: {cell}" for weights in ("FP8", "BF16") for cell in head), "vLLM's setting for FP8"]]
    decoding = [(f"decode, batch {batch}", "decode", f"{_requests(batch)}") for batch in BATCHES]
    prompts = [
        (f"prefill, {many}", "throughput", f"prompts, {many}") for many in ("8 × 1,024 tokens", "16 × 4,096 tokens")
    ]
    for case, what, name in decoding + prompts:
        found = [fastest_vllm(chip, f"{SHAPE}, {weights} weights, {case}", what) for weights in ("FP8", "BF16")]
        cells = [name]
        for row in found:
            cells += [number(row["value"]), number(row["against"]["value"]), ratio(row["against"]["ratio"])]
        setting = found[0]["against"]["peer"].partition(", ")[2]
        rows.append([*cells, f"`{setting}`"])
    return rows


def fastest_vllm(chip: str, case: str, what: str) -> Row:
    """The row of a case that compares octile with the fastest of vLLM's settings."""
    found = [row for row in record(f"{chip}_vllm").rows if (row["case"], row["what"]) == (case, what)]
    return min((row for row in found if row["against"]), key=lambda row: row["against"]["ratio"])


def engine() -> Rows:
    """The engine compared with transformers' `generate`, and with BF16 weights in octile."""
    r = record("h200_serve")
    rows = [["decoding", "peer", "octile, tokens/s", "peer, tokens/s", "ratio"]]
    for batch in BATCHES:
        case = f"{SHAPE}, decode, batch {batch}"
        found = [r.row(case, "decode, FP8 weights")]
        found += [row for row in r.rows if (row["case"], row["what"]) == (case, "decode") and row["against"]]
        for row in found:
            peer = "octile, BF16 weights" if row["against"]["peer"] == "BF16 weights" else "`generate`"
            speeds = [number(row["value"]), number(row["against"]["value"], 1 if row["against"]["value"] < 100 else 0)]
            rows.append([_requests(batch), peer, *speeds, ratio(row["against"]["ratio"])])
    return rows


def _requests(batch: int) -> str:
    return "1 request" if batch == 1 else f"{batch} requests"


def engine_steps() -> Rows:
    """Steps of the engine, their rooflines and overhead."""
    r = record("h200_serve")
    rows = [["decoding", "step, ms", "overhead of the engine, ms", "share of the roofline, %"]]
    for batch in BATCHES:
        case = f"{SHAPE}, decode, batch {batch}"
        found = [(what, 2) for what in ("step", "overhead of the engine")] + [("share of the roofline", 1)]
        rows.append([_requests(batch), *(number(r.value(case, what), digits) for what, digits in found)])
    return rows


def engine_on_h100() -> Rows:
    """The engine on an H100 compared with BF16 weights, and the same ratio on an H200."""
    rows = [["decoding", "octile, tokens/s", "octile, BF16 weights, tokens/s", "ratio", "ratio on an H200"]]
    for batch in BATCHES:
        case = f"{SHAPE}, decode, batch {batch}"
        found = [record(name).row(case, "decode, FP8 weights") for name in ("h100_serve", "h200_serve")]
        speeds = [number(found[0]["value"]), number(found[0]["against"]["value"])]
        rows.append([_requests(batch), *speeds, *(ratio(row["against"]["ratio"]) for row in found)])
    return rows


def engine_steps_on_h100() -> Rows:
    """Steps of the engine on an H100, with their shares of the roofline and of a copy's speed there and on an H200."""
    shares = ["share of the roofline, %", "on an H200, %", "share of a copy's speed, %", "on an H200, %"]
    rows = [["decoding", "step, ms", "overhead of the engine, ms", *shares]]
    h100, h200 = record("h100_serve"), record("h200_serve")
    for batch in BATCHES:
        case = f"{SHAPE}, decode, batch {batch}"
        times = [number(h100.value(case, what), 2) for what in ("step", "overhead of the engine")]
        whats = ("share of the roofline", "share of a copy's speed")
        rows.append(
            [_requests(batch), *times, *(number(r.value(case, what), 1) for what in whats for r in (h100, h200))]
        )
    return rows


def drafts(name: str = "h200_serve") -> Rows:
    """Drafts compared with none, and streams over HTTP compared with one."""
    r = record(name)
    rows = [["`small`", "accepted, %", "tokens/s", "vs.", "tokens/s", "ratio"]]
    for case, text in (
        ("1 client, 256 tokens, 1 draft", "answers of 256 tokens, 1 draft"),
        ("1 client, 256 tokens, 2 drafts", "answers of 256 tokens, 2 drafts"),
        ("64 clients", "64 streams at a time over HTTP"),
    ):
        row = r.row(case, "throughput")
        accepted = "" if case == "64 clients" else number(r.value(case, "drafts accepted"))
        peer = "one stream" if case == "64 clients" else "no draft"
        speeds = [number(row["value"]), peer, number(row["against"]["value"])]
        rows.append([text, accepted, *speeds, ratio(row["against"]["ratio"])])
    return rows


def drafts_on_h100() -> Rows:
    """The same on an H100."""
    return drafts("h100_serve")


def cpu_serving() -> Rows:
    """The server on a CPU."""
    row = record("serve").row("64 clients", "throughput")
    cells = [number(row["value"]), number(row["against"]["value"], 1), ratio(row["against"]["ratio"], 1)]
    return [["64 streams at a time, tokens/s", "one stream", "ratio"], cells]


# goals, of docs/results.md, too: the last lines of the records' text

VERDICT = r"(.+?) (met|missed)(?: \([^)]*\))?"
GOAL = re.compile(rf"^([^:\n]+): (.+?): (?:floor {VERDICT})?(?:, )?(?:aim {VERDICT})?$", re.MULTILINE)


def _goals(name: str) -> list[tuple[str, ...]]:
    """Goal, what was found, floor, met or missed, aim, met or missed: of each goal of a record."""
    text = (RECORDS / f"{name}.txt").read_text(encoding="utf-8").replace("MISSED", "missed")
    return [(goal, found.replace("-", "−"), *rest) for goal, found, *rest in GOAL.findall(text)]


def goals_of_serving() -> Rows:
    """Goals of the server and its engine."""
    return [["goal", "found", "floor", "", "aim", ""], *map(list, _goals("h200_serve"))]


def missed_floors() -> Rows:
    """The floors that the records of the H200 miss."""
    rows = [["goal", "found", "floor", "record"]]
    for path in sorted(RECORDS.glob("h200_*.txt")):
        link = f"[{path.stem}](../benchmarks/results/{path.name})"
        rows += [[goal, found, floor, link] for goal, found, floor, met, *_ in _goals(path.stem) if met == "missed"]
    return rows


# docs/results/loss.md

SIZES = {"30m": "35M", "80m": "81M", "150m": "143M"}  # by the names of the runs: active parameters
CHECKPOINT = "the last 60%, from a BF16 checkpoint"


@cache
def runs(folder: str) -> Results:
    return Results.read(LOSS / folder)


def pairs_without_files() -> list[float]:
    """The gaps of three pairs at 35M, whose losses the runner has printed."""
    text = (LOSS / "one-rounding" / "core-30m.txt").read_text(encoding="utf-8").split("Held-out loss at the end:")[1]
    bf16, fp8 = (re.findall(r"\d: (\d\.\d+)", part) for part in text.split(";"))
    return [float(ours) / float(base) - 1 for base, ours in zip(bf16, fp8, strict=True)]


def planned_gaps(plan: str, recipe: str) -> list[float]:
    """The gaps of a registered plan, all of whose runs have ended, none by divergence."""
    return [gap for gap in pair_gaps(PLANS[plan], _planned_runs())[recipe] if gap is not None]


@cache
def _planned_runs() -> list[dict[str, Any]]:
    return read_runs(LOSS / "planned" / "runs")


def _gap_row(name: str, tokens: str, what: str, gaps: Sequence[float], looks: int = 1) -> list[str]:
    interval, last = (interval_after(gaps, n) if len(gaps) > 1 else None for n in (1, looks))
    ends = [percent(interval.low), percent(interval.high)] if interval else ["", ""]
    return [name, tokens, what, str(len(gaps)), percent(fmean(gaps)), *ends, _within(last)]


def _within(interval: Interval | None) -> str:
    """Whether a mean gap is within the bar: yes, no, or not shown."""
    return {"shown": "yes", "outside": "no"}.get(shown := verdict(interval), shown)


GAP_HEAD = ["active parameters", "tokens", "FP8 in", "seeds", "mean gap", "95%: low", "high", "within the bar"]


def gaps() -> Rows:
    """The gaps since the four corrections."""
    adamw, adamw_143m, muon, muon_81m = (
        {recipe: planned_gaps(plan, recipe) for recipe in PLANS[plan].recipes}
        for plan in ("planned-30m", "planned-150m", "planned-30m-muon", "planned-80m-muon")
    )
    r, blocks = runs("one-rounding/runs"), runs("../wgrad_blocks/loss/runs")
    scratch, of_81m = "all steps", r.gaps("core", "80m", "deepseek_v3")
    return [
        GAP_HEAD,
        _gap_row("81M", "100M", scratch, of_81m, len(LOOKS["core", "80m", len(of_81m)])),
        _gap_row("35M", "100M", f"{scratch}, the rate falls to zero", adamw["deepseek_v3"]),
        _gap_row("35M", "100M", "the same in E5M2, the control", adamw["e5m2"]),
        _gap_row("143M", "100M", f"{scratch}, the rate falls to zero", adamw_143m["deepseek_v3"]),
        _gap_row("81M", "100M", f"{scratch}, with Muon", muon_81m["deepseek_v3"]),
        _gap_row("35M", "100M", f"{scratch}, with Muon", muon["deepseek_v3"]),
        _gap_row("35M", "100M", "with Muon, the gradients' GEMMs alone, the control", muon["without_fprop"]),
        _gap_row("35M", "100M", scratch, pairs_without_files() + r.gaps("core", "30m", "deepseek_v3")),
        _gap_row("35M", "1B", f"{scratch}, a longer text", r.gaps("billion", "30m", "deepseek_v3")),
        _gap_row("143M", "100M", scratch, r.gaps("core", "150m", "deepseek_v3")),
        _gap_row("35M", "100M", f"{scratch}, at half the rate", r.gaps("slow", "30m", "deepseek_v3")),
        _gap_row("81M", "100M", CHECKPOINT, r.gaps("branch", "80m", "deepseek_v3")),
        _gap_row("35M", "100M", CHECKPOINT, r.gaps("branch", "30m", "deepseek_v3")),
        _gap_row("35M", "100M", "the same in E5M2, a control near the bar", r.gaps("branch", "30m", "e5m2")),
        _gap_row("35M", "100M", "the last 60%, from other checkpoints", blocks.gaps("branch", "30m", "deepseek_v3")),
    ]


def evaluations() -> Rows:
    """The gaps of one precision evaluated in another."""
    r = runs("../wgrad_blocks/loss/runs")
    rows = [["active parameters", "seed", "BF16, evaluated in FP8", "FP8, evaluated in FP8", "FP8, evaluated in BF16"]]
    for size in ("30m", "80m"):
        for base in r.bf16("branch", size):
            seed = base["job"]["seed"]
            fp8 = r.get("branch", size, "deepseek_v3", seed)
            if fp8 is None:
                raise KeyError(f"no run of {size} and seed {seed} has deepseek_v3")
            rows.append([SIZES[size], str(seed), *map(percent, gaps_by_evaluation(base, fp8))])
    return rows


def regressions() -> Rows:
    """What is left of the gap where the early gap is zero."""
    now, before = runs("one-rounding/runs"), runs("equal-baseline/runs")
    rows = [["active parameters", "", "pairs", "correlation", "cost", "95%: low", "high"]]
    for text, r, group, size in (
        ("", now, "core", "80m"),
        ("", now, "core", "30m"),
        ("before the last of the four corrections", before, "core", "30m"),
        ("at half the rate", now, "slow", "30m"),
    ):
        early, final = fall.gaps(r, group, size)
        cost = fall.estimate(early, final)
        ends = (cost.cost, cost.cost - cost.half, cost.cost + cost.half)
        rows.append([SIZES[size], text, str(len(early)), number(cost.correlation, 2), *map(percent, ends)])
    return rows


def gaps_before() -> Rows:
    """The gaps before the four corrections."""
    r = runs("runs")
    rows = [GAP_HEAD]
    rows += [_gap_row(SIZES[size], "100M", CHECKPOINT, r.gaps("branch", size, "deepseek_v3")) for size in SIZES]
    for line in scratch_table(r).splitlines():
        cells = line.strip("| ").split(" | ")
        if cells[0] in SIZES:
            size, tokens, _, _, each, mean, _, _, interval, _ = cells
            low, high = interval.split(" … ")
            low = low if low.endswith("%") else f"{low}%"
            within = _within(Interval(_fraction(low), _fraction(high)))
            rows.append([SIZES[size], tokens, "all steps", str(len(each.split(", "))), mean, low, high, within])
    corrected = runs("equal-baseline/runs").gaps("core", "30m", "deepseek_v3")
    rows.append(_gap_row("35M", "100M", "all steps, after the first three corrections", corrected))
    return rows


def _fraction(text: str) -> float:
    return float(text.replace("−", "-").removesuffix("%")) / 100


def cpu_loss() -> Rows:
    """The held-out loss of the default run as it was in `experiments/tiny`."""
    found = json.loads(gzip.decompress((ROOT / "experiments" / "tiny" / "compare.json.gz").read_bytes()))
    first = found["bf16"]["val_loss"][-1]
    rows = [["run", "held-out loss, nats a token", "vs. BF16"], ["BF16", number(first, 4), ""]]
    for name, curve in (("BF16, another seed", found["bf16_other_seed"]), ("`deepseek_v3`", found["recipes"][0])):
        rows.append([name, number(curve["val_loss"][-1], 4), percent(curve["val_loss"][-1] / first - 1)])
    return rows


TABLES: dict[str, Callable[[], Rows]] = {
    table.__name__: table
    for table in (
        readme,
        step, saved_bytes, converted, torchao_experts, trainers, fp8_speed, cpu_training,
        gemms, interleaved_gemms, memory_bound, cross_entropy, gates, tensor_core,
        vllm_on_h200, vllm_on_h100, engine, engine_steps, engine_on_h100, engine_steps_on_h100, drafts, drafts_on_h100,
        cpu_serving, goals_of_serving, missed_floors,
        gaps, evaluations, regressions, gaps_before, cpu_loss,
    )
}  # fmt: skip


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(write(page.read_text(encoding="utf-8")), encoding="utf-8")
