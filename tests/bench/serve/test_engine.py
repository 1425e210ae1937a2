"""What `octile bench serve` measures of the engine alone, on a CPU and a miniature model."""

from dataclasses import replace
from math import prod

import pytest
import torch

from octile.bench.goals import DECODE_256, serve_verdicts
from octile.bench.rows import Row
from octile.bench.serve import engine
from octile.bench.serve.engine import PEER, V2_LITE, Shape, decode_case, random_weights, rows
from octile.models.config import ModelConfig
from octile.scaled import ScaledTensor
from octile.train.kernel_records import KernelRecord

SMALL = Shape(
    "miniature",
    replace(
        ModelConfig.v2_lite_16b(), vocab_size=512, bos_token_id=0, eos_token_id=1, hidden_size=64,
        intermediate_size=96, moe_intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=2, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8,
        v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2,
    ),
    batches=(1, 3), peer_batches=(1, 2), prompt=70, prefill=2, steps=3,
)  # fmt: skip


def test_rows_of_a_miniature_model(monkeypatch):
    monkeypatch.setattr(engine, "_transformers_speeds", lambda shape, device: {1: 5.0})
    found = {(row.case, row.what): row for row in rows(SMALL, torch.device("cpu"))}
    assert list(found) == [
        ("miniature, decode, batch 1", "step"),
        ("miniature, decode, batch 3", "step"),
        ("miniature, prefill, 8 × 1,024 tokens", "throughput"),
        ("miniature, prefill, 8 × 1,024 tokens", "GEMMs of layers"),
        ("miniature, decode, batch 1", "decode"),
        ("miniature, decode, batch 3", "decode"),
    ]
    assert all(row.value > 0 for row in found.values())
    assert found["miniature, decode, batch 1", "decode"].against.peer == PEER
    assert found["miniature, decode, batch 3", "decode"].against is None


def test_transformers_generates_with_the_same_shape():
    pytest.importorskip("transformers")
    speeds = engine._transformers_speeds(SMALL, torch.device("cpu"))
    assert list(speeds) == [1, 2]
    assert all(speed > 0 for speed in speeds.values())


def test_a_peer_that_fails_is_left_out(monkeypatch, capsys):
    def fail(shape: Shape, device: torch.device):
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr(engine, "find_spec", lambda name: object())
    monkeypatch.setattr(engine, "_transformers_speeds", fail)
    found = {(row.case, row.what): row for row in rows(SMALL, torch.device("cpu"))}
    assert found["miniature, decode, batch 1", "decode"].against is None
    assert "left out: transformers, BF16: RuntimeError: no kernel for this" in capsys.readouterr().err


def test_a_profile_has_kinds_idle_time_and_the_largest_kernels(monkeypatch):
    long = "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16> >"
    kernels = [KernelRecord("gemm", 0, 600), KernelRecord("mla_decode", 700, 200), KernelRecord(long, 900, 100)]
    monkeypatch.setattr(engine, "PROFILED", 1)
    monkeypatch.setattr(engine, "record_kernels", lambda work: work() and kernels)
    found = {row.what: (row.value, row.unit) for row in engine.profile_rows("a case", lambda: 1, torch.device("cuda"))}
    assert found == {
        "GEMMs, of the kernels": (pytest.approx(100 * 6 / 9), "%"),
        "attention, of the kernels": (pytest.approx(100 * 2 / 9), "%"),
        "other kernels, of the kernels": (pytest.approx(100 / 9), "%"),
        "the GPU idles": (pytest.approx(10), "%"),
        "1× gemm": (0.6, "ms"),
        "1× mla_decode": (0.2, "ms"),
        f"1× {long[:59]}…": (0.1, "ms"),
    }


def test_a_profiler_without_the_gpu_gives_no_profile(monkeypatch, capsys):
    monkeypatch.setattr(engine, "record_kernels", lambda work: [])
    assert engine.profile_rows("a case", lambda: 1, torch.device("cuda")) == []
    assert "left out: profile of a case" in capsys.readouterr().err


def test_layers_are_in_fp8_and_embeddings_are_not():
    weights = random_weights(SMALL.config, torch.device("cpu"))
    assert isinstance(weights.blocks[0].attention.o, ScaledTensor)
    assert not isinstance(weights.head, ScaledTensor)


def test_random_weights_have_no_nan(monkeypatch):
    monkeypatch.setattr(torch, "randn", lambda shape, **options: torch.linspace(-6, 6, prod(shape)).view(shape))
    weights = random_weights(SMALL.config, torch.device("cpu"))
    assert not weights.blocks[0].attention.o.dequantize().isnan().any()


def test_the_verdicts_of_the_engine():
    assert decode_case(V2_LITE, 256) == DECODE_256
    found = [
        Row(DECODE_256, "overhead of the engine", 0.8, "ms"),
        Row("V2-Lite shape, prefill, 8 × 1,024 tokens", "share of the FP8 peak", 42.0, "%"),
    ]
    assert serve_verdicts(found, "NVIDIA H200").splitlines() == [
        "engine's overhead per step, batch 256, ms: 0.800: floor ≤ 1 met",
        "prefill, % of the FP8 peak: 42.000: floor ≥ 30 met, aim ≥ 55 MISSED",
    ]
