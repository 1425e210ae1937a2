"""What is run, the most important first. A job is one training run.

core       three sizes × BF16 with two seeds, DeepSeek-V3's recipe with two, and a control that has to fail; then
           more seeds, for an interval
again      DeepSeek-V3's recipe at the largest size, twice more with each seed: a GPU adds in another order each time
long       the smallest size over 300M tokens, with three seeds
long-trunk, long-branch   as below, of such a run: what its last 180M tokens cost
trunk      the first part of a BF16 run of `core`, which leaves its weights and moments
branch     the rest of it under each recipe, from the same weights and moments and over the same batches; of seed 2
           the control too, which has to fail
ablation   recipes and variations at the smallest size, all from the same weights and the same batches
rate       learning rates, up to divergence
balance    what keeps the experts' load even, and multi-token prediction

Within the first third of a run the loss falls steeply, a few steps sooner or later as chance has it, and what that is
worth stays until the end: runs from one seed end up to 0.6% apart, whatever their recipe. Branches begin after it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any, Literal

from experiments.loss.sizes import run_config
from octile.train.config import TrainConfig

Group = Literal["core", "again", "long", "long-trunk", "long-branch", "trunk", "branch", "ablation", "rate", "balance"]
TRUNK = 0.4  # of a run's steps
LONG, CORE, SHORT, RATE = 300e6, 100e6, 40e6, 12e6  # tokens
ABLATIONS = (  # the slowest first
    "no_promotion",
    "smooth_swiglu",
    "fp8_lm",
    "fp16_loss_scaling",
    "delayed",
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
MORE_SEEDS = (2, 3, 4, 5)
BRANCHES = ("bf16", "nudged", "deepseek_v3")  # of every trunk
CONTROL_SEED = 2  # of a trunk that no recipe but these and the control goes on from: their BF16 ran beside it
LONG_SEEDS = (1, 2)  # of more runs over 300M tokens, and of their trunks
RATES = (2, 4, 16, 64, 128, 192, 256, 384)  # times the usual one, which every other job has
RATE_RECIPES = ("bf16", "deepseek_v3", "per_tensor")
BALANCES: dict[str, dict[str, float]] = {  # beside the usual: bias of 0.005 a step, sequence loss of 1e-4
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


@dataclass(frozen=True)
class Job:
    """A run.

    Attributes:
        name: of its files.
        changes: of the run's configuration: fields of `OptimConfig` and `ModelConfig` by their names.
        after: the job whose weights and moments it goes on from; none: it begins at the beginning.
        until: the share of its steps after which it ends; before 1 it leaves its weights and moments.
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
    def own_tokens(self) -> float:
        """Those that it trains on itself."""
        return self.tokens * (self.until - (TRUNK if self.after else 0.0))

    def config(self) -> TrainConfig:
        """Its configuration, but for the recipe, which may have no name."""
        config = run_config(self.size, self.tokens, seed=self.seed)
        own = {name: self.changes[name] for name in self.changes if hasattr(config.optim, name)}
        shape = {name: value for name, value in self.changes.items() if name not in own}
        return replace(config, optim=replace(config.optim, **own), model=replace(config.model, **shape))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def all_jobs(small: str = "30m", sizes: tuple[str, ...] = ("150m", "80m", "30m")) -> list[Job]:
    """Every job, in the order in which they begin: what takes longest does so first, and what may be left out last."""
    jobs = [job("long", small, recipe, 0, LONG) for recipe in ("bf16", "deepseek_v3")]
    trunks = {
        (size, seed): replace(job("trunk", size, "bf16", seed, CORE), until=TRUNK)
        for seed, size in (*product((0, 1), sizes), (CONTROL_SEED, small))
    }
    jobs += trunks.values()
    jobs += [branch(trunk, recipe) for trunk in trunks.values() for recipe in BRANCHES]
    jobs += [branch(trunks[small, 0], recipe) for recipe in ABLATIONS]
    jobs.append(branch(trunks[small, CONTROL_SEED], "control"))
    for size in sizes:
        jobs += [job("core", size, *run, CORE) for run in (("bf16", 0), ("deepseek_v3", 0), ("bf16", 1))]
    jobs += [job("core", size, "control", 0, CORE) for size in sizes]
    jobs += [job("ablation", small, *run, SHORT) for run in (("bf16", 0), ("deepseek_v3", 0), ("bf16", 1))]
    jobs += [job("ablation", small, recipe, 0, SHORT) for recipe in ABLATIONS]
    jobs += [job("core", size, "deepseek_v3", 1, CORE) for size in sizes]
    usual = run_config(small, RATE).optim.lr
    jobs += [
        replace(job("rate", small, recipe, 0, RATE, lr=times * usual), name=f"rate-{recipe}-{times}")
        for times in (1, *RATES)
        for recipe in RATE_RECIPES
    ]
    for name, changes in BALANCES.items():
        one = job("balance", small, "deepseek_v3", 0, BALANCE_TOKENS.get(name, SHORT), **changes)
        jobs.append(replace(one, name=f"balance-{name.replace(' ', '-')}"))
    jobs += [job("core", size, *run, CORE) for size in sizes for run in product(("bf16", "deepseek_v3"), MORE_SEEDS)]
    jobs += [
        replace(again, name=f"{again.name}-{number}")
        for number in (1, 2)
        for again in (job("again", sizes[0], "deepseek_v3", seed, CORE) for seed in (0, 1))
    ]
    jobs += [job("long", small, recipe, seed, LONG) for seed in LONG_SEEDS for recipe in ("bf16", "deepseek_v3")]
    for seed in LONG_SEEDS:
        trunk = replace(job("long-trunk", small, "bf16", seed, LONG), until=TRUNK)
        jobs += [trunk, *(branch(trunk, recipe) for recipe in BRANCHES)]
    return [*jobs, job("ablation", small, "deepseek_v3", 1, SHORT)]


def named(jobs: list[Job], names: list[str]) -> list[Job]:
    """The jobs of these names and those that they go on from, in the order of the list.

    Raises:
        ValueError: there is no job of a name.
    """
    known = {job.name: job for job in jobs}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no job is named {', '.join(unknown)}")
    wanted = {*names, *(known[name].after for name in names)}
    return [job for job in jobs if job.name in wanted]


def branch(trunk: Job, recipe: str) -> Job:
    group: Group = "long-branch" if trunk.group == "long-trunk" else "branch"
    return replace(job(group, trunk.size, recipe, trunk.seed, trunk.tokens), after=trunk.name)


def job(group: Group, size: str, recipe: str, seed: int, tokens: float, **changes: Any) -> Job:
    return Job(f"{group}-{size}-{recipe}-{seed}", group, size, recipe, seed, tokens, changes)
