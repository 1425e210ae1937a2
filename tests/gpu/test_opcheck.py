"""torch's own checks of a custom operator that depend on the kernel, on CUDA tensors: schema and fake.

Those of autograd and compilation see no kernel: tests/ops runs them on a CPU.
"""

from typing import Any

import pytest
import torch

from octile.ops.attention import attention, attention_backward, ragged_attention
from octile.ops.cross_entropy import cross_entropy, cross_entropy_backward
from octile.ops.decode_step import accepted_rows, continued_tokens, record_choices, text_rows
from octile.ops.few_rows import few_rows_nt, latent_attention
from octile.ops.few_rows_mixture import few_rows_mixture
from octile.ops.gate import bfloat16_terms, gate, gate_backward
from octile.ops.grouped import (
    grouped_matmul_nt,
    grouped_matmul_nt_out,
    grouped_wgrad,
    grouped_wgrad_out,
    masked_grouped_matmul_nt,
    masked_grouped_matmul_nt_out,
)
from octile.ops.groups import align_groups
from octile.ops.high_precision import high_precision_grouped_nt, high_precision_grouped_tn
from octile.ops.index_rows import index_rows
from octile.ops.latent_cache import read_latents, write_and_rotate, write_latents
from octile.ops.matmul import matmul_nt, matmul_nt_out
from octile.ops.mqa_logits import paged_mqa_schedule
from octile.ops.norm import rms_norm, rms_norm_backward, rms_norm_quantize
from octile.ops.paged_attention import heads_nt_out, heads_nt_quantize, paged_attention
from octile.ops.permute import (
    count_tokens,
    permute,
    routing_plan,
    unpermute,
    unpermute_add_,
    unpermute_backward,
    weighted_routing_plan,
)
from octile.ops.quantize import dequantize, quantize, quantize_with_scale
from octile.ops.rope import rotate_halves
from octile.ops.row_invariant import row_invariant_matmul_nt, row_invariant_matmul_nt_out
from octile.ops.sample_tokens import sample_tokens
from octile.ops.sequence_balance import sequence_balance, sequence_balance_backward
from octile.ops.sparse_attention import paged_sparse_attention, sparse_attention, sparse_attention_with_lse
from octile.ops.sparse_attention_backward import sparse_attention_backward
from octile.ops.sparse_attention_weights import sparse_attention_weights
from octile.ops.swiglu import (
    swiglu,
    swiglu_backward,
    swiglu_backward_quantize,
    swiglu_quantize,
    swiglu_quantize_and_save,
)
from octile.ops.top_keys import top_keys
from octile.ops.transpose import (
    quantize_and_transpose,
    quantize_joined,
    quantize_joined_rows_and_columns,
    quantize_matrices,
    quantize_rows_and_columns,
    quantize_transposed,
    requantize_transposed,
    transpose_encoded,
)
from tests.ops.operators import assert_well_formed

TILE, COLUMN_TILE, BLOCK = (1, 128), (128, 1), (128, 128)


def _operand(shape: tuple[int, ...], block: tuple[int, int], fmt: str = "int8") -> tuple[Any, ...]:
    """An INT8 operand: torch compares an operator's inputs before and after, and has no comparison for FP8."""
    return *quantize(torch.randn(shape, device="cuda"), *block, fmt, False), block


def _offs() -> torch.Tensor:
    return torch.tensor([30, 30, 90], dtype=torch.int32, device="cuda")


def _swiglu_inputs(m: int, h: int) -> tuple[torch.Tensor, ...]:
    data, scale = quantize(torch.randn(2, m, h, device="cuda"), *TILE, "int8", False)
    return *data, *scale


def _labels() -> torch.Tensor:
    return torch.tensor([0, 129, -100, 5, 7], device="cuda")


def _place() -> torch.Tensor:
    return torch.randperm(15, device="cuda").to(torch.int32).view(5, 3)


def _gate_operands() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(5, 64, device="cuda").bfloat16(), torch.randn(8, 64, device="cuda")


def _cache(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(2, 64, *sizes, dtype=dtype, device="cuda")


def _integers(*sizes: int) -> torch.Tensor:
    return torch.zeros(sizes, dtype=torch.int64, device="cuda")


def _slots() -> torch.Tensor:
    return torch.tensor([70, 3], device="cuda")


def _starts() -> torch.Tensor:
    return torch.tensor([0, 6, 9], dtype=torch.int32, device="cuda")


def _pages() -> torch.Tensor:
    return torch.tensor([[1, 0], [0, 1]], dtype=torch.int32, device="cuda")


def _rows(*sizes: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(2, size, device="cuda") for size in sizes)


def _sparse_training(operator: Any, latent_dim: int, width: int) -> tuple[Any, tuple[Any, ...]]:
    q, latents = (torch.randn(*sizes, width, device="cuda").bfloat16() for sizes in ((2, 3), (5,)))
    positions, last = torch.tensor([[1, -1], [0, 4]], dtype=torch.int32, device="cuda"), (latent_dim, 0.1)
    o, lse = sparse_attention_with_lse(q, latents, positions, *last)
    between = {sparse_attention_weights: (lse,), sparse_attention_backward: (o, lse)}.get(operator, ())
    before = (torch.randn_like(o),) if operator is sparse_attention_backward else ()
    return operator, (*before, q, latents, positions, *between, *last)


CASES = {
    "latents of decode rows": lambda: (
        write_and_rotate,
        (
            _cache(16, dtype=torch.float32),
            _slots(),
            *_rows(12, 4),
            torch.ones(12, device="cuda"),
            1e-6,
            *_rows(2, 2),
            torch.randn(2, 3, 8, device="cuda"),
            torch.zeros(2, 3, 16, device="cuda"),
        ),
    ),
    "products of heads": lambda: (
        heads_nt_out,
        tuple(torch.randn(*sides, device="cuda").bfloat16() for sides in ((3, 2, 70), (3, 2, 64), (2, 70, 64))),
    ),
    "quantized products of heads": lambda: (
        heads_nt_quantize,
        (*(torch.randn(*sides, device="cuda").bfloat16() for sides in ((3, 2, 64), (2, 128, 64))), False),
    ),
    "row-invariant GEMM into rows": lambda: (
        row_invariant_matmul_nt_out,
        tuple(torch.randn(2, *sides, device="cuda") for sides in ((5, 3), (5, 7), (3, 7))),
    ),
    "sampled tokens": lambda: (
        sample_tokens,
        (
            torch.randn(3, 100, device="cuda"),
            torch.arange(3, device="cuda"),
            torch.arange(3, device="cuda"),
            torch.ones(3, device="cuda"),
            torch.arange(3, device="cuda"),
            *(torch.tensor(share, dtype=torch.float64, device="cuda") for share in ([1, 0.9, 0.5], [0, 0, 0.1])),
        ),
    ),
    "tokens of a decode step": lambda: (
        continued_tokens,
        (_integers(2, 11, 3), torch.tensor([0, 1], device="cuda"), _integers(4, 2), _integers(4)),
    ),
    "rows of a decode step": lambda: (text_rows, (_integers(2, 2), _integers(2), _integers(2), _pages())),
    "accepted rows of a decode step": lambda: (accepted_rows, (_integers(3, 2), _integers(3, 2), _integers(3))),
    "choices of a decode step": lambda: (
        record_choices,
        (
            *(_integers(3, 2), _integers(3, 2), _integers(3, 1), torch.tensor([0, 1], device="cuda")),
            *(_integers(3, 2), _integers(3), _integers(2, 3, 4)),
        ),
    ),
    "rows of the indexer": lambda: (
        index_rows,
        (torch.randn(2, 3, 4, 32, device="cuda"), *(torch.randn(3, 8, device="cuda") for _ in range(2))),
    ),
    "rows of a cache": lambda: (write_latents, (_cache(40, dtype=torch.bfloat16), _slots(), *_rows(32, 8))),
    "rows of a cache in FP8": lambda: (write_latents, (_cache(52, dtype=torch.uint8), _slots(), *_rows(32, 8))),
    "rows from a cache": lambda: (read_latents, (_cache(52, dtype=torch.uint8), _slots(), 32, torch.bfloat16)),
    **{
        f"paged attention, {dtype}": lambda dtype=dtype, width=width: (
            paged_attention,
            (
                torch.randn(2, 3, 40, device="cuda").bfloat16(),
                _cache(width, dtype=dtype),
                _pages(),
                torch.tensor([70, 3], dtype=torch.int32, device="cuda"),
                32,
                0.1,
            ),
        )
        for dtype, width in ((torch.bfloat16, 40), (torch.uint8, 52))
    },
    "attention of texts of any lengths": lambda: (
        ragged_attention,
        (*torch.randn(4, 9, 2, 32, device="cuda").bfloat16(), *2 * (_starts(),), 6, 6, 0.1),
    ),
    "rows that do not depend on each other": lambda: (
        row_invariant_matmul_nt,
        (*(torch.randn(2, n, 40, device="cuda").bfloat16() for n in (5, 7)), torch.float32),
    ),
    "mixture of few rows": lambda: (
        few_rows_mixture,
        (
            torch.randn(2, 256, device="cuda").bfloat16(),
            torch.rand(256, device="cuda"),
            1e-6,
            torch.randn(8, 256, device="cuda"),
            torch.rand(8, device="cuda"),
            *(3, 1, 1, 1, "sigmoid", True, 2.5),
            torch.randn(8, 256, 256, device="cuda").to(torch.float8_e4m3fn),
            torch.rand(8, 2, 2, device="cuda"),
            torch.randn(8, 256, 128, device="cuda").to(torch.float8_e4m3fn),
            torch.rand(8, 2, 1, device="cuda"),
            torch.randn(512, 256, device="cuda").to(torch.float8_e4m3fn),
            torch.rand(4, 2, device="cuda"),
            torch.randn(256, 256, device="cuda").to(torch.float8_e4m3fn),
            torch.rand(2, 2, device="cuda"),
            False,
        ),
    ),
    "product of few rows": lambda: (
        few_rows_nt,
        (
            torch.randn(2, 256, device="cuda").bfloat16(),
            torch.rand(256, device="cuda"),
            1e-6,
            torch.randn(40, 256, device="cuda").to(torch.float8_e4m3fn),
            torch.rand(1, 2, device="cuda"),
            False,
            torch.randn(2, 40, device="cuda").bfloat16(),
        ),
    ),
    "attention of few rows": lambda: (
        latent_attention,
        (
            *(torch.randn(2, n, device="cuda").bfloat16() for n in (3 * 96, 576)),
            torch.randn(3, 512, 32, device="cuda").bfloat16(),
            torch.rand(512, device="cuda"),
            1e-6,
            *torch.randn(2, 2, 32, device="cuda"),
            torch.tensor([69, -1], device="cuda"),
            _cache(576, dtype=torch.bfloat16),
            _pages(),
            torch.tensor([70, 3], dtype=torch.int32, device="cuda"),
            torch.randn(3, 128, 512, device="cuda").bfloat16(),
            0.1,
        ),
    ),
    "choice of keys": lambda: (
        top_keys,
        (torch.randn(2, 9, device="cuda"), torch.zeros(2, device="cuda").int(), torch.full_like(_pages()[0], 5), 3),
    ),
    "blocks of pages": lambda: (paged_mqa_schedule, (300 * _pages(), 4)),
    "sparse attention": lambda: (
        sparse_attention,
        (torch.randn(2, 3, 40, device="cuda"), torch.randn(5, 40, device="cuda"), _pages(), 32, 0.1),
    ),
    **{
        f"{operator.name}, {width} channels": lambda operator=operator, sizes=(c, width): _sparse_training(
            operator, *sizes
        )
        for operator in (sparse_attention_with_lse, sparse_attention_backward, sparse_attention_weights)
        for c, width in ((32, 40), (512, 576))
    },
    **{
        f"sparse attention in pages, {dtype}": lambda dtype=dtype, width=width: (
            paged_sparse_attention,
            (
                torch.randn(2, 3, 576, device="cuda").bfloat16(),
                _cache(width, dtype=dtype),
                _pages(),
                torch.tensor([[70, 3], [-1, 5]], dtype=torch.int32, device="cuda"),
                512,
                0.1,
            ),
        )
        for dtype, width in ((torch.bfloat16, 576), (torch.uint8, 656))
    },
    "gate": lambda: (
        gate,
        (*_gate_operands(), torch.randn(8, device="cuda"), 3, 4, 2, 2, "sigmoid", True, 2.5),
    ),
    "gate backward": lambda: (
        gate_backward,
        (
            torch.randn(5, 3, device="cuda"),
            *torch.randn(2, 5, 8, device="cuda"),
            torch.arange(15, device="cuda").view(5, 3) % 8,
            *_gate_operands(),
            "softmax",
            False,
            16.0,
        ),
    ),
    "BF16 terms": lambda: (bfloat16_terms, (torch.randn(5, 7, device="cuda"), [2, 0, 1])),
    **{
        f"high-precision groups, {dtype}": lambda dtype=dtype: (
            high_precision_grouped_nt,
            (*(torch.randn(n, device="cuda").bfloat16() for n in ((99, 60), (3, 70, 60))), _offs(), dtype),
        )
        for dtype in (torch.bfloat16, torch.float32)
    },
    **{
        f"high-precision groups, summed over rows, {dtype}": lambda dtype=dtype: (
            high_precision_grouped_tn,
            (*(torch.randn(n, device="cuda").bfloat16() for n in ((99, 60), (99, 70))), _offs(), dtype),
        )
        for dtype in (torch.bfloat16, torch.float32)
    },
    "quantize": lambda: (quantize, (torch.randn(2, 5, 130, device="cuda"), *TILE, "int8", True)),
    "dequantize": lambda: (dequantize, (*_operand((5, 130), TILE)[:2], *TILE, torch.bfloat16)),
    "quantize_with_scale": lambda: (
        quantize_with_scale,
        (torch.randn(5, 130, device="cuda"), torch.ones(1, device="cuda"), "e4m3"),
    ),
    "rows and columns": lambda: (quantize_rows_and_columns, (torch.randn(2, 5, 130, device="cuda"), "int8", False)),
    "blocks": lambda: (quantize_and_transpose, (torch.randn(2, 5, 130, device="cuda"), "int8", False)),
    "blocks, transposed alone": lambda: (
        quantize_transposed,
        (torch.randn(2, 5, 130, device="cuda"), "int8", False, torch.randn(3, device="cuda")),
    ),
    "encoded values": lambda: (transpose_encoded, (_operand((5, 130), TILE)[0], torch.randn(3, device="cuda"))),
    "joined weights": lambda: (
        quantize_joined,
        ([torch.randn(n, 136, device="cuda") for n in (128, 5)], "e4m3", True, True, True),
    ),
    "many weights": lambda: (
        quantize_matrices,
        ([torch.randn(n, 136, device="cuda") for n in (130, 128, 5)], [1, 2], "e4m3", True, True),
    ),
    "rows and columns of parts": lambda: (
        quantize_joined_rows_and_columns,
        ([torch.randn(130, n, device="cuda") for n in (128, 136)], "e4m3", True),
    ),
    "tiles": lambda: (requantize_transposed, (*_operand((5, 130), TILE)[:2], False)),
    "swiglu in high precision": lambda: (swiglu, tuple(torch.randn(2, 5, 130, device="cuda"))),
    "swiglu backward in high precision": lambda: (swiglu_backward, tuple(torch.randn(3, 5, 130, device="cuda"))),
    "swiglu": lambda: (swiglu_quantize, (*torch.randn(2, 5, 130, device="cuda"), "int8", False)),
    "swiglu, inputs saved": lambda: (
        swiglu_quantize_and_save,
        (*torch.randn(2, 5, 130, device="cuda"), "int8", False, "e4m3", True, torch.rand(5, device="cuda")),
    ),
    "swiglu backward": lambda: (
        swiglu_backward_quantize,
        (*torch.randn(3, 5, 128, device="cuda"), None, None, None, "int8", False, "e4m3", True),
    ),
    "swiglu backward of saved inputs": lambda: (
        swiglu_backward_quantize,
        (
            torch.randn(5, 128, device="cuda"),
            *_swiglu_inputs(5, 128),
            torch.rand(5, device="cuda"),
            "int8",
            False,
            "e4m3",
            True,
        ),
    ),
    "rows of tiles": lambda: (requantize_transposed, (*_operand((95, 130), TILE)[:2], False, "e4m3", _offs())),
    "halves": lambda: (
        rotate_halves,
        (
            *(torch.randn(2, 5, heads, 24, device="cuda").transpose(1, 2) for heads in (3, 1)),
            *torch.randn(2, 2, 5, 16, device="cuda"),
        ),
    ),
    "sequence balance": lambda: (sequence_balance, (torch.randn(6, 8, device="cuda"), None, 3, 2, "sigmoid")),
    "sequence balance backward": lambda: (
        sequence_balance_backward,
        (torch.ones((), device="cuda"), *torch.randn(6, 8, device="cuda").split((4, 2)), "softmax"),
    ),
    "count_tokens": lambda: (count_tokens, (_place() % 3, 3, 5)),
    "weighted_routing_plan": lambda: (weighted_routing_plan, (_place() % 3, _place().float(), 3)),
    "routing_plan": lambda: (routing_plan, (_place().long() % 3, torch.full((3,), 5, device="cuda"))),
    "groups": lambda: (align_groups, (_offs(), 99)),
    "rows and columns of groups": lambda: (
        quantize_rows_and_columns,
        (torch.randn(99, 130, device="cuda"), "int8", False, align_groups(_offs(), 99)[0]),
    ),
    "requantize groups": lambda: (
        requantize_transposed,
        (*_operand((99, 130), TILE)[:2], False, None, None, align_groups(_offs(), 99)[0]),
    ),
    "swiglu backward of groups": lambda: (
        swiglu_backward_quantize,
        (
            *torch.randn(3, 99, 128, device="cuda"),
            None,
            None,
            None,
            "int8",
            False,
            "e4m3",
            True,
            align_groups(_offs(), 99)[0],
        ),
    ),
    "permute": lambda: (permute, (*_operand((5, 130), TILE)[:2], _place(), _place().flatten())),
    "unpermute": lambda: (
        unpermute,
        (torch.randn(15, 130, device="cuda"), _place(), torch.ones(5, 130, device="cuda")),
    ),
    "unpermute_add_": lambda: (
        unpermute_add_,
        (torch.zeros(5, 130, device="cuda"), torch.randn(15, 130, device="cuda"), _place()),
    ),
    "unpermute with weights": lambda: (
        unpermute,
        (torch.randn(15, 130, device="cuda"), _place(), None, torch.rand(5, 3, device="cuda")),
    ),
    "unpermute backward": lambda: (
        unpermute_backward,
        (
            torch.randn(5, 130, device="cuda"),
            torch.randn(15, 130, device="cuda"),
            _place(),
            torch.rand(5, 3, device="cuda"),
        ),
    ),
    "rms_norm in high precision": lambda: (
        rms_norm,
        (torch.randn(5, 130, device="cuda"), torch.ones(130, device="cuda"), 1e-6),
    ),
    "rms_norm backward": lambda: (
        rms_norm_backward,
        (
            *torch.randn(2, 5, 130, device="cuda"),
            torch.ones(130, device="cuda"),
            torch.ones(5, device="cuda"),
        ),
    ),
    "cross-entropy": lambda: (cross_entropy, (torch.randn(5, 130, device="cuda"), _labels())),
    "cross-entropy backward": lambda: (
        cross_entropy_backward,
        (torch.rand(5, device="cuda"), torch.randn(5, 130, device="cuda"), _labels(), torch.rand(5, device="cuda")),
    ),
    "attention": lambda: (attention, (*torch.randn(3, 2, 64, 2, 32, device="cuda").bfloat16(), 0.2)),
    "attention to all keys": lambda: (
        attention,
        (*(torch.randn(2, n, 2, 32, device="cuda").bfloat16() for n in (64, 80, 80)), 0.2, False),
    ),
    "attention backward": lambda: (
        attention_backward,
        (*torch.randn(5, 2, 64, 2, 32, device="cuda").bfloat16(), torch.rand(2, 2, 64, device="cuda"), 0.2),
    ),
    "rms_norm": lambda: (
        rms_norm_quantize,
        (torch.randn(5, 130, device="cuda"), torch.ones(130, device="cuda"), 1e-6, "int8", False, True),
    ),
    "matmul_nt": lambda: (matmul_nt, (*_operand((5, 130), TILE), *_operand((7, 130), BLOCK), torch.bfloat16)),
    "matmul_nt_out": lambda: (
        matmul_nt_out,
        (torch.zeros(5, 7, device="cuda"), *_operand((5, 130), TILE), *_operand((7, 130), BLOCK), True),
    ),
    "grouped": lambda: (
        grouped_matmul_nt,
        (*_operand((90, 130), TILE), *_operand((3, 7, 130), BLOCK), _offs(), torch.bfloat16),
    ),
    "masked": lambda: (
        masked_grouped_matmul_nt,
        (*_operand((3, 90, 130), TILE), *_operand((3, 7, 130), BLOCK), _offs() * 0 + 90, torch.bfloat16),
    ),
    "wgrad": lambda: (
        grouped_wgrad,
        (*_operand((90, 7), COLUMN_TILE), *_operand((90, 9), COLUMN_TILE), _offs(), torch.float32),
    ),
    "grouped_out": lambda: (
        grouped_matmul_nt_out,
        (torch.zeros(90, 7, device="cuda"), *_operand((90, 130), TILE), *_operand((3, 7, 130), BLOCK), _offs()),
    ),
    "masked_out": lambda: (
        masked_grouped_matmul_nt_out,
        (
            torch.zeros(3, 90, 7, device="cuda"),
            *_operand((3, 90, 130), TILE),
            *_operand((3, 7, 130), BLOCK),
            _offs() * 0 + 90,
        ),
    ),
    "wgrad_out": lambda: (
        grouped_wgrad_out,
        (
            torch.zeros(3, 7, 9, device="cuda"),
            *_operand((90, 7), COLUMN_TILE),
            *_operand((90, 9), COLUMN_TILE),
            _offs(),
            True,
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_opcheck(case: str):
    operator, arguments = CASES[case]()
    assert_well_formed(operator, arguments, ("test_schema", "test_faketensor"))
