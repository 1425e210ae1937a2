"""What `octile bench serve` measures of the engine alone, on a CPU and a miniature model."""

from dataclasses import replace

import pytest
import torch

from octile.bench.goals import serve_verdicts
from octile.bench.rows import Row, compare
from octile.bench.serve import engine, roofline
from octile.bench.serve.engine import PEER, V2_LITE, Shape, decode_case, rows
from octile.models.config import ModelConfig
from octile.train.step.kernel_records import KernelRecord

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


BYTES = ("experts read by a layer", "bytes", "bytes of routed experts", "bytes of cache", "share of a copy's speed")


def test_rows_of_a_miniature_model(monkeypatch):
    monkeypatch.setattr(engine, "_transformers_speeds", lambda shape, device: {1: 5.0})
    monkeypatch.setattr(roofline, "COPIED", 2**16)
    found = {(row.case, row.what): row for row in rows(SMALL, torch.device("cpu"))}
    fp8, bf16 = (
        [(f"miniature{weights}, decode, batch {batch}", what) for batch in (1, 3) for what in ("step", *BYTES)]
        for weights in ("", ", BF16 weights")
    )
    assert list(found) == [
        ("miniature", "copy"),
        *fp8,
        ("miniature, prefill, 8 × 1,024 tokens", "throughput"),
        ("miniature, prefill, 8 × 1,024 tokens", "GEMMs of layers"),
        *bf16,
        ("miniature, decode, batch 1", "decode, FP8 weights"),
        ("miniature, decode, batch 3", "decode, FP8 weights"),
        ("miniature, decode, batch 1", "decode"),
        ("miniature, decode, batch 3", "decode"),
    ]
    assert all(row.value > 0 for row in found.values())
    assert found["miniature, decode, batch 1", "decode"].against.peer == PEER
    assert found["miniature, decode, batch 3", "decode"].against is None
    assert found["miniature, decode, batch 1", "experts read by a layer"].value == SMALL.config.num_experts_per_tok
    of_cache = sum(found[f"miniature, decode, batch {batch}", "bytes of cache"].value for batch in (1, 3))
    position = 1e-9 * SMALL.config.num_hidden_layers * 2 * SMALL.config.latent_dim
    assert 4 * 70 * position < of_cache < 4 * 80 * position


def test_transformers_generates_with_the_same_shape():
    pytest.importorskip("transformers")
    speeds = engine._transformers_speeds(SMALL, torch.device("cpu"))
    assert list(speeds) == [1, 2]
    assert all(speed > 0 for speed in speeds.values())


def test_a_gpu_without_a_data_sheet_is_named(monkeypatch, capsys):
    monkeypatch.setattr(engine, "measured_bandwidths", lambda device: roofline.Bandwidths(None, 3e12))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")
    next(engine.rows(engine.V2_LITE, torch.device("cuda")))
    assert "octile/plan/clusters has no data sheet of NVIDIA L4" in capsys.readouterr().err


def test_a_peer_that_fails_is_left_out(monkeypatch, capsys):
    def fail(shape: Shape, device: torch.device):
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr(engine, "find_spec", lambda name: object())
    monkeypatch.setattr(engine, "_transformers_speeds", fail)
    monkeypatch.setattr(roofline, "COPIED", 2**16)
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


def test_the_verdicts_of_the_engine():
    one, all_of_them = (decode_case(V2_LITE, batch) for batch in (1, 256))
    found = [
        Row(all_of_them, "overhead of the engine", 0.8, "ms"),
        Row(one, "share of the roofline", 39.0, "%"),
        Row(all_of_them, "share of the roofline", 76.0, "%"),
        compare(one, "decode, FP8 weights", 1.5, "tokens/s", "BF16 weights", 1.0),
        Row("V2-Lite shape, prefill, 8 × 1,024 tokens", "share of the FP8 peak", 42.0, "%"),
    ]
    assert serve_verdicts(found, "NVIDIA H200").splitlines() == [
        "engine's overhead per step, batch 256, ms: 0.800: floor ≤ 1 met",
        "decode, batch 1, % of the roofline: 39.000: floor ≥ 40 MISSED, aim ≥ 75 MISSED",
        "decode, batch 256, % of the roofline: 76.000: floor ≥ 40 met, aim ≥ 75 met",
        "decode, batch 1, FP8 vs. BF16 weights: 1.500: floor ≥ 1.3 met, aim ≥ 1.7 MISSED",
        "prefill, % of the FP8 peak: 42.000: floor ≥ 30 met, aim ≥ 55 MISSED",
    ]
