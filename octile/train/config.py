"""The configuration of a training run as plain data, and its presets.

This module imports no torch, so that the command line answers at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from octile.command_text import option_with_value, quoted_path, train_command
from octile.models.config import PRESETS as MODELS
from octile.models.config import ModelConfig
from octile.tokenizer import check_text, check_vocab_size
from octile.validation import Range, Seed, check_fields, from_json, parse_json, quoted, read_text

if TYPE_CHECKING:
    from octile.recipe import Recipe

MAX_COUNT = 2**31 - 1  # far beyond any run; products of two counts fit 64 bits

Count = Annotated[int, Range(at_least=0, at_most=MAX_COUNT)]
Positive = Annotated[int, Range(at_least=1, at_most=MAX_COUNT)]
Share = Annotated[float, Range(at_least=0, at_most=1)]
DecayRate = Annotated[float, Range(at_least=0, below=1)]
Logger = Literal["tensorboard", "wandb", "mlflow"]


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer, its schedule, and the balance of the experts.

    Attributes:
        name: adamw, or muon: Muon for the matrices of the layers, also of each expert, and AdamW for embedding, head,
            gates and norms, both with the same learning rate and weight decay.
        lr: the peak of the learning rate.
        warmup: share of the steps in which the learning rate rises to its peak.
        decay: share of the steps in which the learning rate falls along a cosine, at the end or before the tail.
        final_lr: the learning rate after the cosine, as a share of the peak.
        tail: share of the steps after the cosine in which the learning rate stays there.
        last_tail: share of the steps after the tail, at the end, with another learning rate.
        last_lr: the learning rate in the last tail, as a share of the peak.
        weight_decay: the decoupled weight decay.
        betas: the decay rates of AdamW's two moments; Muon's momentum has 0.95.
        clip: the largest gradient norm; longer gradients are clipped to it.
        balance_speed: γ, by how much the bias of an expert changes in a step.
        balance_end: share of the steps after which γ is 0.
        mtp_change: share of the steps after which multi-token prediction's loss has its late weight.
        late_mtp_loss_weight: weight of multi-token prediction's loss after mtp_change; until then it is the model's
            mtp_loss_weight.
        ema_decay: the decay of the moving average of the weights on the CPU; 0 computes no average.
    """

    name: Literal["adamw", "muon"] = "adamw"
    lr: Annotated[float, Range(at_least=0, at_most=1_000_000)] = 2.2e-4
    warmup: Share = 0.05
    decay: Share = 0.4
    final_lr: Share = 0.1
    tail: Share = 0.0
    last_tail: Share = 0.0
    last_lr: Share = 0.0
    weight_decay: Annotated[float, Range(at_least=0, at_most=10)] = 0.1
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    clip: Annotated[float, Range(above=0)] = 1.0
    balance_speed: Annotated[float, Range(at_least=0, at_most=1)] = 0.001
    balance_end: Share = 1.0
    mtp_change: Share = 1.0
    late_mtp_loss_weight: Annotated[float, Range(at_least=0, at_most=1000)] = 0.1
    ema_decay: DecayRate = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "optim.")
        phases = {name: getattr(self, name) for name in ("warmup", "decay", "tail", "last_tail")}
        if not sum(phases.values()) <= 1:
            words = " and ".join(f"optim.{name} {share}" for name, share in phases.items() if share)
            raise ValueError(f"{words} are together more than the run")
        if self.last_tail and not self.last_lr <= self.final_lr:
            raise ValueError(f"optim.last_lr must be at most optim.final_lr, {self.final_lr}, not {self.last_lr}")


@dataclass(frozen=True)
class ParallelConfig:
    """The ranks of a run, which torchrun starts.

    Attributes:
        dp: data-parallel ranks, which share each step's batch; pp × dp are all ranks that torchrun starts.
        ep: ranks over which the experts are spread; divides dp.
        pp: ranks of a pipeline, which share the layers.
        schedule: the order in which a pipeline's ranks pass micro_batches: gpipe, 1f1b, zb1p, dualpipe, dualpipev (two
            stages on a rank) or chimera.
        exchange: how rows of tokens go to the experts of other ranks: all_to_all; symmetric_memory, kernels between
            GPUs of one host, and NVSHMEM between hosts, for which no host waits; or auto, these kernels between two
            GPUs. Between hosts it is all_to_all where torch has no NVSHMEM, and in a pipeline.
        reduce: the format in which gradients are summed over the ranks: float32, or bfloat16, half the traffic.
        timeout: seconds after which a rank that waits for another one ends the run.
    """

    dp: Positive = 1
    ep: Positive = 1
    pp: Positive = 1
    schedule: Literal["gpipe", "1f1b", "zb1p", "dualpipe", "dualpipev", "chimera"] = "1f1b"
    exchange: Literal["auto", "all_to_all", "symmetric_memory"] = "auto"
    reduce: Literal["float32", "bfloat16"] = "float32"
    timeout: Annotated[float, Range(above=0, at_most=MAX_COUNT)] = 600.0

    def __post_init__(self) -> None:
        check_fields(self, "parallel.")
        if self.dp % self.ep:
            raise ValueError(f"parallel.ep must divide parallel.dp, {self.dp}, but it is {self.ep}")

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.pp * self.dp

    def describe(self) -> str:
        """The options that say how many ranks there are."""
        return f"parallel.dp {self.dp}" if self.pp == 1 else f"parallel.pp {self.pp} × parallel.dp {self.dp}"


def _next_multiple(number: int, factor: int) -> int:
    return -(-number // factor) * factor


@dataclass(frozen=True)
class TrainConfig:
    """The configuration of a training run.

    Attributes:
        preset: where the defaults come from: tiny (two CPU cores), small or medium (one GPU), v2_lite_16b,
            v2_236b, v3_671b.
        recipe: the number formats: deepseek_v3, bf16, float32, per_tensor, delayed, hybrid_delayed, hybrid_e5m2,
            global_scale, fp16_loss_scaling, fp8_lm, smooth_swiglu, mxfp8, int8_tiles, wgrad_x_blocks or exact; or a
            .toml file with other formats, or exceptions for single layers.
        data: a text file, a folder, hf:NAME (a Hugging Face dataset), stdlib: the source of Python's library, or
            packages: source and documentation of that library and of every package installed here. Or arithmetic:
            additions, most of them wrong, to begin octile rl with. Or the URL of a run's `data/` (s3://bucket/data),
            whose tokens are streamed. Or a file of examples, FILE.jsonl, or a folder of such files, to fine-tune
            the weights of init_from on: messages, prompt and completion, or text in each line.
        val_data: what the held-out loss is measured on, read as data is and of the same kind: text, or examples.
            Nothing of data is held out then. If it is not given, a part of data is.
        init_from: a run or a Hugging Face folder, FP8 or BF16, whose weights and tokenizer the run begins with instead
            of random weights; the model's shape is then that folder's.
        steps: optimizer steps.
        seed: a whole number that determines the initial weights and the order of the data.
        out: the run's folder; chosen under runs/ if not given.
        checkpoints: where checkpoints go: a folder, or a URL that fsspec knows, such as s3://bucket/run; if not given,
            RUN/checkpoints.
        checkpoint_every: steps between checkpoints; 0 writes only the last one.
        validate_every: steps between measurements of the held-out loss.
        patience: consecutive validations without a lower held-out loss, after which the run stops; 0 never stops it.
            With init_from, that of the initial weights counts as the first.
        batch_size: sequences per step.
        initial_batch_size: sequences of the first step, if the batch grows to batch_size.
        batch_ramp: share of the steps in which the batch grows.
        micro_batches: parts of a batch that pass the model, or a pipeline, one after another, to save memory.
        sequence_length: tokens per sequence.
        skip_limit: consecutive steps that may be skipped because a gradient is NaN or Inf, before the run stops.
        val_sequences: held-out sequences of a validation, evenly spaced where there are more.
        device: auto uses a GPU if there is one.
        allow_slow: begin also a run whose GEMMs alone take more than four hours on this CPU.
        deterministic: have two runs give the same bits on a GPU too, which takes longer; on a CPU they always do, with
            the same number of threads.
        log: where the metrics go as well: tensorboard (event files in the run's folder), wandb (Weights & Biases) or
            mlflow. Each needs the extra of its name, and several may be named. A resumed run continues there.
        prompt: the text that the sample at the end of the run continues; an empty one has the model begin a text. If
            it is not given, it is 'def ' for stdlib and packages, and the beginning of a held-out text or the prompt of
            a held-out example for other data.
        telemetry_every: measure the FP8 GEMMs of every n-th step and write telemetry.jsonl; 0 measures none.
        telemetry_layers: patterns of the names of the layers to measure, separated by commas.
        guards: a file of rules on the telemetry that warn, capture operands, or switch a GEMM to BF16.
        indexer_stage: what is trained of a model with indexers: warm_up, the indexers alone, to the distribution of
            dense attention; or sparse, the model, whose attention is sparse, and the indexers. None otherwise. The
            held-out loss is that of sparse attention in both; a warm-up ends with its last model, not with its lowest
            held-out loss.
        model: the shape of the model.
        optim: the optimizer.
        parallel: the ranks.
        recipe_text: the content of the recipe's .toml file when the run began; used even if the file changes later.
        guards_text: the content of the file of rules when the run began; used even if the file changes later.
    """

    preset: str = "tiny"
    recipe: str = "deepseek_v3"
    data: str = "stdlib"
    val_data: str | None = None
    init_from: Path | None = None
    steps: Positive = 1000
    seed: Seed = 0
    out: Path | None = None
    checkpoints: str | None = None
    checkpoint_every: Count = 200
    validate_every: Positive = 100
    patience: Count = 0
    batch_size: Positive = 4
    initial_batch_size: Positive | None = None
    batch_ramp: Share = 0.0
    micro_batches: Positive = 1
    sequence_length: Positive = 128
    skip_limit: Count = 10
    val_sequences: Positive = 128
    device: Literal["auto", "cpu", "cuda"] = "auto"
    allow_slow: bool = False
    deterministic: bool = False
    log: tuple[Logger, ...] | None = None
    prompt: str | None = None
    telemetry_every: Count = 0
    telemetry_layers: str = "*"
    guards: Path | None = None
    indexer_stage: Literal["warm_up", "sparse"] | None = None
    model: ModelConfig = field(default_factory=MODELS["tiny"])
    optim: OptimConfig = field(
        default_factory=lambda: OptimConfig(lr=1.5e-3, warmup=0.02, decay=0.8, betas=(0.9, 0.99), balance_speed=0.01)
    )
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    recipe_text: str | None = None
    guards_text: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.data.strip():
            raise ValueError("data is empty: name a text file, a folder, hf:NAME, stdlib, packages or arithmetic")
        if self.val_data is not None and not self.val_data.strip():
            raise ValueError("val_data is empty: name a text file, a folder, a file of examples or hf:NAME")
        if self.checkpoints is not None and not self.checkpoints.strip():
            raise ValueError("checkpoints is empty: name a folder or a URL, such as s3://bucket/run")
        paths = "data", "val_data", "init_from", "out", "checkpoints", "guards"
        for name in ("prompt", "recipe", "telemetry_layers", *paths):
            check_text(name, str(getattr(self, name)))  # config.json is UTF-8
        if self.init_from is None:  # a tokenizer is trained
            check_vocab_size(self.model.vocab_size, "model.vocab_size")
        if self.sequence_length < self.min_sequence_length:
            raise ValueError(
                f"sequence_length must be at least {self.min_sequence_length} for this model, "
                f"not {self.sequence_length}"
            )
        if (self.initial_batch_size is None) != (self.batch_ramp == 0):
            raise ValueError(
                "initial_batch_size and batch_ramp need each other, but they are "
                f"{self.initial_batch_size} and {self.batch_ramp}"
            )
        if self.initial_batch_size is not None and self.initial_batch_size > self.batch_size:
            raise ValueError(
                f"initial_batch_size must be at most batch_size, {self.batch_size}, not {self.initial_batch_size}"
            )
        if self.optim.mtp_change < 1 and not self.model.num_nextn_predict_layers:
            raise ValueError(
                f"optim.mtp_change {self.optim.mtp_change} has no effect, because the model has no multi-token "
                "prediction: use 1"
            )
        if self.batch_size * self.sequence_length > MAX_COUNT:
            raise ValueError(
                f"batch_size {self.batch_size} × sequence_length {self.sequence_length} must be at most {MAX_COUNT:,} "
                "tokens per step"
            )
        if self.batch_size % self.micro_batches:
            raise ValueError(
                f"batch_size {self.batch_size} must be divisible by micro_batches {self.micro_batches}: "
                f"use --batch-size {_next_multiple(self.batch_size, self.micro_batches)}"
            )
        if self.sequence_length > self.model.max_position_embeddings:
            raise ValueError(
                f"sequence_length {self.sequence_length} exceeds the model's max_position_embeddings, "
                f"{self.model.max_position_embeddings}"
            )
        if self.telemetry_every > self.steps:
            raise ValueError(
                f"telemetry_every must be from 1 to {self.steps}, the run's steps, or 0 for none; "
                f"not {self.telemetry_every}"
            )
        if self.guards is not None and self.parallel.ranks > 1:
            raise ValueError(
                f"guards must not be given on several ranks ({self.parallel.describe()}): they read telemetry, which "
                "needs one rank"
            )
        if self.guards is not None and not self.telemetry_every:
            raise ValueError("guards need telemetry: add --telemetry-every N")
        if self.telemetry_layers != "*" and not self.telemetry_every:
            raise ValueError("telemetry_layers has no effect without telemetry: add --telemetry-every N")
        self._check_indexer()
        self._check_ranks()

    def _check_indexer(self) -> None:
        """Refuse a stage without an indexer, an indexer without a stage or in a pipeline, and a warm-up for nothing."""
        if self.model.has_indexer and self.parallel.pp > 1:
            raise ValueError(f"parallel.pp must be 1 for a model with an indexer, not {self.parallel.pp}")
        if self.model.has_indexer and self.indexer_stage is None:
            raise ValueError("indexer_stage is not given: a model with an indexer needs warm_up or sparse")
        if self.indexer_stage is not None and not self.model.has_indexer:
            raise ValueError(
                f"indexer_stage {self.indexer_stage} needs a model with an indexer: set model.index_n_heads, "
                "model.index_head_dim and model.index_topk"
            )
        if self.indexer_stage != "warm_up":
            return
        if self.patience:
            raise ValueError(f"patience must be 0 where indexer_stage is warm_up, not {self.patience}")
        if self.sequence_length <= (self.model.index_topk or 0):
            raise ValueError(
                f"sequence_length must be above model.index_topk, {self.model.index_topk}, where indexer_stage is "
                f"warm_up, not {self.sequence_length}: every key would be chosen"
            )

    def _check_ranks(self) -> None:
        """Refuse what does not divide between the ranks, or needs one."""
        dp, ep, ranks = self.parallel.dp, self.parallel.ep, self.parallel.ranks
        pieces = dp * self.micro_batches
        if self.batch_size % pieces:
            fewer = 0 if self.batch_size % dp else math.gcd(self.micro_batches, self.batch_size // dp)
            raise ValueError(
                f"batch_size {self.batch_size} must be divisible by micro_batches {self.micro_batches} × parallel.dp "
                f"{dp}: use --batch-size {_next_multiple(self.batch_size, pieces)}"
                f"{f' or --micro-batches {fewer}' if fewer else ''}"
            )
        if ranks > 1 and self.initial_batch_size is not None and self.initial_batch_size < pieces:
            raise ValueError(
                f"initial_batch_size must be at least {pieces}, a sequence for each micro-batch of each rank "
                f"(micro_batches {self.micro_batches}, parallel.dp {dp}), not {self.initial_batch_size}"
            )
        if self.model.n_routed_experts % ep:
            raise ValueError(f"parallel.ep {ep} must divide model.n_routed_experts, {self.model.n_routed_experts}")
        layers = self.model.num_hidden_layers + self.model.num_nextn_predict_layers
        if ep > 1 and self.model.first_k_dense_replace >= layers:
            raise ValueError(
                f"parallel.ep {ep} needs a layer with experts, but model.first_k_dense_replace is "
                f"{self.model.first_k_dense_replace}, as many as there are layers: use parallel.ep 1"
            )
        if ranks > 1 and self.telemetry_every:
            raise ValueError(
                f"telemetry_every must be 0 on several ranks ({self.parallel.describe()}), not {self.telemetry_every}: "
                "it is measured where one rank has the whole model and batch"
            )

    @property
    def command(self) -> str:
        """What starts a run of this configuration, before its options."""
        return train_command(self.parallel.ranks)

    @property
    def resume_command(self) -> str:
        """What continues the run in `out`."""
        assert self.out is not None
        return f"{self.command} --resume --out {quoted_path(self.out)}"

    @property
    def full_command(self) -> str:
        """The command with which a run of this configuration begins, with every option that its preset does not set."""
        default = replace(preset(self.preset) if self.preset in MODELS else TrainConfig(), preset=TrainConfig.preset)
        options = [
            _as_option(name, new)
            for name, (old, new) in differences(default, self).items()
            if name not in FILE_TEXTS
            and not name.startswith("model.extra")
            and not (old is None and self._is_default_flag(name, new))  # of a group that the preset does not have
        ]
        return " ".join([self.command, *options])

    def _is_default_flag(self, name: str, value: Any) -> bool:
        """Whether a setting is true or false, and that is the default of its field, for which there is no option."""
        *groups, last = name.split(".")
        owner = reduce(getattr, groups, self)
        return isinstance(value, bool) and next(f for f in fields(owner) if f.name == last).default is value

    @property
    def micro_batch_size(self) -> int:
        """The sequences that a rank passes through the model, or its stages, at a time."""
        return self.batch_size // (self.micro_batches * self.parallel.dp)

    @property
    def min_sequence_length(self) -> int:
        """The tokens that a loss needs: one, the next one, and with multi-token prediction the one after that."""
        return 3 if self.model.num_nextn_predict_layers else 2

    @property
    def advisable_length(self) -> int:
        """The tokens that a sequence of this run needs: in the warm-up of indexers more than they choose keys."""
        chosen = self.model.index_topk or 0
        return max(self.min_sequence_length, chosen + 1 if self.indexer_stage == "warm_up" else 0)

    def steps_for(self, tokens: int) -> int:
        """The steps that read at least a number of tokens; to within a step if the batch grows."""
        initial = self.batch_size if self.initial_batch_size is None else self.initial_batch_size
        mean_batch = self.batch_size - self.batch_ramp * (self.batch_size - initial) / 2
        return math.ceil(tokens / (mean_batch * self.sequence_length))

    def load_recipe(self) -> Recipe:
        """The recipe that this configuration names or holds as text.

        Transposed weights are cached for the micro-batches of a step, unless a recipe file says otherwise.

        Raises:
            ValueError: there is no recipe of that name, or the text is not a recipe.
            FileNotFoundError: the recipe's file does not exist.
        """
        from octile.recipe import Recipe

        if self.recipe_text is not None:
            recipe = Recipe.parse(self.recipe_text, "recipe_text")
        else:
            recipe = Recipe.named(self.recipe)
        return replace(recipe, transposed_weights=recipe.transposed_weights or "cached")

    def with_file_texts(self) -> TrainConfig:
        """This configuration with the contents of the files of its recipe and its guards, which the run then keeps.

        A text that it holds already stays.

        Raises:
            ValueError: the recipe's file is not a recipe, or a file is not UTF-8.
            FileNotFoundError: a file does not exist.
        """
        recipe_text, guards_text = self.recipe_text, self.guards_text
        if recipe_text is None and self.recipe.endswith(".toml"):
            self.load_recipe()  # checks the file
            recipe_text = read_text(Path(self.recipe))
        if guards_text is None and self.guards is not None:
            guards_text = _read_rules(self.guards)
        return replace(self, recipe_text=recipe_text, guards_text=guards_text)

    def with_texts_of(self, saved: TrainConfig) -> TrainConfig:
        """This configuration with the texts of a saved one, for the files that both name."""
        config = self
        if config.recipe_text is None and config.recipe == saved.recipe:
            config = replace(config, recipe_text=saved.recipe_text)
        if config.guards_text is None and config.guards == saved.guards:
            config = replace(config, guards_text=saved.guards_text)
        return config

    def to_json(self) -> str:
        """This configuration as JSON text, as in a run's config.json."""
        return json.dumps(asdict(self), indent=2, default=str) + "\n"

    def to_values(self) -> dict[str, Any]:
        """This configuration as the JSON object of `to_json`."""
        values: dict[str, Any] = json.loads(self.to_json())
        return values

    @classmethod
    def from_json(cls, text: str) -> TrainConfig:
        """Read the text that `to_json` wrote.

        Raises:
            ValueError: the text is not the configuration of a run.
        """
        return cls.from_values(parse_json(text.encode(), "the configuration"))

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Make a configuration from the JSON object that `to_json` wrote.

        Raises:
            ValueError: it is not the configuration of a run.
        """
        if missing := [name for name in ("model", "optim") if name not in values]:
            raise ValueError(f"not a run's configuration: it lacks {missing[0]}")
        config = from_json(cls, values)
        if config.recipe_text is not None:
            config.load_recipe()  # checks the text
        return config

    @classmethod
    def from_state(cls, state: Mapping[str, Any], file: str) -> TrainConfig:
        """Read the configuration in a checkpoint's state.json.

        Args:
            state: its content.
            file: its path or URL, for messages.

        Raises:
            ValueError: it has none, or one that is damaged.
        """
        try:
            return cls.from_json(json.dumps(state.get("config")))
        except ValueError as error:
            raise ValueError(f"{file} is damaged: config: {error}") from None


def tiny() -> TrainConfig:
    """A run of about two minutes on two CPU cores.

    Its batches are small, because its tokens are few, and β₂ averages over more of them than the published one. Its
    balance_speed is ten times the published one, because its few steps must suffice to balance the experts.
    """
    return TrainConfig()


def small() -> TrainConfig:
    """A run with about 100M parameters on one GPU."""
    return TrainConfig(
        preset="small",
        data="packages",
        steps=2000,
        checkpoint_every=500,
        validate_every=200,
        batch_size=32,
        sequence_length=1024,
        model=MODELS["small"](),
        optim=OptimConfig(lr=1e-3),
    )


def medium() -> TrainConfig:
    """A run with about 2B parameters on one GPU of 80 GB or more; the learning rate is DeepSeek-V2-Lite's.

    Its 105M tokens are fewer than four times the text of an environment that has torch and what octile needs.

    Source: DeepSeek-V2 (arXiv 2405.04434) appendix B.
    """
    return TrainConfig(
        preset="medium",
        data="packages",
        steps=800,
        checkpoint_every=400,
        validate_every=100,
        batch_size=32,
        micro_batches=4,
        sequence_length=4096,
        model=MODELS["medium"](),
        optim=OptimConfig(lr=4.2e-4),
    )


def published(preset: str) -> TrainConfig:
    """A run of a published model with DeepSeek-V3's schedule and a constant batch that fits one host.

    Like the published runs, it has sequences of 4,096 tokens and no YaRN, which extends the context afterwards.
    """
    model = MODELS[preset]()
    length = min(4096, model.max_position_embeddings)
    config = TrainConfig(
        preset=preset,
        data="packages",
        steps=1000,
        checkpoint_every=100,
        validate_every=50,
        batch_size=8,
        micro_batches=8,
        sequence_length=length,
        model=replace(model, rope_scaling=None, max_position_embeddings=length),
    )
    return published_schedule(config)


def published_schedule(config: TrainConfig, batch_ramp: bool = False) -> TrainConfig:
    """A configuration with DeepSeek-V3's schedule, scaled to its steps (arXiv 2412.19437 §4.2).

    Of the 14.8T tokens, the learning rate is 2.2e-4 up to 10T, after a warm-up of 2,000 steps. It falls along a cosine
    to 2.2e-5 over 4.3T, stays there for 333B, and is 7.3e-6 for the last 167B. The weight of multi-token prediction's
    loss is 0.3 up to 10T, then 0.1. γ is 0.001 up to 14.3T, then 0. A step has 15,360 sequences of 4,096 tokens; over
    the first 469B tokens their number grows from 3,072.

    Args:
        config: the configuration of a run; what the schedule does not determine stays.
        batch_ramp: whether the batch grows, too, from a fifth of batch_size.

    Raises:
        ValueError: the batch is to grow, and batch_size is not divisible by 5.
    """
    if batch_ramp and config.batch_size % 5:
        raise ValueError(f"batch_size must be divisible by 5 for the published ramp, not {config.batch_size}")
    ramp_tokens = 469e9 if batch_ramp else 0.0
    ramp_steps = ramp_tokens / (4096 * (3072 + 15360) / 2)

    def step(tokens: float) -> float:
        """The step after which a number of tokens was seen, once the batch has its full size."""
        return ramp_steps + (tokens - ramp_tokens) / (4096 * 15360)

    steps = step(14.8e12)
    optim = OptimConfig(
        lr=2.2e-4,
        warmup=2000 / steps,
        decay=(step(14.3e12) - step(10e12)) / steps,
        final_lr=0.1,
        tail=(step(14.633e12) - step(14.3e12)) / steps,
        last_tail=(steps - step(14.633e12)) / steps,
        last_lr=7.3e-6 / 2.2e-4,
        balance_speed=0.001,
        balance_end=step(14.3e12) / steps,
        mtp_change=step(10e12) / steps if config.model.num_nextn_predict_layers else 1.0,
        late_mtp_loss_weight=0.1,
    )
    if not batch_ramp:
        return replace(config, optim=optim)
    return replace(config, optim=optim, initial_batch_size=config.batch_size // 5, batch_ramp=ramp_steps / steps)


def preset(name: str) -> TrainConfig:
    """The configuration that a preset stands for.

    Raises:
        ValueError: there is no preset of that name.
    """
    if name not in MODELS:
        raise ValueError(f"unknown preset {name!r}; there are {', '.join(MODELS)}")
    own = {"tiny": tiny, "small": small, "medium": medium}
    return own[name]() if name in own else published(name)


RESUMABLE = {  # the settings that may differ when a run is resumed
    "steps",
    "checkpoints",
    "checkpoint_every",
    "validate_every",
    "log",
    "out",
    "device",
    "allow_slow",
    "prompt",
    "micro_batches",
    "skip_limit",
    "patience",
    "parallel",
}
COMPARE_RESUMABLE = {"device", "allow_slow", "out"}  # the same for a comparison
FILE_TEXTS = {"recipe_text": "recipe", "guards_text": "guards"}  # contents of a file: the setting that names it
OBSERVATION = {"telemetry_every", "telemetry_layers", "guards", "guards_text"}  # may differ if the run has no guards


def differences(before: TrainConfig, after: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """The settings that differ between two configurations, as {"optim.lr": (before, after)}."""
    old, new = dict(flatten(asdict(before))), dict(flatten(asdict(after)))
    names = dict.fromkeys((*old, *new))
    return {name: (old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)}


def changed_settings(saved: TrainConfig, requested: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """The settings that differ between a saved and a requested configuration, but may not when a run is resumed.

    Guards switch GEMMs, and telemetry is what they see, so both stay as they are. They may be added to a run that has
    no guards.
    """
    allowed = RESUMABLE if saved.guards is not None else RESUMABLE | OBSERVATION
    return {
        name: change for name, change in differences(saved, requested).items() if name.partition(".")[0] not in allowed
    }


def describe_changes(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """Changed settings in words: "seed is 1 instead of 0". Contents of files are not quoted."""
    words = [
        f"{name} is {shown(new)} instead of {shown(old)}"
        if name not in FILE_TEXTS
        else f"the file of {FILE_TEXTS[name]} has other contents"
        for name, (old, new) in changes.items()
        if FILE_TEXTS.get(name) not in changes
    ]
    return ", ".join(words)


def shown(value: Any) -> str:
    """A setting's value in a message, on one line."""
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return quoted(value) if isinstance(value, str) and value.split() != [value] else str(value)


def _as_option(name: str, value: Any) -> str:
    """A setting as an option of a command, such as "--optim.betas 0.9 0.95"."""
    if value is False:
        group, _, last = name.rpartition(".")
        name = f"{group}.no-{last}" if group else f"no-{last}"
    option = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return option
    if isinstance(value, tuple):
        return " ".join([option, *map(str, value)])
    return option_with_value(option, str(value))


def describe_settings(
    config: TrainConfig,
    first: tuple[str, ...] = ("preset", "recipe", "seed"),
    others: Container[str] | None = None,
) -> str:
    """A configuration in a line: the settings in `first`, and the others, or what differs from the preset's default.

    Not described is what a folder's config.json says besides the model's fields.
    """
    if others is None:
        others = differences(preset(config.preset) if config.preset in MODELS else TrainConfig(), config)
    other = {name: value for name, value in flatten(asdict(config)) if name in others}
    other = {name: value for name, value in other.items() if not name.startswith("model.extra")}
    shown = {name: getattr(config, name) for name in first} | other
    written = {name: " ".join(map(str, value)) if isinstance(value, tuple) else value for name, value in shown.items()}
    return ", ".join(f"{name} {written[name]}" for name in written if name not in ("out", "recipe_text", "guards_text"))


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The names and values of nested settings: {"optim": {"lr": 1}} gives ("optim.lr", 1)."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _read_rules(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(f"the file of rules {str(path)!r} does not exist")
    return read_text(path)
