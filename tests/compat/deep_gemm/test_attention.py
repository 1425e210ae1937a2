"""The indexer's logits under DeepGEMM's names: as the operators compute them, and refused by these names."""

from typing import Any

import pytest
import torch

import octile.compat.deep_gemm as deep_gemm
from octile.ops.mqa_logits import PAGE
from tests.ops.paged_keys import filled_pages, in_order, int32, scored

S, T, H, D = 4, 128, 8, 32
E4M3 = torch.float8_e4m3fn
Arguments = dict[str, Any]


def dense() -> Arguments:
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(S, H, D, generator=g).to(E4M3), torch.randn(T, D, generator=g).to(E4M3)
    return {
        "q": q,
        "kv": (k, torch.rand(T, generator=g) + 0.5),
        "weights": torch.randn(S, H, generator=g),
        "cu_seq_len_k_start": int32([0, 5, 60, 0]),
        "cu_seq_len_k_end": int32([128, 9, 128, 0]),
    }


def paged() -> Arguments:
    arguments = dense()
    context_lens = int32([[70, 100], [0, 64]])
    return {
        "q": arguments["q"].view(2, 2, H, D),
        "kv_cache": filled_pages(*arguments["kv"]).view(2, PAGE, 1, D + 4),
        "weights": arguments["weights"],
        "context_lens": context_lens,
        "block_table": int32([[1, 0], [0, 0]]),
        "schedule_meta": deep_gemm.get_paged_mqa_logits_metadata(context_lens, PAGE, 3),
        "max_context_len": 120,
    }


def with_scale_of_q(arguments: Arguments) -> Arguments:
    return arguments | {"q": (arguments["q"], None)}


@pytest.mark.parametrize("clean", [True, False])
def test_logits_are_the_weighted_sum_over_heads(clean: bool):
    arguments = dense()
    found = deep_gemm.fp8_mqa_logits(**arguments, clean_logits=clean)
    exact = scored(arguments["q"], *arguments["kv"], arguments["weights"])
    for row, (start, end) in enumerate(((0, 128), (5, 9), (60, 128), (0, 0))):
        torch.testing.assert_close(found[row, start:end].double(), exact[row, start:end], rtol=1e-6, atol=1e-4)
        assert not clean or (found[row] > -torch.inf).sum() == end - start


def test_compressed_logits_begin_at_the_first_key():
    whole = deep_gemm.fp8_mqa_logits(**dense())
    found = deep_gemm.fp8_mqa_logits(**dense(), clean_logits=False, max_seqlen_k=128)
    assert found.shape == (S, 128)
    assert torch.equal(found[1, :4], whole[1, 5:9])


def test_logits_of_pages_are_those_of_their_keys():
    arguments = paged()
    found = deep_gemm.fp8_paged_mqa_logits(**arguments, clean_logits=True)
    k, scale = in_order(arguments["kv_cache"].flatten(1), arguments["block_table"][0], D)
    exact = scored(arguments["q"][0], k, scale, arguments["weights"][:2])
    for row, length in enumerate((70, 100)):
        torch.testing.assert_close(found[row, :length].double(), exact[row, :length], rtol=1e-6, atol=1e-4)
        assert (found[row, length:] == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_names_with_fp4_take_q_as_a_pair(dtype: torch.dtype):
    found = deep_gemm.fp8_fp4_mqa_logits(**with_scale_of_q(dense()), logits_dtype=dtype)
    assert torch.equal(found, deep_gemm.fp8_mqa_logits(**dense()).to(dtype))
    found = deep_gemm.fp8_fp4_paged_mqa_logits(**with_scale_of_q(paged()), clean_logits=True, logits_dtype=dtype)
    assert torch.equal(found, deep_gemm.fp8_paged_mqa_logits(**paged(), clean_logits=True).to(dtype))


WRONG: list[tuple[str, Any, type[Exception], str]] = [
    ("q", (dense()["q"], torch.ones(1)), ValueError, "q's scale must be None: FP4"),
    ("q", dense()["q"], TypeError, r"q must be a pair \(data, scale\), not Tensor"),
    ("q", (None, None), TypeError, "q must be a tensor, not NoneType"),
    ("kv", dense()["kv"][0], TypeError, r"kv must be a pair \(data, scale\), not Tensor"),
    ("kv", (dense()["kv"][0], None), TypeError, "kv's scale must be a tensor"),
    ("kv", (dense()["kv"][0], torch.ones(3)), ValueError, r"kv's scale must be \(128,\)"),
    ("kv", (dense()["kv"][0].float(), torch.ones(T)), TypeError, "kv's data must be float8_e4m3fn"),
    ("weights", torch.ones(S, H).half(), TypeError, "weights must be float32"),
    ("cu_seq_len_k_start", torch.zeros(S), TypeError, "cu_seq_len_k_start must be int32"),
    ("cu_seq_len_k_end", None, TypeError, "cu_seq_len_k_end must be a tensor"),
    ("max_seqlen_k", -1, ValueError, "max_seqlen_k must be from 0 to 2,147,483,647, not -1"),
    ("max_seqlen_k", 10**12, ValueError, "max_seqlen_k must be from 0 to 2,147,483,647"),
    ("max_seqlen_k", 4.0, TypeError, "max_seqlen_k must be an integer, not 4.0"),
    ("max_seqlen_k", 5, ValueError, "clean_logits must be False where max_seqlen_k is 5"),
    ("logits_dtype", torch.float16, TypeError, "logits_dtype must be bfloat16 or float32"),
]
WRONG_PAGED: list[tuple[str, Any, type[Exception], str]] = [
    ("kv_cache", paged()["kv_cache"].flatten(1), ValueError, r"kv_cache must be \[P, 64, 1, D \+ 4\]"),
    ("kv_cache", paged()["kv_cache"].view(torch.int8), TypeError, "kv_cache must be uint8"),
    ("context_lens", int32([100, 64]), ValueError, "context_lens must have 2 dimensions"),
    ("block_table", int32([[1, 0]]), ValueError, r"block_table must be \(2, M\)"),
    ("schedule_meta", None, TypeError, "schedule_meta must be a tensor"),
    ("schedule_meta", int32([[0, 0]]), ValueError, r"schedule_meta must be \[blocks \+ 1, 2\]"),
    ("max_context_len", -1, ValueError, "max_context_len must be from 0 to 2,147,483,647, not -1"),
    ("max_context_len", 128.0, TypeError, "max_context_len must be an integer, not 128.0"),
    (
        "max_context_len",
        64,
        ValueError,
        "context_lens must be from 0 to the 64 keys of max_context_len and block_table",
    ),
    ("context_lens", int32([[-1, 1], [0, 0]]), ValueError, "context_lens must be from 0 to the 120 keys"),
    (
        "block_table",
        int32([[1, 6], [0, 0]]),
        ValueError,
        r"block_table must be from 0 to below the 2 pages of kv_cache",
    ),
    ("indices", int32([0, 1]), ValueError, "indices must be None"),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), WRONG)
def test_wrong_arguments_are_refused(name: str, value: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        deep_gemm.fp8_fp4_mqa_logits(**with_scale_of_q(dense()) | {name: value})


@pytest.mark.parametrize(("name", "value", "error", "message"), WRONG_PAGED)
def test_wrong_arguments_with_pages_are_refused(name: str, value: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        deep_gemm.fp8_fp4_paged_mqa_logits(**with_scale_of_q(paged()) | {name: value})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((None, 64, 3), TypeError, "context_lens must be a tensor"),
        ((int32([[1]]), 32, 3), ValueError, "block_kv must be 64, not 32"),
        ((int32([[1]]), 64, 0), ValueError, "num_sms must be from 1 to 65,535, not 0"),
        ((int32([[1]]), 64, 10**10), ValueError, "num_sms must be from 1 to 65,535"),
        ((int32([[1]]), 64, 4.0), TypeError, "num_sms must be an integer, not 4.0"),
        ((int32([[5], [-1]]), 64, 4), ValueError, r"context_lens must be at least 0, not \[\[5\], \[-1\]\]"),
        ((int32([[1]]), 64, 3, int32([0])), ValueError, "indices must be None"),
    ],
)
def test_wrong_metadata_is_refused(arguments: tuple[Any, ...], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        deep_gemm.get_paged_mqa_logits_metadata(*arguments)


def test_the_flow_of_deep_gemms_tests_runs_without_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = paged()
    blocks = deep_gemm.get_num_sms()
    metadata = deep_gemm.get_paged_mqa_logits_metadata(arguments["context_lens"], PAGE, blocks)
    found = deep_gemm.fp8_paged_mqa_logits(**arguments | {"schedule_meta": metadata}, clean_logits=True)
    assert torch.equal(found, deep_gemm.fp8_paged_mqa_logits(**arguments, clean_logits=True))


@pytest.mark.oldest_torch
def test_logits_of_pages_are_traced_whole():
    arguments = paged()
    logits = torch.compile(deep_gemm.fp8_paged_mqa_logits, backend="eager", fullgraph=True)
    whole = deep_gemm.fp8_paged_mqa_logits(**arguments, clean_logits=True)
    assert torch.equal(logits(**arguments, clean_logits=True), whole)
