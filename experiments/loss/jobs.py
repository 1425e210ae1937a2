"""The training runs of the experiment, the most important first. A job is one training run.

group        runs
core         three sizes with BF16 and DeepSeek-V3's recipe, several seeds each, and a control that has to fail
again        DeepSeek-V3's recipe at the largest size, repeated twice for each of two seeds: a GPU's order of additions
             differs from run to run. The results have a pair of the smallest size, too
slow         the smallest size from scratch at half the peak rate, with a warm-up over a fifth of the steps: pairs
             were to deviate less than those of `core`, 0.37%; nine deviated by 0.77%
long         the smallest size over 300M tokens: at the end of shorter runs the loss still depends on the step at which
             it began to fall steeply, by chance
trunk        the first part of a BF16 run of `core`; saves its weights and moments
branch       the rest of that run under each recipe, from the same weights and moments and over the same batches; with
             seed 2 also the control
long-trunk,  the same for runs over 300M tokens: they measure the cost of the last 180M tokens
long-branch
billion      the smallest size over 1B tokens of the longer text (`experiments.loss.text`)
ablation     recipes and variations at the smallest size, all from the same weights and the same batches
rate         learning rates up to divergence
balance      variations of the expert balance, and multi-token prediction
noise        the smallest size from scratch by designs that may make pairs deviate less ([plan](noise/README.md))
noise-scan   the smallest size in BF16 with changes that may let its loss fall sooner; two seeds each
noise-parts  the smallest size by the design with the smallest noise, with parts of DeepSeek-V3's recipe in BF16
planned      the runs of registered plans ([pages](planned/README.md), `experiments.loss.plans`)

In the first third of a run the loss falls steeply, a few steps sooner or later by chance, and the difference remains
until the end: runs from one seed end up to 0.6% apart, whatever their recipe. Branches begin after that.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any, Literal

from experiments.loss.plans import PLANS
from experiments.loss.sizes import BATCH, run_config
from experiments.loss.sizes import RATES as PEAK_RATES
from octile.train.config import TrainConfig

Group = Literal[
    "core",
    "again",
    "slow",
    "long",
    "long-trunk",
    "long-branch",
    "billion",
    "trunk",
    "branch",
    "ablation",
    "rate",
    "balance",
    "noise",
    "noise-scan",
    "noise-parts",
    "planned",
]
TRUNK = 0.4  # the share of a run's steps that its trunk takes
BILLION, LONG, CORE, SHORT, RATE = 1e9, 300e6, 100e6, 40e6, 12e6  # tokens
ABLATIONS = (  # the slowest first
    "mxfp8",
    "no_promotion",
    "smooth_swiglu",
    "fp8_lm",
    "fp16_loss_scaling",
    "delayed",
    "hybrid_delayed",
    "int8_tiles",
    "per_tensor",
    "hybrid_e5m2",
    "no_e5m6",
    "float32_scales",
    "weights_1x128",
    "blockwise_gradients",
    "fp32_moments",
    "global_scale",
)
MORE_SEEDS = {"150m": range(2, 6), "80m": range(2, 28), "30m": range(2, 38)}  # as many as `power.py` asks for, or fit
SLOW_SEEDS = range(9)  # after which they were given up
SLOW_WARMUP = 0.2
WGRAD_BLOCKS = "wgrad_x_blocks"  # at the two smaller sizes, from a checkpoint and from scratch
WGRAD_SEEDS = {"80m": (0, 1), "30m": (3, 4)}  # from scratch; one-rounding/runs has their runs of other recipes
BRANCHES = ("bf16", "nudged", "deepseek_v3", "e5m2")  # recipes that continue from every trunk
CONTROL_SEED = 2  # seed of a trunk from which only BRANCHES and the control continue
LONG_SEEDS = range(1, 18)  # of runs over 300M tokens: as many as `power.py` asks for at a deviation of 0.25%
LONG_TRUNK_SEEDS = (1, 2)
RATES = (2, 4, 16, 64, 128, 192, 256, 384)  # times the usual learning rate, which all other jobs have
RATE_RECIPES = ("bf16", "deepseek_v3", "per_tensor")
BALANCES: dict[str, dict[str, float]] = {  # changes of the usual: bias speed 0.005, sequence loss 1e-4
    "bias alone": {"aux_loss_alpha": 0.0},
    "sequence loss alone": {"balance_speed": 0.0},
    "auxiliary loss alone": {"balance_speed": 0.0, "aux_loss_alpha": 0.01},
    "nothing": {"balance_speed": 0.0, "aux_loss_alpha": 0.0},
    "published speed": {"balance_speed": 0.001},
    "speed 0.003": {"balance_speed": 0.003},
    "speed 0.002": {"balance_speed": 0.002},
    "speed 0.002 over 100M tokens": {"balance_speed": 0.002},
    "speed 0.004": {"balance_speed": 0.004},
    "speed 0.01": {"balance_speed": 0.01},
    "sequence loss 1e-3": {"aux_loss_alpha": 1e-3},
    "sequence loss 1e-3 over 100M tokens": {"aux_loss_alpha": 1e-3},
    "usual again": {},
    "with MTP": {"num_nextn_predict_layers": 1},
}
BALANCE_TOKENS = {"speed 0.002 over 100M tokens": CORE, "sequence loss 1e-3 over 100M tokens": CORE}  # others: SHORT
DESIGNS: dict[str, dict[str, Any]] = {  # changes of the usual configuration
    "usual": {},
    "to-zero": {"decay": 0.4, "final_lr": 0.0},  # a constant rate, then to zero in the last 40% of the steps
    "double-batch": {"batch_size": 2 * BATCH},
    "muon": {"name": "muon"},
    "muon-to-zero": {"name": "muon", "decay": 0.4, "final_lr": 0.0},
}
NOISE_SEEDS = range(4)
PARTS_DESIGN, PARTS_SEEDS = "muon", range(2)  # the design whose gap is divided among what the recipe has in 8 bits
PARTS = (
    "nudged",
    "gemms_alone",
    "without_fprop",
    "without_wgrad",
    "without_dgrad",
    "wgrad_alone",
    "mlp_alone",
    "attention_alone",
    "weights_1x128",
)
SCANS: dict[str, dict[str, Any]] = {
    "usual": {},
    "initial-0.01": {"initializer_range": 0.01},
    "initial-0.04": {"initializer_range": 0.04},
    "double-rate": {"lr": 2 * PEAK_RATES["30m"]},
    "short-warmup": {"warmup": 0.01},
    "muon": {"name": "muon"},
}
SCAN_SEEDS = range(2)


@dataclass(frozen=True)
class Job:
    """One training run.

    Attributes:
        name: the stem of its files' names.
        changes: what differs from the usual configuration: fields of `OptimConfig` and `ModelConfig`, and batch_size,
            with which as many tokens take another number of steps. A larger batch is divided into micro-batches of the
            usual size, so that two runs still fit on a GPU.
        after: the job from whose weights and moments it continues; empty if it starts from scratch.
        until: the share of the steps after which it ends; a trunk then saves its weights and moments.
    """

    name: str
    group: Group
    size: str
    recipe: str
    seed: int
    tokens: float
    changes: dict[str, Any] = field(default_factory=dict)
    after: str = ""
    until: float = 1.0

    @property
    def is_trunk(self) -> bool:
        """Whether other jobs continue from it."""
        return self.group in ("trunk", "long-trunk")

    @property
    def own_tokens(self) -> float:
        """The tokens that this job trains on, without those of the job that it continues."""
        return self.tokens * (self.until - (TRUNK if self.after else 0.0))

    def config(self) -> TrainConfig:
        """Return the configuration without the recipe, which may be none of the library's."""
        config = run_config(self.size, self.tokens, seed=self.seed)
        batch = self.changes.get("batch_size", config.batch_size)
        own = {name: self.changes[name] for name in self.changes if hasattr(config.optim, name)}
        shape = {name: value for name, value in self.changes.items() if name not in (*own, "batch_size")}
        steps = max(1, round(config.steps * config.batch_size / batch))
        config = replace(config, batch_size=batch, micro_batches=max(1, batch // config.batch_size), steps=steps)
        return replace(config, optim=replace(config.optim, **own), model=replace(config.model, **shape))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def all_jobs(small: str = "30m", sizes: tuple[str, ...] = ("150m", "80m", "30m")) -> list[Job]:
    """Return every job in the order in which they start: the longest first, the least important last."""
    jobs = [job("long", small, recipe, 0, LONG) for recipe in ("bf16", "deepseek_v3")]
    trunks = {
        (size, seed): replace(job("trunk", size, "bf16", seed, CORE), until=TRUNK)
        for seed, size in (*product((0, 1), sizes), (CONTROL_SEED, small))
    }
    jobs += trunks.values()
    jobs += [branch(trunk, recipe) for trunk in trunks.values() for recipe in BRANCHES]
    jobs += [branch(trunks[small, 0], recipe) for recipe in ABLATIONS]
    jobs += [branch(trunks[size, seed], WGRAD_BLOCKS) for seed, size in product((0, 1), sizes[-2:])]
    jobs.append(branch(trunks[small, CONTROL_SEED], "control"))
    for size in sizes:
        jobs += [job("core", size, *run, CORE) for run in (("bf16", 0), ("deepseek_v3", 0), ("bf16", 1))]
    jobs += [job("core", size, "control", 0, CORE) for size in sizes]
    jobs += [job("ablation", small, *run, SHORT) for run in (("bf16", 0), ("deepseek_v3", 0), ("bf16", 1))]
    jobs += [job("ablation", small, recipe, 0, SHORT) for recipe in ABLATIONS]
    jobs += [job("core", size, "deepseek_v3", 1, CORE) for size in sizes]
    jobs += [job("core", size, WGRAD_BLOCKS, seed, CORE) for size in sizes for seed in WGRAD_SEEDS.get(size, ())]
    usual = run_config(small, RATE).optim.lr
    jobs += [
        replace(job("rate", small, recipe, 0, RATE, lr=times * usual), name=f"rate-{recipe}-{times}")
        for times in (1, *RATES)
        for recipe in RATE_RECIPES
    ]
    for name, changes in BALANCES.items():
        one = job("balance", small, "deepseek_v3", 0, BALANCE_TOKENS.get(name, SHORT), **changes)
        jobs.append(replace(one, name=f"balance-{name.replace(' ', '-')}"))
    jobs += [
        job("core", size, recipe, seed, CORE)
        for size in sizes
        for seed in MORE_SEEDS.get(size, ())
        for recipe in ("bf16", "deepseek_v3")
    ]
    jobs += [
        replace(again, name=f"{again.name}-{number}")
        for number in (1, 2)
        for again in (job("again", sizes[0], "deepseek_v3", seed, CORE) for seed in (0, 1))
    ]
    slow = {"lr": run_config(small, CORE).optim.lr / 2, "warmup": SLOW_WARMUP, "decay": 1 - SLOW_WARMUP}
    jobs += [
        job("slow", small, recipe, seed, CORE, **slow) for seed in SLOW_SEEDS for recipe in ("bf16", "deepseek_v3")
    ]
    jobs += [job("long", small, recipe, seed, LONG) for seed in LONG_SEEDS for recipe in ("bf16", "deepseek_v3")]
    for seed in LONG_TRUNK_SEEDS:
        trunk = replace(job("long-trunk", small, "bf16", seed, LONG), until=TRUNK)
        jobs += [trunk, *(branch(trunk, recipe) for recipe in BRANCHES)]
    jobs.append(job("ablation", small, "deepseek_v3", 1, SHORT))
    jobs += [
        replace(
            job("noise-scan", small, "bf16", seed, CORE, **changes),
            name=f"noise-scan-{name}-{small}-bf16-{seed}",
            until=TRUNK,
        )
        for name, changes in SCANS.items()
        for seed in SCAN_SEEDS
    ]
    jobs += [
        replace(job("noise", small, recipe, seed, CORE, **changes), name=f"noise-{name}-{small}-{recipe}-{seed}")
        for name, changes in DESIGNS.items()
        for seed in NOISE_SEEDS
        for recipe in ("bf16", "deepseek_v3")
    ]
    jobs += [
        replace(
            job("noise-parts", small, recipe, seed, CORE, **DESIGNS[PARTS_DESIGN]),
            name=f"noise-{PARTS_DESIGN}-{small}-{recipe}-{seed}",
        )
        for recipe in PARTS
        for seed in PARTS_SEEDS
    ]
    jobs += [
        replace(job("planned", plan.size, recipe, seed, CORE, **DESIGNS[plan.design]), name=name)
        for plan in PLANS.values()
        if plan.size in sizes
        for recipe, seed, name in plan.runs
    ]
    return [*jobs, *(job("billion", small, recipe, 0, BILLION) for recipe in ("bf16", "deepseek_v3"))]


def named(jobs: list[Job], names: list[str]) -> list[Job]:
    """Return the jobs of these names in their order, each after the one from which it continues.

    Raises:
        ValueError: a name is that of no job.
    """
    known = {job.name: job for job in jobs}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no job is named {', '.join(unknown)}")
    wanted = dict.fromkeys(one for name in names for one in (known[name].after, name) if one)
    return [known[name] for name in wanted]


def branch(trunk: Job, recipe: str) -> Job:
    """Return the job that continues from a trunk under a recipe."""
    group: Group = "long-branch" if trunk.group == "long-trunk" else "branch"
    return replace(job(group, trunk.size, recipe, trunk.seed, trunk.tokens), after=trunk.name)


def job(group: Group, size: str, recipe: str, seed: int, tokens: float, **changes: Any) -> Job:
    return Job(f"{group}-{size}-{recipe}-{seed}", group, size, recipe, seed, tokens, changes)
