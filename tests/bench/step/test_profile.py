"""Tests of the operation, byte and kernel counts of a training step."""

import pytest
import torch

from octile.bench.step.models import Sizes, decoder
from octile.bench.step.profile import Call, Peak, calls, shares, split, table
from octile.nn.conversion import apply_recipe
from octile.ops.attention import attention
from octile.ops.grouped import grouped_matmul_nt, grouped_wgrad
from octile.ops.rope import rotate_
from octile.recipe import Recipe
from octile.scaled import quantize
from octile.train.step.kernel_records import KernelRecord

SIZES = Sizes(layers=1, hidden=256, intermediate=384, heads=2, batch=1, sequence=128)
PEAK = Peak(fp8=4.0, bf16=2.0, copy=1.0)


def parts(t, block):
    q = quantize(t, block)
    return q.data, q.scale, q.block


def test_a_step_calls_each_gemm_with_its_operations():
    work = decoder(SIZES, "cpu")
    apply_recipe(work.model, Recipe.deepseek_v3())
    found = calls(work.step)
    weights = sum(p.numel() for p in work.model.parameters() if p.dim() > 1)
    assert sum(call.operations for call in found if call.kind == "product") == 3 * 2 * weights * SIZES.sequence
    assert [call.name.split()[0] for call in found if call.kind == "attention"] == ["attention", "attention_backward"]


def test_gemms_of_experts_count_each_row_once():
    x, w, dy = torch.randn(12, 256), torch.randn(2, 128, 256), torch.randn(12, 128)
    offs = torch.tensor([5, 12], dtype=torch.int32)
    a, b = parts(x, (1, 128)), parts(w, (128, 128))
    columns = *parts(dy, (128, 1)), *parts(x, (128, 1))
    (fprop,) = calls(lambda: grouped_matmul_nt(*a, *b, offs, torch.bfloat16))
    (wgrad,) = calls(lambda: grouped_wgrad(*columns, offs, torch.float32))
    assert fprop.operations == wgrad.operations == 2 * 12 * 128 * 256


def test_causal_attention_counts_half_of_its_scores():
    q, v = torch.randn(1, 64, 2, 24), torch.randn(1, 64, 2, 16)
    (call,) = calls(lambda: attention(q, q, v, 0.1))
    assert call.operations == 2 * 64 * 64 * (24 + 16)


def test_bytes_are_what_is_read_and_written():
    x = torch.randn(64, 64)
    copied, added = calls(lambda: (x.clone(), x.add_(1.0)))
    assert (copied.bytes, added.bytes) == (2 * x.nbytes, 2 * x.nbytes)


def test_channels_that_are_not_rotated_are_not_counted():
    x, angle = torch.randn(1, 6, 2, 24), torch.randn(6, 4)
    (rotated,) = calls(lambda: rotate_(x, angle, angle))
    assert rotated.bytes == 4 * (2 * 6 * 2 * 8 + 2 * 6 * 4)


@pytest.mark.parametrize(
    ("call", "least"),
    [
        (Call("p", "product", 8, 1, 9.0), 2.0),
        (Call("p", "product", 8, 3, 9.0), 3.0),
        (Call("a", "attention", 8, 1, 9.0), 4.0),
        (Call("c", "other", 0, 5, 9.0), 5.0),
    ],
)
def test_the_peak_is_operations_or_bytes(call, least):
    assert call.at(PEAK) == least


def test_calls_are_shown_by_what_they_lose():
    found = [Call("a", "other", 0, 1, 2.0), Call("b", "other", 0, 1, 9.0), Call("a", "other", 0, 1, 2.0)]
    assert [(row.what, row.value) for row in table("case", found, PEAK)] == [
        ("3× all", 13000.0),
        ("1× b", 9000.0),
        ("2× a", 4000.0),
    ]


def test_shares_are_those_of_the_time():
    assert shares([Call("a", "product", 1, 1, 3.0), Call("b", "other", 0, 1, 1.0)]) == {"product": 0.75, "other": 0.25}


def test_gaps_are_idle_and_concurrent_kernels_count_once():
    kernels = [
        KernelRecord("gemm", 0.0, 4.0),
        KernelRecord("triton_poi_fused__scaled_mm_silu", 2.0, 4.0),
        KernelRecord("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 8.0, 2.0),
    ]
    idle, parts = split(kernels)
    assert idle == pytest.approx(0.2)
    assert parts == pytest.approx({"product": 0.5, "other": 0.25, "attention": 0.25})


@pytest.mark.parametrize(
    "kernel", ["flash_fwd_sm90", "flash_bwd_preprocess", "flash_bwd_sm90", "flash_bwd_postprocess"]
)
def test_the_kernels_of_flash_attn_4_are_attention_although_cutlass_generates_them(kernel: str):
    name = f"kernel_cutlass_kernel_flash_attncute{kernel}FlashAttention_object_at__tensorptrbf16"
    assert split([KernelRecord(name, 0.0, 1.0)])[1] == {"attention": 1.0}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "attention") for name in ("mla_few_rows", "latent_queries", "merge_values", "mla_merge")),
        *((name, "attention") for name in ("mla_one_row", "values_one_row")),
        *(
            (name, "product")
            for name in ("few_rows_nt", "one_row_nt", "mixture_gate", "mixture_up", "high_precision_nt")
        ),
        *((name, "other") for name in ("rms_norm_high_precision", "swiglu_high_precision", "choose_experts")),
    ],
)
def test_kernels_of_decode_steps_have_their_kinds(name: str, kind: str):
    assert split([KernelRecord(name, 0.0, 1.0)])[1] == {kind: 1.0}
