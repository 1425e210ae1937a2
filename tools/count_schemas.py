"""Count the JSON schemas of a folder whose answers are valid: a model with random logits generates JSON for each.

    python -m tools.count_schemas FOLDER --count 500

FOLDER has schemas as JSON files, at any depth, such as the folder `data` of JSONSchemaBench
(https://github.com/guidance-ai/jsonschemabench). Of each a text of at most 1,000 tokens is sampled in which tokens that
close something are likelier. A text that has ended is compared with its schema by the package jsonschema. The exit
status is 1 if one is not valid.
"""

import argparse
import json
import random
import sys
import sysconfig
import time
from collections import Counter
from pathlib import Path
from statistics import median

import torch

from octile.serve.engine.grammar import GrammarCompiler, GrammarError, Matcher, json_schema
from octile.serve.engine.history import History, TokenCounts
from octile.serve.engine.request import Sampling
from octile.serve.engine.sampler import Row, choose
from octile.tokenizer import Tokenizer

NEW_TOKENS, VOCABULARY = 1000, 8192
CLOSING = {'"': 6.0, "}": 6.0, "]": 6.0, '"}': 6.0, "true": 3.0, "null": 3.0}  # added to logits, which deviate by 1


def sample(matcher: Matcher, tokenizer: Tokenizer, seed: int) -> tuple[list[int], bool]:
    """Tokens that follow a grammar, and whether they have ended before NEW_TOKENS."""
    generator = torch.Generator().manual_seed(seed)
    bias = torch.zeros(tokenizer.vocab_size)
    for text, value in CLOSING.items():
        bias[tokenizer.encode(text)] = value
    sampling, tokens, counts = Sampling(NEW_TOKENS, 1.0, grammar="-"), list[int](), TokenCounts([])
    while len(tokens) < NEW_TOKENS:
        logits = bias + torch.randn(tokenizer.vocab_size, generator=generator)
        row = Row(sampling, seed, len(tokens), History(counts, tokens, mask=matcher.masks()[0]))
        token = int(choose(logits[None], [row]))
        if token == tokenizer.end:
            return tokens, True
        matcher.consume(token)
        tokens.append(token)
        if matcher.has_ended:
            return tokens, True
    return tokens, False


def main() -> None:
    import jsonschema

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    tokenizer = Tokenizer.train((file.read_text(encoding="utf-8") for file in sources), VOCABULARY)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [tokenizer.end])
    files = sorted(options.folder.rglob("*.json"))
    found, reasons, seconds, wrong = Counter[str](), Counter[str](), [], []
    for file in random.Random(options.seed).sample(files, min(options.count, len(files))):
        schema = json.loads(file.read_text(encoding="utf-8"))
        begin = time.perf_counter()
        try:
            matcher = compiler.compile(json_schema(schema))
        except GrammarError as error:
            found["refused"] += 1
            reasons[str(error)[:70]] += 1
            continue
        seconds.append(time.perf_counter() - begin)
        tokens, has_ended = sample(matcher, tokenizer, options.seed)
        if not has_ended:
            found["cut"] += 1
            continue
        try:
            jsonschema.validate(json.loads(tokenizer.decode(tokens)), schema)
            found["valid"] += 1
        except (ValueError, jsonschema.ValidationError) as error:
            found["not valid"] += 1
            wrong.append(f"{file.name}: {str(error).splitlines()[0][:150]}")
        except Exception as error:  # a schema that the package cannot read
            found["not compared"] += 1
            reasons[f"not compared: {type(error).__name__}: {str(error).splitlines()[0][:50]}"] += 1
    print(", ".join(f"{name} {count}" for name, count in found.items()))
    print(f"compiled in {1e3 * median(seconds):.2f} ms (median), {1e3 * max(seconds):.1f} ms at most")
    print("\n".join(f"{count:4} {reason}" for reason, count in reasons.most_common()))
    print("\n".join(wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
