"""`octile eval`: the losses of the models in folders, on the same sequences of a text.

The forward pass is that of a validation of `octile train`. A folder's own recipe is that of its FP8 weights, or BF16
where it has none. Other recipes compute with its weights, too, in the recipe's formats.

Shapes: B sequences of S tokens at a time, N in all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from octile.checkpoint.fp8_layout import is_scale, with_scales_as_announced
from octile.checkpoint.hugging_face import OpenFolder, load, open_folder
from octile.models.counts import count_parameters
from octile.models.deepseek_v3 import DeepseekV3
from octile.models.meta import meta_model
from octile.nn.conversion import apply_recipe
from octile.nn.precision import forward_precision
from octile.nn.weight_cache import frozen_weights
from octile.recipe import Recipe
from octile.report.evaluation import EvaluatedModel, Evaluation
from octile.serve.weights.load import Folder
from octile.text import format_bytes
from octile.tokenizer import Tokenizer
from octile.train.data.corpus import find_token_store
from octile.train.data.packed_tokens import count_labels, is_packed
from octile.train.evaluation.text import Sequences
from octile.train.memory.device import available_memory, is_out_of_memory
from octile.train.step.passes import token_losses

OWN = "own"  # as the name of a recipe: that of a folder's weights
TOKENS_AT_ONCE = 4096  # of a forward pass, unless a sequence is longer
STORED_NAMES = {"F8_E4M3": "FP8", "F16": "FP16", "F32": "FP32"}


@dataclass(frozen=True, eq=False)
class ModelFolder:
    """A folder to evaluate, whose small files and headers are read, and whose weights are not.

    Attributes:
        name: the folder, as it was named.
        path: the Hugging Face folder: itself or, of a run, its `model/`.
        tokenizer: its tokenizer.
        opened: its headers and config.json.
        model: the model on the meta device.
    """

    name: str
    path: Path
    tokenizer: Tokenizer
    opened: OpenFolder
    model: DeepseekV3

    @classmethod
    def open(cls, path: Path) -> ModelFolder:
        """Open a run folder or a Hugging Face folder.

        Raises:
            FileNotFoundError: there is no model or no tokenizer.
            ValueError: a file is damaged, octile does not load such a model, a tensor is missing or of another shape
                than config.json says, or the tokenizer is that of another model.
        """
        folder, opened = Folder.open(path), open_folder(path)
        return cls(str(path), folder.path, folder.tokenizer, opened, opened.meta_model())

    @property
    def context(self) -> int:
        """The tokens that a sequence may have."""
        return self.model.config.max_position_embeddings

    @property
    def own_recipe(self) -> Recipe:
        """The recipe of the FP8 weights; BF16 where there are none."""
        return self.opened.recipe() if self.opened.fp8_layers() else Recipe.bf16()

    @property
    def run_data(self) -> Path | None:
        """The token store of the run whose model this is; None if it is of no run, or of one whose data are gone."""
        run = self.path.parent
        return find_token_store(run / "data") if (run / "metrics.jsonl").exists() else None

    def recipe(self, name: str) -> Recipe:
        """Return a recipe by its name. Weights get scales as the folder's: powers of two if it announces them.

        Raises:
            ValueError: there is no such recipe, this model cannot have it, or it needs what a folder does not hold.
            FileNotFoundError: the recipe's file does not exist.
        """
        if name == OWN:
            return self.own_recipe
        recipe = Recipe.named(name)
        if recipe.has_delayed_scaling:
            raise ValueError(
                f"recipes has {name}, whose scales come from past steps of training, which a folder of weights does "
                "not hold: per_tensor takes them from the tensors themselves"
            )
        apply_recipe(meta_model(self.model.config), recipe)
        return with_scales_as_announced(recipe, self.model.config.extra)

    def check_packed(self, recipes: Iterable[Recipe]) -> None:
        """Refuse packed sequences where a recipe, or the model, does not know the borders of texts in them.

        Raises:
            ValueError: one of the recipes or the model does not.
        """
        exact = next((recipe for recipe in recipes if recipe.batch_invariant), None)
        if exact is not None or self.model.config.has_indexer:
            what = "its indexer does" if exact is None else f"recipe {exact.name} does"
            raise ValueError(
                f"data holds packed examples, on which {self.name} is not evaluated: {what} not know the borders of "
                "texts that share a sequence"
            )

    def check_memory(self, recipes: Iterable[Recipe], device: torch.device) -> None:
        """Refuse a model whose FP32 weights exceed the memory that is available.

        Those that a recipe quantizes to 8 bits are in it in addition, whatever the folder holds.

        Args:
            recipes: in which it is evaluated, one after the other.
            device: where to compute.

        Raises:
            ValueError: they do.
        """
        bf16 = 2 if device.type == "cuda" else 0  # autocast caches them, besides FP32
        copies = max(bf16 if recipe.formats is None else 1 for recipe in recipes)
        needed = sum((4 + copies) * parameter.numel() for parameter in self.model.parameters())
        available = available_memory(device)
        if needed > available:
            raise ValueError(
                f"the weights of {self.name} take {format_bytes(needed)}, but {format_bytes(available)} are available "
                f"on the {device.type}: an evaluation computes with FP32 weights, as training does"
            )

    def describe(self) -> EvaluatedModel:
        """Return what a report says of the model."""
        specs, sizes = self.opened.shards.specs, Counter[str]()
        for name, spec in specs.items():
            if not is_scale(name, specs):
                sizes[STORED_NAMES.get(spec.dtype, spec.dtype)] += spec.numel
        counts, total = count_parameters(self.model.config), sizes.total()
        shares = {name: size / total for name, size in sizes.most_common()}
        return EvaluatedModel(self.name, counts.total, counts.active, shares)

    def evaluate(
        self,
        sequences: Sequences,
        recipes: Mapping[str, Recipe],
        device: torch.device,
        advance: Callable[[int], object],
    ) -> Iterator[Evaluation]:
        """Read the weights, and yield the losses under each recipe.

        Args:
            sequences: sequences of a text that was encoded by this tokenizer.
            recipes: by their names, as of `recipe`; OWN only as the first.
            device: where to compute.
            advance: called with the number of sequences that were evaluated since the last call.

        Raises:
            FloatingPointError: a loss is NaN or Inf.
            MemoryError: there is no memory for a sequence.
            ValueError: a file is damaged.
        """
        described = self.describe()
        model = load(self.path, torch.float32, device)
        for name, recipe in recipes.items():
            if name != OWN or recipe.formats is None:  # otherwise `load` has applied it, to the FP8 layers only
                apply_recipe(model, recipe)
            with _explaining_memory(device, sequences), forward_precision(device, recipe.compute):
                sums, labels = _losses(model.eval(), sequences, device, advance)
            evaluation = Evaluation(described, recipe.name if name == OWN else name, name == OWN, sums, labels)
            if not np.isfinite(sums).all():
                raise FloatingPointError(
                    f"the loss of {self.name} is not finite under recipe {evaluation.recipe}: a weight is damaged, or "
                    "the training diverged"
                )
            yield evaluation


@torch.no_grad()
def _losses(
    model: DeepseekV3, sequences: Sequences, device: torch.device, advance: Callable[[int], object]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the summed losses float64 [N] and the predicted tokens int64 [N] of each sequence."""
    sums, labels = list[np.ndarray](), list[int]()
    with frozen_weights(model):
        for batch in sequences.read(max(1, TOKENS_AT_ONCE // sequences.sequence_length)):
            losses_BS = token_losses(model, batch.to(device), sequences.text.statistics)
            sums.append(losses_BS.double().sum(1).cpu().numpy())
            labels += [int(count_labels(each[None])[0]) if is_packed(batch) else each.numel() - 1 for each in batch]
            advance(len(batch))
    return np.concatenate(sums), np.array(labels)


@contextmanager
def _explaining_memory(device: torch.device, sequences: Sequences) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        length, advice = sequences.sequence_length, "the model is too large for it"
        if length > TOKENS_AT_ONCE:  # shorter ones are read together
            advice = f"use a smaller --sequence-length (now {length:,}), or a smaller model"
        raise MemoryError(f"out of memory on the {device.type}: {advice}") from error
