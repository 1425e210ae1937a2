"""torchtitan's trainer of its own DeepSeek-V3 model, as a peer of `octile train`. It imports torchtitan 0.2 lazily.

The trainer, the model, the optimizer, the loss, the compilation and the FP8 converters are torchtitan's, except for
octile's converter where it is measured. The batches are those of `octile train`.

Differences that remain:
    - torchtitan has no multi-token prediction and no sequence-wise balance loss, so octile is measured without them.
    - On one GPU torchtitan trains FP32 weights under BF16 autocast. Its AdamW has FP32 moments, octile's has BF16 ones.
    - torchtitan launches compiled kernels one by one; this version has no CUDA graphs.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from octile.bench.train.worker import Requests, Stopped
from octile.models.config import ModelConfig
from octile.train.config import TrainConfig
from octile.train.data.batches import Batches
from octile.train.data.token_store import TokenStore
from octile.train.run.folder import DATA

NAME = "octile_bench"  # of the model among torchtitan's
IGNORED = -100  # the label of a position that has no next token
COMPILED = (("model", "loss"), ("loss",))  # what torch.compile compiles; the second is what torchtitan's own runs do
CHECKPOINTING = ("none", "selective", "full")  # of activations, from fast to frugal
FLOAT8 = ("quantize.linear.float8", "quantize.grouped_mm.float8")  # converters of torchao
OCTILE = ("octile",)


def why_not(converters: Sequence[str]) -> str | None:
    """Return why torchtitan cannot be measured here with these converters, or None."""
    needed = ("torchtitan", "torchao") if converters == FLOAT8 else ("torchtitan",)
    missing = [name for name in needed if find_spec(name) is None]
    return f"{missing[0]} is not installed" if missing else None


def run(requests: Requests, config: TrainConfig, converters: Sequence[str]) -> None:
    """Train torchtitan's model of the same shape with its own loop.

    The model and the loss are compiled, and all activations are saved. If the GPU's memory does not suffice, those are
    saved that torchtitan's selective checkpointing saves, or none. If the compiled model fails, only the loss is
    compiled. The setting of the requests says which it is.

    Args:
        requests: what is measured.
        config: configuration of the run of `octile train` to compare with; the tokens are in its folder.
        converters: names of torchtitan's model converters: none, `FLOAT8` or `OCTILE`.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    attempts = [(compiled, mode) for compiled in COMPILED for mode in CHECKPOINTING]
    while attempts:
        compiled, mode = attempts.pop(0)
        requests.setting = f"compiled: {' and '.join(compiled)}, activation checkpointing: {mode}"
        try:
            train(requests, config, converters, compiled, mode)
        except Stopped:
            raise
        except torch.OutOfMemoryError as error:
            failure: Exception = error.with_traceback(None)
        except Exception as error:
            failure = error.with_traceback(None)
            attempts = [attempt for attempt in attempts if attempt[0] != compiled]  # less memory does not help
        if not attempts:
            raise failure
        print(f"torchtitan fails if {requests.setting}: {type(failure).__name__}: {failure}", file=sys.stderr)
        gc.collect()
        torch.cuda.empty_cache()
        torch._dynamo.reset()


def train(
    requests: Requests, config: TrainConfig, converters: Sequence[str], compiled: Sequence[str], checkpointing: str
) -> None:
    """Build torchtitan's trainer and run its loop."""
    from torchtitan.protocols import train_spec
    from torchtitan.train import Trainer

    class Measured(Trainer):
        def should_continue_training(self) -> bool:
            requests.before_step()
            return True

    spec = train_spec.get_train_spec("deepseek_v3")
    train_spec._extra_train_specs[NAME] = replace(
        spec,
        model_args={NAME: model_args(config)},
        build_tokenizer_fn=None,
        build_dataloader_fn=lambda **_: Loader(config),
    )
    Measured(job_config(config, converters, compiled, checkpointing)).train()


def model_args(config: TrainConfig) -> Any:
    """Return the arguments of torchtitan's model for a configuration of octile."""
    from torchtitan.models.deepseek_v3 import DeepSeekV3ModelArgs
    from torchtitan.models.moe import MoEArgs

    m: ModelConfig = config.model
    experts = MoEArgs(
        num_experts=m.n_routed_experts,
        num_shared_experts=m.n_shared_experts,
        top_k=m.num_experts_per_tok,
        score_func=m.scoring_func,
        route_norm=m.norm_topk_prob,
        route_scale=m.routed_scaling_factor,
        num_expert_groups=m.n_group if m.n_group > 1 else None,
        num_limited_groups=m.topk_group if m.n_group > 1 else None,
        score_before_experts=False,
        load_balance_coeff=config.optim.balance_speed,
    )
    return DeepSeekV3ModelArgs(
        vocab_size=m.vocab_size,
        dim=m.hidden_size,
        inter_dim=m.intermediate_size,
        moe_inter_dim=m.moe_intermediate_size,
        n_layers=m.num_hidden_layers,
        n_dense_layers=m.first_k_dense_replace,
        n_heads=m.num_attention_heads,
        norm_eps=m.rms_norm_eps,
        moe_args=experts,
        q_lora_rank=m.q_lora_rank or 0,
        kv_lora_rank=m.kv_lora_rank,
        qk_nope_head_dim=m.qk_nope_head_dim,
        qk_rope_head_dim=m.qk_rope_head_dim,
        v_head_dim=m.v_head_dim,
        rope_theta=m.rope_theta,
    )


def job_config(config: TrainConfig, converters: Sequence[str], compiled: Sequence[str], checkpointing: str) -> Any:
    """Return torchtitan's configuration of a run with its own defaults for what octile's does not name."""
    from torchtitan.config import JobConfig

    job, optim = JobConfig(), config.optim
    job.job.dump_folder = f"{config.out}-torchtitan"
    job.model.name = job.model.flavor = NAME
    job.optimizer.lr, job.optimizer.weight_decay = optim.lr, optim.weight_decay
    job.optimizer.beta1, job.optimizer.beta2 = optim.betas
    job.lr_scheduler.warmup_steps = max(1, round(optim.warmup * config.steps))
    job.training.local_batch_size = config.batch_size // config.micro_batches
    job.training.global_batch_size = config.batch_size
    job.training.seq_len = config.sequence_length
    job.training.max_norm = optim.clip
    job.training.steps = config.steps
    job.activation_checkpoint.mode = checkpointing
    job.activation_checkpoint.selective_ac_option = "op"
    job.compile.enable, job.compile.components = True, list(compiled)
    job.debug.seed = config.seed
    job.model.converters = list(converters)
    if converters == OCTILE:
        job.experimental.custom_import = "octile.integrations.torchtitan"
    elif converters == FLOAT8:  # as in torchtitan's configurations of DeepSeek-V3
        job.quantize.linear.float8.filter_fqns = ["output", "router.gate"]
        job.quantize.grouped_mm.float8.fqns = ["moe.experts"]
    return job


class Loader:
    """The batches of `octile train` as torchtitan's loader yields them: {"input": [B, S]} and labels [B, S].

    Every token of a window is an input, as in octile. The last one has no label.
    """

    def __init__(self, config: TrainConfig):
        assert config.out is not None
        tokens = TokenStore.open(config.out / DATA).train
        self._config = config
        self._batches = Batches(tokens, config.batch_size, config.sequence_length - 1, config.seed)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for step in range(self._config.steps):
            for tokens_BS in self._batches.batch(step).chunk(self._config.micro_batches):
                labels_BS = torch.nn.functional.pad(tokens_BS[:, 1:], (0, 1), value=IGNORED)
                yield {"input": tokens_BS}, labels_BS

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the run is not continued."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ignore the state."""
