"""Everything that decides a training run, as plain data; imports no torch, so the command line answers at once."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from octile.models.config import PRESETS as MODELS
from octile.models.config import ModelConfig, RopeScaling

LARGEST_SEED = 2**63 - 1  # what a checkpoint can hold


@dataclass(frozen=True)
class OptimConfig:
    """AdamW, its schedule and the balance of the experts.

    Attributes:
        lr: the peak of the learning rate.
        warmup: share of the steps in which the rate rises to its peak.
        decay: share of the steps, at the end, in which it falls along a cosine.
        final_lr: the rate at the end, as a share of the peak.
        weight_decay: AdamW's decoupled decay.
        betas: of AdamW's two moments.
        clip: the gradient's largest norm.
        balance_speed: γ, how far a gate's bias moves a step.
        ema_decay: of the moving average of the weights that is kept on the CPU; 0 keeps none.
    """

    lr: float = 2.2e-4
    warmup: float = 0.05
    decay: float = 0.4
    final_lr: float = 0.1
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    balance_speed: float = 0.001
    ema_decay: float = 0.0

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "balance_speed"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"optim.{name} must be at least 0, not {getattr(self, name)}")
        for name in ("warmup", "decay", "final_lr"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"optim.{name} must be a share from 0 to 1, not {getattr(self, name)}")
        if not self.warmup + self.decay <= 1:
            raise ValueError(f"optim.warmup {self.warmup} and optim.decay {self.decay} are together more than the run")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optim.betas must be from 0 to below 1, not {self.betas}")
        if not self.clip > 0:
            raise ValueError(f"optim.clip must be above 0, not {self.clip}")
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"optim.ema_decay must be from 0 to below 1, not {self.ema_decay}")


@dataclass(frozen=True)
class TrainConfig:
    """A training run.

    Attributes:
        preset: where the defaults come from: tiny (two CPU cores), small (one GPU), v2_lite_16b, v2_236b, v3_671b.
        recipe: the number formats: deepseek_v3, bf16, float32, per_tensor, delayed, hybrid_e5m2, global_scale,
            fp16_loss_scaling, fp8_lm, smooth_swiglu or int8_tiles; or a .toml file with exceptions for single layers.
        data: a text file, a folder, hf:NAME (a Hugging Face dataset), or stdlib: the source of Python's library.
        init_from: a run or a Hugging Face folder, FP8 or BF16, whose weights and tokenizer the run begins with, instead
            of drawn ones; the model's shape is then that folder's.
        steps: optimizer steps.
        seed: of the initial weights and the order of the data.
        out: the run's folder; chosen under runs/ if not given.
        checkpoint_every: steps between checkpoints; 0 writes only the last.
        validate_every: steps between measurements on held-out text.
        batch_size: sequences a step.
        micro_batches: pieces a step's batch is cut into, to save memory.
        sequence_length: tokens a sequence.
        skip_limit: steps in a row that change no weight, because a gradient is NaN or Inf, before the run stops.
        val_sequences: held-out sequences that are measured.
        device: auto takes a GPU where there is one.
        deterministic: two runs give the same bits on a GPU too, and take longer; on a CPU they always do.
        prompt: what the sample at the end continues.
        model: its shape.
        optim: the optimizer.
        recipe_text: what a .toml file said when the run began; the run is trained by that, whatever became of the file.
    """

    preset: str = "tiny"
    recipe: str = "deepseek_v3"
    data: str = "stdlib"
    init_from: Path | None = None
    steps: int = 500
    seed: int = 0
    out: Path | None = None
    checkpoint_every: int = 100
    validate_every: int = 50
    batch_size: int = 8
    micro_batches: int = 1
    sequence_length: int = 128
    skip_limit: int = 10
    val_sequences: int = 128
    device: Literal["auto", "cpu", "cuda"] = "auto"
    deterministic: bool = False
    prompt: str = "def "
    model: ModelConfig = field(default_factory=MODELS["tiny"])
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=2e-3, balance_speed=0.01))
    recipe_text: str | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "micro_batches", "sequence_length", "val_sequences", "validate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("seed", "checkpoint_every", "skip_limit"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, but is {getattr(self, name)}")
        if self.seed > LARGEST_SEED:
            raise ValueError(f"seed must be below 2**63, not {self.seed}")
        if not self.data.strip():
            raise ValueError("data is empty: name a text file, a folder, hf:NAME or stdlib")
        if self.sequence_length < self.shortest_sequence:
            raise ValueError(
                f"sequence_length must be at least {self.shortest_sequence} for this model, not {self.sequence_length}"
            )
        if self.batch_size % self.micro_batches:
            raise ValueError(f"batch_size {self.batch_size} must be divisible by micro_batches {self.micro_batches}")
        if self.sequence_length > self.model.max_position_embeddings:
            raise ValueError(
                f"sequence_length {self.sequence_length} exceeds the model's max_position_embeddings, "
                f"{self.model.max_position_embeddings}"
            )

    @property
    def shortest_sequence(self) -> int:
        """Tokens that a loss needs: one, the next one, and with multi-token prediction the one after that."""
        return 3 if self.model.num_nextn_predict_layers else 2

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, default=str) + "\n"

    @classmethod
    def from_json(cls, text: str) -> TrainConfig:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: it is not such a text.
        """
        try:
            values: dict[str, Any] = json.loads(text)
            model = values.pop("model")
            rope = model.pop("rope_scaling")
            optim = values.pop("optim")
            out, init_from = values.pop("out"), values.pop("init_from", None)
            return cls(
                **values,
                out=None if out is None else Path(out),
                init_from=None if init_from is None else Path(init_from),
                model=ModelConfig(**model, rope_scaling=RopeScaling(**rope) if rope else None),
                optim=OptimConfig(**{**optim, "betas": tuple(optim["betas"])}),
            )
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a run's configuration: {error}") from None


def tiny() -> TrainConfig:
    """Three to four minutes on two CPU cores. Few steps balance the experts, so each is ten times the published one."""
    return TrainConfig()


def small() -> TrainConfig:
    """About 100M parameters on one GPU."""
    return TrainConfig(
        preset="small",
        steps=2000,
        checkpoint_every=500,
        validate_every=200,
        batch_size=32,
        sequence_length=1024,
        model=MODELS["small"](),
        optim=OptimConfig(lr=1e-3),
    )


def published(preset: str) -> TrainConfig:
    """A published model with DeepSeek-V3's hyper-parameters, and a batch that one host may hold."""
    return TrainConfig(
        preset=preset,
        steps=1000,
        batch_size=8,
        micro_batches=8,
        sequence_length=4096,
        model=MODELS[preset](),
        optim=OptimConfig(),
    )


def preset(name: str) -> TrainConfig:
    """The run of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in MODELS:
        raise ValueError(f"unknown preset {name!r}; there are {', '.join(MODELS)}")
    if name in ("tiny", "small"):
        return {"tiny": tiny, "small": small}[name]()
    return published(name)


RESUMABLE = {  # may differ when resumed
    *("steps", "checkpoint_every", "validate_every", "out", "device", "prompt", "micro_batches", "skip_limit"),
}


def changed(saved: TrainConfig, asked: TrainConfig) -> list[str]:
    """The settings in which a resumed run would differ from what was saved, and may not."""
    fields = (f.name for f in dataclasses.fields(TrainConfig))
    return [name for name in fields if name not in RESUMABLE and getattr(saved, name) != getattr(asked, name)]
