"""Counts steps, waits of the host and accepted drafts of 8 requests with two drafts each, of which some have a grammar.

    python benchmarks/history/serve/divided_steps.py --data TEXTS
    octile train --data TEXTS --steps 400 --model.num-nextn-predict-layers 1 --out RUN
    python benchmarks/history/serve/divided_steps.py RUN

It runs on a CPU, where no step is launched ahead in fact: they are counted as on a GPU. Of each pair of rows the first
one has steps that are collected at once.
"""

import json
import random
import sys
from collections import Counter
from pathlib import Path

import octile
from octile.serve.engine import drafts, sampler
from octile.serve.engine.config import EngineConfig
from octile.serve.engine.engine import Engine
from octile.serve.engine.grammar import json_schema
from octile.serve.engine.request import Sampling
from octile.serve.runner.batch import DecodedTokens
from octile.serve.runner.model_runner import ModelRunner
from octile.tokenizer import Tokenizer

N_REQUESTS, N_DRAFTS, NEW_TOKENS = 8, 2, 40
STRING = {"type": "string", "maxLength": 12}
LIKELY = {"name": STRING, "age": {"type": "integer"}, "city": STRING, "tags": {"type": "array", "items": STRING}}
UNLIKELY = {"person": STRING, "years": {"type": "integer"}, "place": STRING}
waits = Counter[str]()


def grammar(properties):
    fields = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"grammar": json_schema(fields)}


def count_calls(owner, name):
    call = getattr(owner, name)

    def counted(*arguments):
        waits["host"] += 1
        return call(*arguments)

    setattr(owner, name, counted)


def write_data(path):
    draw, lines = random.Random(0), []
    for _ in range(20_000):
        name = draw.choice(["Ada", "Bob", "Cleo", "Dan", "Eve", "Finn"])
        age, city = draw.randint(10, 99), draw.choice(["Rome", "Oslo", "Lima", "Bern"])
        lines.append(json.dumps({"name": name, "age": age, "city": city, "tags": draw.sample([*"abcd"], 2)}))
    Path(path).write_text("\n".join(lines) + "\n")


def main(run):
    model, tokenizer = octile.load(run), Tokenizer.load(f"{run}/model")
    for owner, name in (
        (DecodedTokens, "wait"), (drafts, "choose_each"), (sampler, "choose_each"), (sampler, "log_probabilities")
    ):  # fmt: skip
        count_calls(owner, name)
    ways = {
        "nothing": {},
        "the grammar of the data": grammar(LIKELY),
        "another grammar": grammar(UNLIKELY),
        "frequency_penalty 0.5": {"frequency_penalty": 0.5},
        "logprobs 2": {"logprobs": 2},
    }
    print("has                      requests  ahead   steps  ahead  waits a step  accepted of drafted  tokens a pass")
    for name, fields in ways.items():
        for n_having in (1, N_REQUESTS):
            for ahead in (False, True):
                runner = ModelRunner(model, 64, n_drafts=N_DRAFTS)
                runner.max_ahead, runner.runs_ahead = N_REQUESTS, ahead
                limits = EngineConfig(max_batch=N_REQUESTS, max_step_tokens=256, n_drafts=N_DRAFTS)
                made = Engine(runner, tokenizer, limits)
                made.compiles_in_background = False
                waits.clear()
                requests = [
                    made.add(
                        tokenizer.encode_prompt("\n"),
                        Sampling(NEW_TOKENS, 1.0, seed=i, ignore_eos=True, **(fields if i < n_having else {})),
                    )
                    for i in range(N_REQUESTS)
                ]
                steps = None
                while made.has_work:
                    made.step()
                    if steps is None and any(r.finish_reason is not None for r in requests[:n_having]):
                        steps, counted = made.stats(), waits["host"]  # while all that have it run
                having = requests[:n_having]
                generated, drafted, accepted = (
                    sum(numbers)
                    for numbers in zip(
                        *((r.n_generated, r.drafted_tokens, r.accepted_tokens) for r in having), strict=True
                    )
                )
                per_pass = generated / (generated - accepted)
                print(
                    f"{name:24} {n_having:8}  {ahead!s:6} {steps.steps:6} {steps.steps_ahead:6} "
                    f"{counted / steps.steps:13.1f} {accepted:9} of {drafted:5} {per_pass:17.2f}"
                )


if __name__ == "__main__":
    if sys.argv[1] == "--data":
        write_data(sys.argv[2])
    else:
        main(sys.argv[1])
