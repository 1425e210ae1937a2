"""Experts spread over two ranks, to train and to generate: are log-probabilities those of one process, bit for bit?

    torchrun --nproc-per-node 2 -m tools.check_spread_bits tiny --device cpu    # gloo
    torchrun --nproc-per-node 2 -m tools.check_spread_bits small                # two GPUs

A trainer whose experts are spread takes some steps under the recipe `exact`, and its weights are written as a folder.
An engine over the same ranks samples texts, each rank its own, and gives the log-probabilities of prompts, too. A
trainer that begins with the folder, spread as well, and one process with the whole model compute those of these texts
again. The exit status is 1 if one of them has other bits.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import octile
from octile.lab.operators import count_equal
from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.conversion import apply_recipe
from octile.parallel.ranks import Ranks, join, leave
from octile.recipe import Recipe
from octile.serve.engine.config import CacheConfig, EngineConfig
from octile.serve.engine.config import ParallelConfig as ServedParallel
from octile.serve.engine.request import Sampling
from octile.serve.weights.load import Folder
from octile.tokenizer import Tokenizer
from octile.train.config import ParallelConfig, TrainConfig, preset
from octile.train.trainer import Trainer
from tools.random_run import random_store

N_RANKS, STEPS, NEW_TOKENS = 2, 12, 128


def write_folder(trainer: Trainer, tokenizer: Tokenizer, folder: Path, ranks: Ranks) -> None:
    """Write the weights of all ranks as one folder, by the first rank."""
    whole = {}
    for name, tensor in trainer.model.state_dict().items():
        if ".experts." in name:
            parts = [torch.empty_like(tensor) for _ in range(N_RANKS)]
            dist.all_gather(parts, tensor.contiguous())
            tensor = torch.cat(parts)
        whole[name] = tensor
    if ranks.is_first:
        model = DeepseekV3(trainer.config.model)
        model.load_state_dict(whole)
        apply_recipe(model, Recipe.exact())
        octile.save(model, folder)
        tokenizer.save(folder)
    dist.barrier()


def generate(
    folder: Path, vocabulary: int, n_texts: int, device: torch.device, rank: int
) -> list[tuple[list[int], Tensor]]:
    """Sample texts of this rank over all ranks: each with the log-probabilities of all its tokens but the first."""
    opened, parallel = Folder.open(folder), ServedParallel(ep=N_RANKS)
    opened.check_parallel(parallel, batch_invariant=True)
    engine, _ = opened.load_expert_parallel(
        device,
        EngineConfig(max_batch=32, max_step_tokens=1024, exact=True),
        CacheConfig(gib=1.0 if device.type == "cuda" else 0.05),
        parallel,
        dist.new_group(backend="gloo"),
    )
    if device.type == "cuda":
        engine.warm_up()
    tokens: dict[int, list[int]] = {}
    log_probs: dict[int, list[float]] = {}
    for i in range(n_texts):
        prompt = [(13 * i + 7 * j + 101 * rank) % vocabulary for j in range(1 + (37 * i + 11 * rank) % 200)]
        sampling = Sampling(NEW_TOKENS, 1.0, seed=1000 * rank + i, ignore_eos=True, logprobs=0, prompt_logprobs=0)
        number = engine.engine.add(prompt, sampling).id
        tokens[number], log_probs[number] = prompt, []
    while (outputs := engine.step()) is not None:
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
            tokens[output.request_id].extend(output.tokens)
            log_probs[output.request_id].extend(each.logprob for each in (*output.prompt_logprobs, *output.logprobs))
    engine.close()
    return [(tokens[number], torch.tensor(log_probs[number])) for number in tokens]


@torch.no_grad()
def compute(model: DeepseekV3, texts: list[tuple[list[int], Tensor]], device: torch.device) -> list[Tensor]:
    ids = (torch.tensor([tokens], device=device) for tokens, _ in texts)
    return [model.log_probs(each)[0].cpu() for each in ids]


def count_kinds(served: list[Tensor], trained: list[Tensor]) -> Iterator[tuple[int, int]]:
    """Yield for prompts and decoded tokens how many there are, and how many have equal bits."""
    for part in slice(-NEW_TOKENS), slice(-NEW_TOKENS, None):
        yield count_equal([each[part] for each in served], [each[part] for each in trained])[:2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", nargs="?", default="small")
    parser.add_argument("--texts", type=int, default=64, help="of each rank")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--exchange", default="auto", choices=["auto", "all_to_all", "symmetric_memory"])
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ranks = join(device, 120)
    config: TrainConfig = replace(
        preset(options.preset),
        recipe="exact",
        device=options.device,
        batch_size=4,
        micro_batches=1,
        sequence_length=512,  # the longest text fits: ranks have room for the tokens of a step
        val_sequences=4,
        parallel=ParallelConfig(N_RANKS, N_RANKS, exchange=options.exchange),
    )
    store = random_store(config.model.vocab_size, 64 * config.sequence_length)
    folder = Path(ranks.from_first(lambda: tempfile.mkdtemp(prefix="spread-"), str))
    trainer = Trainer(config, store, device, ranks=ranks)
    losses = [trainer.step()["loss"] for _ in range(STEPS)]
    model_config = trainer.config.model
    write_folder(trainer, store.tokenizer, folder, ranks)
    trainer.close()
    trainer.release_captured()
    texts = generate(folder, model_config.vocab_size, options.texts, device, ranks.rank)
    spread = Trainer(replace(config, init_from=folder, model=model_config), store, device, ranks=ranks)
    served = [log_probs for _, log_probs in texts]
    of_spread = compute(spread.model.eval(), texts, device)
    of_whole = compute(octile.load(folder, device=device), texts, device)
    spread.close()
    differs = False
    if ranks.is_first:
        print(f"{options.preset}, {STEPS} steps over {N_RANKS} ranks: loss {losses[0]:.4f} to {losses[-1]:.4f}")
    for label, a, b in (
        ("generation and training, both over two ranks", served, of_spread),
        ("generation over two ranks, training in one process", served, of_whole),
    ):
        counts = torch.tensor([*count_kinds(a, b)], dtype=torch.int64, device=device)
        dist.all_reduce(counts)
        shown = []
        for kind, (n, equal) in zip(("prompts", "decoded"), counts.tolist(), strict=True):
            differs |= equal != n
            shown.append(f"{kind} {equal:,} of {n:,}")
        if ranks.is_first:
            print(f"{label}, equal bits: {', '.join(shown)}", flush=True)
    if ranks.is_first:
        shutil.rmtree(folder)
    leave()
    sys.exit(differs)


if __name__ == "__main__":
    main()
