"""How long a stream pauses while the first request with a grammar is answered, with a vocabulary of 129,280 tokens.

    python -m benchmarks.history.serve.first_grammar

An untrained model of the preset `tiny` is served with DeepSeek-V3's number of tokens, on a CPU.
"""

import asyncio
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import httpx
import torch

from octile.bench.serve.peer.random_folder import letter_tokenizer, write_random_folder
from octile.bench.serve.peer.vllm import Launch, free_port, server
from octile.train.config import MODELS

VOCABULARY = 129_280
SECONDS = 3.0  # of the stream alone
STREAMED = {"model": "micro", "prompt": "ab", "max_tokens": 2000, "ignore_eos": True, "stream": True}
BOUND = {"model": "micro", "prompt": "ab", "max_tokens": 8, "structured_outputs": {"regex": "[a-c]{3}"}}


async def pauses(url: str) -> list[float]:
    """The longest pause of a stream in seconds: alone, and beside the first request with a grammar."""
    found = [0.0, 0.0]
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def stream() -> None:
            async with client.stream("POST", "/v1/completions", json=STREAMED) as response:
                last = 0.0
                async for _ in response.aiter_text():
                    now = time.perf_counter()
                    if last:
                        found[phase] = max(found[phase], now - last)
                    last = now

        phase = 0
        streaming = asyncio.create_task(stream())
        await asyncio.sleep(SECONDS)
        phase = 1
        response = await client.post("/v1/completions", json=BOUND)
        assert len(response.json()["choices"][0]["text"]) == 3
        await asyncio.sleep(0.5)
        streaming.cancel()
    return found


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as made:
        folder, port = Path(made) / "micro", free_port()
        config = replace(MODELS["tiny"](), vocab_size=VOCABULARY)
        write_random_folder(folder, config, "fp8", "cpu", letter_tokenizer(VOCABULARY))
        command = [sys.executable, "-m", "octile", "serve", str(folder), "--port", str(port), "--device", "cpu"]
        with server(Launch("octile serve", command, {}, Path(made) / "serve.log"), port) as url:
            alone, beside = asyncio.run(pauses(url))
    print(f"longest pause: {1e3 * alone:.0f} ms alone, {1e3 * beside:.0f} ms beside the first request with a grammar")


if __name__ == "__main__":
    main()
