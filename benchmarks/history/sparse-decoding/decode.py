"""Times of a captured decode step of four layers over long texts, with sparse and with dense attention.

python benchmarks/history/sparse-decoding/decode.py
"""

import statistics
import time
from array import array
from dataclasses import replace

import torch

from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import DeepseekV3
from octile.serve.runner.batch import Batch, Chunk
from octile.serve.runner.model_runner import ModelRunner

TEXTS, ROUNDS, WARM_UP = 32, 12, 2
CONTEXTS = (4096, 32768, 65000)
DENSE = replace(  # 16 heads, latents of 512 + 64 channels, no experts
    ModelConfig.medium(),
    num_hidden_layers=4,
    first_k_dense_replace=4,
    num_nextn_predict_layers=0,
    vocab_size=1024,
    max_position_embeddings=65536,
)
MODELS = {"dense": DENSE, "sparse": replace(DENSE, index_n_heads=64, index_head_dim=128, index_topk=2048)}


def milliseconds(config: ModelConfig, context: int) -> float:
    """Return the median time of a step, with the host's."""
    torch.manual_seed(0)
    n_pages = -(-(context + 64) // 64)
    with torch.device("cuda"):
        model = DeepseekV3(config).to(torch.bfloat16).eval()
    runner = ModelRunner(model, TEXTS * n_pages, "bf16", TEXTS, max_step_tokens=0)
    for layer in runner.cache.layers:
        layer.normal_()
    for layer in runner.index.layers if runner.index is not None else ():
        layer.random_(0, 100)  # keys, and scales that are finite
    pages = [array("i", range(i * n_pages, (i + 1) * n_pages)) for i in range(TEXTS)]
    batch = Batch([Chunk([1], context, of_text, 1) for of_text in pages])
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        runner.run(batch)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[WARM_UP:])


if __name__ == "__main__":
    for context in CONTEXTS:
        for name, config in MODELS.items():
            print(name, context, "ms", round(milliseconds(config, context), 3), flush=True)
            torch.cuda.empty_cache()
