"""Write the report of the experiment: `python -m experiments.loss.report RUNS … FOLDER`.

RUNS are folders with a file for each run, JOB.json.gz; of a job that several have, the last one counts.
FOLDER/README.md has the tables and names the jobs that were not run. FOLDER/NAME.svg and FOLDER/NAME/report.html, which
`octile compare` draws too, show each group of runs that has BF16 with two seeds.

A gap is (L − L_s) / L_s, where L_s is the held-out loss of BF16 with the same seed on the same windows; its 95%
interval is over blocks of these. A run that was stopped early is compared at the last step at which both were measured.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from experiments.loss.figures import COLORS, Line, save_lines, save_loads
from experiments.loss.job import DIVERGED_LOSS, STEPS_PER_LINE
from experiments.loss.jobs import BALANCE_TOKENS, BALANCES, CORE, RATE_RECIPES, RATES, Job, all_jobs, job
from experiments.loss.runs import SUFFIX, read_runs
from experiments.loss.sizes import MODELS, SEQUENCE, TOKENS_A_STEP, VOCABULARY, operations, share_in_8_bits
from experiments.loss.sizes import RATES as USUAL_RATE
from experiments.loss.text import FACTS, LONG_FACTS
from octile.report.compare.intervals import TEXT_BLOCKS, block_means, bootstrap_interval, student_interval
from octile.report.compare.page import save_compare_figure, write_compare_report
from octile.report.compare.result import CompareResult, Curve
from octile.report.compare.summary import verdict_sentence
from octile.text import format_percent

Result = dict[str, Any]
Rows = list[tuple[str, ...]]
KINDS = ("master", "gradient", "exp_avg", "exp_avg_sq", "copies")
FIGURES = "The command draws the curves of each comparison, `NAME.svg`, and its page, `NAME/report.html`."
NO_FIGURES = "None: a comparison needs BF16 with two seeds and another recipe at one size."
BRANCHES_OF = {"core": "branch", "long": "long-branch"}  # group of runs from scratch → group of their branches
SCRATCH = {
    "core": "",
    "slow": ", half the rate",
    "long": "",
    "billion": "",
}  # groups of runs from scratch, and what their sizes are called
LENGTHS = ("core", "long", "billion")  # groups of runs from scratch at the usual rate, the shortest runs first
NOTE = "note.md"  # what is to be said of these runs before all else
AFTER_WARM_UP = 0.2  # share of the steps after which the expert load counts
COUNTERPART = {"no_promotion": "per_tensor"}  # the recipe that it changes in one thing; others change `deepseek_v3`
BAR = 0.0025
AIM = 1.3  # upper limit of the maximum expert load / mean
STEEP = 3.2  # nats a token; where the loss falls most steeply
METHOD = f"""| step | command |
| --- | --- |
| text | `python -m experiments.loss.text fetch .data`, then `… build .data` |
| longer text | `python -m experiments.loss.text fetch .data --long`, then `… extend .data STORE .data/long`, where \
STORE has the checksums of `text.json`: commit d7c74e3 builds it |
| runs | `python -m experiments.loss.run .data/tokens OUT --seconds N --gpus 0,1,…` |
| runs over 1B tokens | `python -m experiments.loss.run .data/long OUT --seconds N --groups billion` |
| two runs on a GPU | `… --together core`; with CUDA's MPS (`nvidia-cuda-mps-control -d` before) 6% more tokens/s |
| this page, its figures and the pages of its comparisons | `python -m experiments.loss.report FOLDER/runs FOLDER` |

`sizes.py` and `jobs.py` configure the runs. `recipes.py` lists what a variation changes, `docs/recipes.md` the
library's recipes.

| setting | value |
| --- | --- |
| batch | {TOKENS_A_STEP:,} tokens in sequences of {SEQUENCE:,} |
| learning rate | warm-up over 5% of the steps, then a cosine to a tenth of the peak |
| "half the rate" | half the peak, with a warm-up over 20% of the steps |
| optimizer | AdamW: betas 0.9 and 0.95, weight decay 0.1, gradients clipped at norm 1 |
| held-out windows | 1,536 at the end, 256 before; the same for every run |

The seed determines the initial weights and the order of the text: runs of one seed start alike and read the same
batches. Runs that shared a GPU have no tokens/s here. All runs of 30m shared theirs unless they are recorded as
alone."""

TERMS = f"""| term | meaning |
| --- | --- |
| gap | (L − L_s) / L_s: the held-out loss L of a run relative to that of BF16, L_s, with the same seed and windows. \
Above zero, the run is worse than BF16 |
| bar | {BAR:.2%}, the largest gap in either direction that counts as equal (DeepSeek-V3, arXiv 2412.19437, §3.3.1) |
| standard error | written after ±: of a mean over blocks of consecutive held-out windows, which are alike within a \
document. A loss's is large, because prose and source code differ; a gap's is small, because both runs read one text |
| 95% interval | over text: a bootstrap of the gap over the same blocks. Over seeds: Student's, of the seeds' gaps |
| noise | how far runs end apart by chance. From scratch: the gap between BF16 runs of the same or of different seeds. \
From a checkpoint: the gap of BF16 that continues from weights rounded once (`nudged`) |"""
SUMMARY_NOTE = """The table lists gaps, one per seed. "From a checkpoint" means: the last 60% of the steps, from a
common BF16 checkpoint. Runs from scratch diverge from each other where the loss falls
steeply, a few steps sooner or later by chance, and the difference remains: BF16 itself, run twice from the same seed,
ends that far apart. Runs from a checkpoint start after most of the fall and measure the cost of the last 60% of the
steps. The `control` is a recipe that has to fail."""
ABLATION_NOTE = """These runs of 40M tokens end while the loss still falls steeply, so chance outweighs the recipe. They
show what breaks; "From a checkpoint" shows what a recipe costs."""
BRANCH_NOTE = """Every recipe continues from the weights and moments that BF16 had after 40% of the steps, over the same
batches. `nudged` is BF16 from those weights rounded to BF16 once. The noise, {noise}, is the root mean square of its
gap over all sizes and seeds. The column "vs. `deepseek_v3`" is the gap minus that of `deepseek_v3` from the same
checkpoint: what a change of that recipe costs or gains. It comes from one seed, so it only suggests which choices
matter at this size.

"""
GUESSING = math.log(VOCABULARY)  # nats; the loss of a model for which all tokens are equally likely
EVALUATION_NOTE = """The weights at the end of each run, evaluated in the formats in which they were trained and in the
others: BF16, or `deepseek_v3`. Gaps are to BF16 of the same seed, evaluated in BF16.

"""
DIVERGED_NOTE = f"""A run has diverged if its mean loss over {STEPS_PER_LINE} steps was above {GUESSING:.2f} nats, the
loss of guessing among {VOCABULARY:,} tokens, or not finite. It was stopped at {DIVERGED_LOSS:g} nats. For a run that
diverged and was not stopped, the loss at its end follows: none came back to what the usual rate reaches.

"""
LOSS_COLUMN = f"held-out loss ± standard error over {TEXT_BLOCKS} blocks of text"
TEXT_COLUMN = f"95% interval over {TEXT_BLOCKS} blocks of text"
BALANCE_NOTE = f"""Maximum expert load / mean compares the tokens of a layer's most loaded expert with the mean of its
experts. It is measured in single steps of {TOKENS_A_STEP:,} tokens, every {STEPS_PER_LINE} steps after the first
{AFTER_WARM_UP:.0%}. The aim is at most {AIM}, for the mean over layers and, which is harder, for the worst layer of
each step. "Over all steps" is the same ratio for the tokens of these steps together, where it was recorded: the mean
over layers, and the worst layer. (Wang et al., arXiv 2408.15664, call both MaxVio, of a batch and global, less one.)

"""


def curve(result: Result, name: str | None = None) -> Curve:
    """Return a job's result as a curve of `octile compare`."""
    job = result["job"]
    return Curve(
        recipe=name or job["recipe"],
        seed=job["seed"],
        steps=tuple(result.get("steps", ())),
        train_loss=tuple(result.get("loss", ())),
        val_steps=tuple(result.get("val_steps", ())),
        val_loss=tuple(result.get("val_loss", ())),
        tokens_per_s=speed(result),
        diverged_at=max((*result["steps"], *result["val_steps"], 1)) if result["state"] == "diverged" else None,
        window_loss=tuple(result.get("window_loss", ())) if result["state"] == "done" else (),
    )


def speed(result: Result) -> float:
    """Return the median of tokens per second after the first two lines, in which kernels are compiled.

    NaN if the run shared its GPU. Results that do not record this shared it if they are of the smallest size.
    """
    measured = result.get("speed") or [math.nan]
    return (
        math.nan
        if result.get("shared", result["job"]["size"] == "30m")
        else statistics.median(measured[2:] or measured)
    )


def gap(result: Result, base: Result) -> tuple[float, int]:
    """Return (L − L_s) / L_s at the last step at which both were measured, and that step; NaN and 0 without one."""
    known = dict(zip(base.get("val_steps", ()), base.get("val_loss", ()), strict=True))
    both = [(s, v) for s, v in zip(result.get("val_steps", ()), result.get("val_loss", ()), strict=True) if s in known]
    return (both[-1][1] / known[both[-1][0]] - 1, both[-1][0]) if both else (math.nan, 0)


def gap_difference(result: Result, other: Result, base: Result) -> float:
    """Return a run's gap minus another's at the last step at which all three were measured."""
    a, b, c = (dict(zip(r["val_steps"], r["val_loss"], strict=True)) for r in (result, other, base))
    both = a.keys() & b.keys() & c.keys()
    return (a[max(both)] - b[max(both)]) / c[max(both)] if both else math.nan


def interval(result: Result, base: Result) -> str:
    """Return the 95% interval of the gap at the end, over blocks of the held-out windows of both runs."""
    a, b = (np.array(r.get("window_loss", ())) for r in (result, base))
    if not a.size or a.shape != b.shape or {result["state"], base["state"]} != {"done"}:
        return ""
    found = bootstrap_interval(block_means((a - b) / b.mean()))
    return f"{_percent(found.low)} … {_percent(found.high)}" if found else ""


class Results:
    """The results of all runs, by group, size, recipe and seed."""

    def __init__(self, found: Iterable[Result]):
        self.all = {result["job"]["name"]: result for result in found}

    @classmethod
    def read(cls, *folders: Path) -> Results:
        """Read the runs of folders; of a job that several have, the last one counts.

        Raises:
            FileNotFoundError: a folder has no runs.
        """
        found = {folder: read_runs(folder) for folder in folders}
        for folder, runs in found.items():
            if not runs:
                raise FileNotFoundError(f"RUNS must be folders with files JOB{SUFFIX}; {folder} has none")
        return cls(result for runs in found.values() for result in runs)

    def get(self, group: str, size: str, recipe: str, seed: int = 0) -> Result | None:
        return self.all.get(f"{group}-{size}-{recipe}-{seed}")

    def sizes(self, *groups: str) -> list[str]:
        """Return the sizes of these groups, the smallest first."""
        there = {r["job"]["size"] for r in self.all.values() if r["job"]["group"] in groups}
        return sorted(there, key=lambda size: list(MODELS).index(size) if size in MODELS else -1)

    def of(self, group: str, size: str) -> list[Result]:
        rows = [r for r in self.all.values() if (r["job"]["group"], r["job"]["size"]) == (group, size)]
        return [r for r in rows if r.get("val_loss")]

    def tokens(self, group: str, size: str) -> str:
        """Return the tokens of each run of a group and size, which must have one."""
        jobs = (r["job"] for r in self.all.values())
        return next(f"{job['tokens'] / 1e6:,.0f}M" for job in jobs if (job["group"], job["size"]) == (group, size))

    def bf16(self, group: str, size: str) -> list[Result]:
        """Return the BF16 runs, sorted by seed."""
        found = (r for r in self.of(group, size) if r["job"]["recipe"] == "bf16")
        return sorted(found, key=lambda r: r["job"]["seed"])

    def gaps(self, group: str, size: str, recipe: str, base_group: str = "") -> list[float]:
        """Return a recipe's gaps to BF16 of the same seed, in that group or in `base_group`, sorted by seed."""
        pairs = [(self.get(group, size, recipe, b["job"]["seed"]), b) for b in self.bf16(base_group or group, size)]
        return [gap(run, base)[0] for run, base in pairs if run and run.get("val_loss")]

    def comparison(self, group: str, size: str) -> CompareResult | None:
        """Return the comparison of a group and size; None without two seeds of BF16."""
        first, other, *more = [*self.bf16(group, size), None, None]
        if not (first and other):
            return None
        nudge = self.nudges(group) if group in BRANCHES_OF.values() else ()
        rest = [r for r in self.of(group, size) if r["job"]["recipe"] not in ("bf16", *(("nudged",) if nudge else ()))]
        rest.sort(key=lambda r: r["job"]["recipe"] != "deepseek_v3")  # the verdict is about the first one
        device = first["facts"].get("device", "")
        return CompareResult(
            f"{group} {size}", curve(first), curve(other), tuple(curve(r) for r in rest), machine=device,
            bf16_more_seeds=tuple(curve(r) for r in more if r), nudge=nudge,
        )  # fmt: skip

    def nudges(self, group: str) -> tuple[tuple[int, float], ...]:
        """Return (step, noise) of a group's branches: the RMS of the gap of `nudged` over sizes and seeds."""
        squares = defaultdict(list)
        for size in self.sizes(group):
            for base in self.bf16(group, size):
                if nudged := self.get(group, size, "nudged", base["job"]["seed"]):
                    known = dict(zip(base["val_steps"], base["val_loss"], strict=True))
                    for step, loss in zip(nudged["val_steps"], nudged["val_loss"], strict=True):
                        if step in known:
                            squares[step].append((loss / known[step] - 1) ** 2)
        return tuple((step, statistics.fmean(squares[step]) ** 0.5) for step in sorted(squares))


def answer_table(r: Results) -> str:
    """Return the gaps of DeepSeek-V3's recipe at each size, from a checkpoint and from scratch."""
    rows: Rows = [
        (
            "size",
            "tokens",
            "`deepseek_v3` from a checkpoint",
            "BF16 from rounded weights",
            "`deepseek_v3` from scratch",
            "BF16, same seed again",
            "BF16, other seeds",
            "`control` from scratch",
        )
    ]
    for group in LENGTHS:
        branches = BRANCHES_OF.get(group, "")
        for size in r.sizes(group, branches):
            tokens = r.tokens(group if size in r.sizes(group) else branches, size)
            base = r.get(group, size, "bf16")
            others = [gap(other, base)[0] for other in r.bf16(group, size) if base and other is not base]
            found = (
                r.gaps(branches, size, "deepseek_v3"),
                r.gaps(branches, size, "nudged"),
                r.gaps(group, size, "deepseek_v3"),
                r.gaps(branches, size, "bf16", base_group=group),  # with its trunk it is a second run from scratch
                others,
                r.gaps(group, size, "control"),
            )
            rows.append((size, tokens, *(", ".join(map(_percent, gaps)) or "–" for gaps in found)))
    return f"{SUMMARY_NOTE}\n\n{_table(rows)}"


def _loss(result: Result) -> str:
    """Return the held-out loss at the end with its standard error, or without it if it was not measured by window."""
    if not result["val_loss"]:
        return ""
    blocks = block_means(np.array(result.get("window_loss", ())))
    error = f" ± {blocks.std(ddof=1) / len(blocks) ** 0.5:.4f}" if len(blocks) > 1 else ""
    return f"{result['val_loss'][-1]:.4f}{error}"


def core_table(r: Results) -> str:
    rows: Rows = [
        ("size", "recipe, seed", "tokens", LOSS_COLUMN, "gap to BF16", TEXT_COLUMN, f"below {STEEP} at step",
         "tokens/s", "GiB", "")
    ]  # fmt: skip
    for group in ("core", "again", "slow", "long", "billion"):
        for size in r.sizes(group):
            for result in sorted(r.of(group, size), key=lambda x: (x["job"]["recipe"], x["job"]["seed"])):
                job = result["job"]
                is_base = job["recipe"] == "bf16"
                usual = "core" if group == "again" else group
                base = r.get(usual, size, "bf16", 0 if is_base and group == usual else job["seed"])
                base = None if base is result else base
                rows.append((
                    f"{size}{SCRATCH.get(group, '')}",
                    f"`{job['recipe']}`, {job['seed']}{', again' if group == 'again' else ''}",
                    f"{result['facts']['tokens'] / 1e6:,.0f}M" if "tokens" in result["facts"] else "",
                    _loss(result),
                    _percent(gap(result, base)[0]) + (" (the noise)" if is_base else "") if base else "",
                    interval(result, base) if base else "",
                    step_below(result, STEEP),
                    _integer(speed(result)),
                    f"{result['facts'].get('peak_GiB', math.nan):.1f}",
                    _ending(result),
                ))  # fmt: skip
    return _table(rows)


def step_below(result: Result, level: float) -> str:
    """Return the first step at which the training loss, a mean over some steps, is below a level."""
    return next((f"{step:,}" for step, loss in zip(result["steps"], result["loss"], strict=True) if loss < level), "–")


def scratch_table(r: Results) -> str:
    """Return the mean gap of all runs from scratch; runs of one recipe and seed count as repetitions."""
    rows: Rows = [
        ("size", "tokens", "runs of BF16", "runs of `deepseek_v3`", "gap of each seed", "mean",
         "standard error over runs", "standard error over seeds", "95% interval over seeds", f"bar, {BAR:.2%}")
    ]  # fmt: skip
    known = {
        (group, size): pairs for group in SCRATCH for size in r.sizes(group) if (pairs := _repeated(r, group, size))
    }
    apart = [
        [end / statistics.fmean(base) - statistics.fmean(ends) / statistics.fmean(base) for end in ends]
        for pairs in known.values() for base, found in pairs for ends in (base, found)
    ]  # fmt: skip
    freedom = sum(len(each) - 1 for each in apart)
    if not freedom:
        return ""
    variance = sum(x**2 for each in apart for x in each) / freedom
    of_core = []
    for (group, size), pairs in known.items():
        gaps = [statistics.fmean(found) / statistics.fmean(base) - 1 for base, found in pairs]
        mean = statistics.fmean(gaps)
        by_runs = (variance * sum(1 / len(base) + 1 / len(found) for base, found in pairs)) ** 0.5 / len(pairs)
        by_seeds = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else math.nan
        if group == "core" and len(gaps) > 1:
            of_core.append((mean, by_runs, by_seeds))
        runs = (str(sum(len(ends[i]) for ends in pairs)) for i in (0, 1))
        rows.append((f"{size}{SCRATCH[group]}", r.tokens(group, size), *runs, ", ".join(map(_percent, gaps)),
                     _percent(mean), f"{by_runs:.2%}", f"{by_seeds:.2%}" if len(gaps) > 1 else "",
                     *_at_the_bar(gaps)))  # fmt: skip
    return (
        f"All runs from scratch over at least {CORE / 1e6:.0f}M tokens, with the seeds that both recipes have. The"
        " standard error over runs comes from how far runs of one recipe and seed end apart, because a GPU's order of"
        f" additions differs from run to run: over all rows {variance**0.5:.2%} ({freedom} degrees of freedom). The"
        " standard error over seeds comes from the spread of the seeds' gaps, of which there are few; the 95% interval"
        " is Student's, from that error. The last column compares the whole interval with the bar."
        f"{_over_the_sizes(of_core)}\n\n{_table(rows)}"
    )


def _over_the_sizes(found: Sequence[tuple[float, float, float]]) -> str:
    """Return a sentence on the mean over sizes of several seeds, from each size's mean and two standard errors."""
    if not found:
        return ""
    means, *errors = zip(*found, strict=True)
    by_runs, by_seeds = (sum(error**2 for error in each) ** 0.5 / len(each) for each in errors)
    return (
        f" The mean over sizes of the runs over {CORE / 1e6:.0f}M tokens, of sizes with several seeds, is"
        f" {_percent(statistics.fmean(means))}, with a standard error of {by_runs:.2%} over runs or {by_seeds:.2%} over"
        " seeds."
    )


def _at_the_bar(gaps: Sequence[float]) -> tuple[str, str]:
    """Return the 95% interval of the mean gap over seeds, and what it says about the bar."""
    interval, mean = student_interval(np.array(gaps)), statistics.fmean(gaps)
    if interval is None:
        return "", "not shown: one seed"
    low, high = interval.low, interval.high
    side = " below BF16" if mean < -BAR else " above BF16" if mean > BAR else ""
    if abs(mean) <= BAR:
        outcome = "met" if max(-low, high) <= BAR else "not shown: the interval reaches over it"
    else:
        outcome = f"missed:{side}" if low > BAR or high < -BAR else f"not shown: the mean lies beyond it,{side}"
    return f"{_percent(low)} … {_percent(high)}", outcome


def _repeated(r: Results, group: str, size: str) -> list[tuple[list[float], list[float]]]:
    """Return the held-out losses of BF16 and of DeepSeek-V3's recipe from scratch, for each seed that both have."""
    groups = [group, BRANCHES_OF[group]] if group in BRANCHES_OF else [group]  # a branch and its trunk are one run, too

    def ends(run: str, *of: str) -> list[float]:
        again = (f"again-{run}-1", f"again-{run}-2") if group == "core" else ()
        found = (r.all.get(name) for name in (*(f"{each}-{run}" for each in of), *again))
        return [x["val_loss"][-1] for x in found if x and x["state"] == "done"]

    pairs = []
    for seed in sorted({base["job"]["seed"] for of in groups for base in r.bf16(of, size)}):
        bf16 = ends(f"{size}-bf16-{seed}", *groups)
        found = ends(f"{size}-deepseek_v3-{seed}", group)
        if bf16 and found:
            pairs.append((bf16, found))
    return pairs


def branch_table(r: Results) -> str:
    rows: Rows = [
        ("size, seed", "tokens", "recipe", "held-out loss", "gap to BF16", TEXT_COLUMN, "gap / noise",
         "vs. `deepseek_v3`, or as named", "")
    ]  # fmt: skip
    rows += [row for group in BRANCHES_OF.values() for row in _branch_rows(r, group)]
    return BRANCH_NOTE.format(noise=_noises(r)) + _table(rows) if len(rows) > 1 else "None was run."


def _branch_rows(r: Results, group: str) -> Rows:
    noise = _noise(r, group)
    rows: Rows = []
    for size in r.sizes(group):
        for base in r.bf16(group, size):
            seed = base["job"]["seed"]
            nudged, v3 = (r.get(group, size, recipe, seed) for recipe in ("nudged", "deepseek_v3"))
            runs = [x for x in r.of(group, size) if x["job"]["seed"] == seed and x is not base]
            for result in [base, *sorted(runs, key=lambda x: gap(x, base)[0])]:
                found, at = gap(result, base)
                rows.append((
                    f"{size}, {seed}",
                    r.tokens(group, size),
                    f"`{result['job']['recipe']}`",
                    f"{result['val_loss'][-1]:.4f}",
                    _percent(found) if result is not base else "",
                    interval(result, base) if result is not base else "",
                    _versus_noise(found, noise) if result not in (base, nudged) else "",
                    _versus_counterpart(r, result, base, noise) if result not in (base, nudged, v3) else "",
                    _ending(result) and f"{_ending(result)}; gap at step {at:,}",
                ))  # fmt: skip
    return rows


def evaluation_table(r: Results) -> str:
    """Return the gaps of weights that were trained in BF16 or FP8 and evaluated in either; nothing without any."""
    rows: Rows = [
        ("size", "tokens", "seeds", "trained in BF16, evaluated in FP8", "trained in FP8, evaluated in FP8",
         "trained in FP8, evaluated in BF16")
    ]  # fmt: skip
    for group in (*BRANCHES_OF.values(), *SCRATCH):
        for size in r.sizes(group):
            pairs = [(base, r.get(group, size, "deepseek_v3", base["job"]["seed"])) for base in r.bf16(group, size)]
            gaps = [gaps_by_evaluation(base, fp8) for base, fp8 in pairs if fp8 and _evaluated_twice(base, fp8)]
            if gaps:
                start = ", from a checkpoint" if group in BRANCHES_OF.values() else SCRATCH[group]
                cells = map(_mean_and_each, zip(*gaps, strict=True))
                rows.append((f"{size}{start}", r.tokens(group, size), str(len(gaps)), *cells))
    return EVALUATION_NOTE + _table(rows) if len(rows) > 1 else ""


def _evaluated_twice(*runs: Result) -> bool:
    return all(run.get("other_window_loss") for run in runs)


def gaps_by_evaluation(base: Result, fp8: Result) -> tuple[float, float, float]:
    """Return the gaps to BF16 of BF16 evaluated in FP8, and of FP8 evaluated in FP8 and in BF16."""
    losses = base["other_window_loss"]["deepseek_v3"], fp8["window_loss"], fp8["other_window_loss"]["bf16"]
    bf16, *others = (statistics.fmean(of) for of in (base["window_loss"], *losses))
    a, b, c = (loss / bf16 - 1 for loss in others)
    return a, b, c


def _mean_and_each(gaps: Sequence[float]) -> str:
    """Return a mean and what it is of, or the only gap."""
    each = ", ".join(map(_percent, gaps))
    return f"{_percent(statistics.fmean(gaps))} ({each})" if len(gaps) > 1 else each


def _noise(r: Results, group: str) -> float:
    """Return the noise of a group's branches at the end."""
    found = r.nudges(group)
    return found[-1][1] if found else math.nan


def _noises(r: Results) -> str:
    """Return the noise of each group of branches as text."""
    known = [
        (_noise(r, group), r.tokens(group, r.sizes(group)[0])) for group in BRANCHES_OF.values() if r.nudges(group)
    ]
    if len(known) > 1:
        return " and ".join(f"{noise:.3%} over {tokens} tokens" for noise, tokens in known)
    return f"{known[0][0]:.3%}" if known else "not measured"


def _versus_counterpart(r: Results, result: Result, base: Result, noise: float) -> str:
    """Return the gap minus that of the recipe that it changes in one thing."""
    job = result["job"]
    like = COUNTERPART.get(job["recipe"], "deepseek_v3")
    other = r.get(job["group"], job["size"], like, job["seed"])
    if other is None:
        return ""
    found = gap_difference(result, other, base)
    text = "below the noise" if abs(found) <= noise else _percent(found)
    return text if like == "deepseek_v3" else f"{text}, vs. `{like}`"


def ablation_table(r: Results) -> str:
    parts = []
    for size in r.sizes("ablation"):
        base, other = (r.get("ablation", size, "bf16", seed) for seed in (0, 1))
        if base is None:
            continue
        noise = abs(gap(other, base)[0]) if other else math.nan
        rows: Rows = [("recipe", "gap to BF16", TEXT_COLUMN, "gap / noise", *KINDS, "sum, bytes", "")]
        runs = [x for x in r.of("ablation", size) if x is not base]
        for result in sorted(runs, key=lambda x: gap(x, base)[0]):
            job = result["job"]
            partner = r.get("ablation", size, "bf16", job["seed"]) if job["recipe"] != "bf16" else base
            found = gap(result, partner or base)[0]
            stored = result["facts"].get("bytes_a_parameter", {})
            rows.append((
                f"`{job['recipe']}`" + (f", seed {job['seed']}" if job["seed"] else ""),
                _percent(found),
                interval(result, partner or base),
                "the noise" if job["recipe"] == "bf16" else _versus_noise(found, noise),
                *(f"{stored.get(kind, math.nan):.2f}" for kind in KINDS),
                f"{sum(stored.values()):.2f}",
                _ending(result),
            ))  # fmt: skip
        loss = f"{base['val_loss'][-1]:.4f}"
        parts.append(f"Size {size}, BF16 of seed 0: {loss}. Two seeds of BF16 end {noise:.2%} apart.\n\n{_table(rows)}")
    if parts:
        parts.insert(0, ABLATION_NOTE)
    return "\n\n".join(parts) or "None was run."


def rate_table(r: Results) -> str:
    found = {name: r.all.get(name) for name in (f"rate-{c}-{t}" for c in RATE_RECIPES for t in (1, *RATES))}
    sizes = {x["job"]["size"] for x in found.values() if x}
    rows: Rows = [("learning rate", *(f"`{recipe}`" for recipe in RATE_RECIPES))]
    for times in (1, *RATES):
        runs = [found[f"rate-{recipe}-{times}"] for recipe in RATE_RECIPES]
        if not any(runs):
            continue
        peak = ", ".join(f"{times * USUAL_RATE[size]:g}" for size in sizes if size in USUAL_RATE)
        rows.append((f"{times} × usual{f', {peak}' if peak else ''}", *map(_rate_cell, runs)))
    return DIVERGED_NOTE + _table(rows)


def _rate_cell(result: Result | None) -> str:
    if result is None or not result.get("loss"):
        return "–"
    last = result["val_loss"][-1] if result["val_loss"] else math.nan
    if not _has_diverged(result):
        return f"{last:.4f}{_ending(result) and ', ' + _ending(result)}"
    top = f"diverged, up to {max(result['loss']):.1f}"
    return (
        f"{top}; stopped at step {curve(result).diverged_at:,}"
        if result["state"] == "diverged"
        else f"{top}; ends at {last:.2f}"
    )


def _has_diverged(result: Result) -> bool:
    """Whether a run's training loss was above that of guessing, or not finite."""
    return result["state"] == "diverged" or not max(result["loss"]) <= GUESSING


def balance_table(r: Results) -> str:
    rows: Rows = [
        ("balance", LOSS_COLUMN, "max load / mean, mean over layers", "worst layer", f"aim ≤ {AIM}",
         "over all steps", "drafts accepted: greedy, sampled", "")
    ]  # fmt: skip
    for name, result in _balanced(r).items():
        mean, worst, peak = _maximum_load(result)
        drafts = result.get("drafts") or {}
        rows.append((
            name,
            _loss(result),
            f"{mean:.3f}",
            f"{worst:.3f}, up to {peak:.2f}",
            _at_the_aim([mean], [worst]),
            _load_over_all_steps(result),
            f"{drafts['greedy']:.1%}, {drafts['drawn']:.1%}" if drafts else "",
            _ending(result),
        ))  # fmt: skip
    return BALANCE_NOTE + _table(rows) + _balance_noise(r) + _balance_of_other_runs(r)


def _balance_noise(r: Results) -> str:
    """Return a sentence on how far the losses of two runs of this table end apart by chance."""
    found = _balanced(r)
    usual, again = (next((x for name, x in found.items() if name.startswith(which)), None)
                    for which in ("usual:", "usual again"))  # fmt: skip
    if not usual or not again:
        return ""
    apart = abs(gap(again, usual)[0])
    return (
        f"\n\nTwo runs with the usual balance end {apart:.1%} apart, so smaller differences in this table mean nothing."
    )


def _balance_of_other_runs(r: Results) -> str:
    """Return a table of the other groups' runs, all with the usual bias and sequence loss."""
    rows: Rows = [
        ("size", "recipe, seeds", "tokens", "max load / mean, mean over layers", "worst layer", f"aim ≤ {AIM}")
    ]
    for group in LENGTHS:
        for size in r.sizes(group):
            runs = defaultdict(list)
            for result in sorted(r.of(group, size), key=lambda x: (x["job"]["recipe"], x["job"]["seed"])):
                runs[result["job"]["recipe"]].append(result)
            for recipe, of in runs.items():
                means, worst, _ = zip(*map(_maximum_load, of), strict=True)
                rows.append((
                    size,
                    f"`{recipe}`, {', '.join(str(x['job']['seed']) for x in of)}",
                    r.tokens(group, size),
                    ", ".join(f"{mean:.3f}" for mean in means),
                    ", ".join(f"{each:.3f}" for each in worst),
                    _at_the_aim(means, worst),
                ))  # fmt: skip
    return f"\n\nThe usual balance in longer runs and larger models:\n\n{_table(rows)}" if len(rows) > 1 else ""


def _maximum_load(result: Result) -> tuple[float, float, float]:
    """Return maximum expert load / mean: the mean over layers, of each step's worst layer, and the largest of all."""
    loads = np.array(result["imbalance"])
    late = loads[_is_late(result)] if len(loads) > 4 else loads
    return float(late.mean()), float(late.max(1).mean()), float(late.max())


def _load_over_all_steps(result: Result) -> str:
    """Return maximum expert load / mean over all late steps together: the mean over layers, and the worst layer."""
    if not result.get("loads"):
        return ""
    maxima = np.array(result["loads"])[_is_late(result)].mean(0).max(-1)
    return f"{maxima.mean():.3f}, {maxima.max():.3f}"


def _is_late(result: Result) -> npt.NDArray[np.bool_]:
    """Return which measurements come after the first steps, a share of those asked for, also in a stopped run."""
    steps = np.array(result["steps"])
    return np.asarray(steps > AFTER_WARM_UP * result["facts"].get("steps_asked", steps[-1]))


def _at_the_aim(means: Sequence[float], worst: Sequence[float]) -> str:
    """Return whether runs meet the aim: by the mean over layers, and by the worst layer."""
    if max(worst) <= AIM:
        return "met"
    met = sum(mean <= AIM for mean in means)
    if not met:
        return "missed"
    some = f" in {met} of {len(means)}" if met < len(means) else ""
    return f"met by the mean{some}, missed by the worst layer"


def _balanced(r: Results) -> dict[str, Result]:
    """Return the runs that differ in the balance, by its name."""
    runs = {"usual: bias 0.005, sequence loss 1e-4": next(iter(_usual(r)), None)}
    runs |= {name: r.all.get(f"balance-{name.replace(' ', '-')}") for name in BALANCES}
    return {name: result for name, result in runs.items() if result and result.get("imbalance")}


def balance_figure(r: Results, folder: Path) -> str:
    found = _balanced(r)
    if not found:
        return ""
    found = {name: x for name, x in found.items() if name not in BALANCE_TOKENS}  # all of one length
    lines: list[Line] = [
        (name, x["steps"], [statistics.fmean(of) for of in x["imbalance"]]) for name, x in found.items()
    ]
    shared = [lines[i :: len(COLORS)] for i in range(len(COLORS))]  # with more lines than colors, two share one
    what = "maximum expert load / mean, averaged over layers"
    save_lines(folder / "balance.svg", what, shared, (1.0, 8.0), (AIM, f"aim {AIM}"))
    text = "\n\n`balance.svg`, which the command draws, has the load by step."
    if whole := {name: (x["steps"], x["loads"]) for name, x in found.items() if x.get("loads")}:
        save_loads(folder / "experts.svg", whole)
        text += " `experts.svg` has the load of each expert over the mean of its layer."
    missing = [name for name in found if name not in whole]
    return text + (f" The load of each expert was not recorded for: {'; '.join(missing)}." if missing else "")


def rate_figure(r: Results, folder: Path) -> str:
    runs = [
        [_rate_line(f"{recipe}, {times}×", x) for recipe in RATE_RECIPES if (x := r.all.get(f"rate-{recipe}-{times}"))]
        for times in (1, *RATES)
    ]
    if not any(runs):
        return ""
    what = "training loss (nats a token), by learning rate"
    save_lines(folder / "rates.svg", what, [x for x in runs if x], (4, DIVERGED_LOSS))
    return (
        "\n\nThe command draws the curves, `rates.svg`: BF16 is solid, `deepseek_v3` dashed, `per_tensor` dotted; a"
        " cross at the top marks where a run was stopped."
    )


def _rate_line(name: str, result: Result) -> Line:
    """Return a run's training loss as a line, which ends at infinity if the run diverged."""
    if result["state"] != "diverged":
        return name, result["steps"], result["loss"]
    return f"{name} diverged", (*result["steps"], curve(result).diverged_at or 0), (*result["loss"], math.inf)


def _usual(r: Results) -> Iterable[Result]:
    found = (r.get("ablation", size, "deepseek_v3") for size in r.sizes("ablation"))
    return (x for x in found if x)


def text_table(r: Results) -> str:
    """Return what the text and the longer text consist of, and how often the runs read them."""
    text, more = (json.loads(file.read_text()) for file in (FACTS, LONG_FACTS))
    kinds, more_kinds = (
        " and ".join(f"{n / 1e6:.0f} MB of {kind}" for kind, n in of["kinds"].items()) for of in (text, more)
    )
    rows: Rows = [("source", "MB", "MB that the longer text adds")]
    for name in text["bytes"] | more["bytes"]:
        rows.append((name, *(f"{of['bytes'][name] / 1e6:.1f}" if name in of["bytes"] else "" for of in (text, more))))
    return (
        f"The text has {kinds}: {text['tokens']['train']:,} tokens to train on and {text['tokens']['val']:,} held out,"
        f" with a vocabulary of {VOCABULARY:,}. The longer text, for runs over 1B tokens, begins with the text, adds"
        f" {more_kinds}, and has {more['tokens']['train']:,} tokens to train on. Both have the same held-out tokens."
        f"\n\n{_passes_table(r, text['tokens']['train'])}\n\n{_table(rows)}"
    )


def _passes_table(r: Results, unrecorded: int) -> str:
    """Return how often runs over at least CORE tokens read their text, which has `unrecorded` tokens in old results."""
    found = {
        (x["job"]["tokens"], x.get("facts", {}).get("text_tokens", unrecorded))
        for x in r.all.values()
        if x["job"]["tokens"] >= CORE
    }
    rows: Rows = [("tokens of a run", "tokens of its text", "passes over it")]
    rows += [(f"{run / 1e6:,.0f}M", f"{text / 1e6:,.1f}M", f"{run / text:.2f}") for run, text in sorted(found)]
    return _table(rows) if found else f"No run is over {CORE / 1e6:.0f}M tokens or more."


def size_table() -> str:
    from octile.models.counts import count_parameters

    rows: Rows = [("size", "hidden", "layers", "active", "all", "in 8 bits", "head", "attention", "gate", "peak rate")]
    for name, model in MODELS.items():
        counts, of = count_parameters(model), operations(model)
        total = sum(of.values())
        shares = [f"{of[kind] / total:.1%}" for kind in ("head", "attention", "gate")]
        active, every = (f"{n / 1e6:.1f}M" for n in (counts.active, counts.total))
        first = (name, f"{model.hidden_size:,}", str(model.num_hidden_layers), active, every)
        rows.append((*first, f"{share_in_8_bits(model):.1%}", *shares, f"{USUAL_RATE[name]:g}"))
    return _table(rows)


def machines(r: Results) -> str:
    """Return a paragraph on the GPUs, torch versions and commits of the runs."""
    facts = [x["facts"] for x in r.all.values() if "device" in x.get("facts", {})]
    machines = (x.get("facts", {}).get("machine") or {} for x in r.all.values())
    commits = [machine["commit"] for machine in machines if machine.get("commit")]
    return (
        "Ran on: " + "; ".join(sorted({f"{x['device']}, torch {x['torch']}" for x in facts})) + ". "
        "`runs/` has each run and its job, from which `sizes.py` and `jobs.py` build its configuration. For "
        f"{len(commits)} of {len(r.all)} runs it also has the configuration and the commit"
        + (f" ({', '.join(sorted(set(commits)))})." if commits else ".")
    )


def not_run(missing: Iterable[Job]) -> str:
    """Return a table of jobs by group, size and recipe: their seeds, or the names of variations, with their seeds."""
    seeds: dict[tuple[str, str, str], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    variations: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for one in missing:
        key, name = (one.group, one.size, one.recipe), one.name.removesuffix(f"-{one.seed}")
        if name == one.name:
            variations[key].append(name)
        else:
            is_usual = one.name == job(*key, one.seed, one.tokens).name
            seeds[key]["" if is_usual else f"{name}-"].append(one.seed)
    rows: Rows = []
    for key in {**seeds, **variations}:
        numbered = [f"{name}{numbers}" for name, of_name in seeds[key].items() for numbers in _ranges(of_name)]
        rows.append((*key[:2], f"`{key[2]}`", ", ".join([*numbered, *variations[key]])))
    return _table([("group", "size", "recipe", "seeds or jobs"), *sorted(rows)]) if rows else "All jobs were run."


def _ranges(numbers: Iterable[int]) -> list[str]:
    """Return numbers as texts, three and more in a row as "2–5"."""
    rows: list[list[int]] = []
    for number in sorted(numbers):
        if rows and number == rows[-1][-1] + 1:
            rows[-1].append(number)
        else:
            rows.append([number])
    return [text for row in rows for text in ([f"{row[0]}–{row[-1]}"] if len(row) > 2 else map(str, row))]


OWN_PAGE = "noise", "noise-scan", "planned"  # groups whose runs are on the pages noise and planned


def write(runs: Sequence[Path], folder: Path) -> Path:
    """Write FOLDER/README.md, and a figure and page of each comparison; return the README's path.

    The text of FOLDER/note.md, if there is one, comes first.
    """
    r = Results.read(*runs)
    folder.mkdir(parents=True, exist_ok=True)
    figures = []
    for group in ("branch", "long-branch", "core", "slow", "long", "ablation"):
        for size in r.sizes(group):
            comparison = r.comparison(group, size)
            if comparison is None:
                continue
            name = f"{group}-{size}"
            save_compare_figure(comparison, folder / f"{name}.svg")
            (folder / name).mkdir(exist_ok=True)
            write_compare_report(folder / name, comparison)
            figures.append(f"- `{name}`: {verdict_sentence(comparison)}")
    failed = [f"- {n}: {x['why']}; `{(x.get('log') or [''])[-1]}`" for n, x in r.all.items() if x["state"] == "failed"]
    missing = [job for job in all_jobs() if job.name not in r.all and job.group not in OWN_PAGE]
    evaluated = evaluation_table(r)
    parts = {
        "The loss of FP8 compared with BF16": "",
        "Summary": answer_table(r) + "\n\n" + TERMS,
        "Method": METHOD + "\n\n" + machines(r),
        "Text": text_table(r),
        "Models": size_table(),
        "The loss": core_table(r),
        "From scratch, all runs": scratch_table(r) or "No recipe was run twice.",
        "From a checkpoint": branch_table(r),
        **({"Trained in one precision, evaluated in another": evaluated} if evaluated else {}),
        "Curves": f"{FIGURES}\n\n" + "\n".join(figures) if figures else NO_FIGURES,
        "Ablations": ablation_table(r),
        "Learning rates": rate_table(r) + rate_figure(r, folder),
        "Balance and multi-token prediction": balance_table(r) + balance_figure(r, folder),
        "Not run": not_run(missing),
        "Failed": "\n".join(failed) or "None.",
    }
    title, *rest = parts
    note = (folder / NOTE).read_text() + "\n" if (folder / NOTE).exists() else ""
    text = f"# {title}\n\n{note}" + "\n\n".join(f"## {name}\n\n{parts[name]}" for name in rest) + "\n"
    (folder / "README.md").write_text(text)
    return folder / "README.md"


def _ending(result: Result) -> str:
    if result["state"] == "done":
        return ""
    if result["state"] == "diverged":
        return f"diverged at step {curve(result).diverged_at:,}"
    at = (result.get("val_steps") or [0])[-1]
    return f"{result['state']} at step {at:,} of {result.get('facts', {}).get('steps_asked', '?')}"


def _versus_noise(found: float, noise: float) -> str:
    if math.isnan(found) or math.isnan(noise):
        return ""
    return "below the noise" if abs(found) <= noise else f"{abs(found) / noise:.1f} × the noise" if noise else "above 0"


def _integer(number: float) -> str:
    return f"{number:,.0f}" if math.isfinite(number) else "–"


def _percent(fraction: float) -> str:
    return format_percent(fraction) if math.isfinite(fraction) else "–"


def _table(rows: Rows) -> str:
    head, *rest = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rest))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs")
    parser.add_argument("folder", type=Path)
    asked = parser.parse_args()
    print(write(asked.runs, asked.folder))
