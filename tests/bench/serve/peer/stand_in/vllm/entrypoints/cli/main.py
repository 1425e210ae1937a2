"""`vllm serve`, by `octile serve`."""

import argparse

from octile.cli import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    for option in ("--host", "--port", "--gpu-memory-utilization", "--max-num-seqs", "--max-num-batched-tokens"):
        parser.add_argument(option, required=True)
    for option in ("--max-model-len", "--generation-config", "--moe-backend"):
        parser.add_argument(option, required=True)
    for option in ("--no-enable-prefix-caching", "--disable-uvicorn-access-log"):
        parser.add_argument(option, action="store_true", required=True)
    given = parser.parse_args()
    main(["serve", given.model, "--host", given.host, "--port", given.port, "--cache.gib", "0.05"])
