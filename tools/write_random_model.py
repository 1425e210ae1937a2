"""A Hugging Face folder with random weights of DeepSeek-V2-Lite's shape, which octile and vLLM load unchanged.

    python -m tools.write_random_model runs/v2-lite-fp8 fp8

`octile bench serve --peer vllm` makes such folders and removes them; one that stays saves their time in a second call:
16 GB with FP8 weights, 31 GB with BF16 weights (bf16). The values are made on a GPU if there is one.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from octile.bench.serve.peer.random_folder import V2_LITE, write_random_folder


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("weights", choices=["fp8", "bf16"])
    given = parser.parse_args(arguments)
    write_random_folder(given.folder, V2_LITE, given.weights, "cuda" if torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    main()
