"""Shared by the tests of checkpoints: damaged files, and folders as other programs write them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor


@pytest.fixture
def flip_byte() -> Callable[[Path, int], None]:
    """flip_byte(path, i): inverts byte i of a file; it counts from the end if negative."""

    def flip(path: Path, index: int) -> None:
        data = bytearray(path.read_bytes())
        data[index] ^= 0xFF
        path.write_bytes(data)

    return flip


@pytest.fixture
def same() -> Callable[[Tensor, Tensor], bool]:
    """same(a, b): equal in dtype, shape and every bit, so that NaN equals itself and −0 does not equal 0."""

    def compare(a: Tensor, b: Tensor) -> bool:
        bits = [tensor.contiguous().flatten().view(torch.uint8) for tensor in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and bits[0].equal(bits[1])

    return compare


@pytest.fixture
def hf_folder() -> Callable[..., Path]:
    """hf_folder(path, config, [tensors of file 1, tensors of file 2, …]): a checkpoint, without octile's record."""

    def write(path: Path, config: Mapping, shards: list[Mapping[str, Tensor]]) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config))
        if len(shards) == 1:
            save_file(dict(shards[0]), path / "model.safetensors", metadata={"format": "pt"})
            return path
        weight_map = {}
        for i, tensors in enumerate(shards, 1):
            name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
            save_file(dict(tensors), path / name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, name)
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return path

    return write


@pytest.fixture
def moe_tensors() -> list[dict[str, Tensor]]:
    """Two shards of a small mixture of experts in BF16, with ragged shapes and tensors that nobody knows."""
    torch.manual_seed(0)

    def bf16(*shape: int) -> Tensor:
        return (torch.randn(shape) * 0.02).bfloat16()

    layer = "model.layers.0."
    first = {
        "model.embed_tokens.weight": bf16(50, 192),
        f"{layer}input_layernorm.weight": bf16(192),
        f"{layer}self_attn.q_proj.weight": bf16(256, 192),
        f"{layer}self_attn.kv_a_proj_with_mqa.weight": bf16(200, 192),
        f"{layer}self_attn.q_proj.bias": bf16(256),
        f"{layer}mlp.gate.weight": bf16(4, 192),
        f"{layer}mlp.gate.e_score_correction_bias": torch.randn(4),
    }
    second = {f"{layer}mlp.experts.{e}.{p}_proj.weight": bf16(130, 192) for e in range(4) for p in ("gate", "up")}
    second |= {f"{layer}mlp.experts.{e}.down_proj.weight": bf16(192, 130) for e in range(4)}
    second |= {
        "model.layers.1.eh_proj.weight": bf16(192, 384),
        "lm_head.weight": bf16(50, 192),
        "who.knows": torch.arange(7),
    }
    return [first, second]


@pytest.fixture
def moe_config() -> dict:
    return {"model_type": "deepseek_v3", "n_routed_experts": 4, "num_experts_per_tok": 1, "torch_dtype": "bfloat16"}
