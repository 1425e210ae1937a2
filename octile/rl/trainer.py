"""The trainer: a model, its engine, its reference and its optimizer in one process; and its steps.

A step samples G completions of each of P prompts, scores them, takes optimizer steps on them, and gives the engine the
new weights. It depends on the weights, the moments and the step's number alone, so that a run that is saved, killed and
loaded continues with the same bits.

The biases of gates stay as they are, and no balance loss is added: groups of completions are no sample of the text that
experts were balanced on.

Shapes: B completions, T tokens, P prompts, G completions of each.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octile.checkpoint.hugging_face import load
from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.linear import recipe_of
from octile.ops.high_precision import without_reduced_precision_reduction
from octile.optim import AdamW, clip_factor, param_groups
from octile.optim.gradient import added_in_place, gradient_norm
from octile.recipe import OptimizerFormats
from octile.report.run.lines import Record
from octile.rl.batch import Batch, compare_log_probs, estimate_kl, make_batch
from octile.rl.config import RLConfig
from octile.rl.grpo import completion_mean, group_advantages, importance_weights, token_losses
from octile.rl.prompts import Prompts
from octile.rl.rewards import Rewards
from octile.rl.sample import Completion, sample_groups, sampling_seeds
from octile.serve.engine.config import EngineConfig
from octile.serve.engine.engine import Engine
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.weights.live import LiveWeights
from octile.serve.weights.load import Folder
from octile.train.state import load_moments, parts_of, state_tensors

BETAS = 0.9, 0.95
WEIGHT_DECAY = 0.0  # of the policy, which the reference draws to itself
MAX_NORM = 1.0  # to which gradients are clipped
MAX_BATCH = 256  # completions that the engine decodes at once


class ScoredCompletion(NamedTuple):
    """A completion, and its reward."""

    completion: Completion
    reward: float


class RLTrainer:
    """A policy and everything that trains it.

    Args:
        config: the configuration of the run.
        folder: the model that the run begins with, in Hugging Face's layout.
        prompts, rewards: what is asked, and how completions are scored.
        device: the device of the model.

    Attributes:
        model: the policy.
        is_exact: whether the engine's log-probabilities have the bits of the trainer's.
        steps_done: the steps that were taken.
        is_between_steps: whether the weights are those after these steps: not from the first optimizer step of the next
            one to its end.
        seconds, tokens: what they have taken, and how many tokens they have sampled.
        last: the completions of the last step.

    Raises:
        FileNotFoundError: there is no model or no tokenizer.
        ValueError: a file is damaged, the model cannot be served as it is trained, or the longest prompt and
            `max_new_tokens` exceed its context.
    """

    def __init__(self, config: RLConfig, folder: Path, prompts: Prompts, rewards: Rewards, device: torch.device):
        self.config, self.device = config, device
        self._prompts, self._rewards = prompts, rewards
        opened = Folder.open(folder)
        longest = longest_prompt(opened, prompts)
        check_length(opened, longest, config.max_new_tokens)
        self.model = load(folder, device=device).train()
        self._reference = load(folder, device=device).requires_grad_(False) if config.kl_coefficient else None
        recipe = recipe_of(self.model)
        self.optimizer = AdamW(
            param_groups(self.model, WEIGHT_DECAY),
            lr=config.lr,
            betas=BETAS,
            formats=OptimizerFormats() if recipe is None else recipe.optimizer,
        )
        self.is_exact = recipe is not None and recipe.batch_invariant
        count = min(config.prompts_per_step * config.group_size, MAX_BATCH)
        pages = 1 + -(-(longest + config.max_new_tokens) // ModelRunner.page_size)  # the engine keeps one free
        runner = ModelRunner(
            LiveWeights(self.model),
            count * pages,
            "fp8" if recipe is not None and recipe.latents == "fp8" else None,
            count,
            batch_invariant=self.is_exact,
        )
        self._tokenizer = opened.tokenizer
        self.engine = Engine(runner, opened.tokenizer, EngineConfig(count), end_tokens=opened.generation.end_tokens)
        self.steps_done, self.seconds, self.tokens = 0, 0.0, 0
        self.is_between_steps = True
        self.last: list[ScoredCompletion] = []

    def step(self) -> Record:
        """Take a step and return its metrics.

        Raises:
            FloatingPointError: logits or gradients are not finite; the weights are those before the optimizer step.
            RuntimeError, TypeError, ValueError: as for `Rewards`.
        """
        config, begin = self.config, time.perf_counter()
        prompts = self._prompts.of_step(self.steps_done, config.prompts_per_step)
        completions = sample_groups(
            self.engine,
            self._tokenizer,
            prompts,
            config.group_size,
            config.max_new_tokens,
            sampling_seeds(config.seed, self.steps_done, len(prompts) * config.group_size),
        )
        sampled = time.perf_counter()
        values = [self._rewards(c.prompt.prompt, c.text, c.prompt.answer) for c in completions]
        rewards_PG = torch.tensor([each["reward"] for each in values]).view(len(prompts), -1)
        batch = make_batch(completions, group_advantages(rewards_PG).flatten(), self.device)
        trained = self._train(batch)
        self.engine.update_weights()
        end = time.perf_counter()
        self.steps_done += 1
        self.is_between_steps = True
        self.seconds += end - begin
        self.tokens += trained["delta_tokens"]
        self.last = [ScoredCompletion(c, each["reward"]) for c, each in zip(completions, values, strict=True)]
        return {
            "step": self.steps_done,
            **{name: fmean(each[name] for each in values) for name in ("reward", *self._rewards.parts)},
            "reward_std": float(rewards_PG.std(1, correction=0).mean()),
            "equal_groups": float((rewards_PG == rewards_PG[:, :1]).all(1).float().mean()),
            "length": fmean(len(c.tokens) for c in completions),
            "cut_off": fmean(not c.is_ended for c in completions),
            **trained,
            "tokens": self.tokens,
            "sampling_seconds": sampled - begin,
            "training_seconds": end - sampled,
            "seconds": self.seconds,
        }

    def _train(self, batch: Batch) -> Record:
        """Take the optimizer steps on a batch, and return what they measure."""
        config = self.config
        parts = [part.split(config.micro_batches) for part in batch.split(config.updates)]
        # with one optimizer step the old log-probabilities are those of its own forward pass
        olds = None
        if config.updates > 1:
            olds = [[_no_grad_log_probs(self.model, part) for part in group] for group in parts]
        sums: dict[str, float] = defaultdict(float)
        differences: list[tuple[Tensor, Tensor]] = []
        for number, group in enumerate(parts):
            count = sum(len(part.tokens) for part in group)
            for index, part in enumerate(group):
                with added_in_place(self.model.parameters()):
                    new_BT = self.model.log_probs(part.tokens)
                    old_BT = new_BT.detach() if olds is None else olds[number][index]
                    differences.append((part.engine[part.mask], old_BT[part.mask]))
                    loss = self._loss(part, new_BT, old_BT, sums) * (len(part.tokens) / count)
                    with without_reduced_precision_reduction():
                        loss.backward()
            norm = gradient_norm([p for g in self.optimizer.param_groups for p in g["params"]]).norm
            if not math.isfinite(float(norm)):
                raise FloatingPointError(f"the gradient is not finite at step {self.steps_done + 1}")
            self.is_between_steps = False
            self.optimizer.step(gradient_scale=clip_factor(norm, MAX_NORM))
            self.optimizer.zero_grad()
            sums["grad_norm"] += float(norm) / config.updates
        engine_N, own_N = map(torch.cat, zip(*differences, strict=True))
        difference = compare_log_probs(engine_N, own_N)
        tokens, limit = difference.tokens, config.importance_limit
        return {
            **({"kl": sums["kl"] / tokens} if self._reference is not None else {}),
            "entropy": sums["entropy"] / tokens,
            "clipped": sums["clipped"] / tokens,
            **({} if limit is None else {name: sums[name] / tokens for name in ("weight_mean", "weight_truncated")}),
            "grad_norm": sums["grad_norm"],
            **{f"delta_{name}": value for name, value in difference._asdict().items()},
            "delta_kl": estimate_kl(engine_N, own_N),
        }

    def _loss(self, part: Batch, new_BT: Tensor, old_BT: Tensor, sums: dict[str, float]) -> Tensor:
        """Compute the loss of a micro-batch, and add what is measured of its tokens."""
        config, mask_BT = self.config, part.mask
        limit = config.importance_limit
        weights_BT = None if limit is None else importance_weights(old_BT, part.engine, limit)
        found = token_losses(
            new_BT,
            old_BT,
            part.advantages,
            config.clip,
            reference_BT=None if self._reference is None else _no_grad_log_probs(self._reference, part),
            kl_coefficient=config.kl_coefficient,
            weights_BT=weights_BT,
        )
        sums["clipped"] += float(found.is_clipped[mask_BT].sum())
        sums["entropy"] -= float(old_BT[mask_BT].double().sum())
        if weights_BT is not None:
            sums["weight_mean"] += float(weights_BT[mask_BT].double().sum())
            sums["weight_truncated"] += float((weights_BT[mask_BT] == weights_BT.new_tensor(limit)).sum())
        if found.kl is not None:
            sums["kl"] += float(found.kl.detach()[mask_BT].double().sum())
        return completion_mean(found.loss, mask_BT)

    def texts(self) -> list[dict[str, Any]]:
        """Return the first completion of each prompt of the last step, with its reward, for JSON."""
        firsts = self.last[:: self.config.group_size]
        return [
            {"prompt": c.prompt.prompt, "completion": c.text, "answer": c.prompt.answer, "reward": reward}
            for c, reward in firsts
        ]

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the state on which later steps depend: tensors, and values for JSON."""
        values = {"steps_done": self.steps_done, "seconds": self.seconds, "tokens": self.tokens}
        return state_tensors(self.model, self.optimizer), values

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Restore the result of `state`.

        Raises:
            ValueError, RuntimeError: it is that of another model.
        """
        parts = parts_of(tensors, "model", "optimizer")
        self.model.load_state_dict(parts["model"])
        load_moments(self.optimizer, parts["optimizer"])
        self.steps_done, self.seconds, self.tokens = state["steps_done"], state["seconds"], state["tokens"]
        self.engine.update_weights()


@torch.no_grad()
def _no_grad_log_probs(model: DeepseekV3, part: Batch) -> Tensor:
    return model.log_probs(part.tokens)


def longest_prompt(folder: Folder, prompts: Prompts) -> int:
    """Return the tokens of the longest prompt, with those that begin it."""
    tokenizer, longest = folder.tokenizer, prompts.longest()
    texts = tokenizer.encode_batch([prompt.prompt for prompt in longest if prompt.tokens is None])
    conversations = [len(prompt.tokens) for prompt in longest if prompt.tokens is not None]
    return max(1, *(len(tokenizer.prefix) + len(text) for text in texts), *conversations)


def check_length(folder: Folder, longest: int, max_new_tokens: int) -> None:
    """Refuse completions that do not fit into the context of a model.

    Raises:
        ValueError: they do not.
    """
    context = folder.model.max_position_embeddings
    if longest >= context:
        raise ValueError(
            f"prompts must leave room for completions in the model's context of {context} tokens, but the longest has "
            f"{longest}"
        )
    if longest + max_new_tokens > context:
        raise ValueError(
            f"max_new_tokens must be at most {context - longest} after the longest prompt of {longest} tokens in the "
            f"model's context of {context}, not {max_new_tokens}"
        )
