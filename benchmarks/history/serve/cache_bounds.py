"""How much memory the caches of an HTTP process hold when they are full, and what encoding costs without one.

Sizes are by malloc's and Python's own counts. A tokenizer of 16,384 tokens is trained on a half of this repository's
documents and Python's library; prompts of 4,000 letters are cut from the other half.

    python -m benchmarks.history.serve.cache_bounds
"""

import gc
import json
import random
import statistics
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from benchmarks.history.serve.http_growth import small_objects
from octile.bench.serve.peer.random_folder import letter_tokenizer
from octile.serve.engine.grammar import GrammarCompiler, json_schema
from octile.tokenizer import Tokenizer
from tests.chat.templates import with_tokens
from tests.malloc_info import malloc_info
from tests.serve.http.mixed_load import LETTERS
from tests.serve.http.trip import STRICT
from tools.long_load import VOCABULARY


class Texts(BaseModel):
    """A body with texts."""

    texts: list[str]


def letters(drawn: random.Random, n: int) -> str:
    """A word of so many letters."""
    return "".join(drawn.choices(LETTERS, k=n))


def used() -> int:
    """Bytes in use, of malloc and of Python's allocator of small objects."""
    gc.collect()
    info = malloc_info()
    return info.uordblks + info.hblkhd + 1024 * small_objects()[1]


def show(name: str, counts: list[int], fill: Callable[[int], object]) -> None:
    """Print what is in use after so many entries more than before."""
    before, cells = used(), []
    for count in counts:
        fill(count)
        cells.append(f"{count:,}: {(used() - before) / 2**20:.1f} MiB")
    print(f"{name}: {', '.join(cells)}", flush=True)


def main() -> None:
    drawn = random.Random(0)
    made = with_tokens(letter_tokenizer(VOCABULARY))

    def words(tokenizer: Tokenizer, shortest: int, longest: int) -> Callable[[int], object]:
        seen = 0

        def fill(count: int) -> None:
            nonlocal seen
            while seen < count:
                tokenizer.encode(" ".join(letters(drawn, drawn.randint(shortest, longest)) for _ in range(500)))
                seen += 500

        return fill

    def in_threads(n: int) -> None:
        """Encode the same texts in so many further threads, which stay."""
        ready, over = threading.Barrier(n + 1), threading.Event()

        def encode() -> None:
            for text in texts:
                made.encode(text)
            ready.wait()
            over.wait()

        threads = [threading.Thread(target=encode) for _ in range(n)]
        for thread in threads:
            thread.start()
        ready.wait()
        try:
            print(f"in {n} threads: {(used() - before) / 2**20:.1f} MiB")
        finally:
            over.set()
            for thread in threads:
                thread.join()

    texts = [" ".join(letters(drawn, 13) for _ in range(500)) for _ in range(20)]
    print("one tokenizer that encodes the same 10,000 words of 13 letters")
    before = used()
    for n in 1, 2, 4, 6, 20:
        in_threads(n)
    for shortest, longest in (6, 20), (250, 250), (300, 300):
        tokenizer = Tokenizer(type(made.backend).from_str(made.backend.to_str()), made.config)
        fill = words(tokenizer, shortest, longest)
        show(f"words of {shortest} to {longest} letters", [500, 5000, 10_000, 20_000, 40_000], fill)
    for n in 12, 63:

        def strings(count: int, n: int = n) -> None:
            texts = [letters(drawn, n) for _ in range(count)]
            Texts.model_validate_json(json.dumps({"texts": texts}))

        show(f"strings of {n} letters in JSON", [1000, 16_384, 65_536, 131_072], strings)

    def grammars(schema: dict) -> Callable[[int], object]:
        compiler = GrammarCompiler(made, made.vocab_size, [made.end])
        compiler.prepare()
        number = 0

        def fill(count: int) -> None:
            nonlocal number
            while number < count:
                properties = {f"p{number}": {"type": "string"}, **schema["properties"]}
                compiler.compile(json_schema({**schema, "properties": properties}))
                number += 1

        fill(1)
        return fill

    small = STRICT["function"]["parameters"]
    large = {"type": "object", "properties": {f"field_{i}": {**small, "title": f"{i}"} for i in range(100)}}
    show("grammars of the schema of a trip", [2, 32, 128, 256, 512], grammars(small))
    show("grammars of 100 such schemas", [2, 32, 128, 256], grammars(large))
    compiler = GrammarCompiler(made, made.vocab_size, [made.end])

    def follow(count: int) -> None:
        for _ in range(count):
            matcher = compiler.compile(json_schema(small))
            for _ in range(40):
                if not matcher.has_ended:
                    bits = np.unpackbits(matcher.masks()[0].view(np.uint8), bitorder="little")[: made.vocab_size]
                    matcher.consume(int(drawn.choice(np.flatnonzero(bits))))

    show("texts that follow the first, up to 40 tokens", [1, 100, 400, 1000], follow)
    show_times(drawn)


def show_times(drawn: random.Random) -> None:
    """Print how long prompts take with caches of words of some sizes, each in a thread of its own."""
    files = [*Path("docs").glob("*.md"), *Path(sysconfig.get_path("stdlib")).glob("*.py")]
    texts = [file.read_text(encoding="utf-8", errors="ignore") for file in sorted(files)]
    tokenizer, prompts = Tokenizer.train(texts[::2], 16_384), list[str]()
    while len(prompts) < 400:
        text = drawn.choice(texts[1::2])
        begin = drawn.randrange(max(1, len(text) - 4000))
        prompts.append(text[begin : begin + 4000])
    took = dict[int, list[float]]()

    def encode(size: int) -> None:
        resize_word_cache(tokenizer, size)
        for prompt in prompts[:200]:  # the cache fills
            tokenizer.encode(prompt)
        begin = time.perf_counter()
        for prompt in prompts[200:]:
            tokenizer.encode(prompt)
        took.setdefault(size, []).append(5 * (time.perf_counter() - begin))

    for _ in range(9):
        for size in 10_000, 1000, 0:
            thread = threading.Thread(target=encode, args=(size,))
            thread.start()
            thread.join()
    n_tokens = sum(len(tokenizer.encode(prompt)) for prompt in prompts[200:]) / 200
    for size, times in took.items():
        cells = f"{statistics.median(times):.2f} ms a prompt of {n_tokens:.0f} tokens, {min(times):.2f} at best"
        print(f"{size:,} words cached: {cells}")


def resize_word_cache(tokenizer: Tokenizer, size: int) -> None:
    tokenizer.backend.model._resize_cache(size)


if __name__ == "__main__":
    main()
