"""Every operator, and every function above them, refuses an argument that is not a tensor by its name."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import octile
from octile.ops.adamw import adamw
from octile.ops.attention import attention, attention_backward, ragged_attention
from octile.ops.cross_entropy import cross_entropy, cross_entropy_backward
from octile.ops.decode_step import accepted_rows, continued_tokens, record_choices, text_rows
from octile.ops.few_rows import few_rows_nt, latent_attention
from octile.ops.few_rows_mixture import few_rows_mixture
from octile.ops.gate import bfloat16_terms, gate, gate_backward
from octile.ops.gradient_norms import gradient_norms
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
from octile.ops.mqa_logits import mqa_logits, paged_mqa_logits, paged_mqa_schedule
from octile.ops.norm import rms_norm, rms_norm_backward, rms_norm_quantize
from octile.ops.operator import LIBRARIES
from octile.ops.packed import packed_matmul_nt
from octile.ops.packed_attention import packed_attention, packed_attention_backward
from octile.ops.paged_attention import heads_nt_out, heads_nt_quantize, paged_attention, paged_attention_with_lse
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
from octile.ops.rope import latent_keys, latent_keys_backward, rotate_, rotate_and_copy_, rotate_halves
from octile.ops.row_invariant import (
    row_invariant_matmul_nt,
    row_invariant_matmul_nt_out,
    row_invariant_scaled_nt_out,
)
from octile.ops.sample_tokens import sample_tokens
from octile.ops.scale_layouts import (
    mn_major,
    pack_grouped_ue8m0,
    pack_ue8m0,
    tile_128x4,
    to_ue8m0,
    unpack_grouped_ue8m0,
    unpack_ue8m0,
)
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

FLAT, HEADS, ONE = torch.ones(128), torch.ones(1, 1, 1, 4), torch.ones(1, 1)
SMALL = torch.ones(1)  # torch's own message, which octile replaces, shows each element
X, ENCODED = torch.ones(2, 128), torch.ones(2, 128, dtype=torch.int8)
SCALE = torch.ones(2, 1)
PACKED = pack_ue8m0(SCALE)
A = (ENCODED, SCALE, (1, 128))
STACK = (ENCODED[None], SCALE[None], (1, 128))
TRANSPOSED = (ENCODED, torch.ones(1, 128), (128, 1))
TILES, INT8 = torch.tensor([[0, 1], [1, 2]], dtype=torch.int32), ("int8", False)
ENDS, PLACES = torch.tensor([2], dtype=torch.int32), torch.tensor([[0], [1]], dtype=torch.int32)
INT = torch.tensor([[0, 0], [1, 0]], dtype=torch.int32)
INT64 = torch.zeros(2, 2, dtype=torch.int64)
LABELS = torch.tensor([3, -100])
CACHE, SLOTS = torch.zeros(1, 64, 128), torch.tensor([1, 0])
F8 = ENCODED.to(torch.float8_e4m3fn)
KEYS = torch.zeros(2, 64 * 132, dtype=torch.uint8)
Q, W, COLUMNS = octile.ScaledTensor(*A), octile.ScaledTensor(*STACK), octile.ScaledTensor(*TRANSPOSED)

STARTS = torch.tensor([0, 2], dtype=torch.int32)

CALLS: dict[Callable[..., Any], tuple[Any, ...]] = {
    adamw: ([FLAT.clone()], [FLAT], [FLAT.clone()], [FLAT.clone()], [], torch.ones(1, 3), 0.9, 0.9, 1e-8),
    align_groups: (ENDS, 2),
    attention: (HEADS, HEADS, HEADS, 1.0),
    attention_backward: (HEADS, HEADS, HEADS, HEADS, HEADS, torch.ones(1, 1, 1), 1.0),
    cross_entropy: (X, LABELS),
    cross_entropy_backward: (torch.ones(2), X, LABELS, torch.ones(2)),
    bfloat16_terms: (X, [0]),
    count_tokens: (PLACES, 2),
    dequantize: (ENCODED, SCALE, 1, 128, torch.float32),
    gate: (X, X, torch.ones(2), 1, 1, 1, 1, "sigmoid", True, 1.0),
    gate_backward: (torch.ones(2, 1), torch.ones(2, 2), torch.ones(2, 2), PLACES.long(), X, X, "sigmoid", True, 1.0),
    gradient_norms: ([X, FLAT],),
    grouped_matmul_nt: (*A, *STACK, ENDS, torch.float32),
    grouped_matmul_nt_out: (torch.ones(2, 2), *A, *STACK, ENDS),
    grouped_wgrad: (*TRANSPOSED, *TRANSPOSED, ENDS, torch.float32),
    grouped_wgrad_out: (torch.ones(1, 128, 128), *TRANSPOSED, *TRANSPOSED, ENDS, False),
    heads_nt_out: (torch.ones(2, 1, 2), torch.ones(2, 1, 3), torch.ones(1, 2, 3)),
    heads_nt_quantize: (torch.ones(2, 1, 3), torch.ones(1, 2, 3), False),
    index_rows: (HEADS, ONE, ONE),
    latent_keys: (torch.ones(1, 1, 1, 4), torch.ones(1, 1, 2), ONE, ONE, 2),
    latent_keys_backward: (HEADS, HEADS, ONE, ONE),
    masked_grouped_matmul_nt: (*STACK, *STACK, ENDS, torch.float32),
    masked_grouped_matmul_nt_out: (torch.ones(1, 2, 2), *STACK, *STACK, ENDS),
    matmul_nt: (*A, *A, torch.float32),
    matmul_nt_out: (torch.ones(2, 2), *A, *A, False),
    mqa_logits: (F8[None], F8, torch.ones(2), torch.ones(1, 2), ENDS - 2, ENDS, 0, True, torch.float32),
    paged_mqa_logits: (
        F8[None, None],
        KEYS,
        torch.ones(1, 2),
        ENDS[None],
        ENDS[None] - 1,
        INT,
        64,
        True,
        torch.float32,
    ),
    paged_mqa_schedule: (ENDS[None], 1),
    paged_attention: (X[:, None], CACHE, torch.zeros_like(PLACES), ENDS.expand(2), 100, 1.0),
    paged_attention_with_lse: (X[:, None], CACHE, torch.zeros_like(PLACES), ENDS.expand(2), 100, 1.0, 64),
    paged_sparse_attention: (X[:, None], CACHE, torch.zeros_like(PLACES), torch.zeros_like(PLACES), 100, 1.0),
    packed_matmul_nt: (F8, PACKED, 128, F8, PACKED, 128, torch.float32),
    permute: (ENCODED, SCALE, PLACES, PLACES[:, 0]),
    high_precision_grouped_nt: (X, X[None], ENDS, torch.float32),
    high_precision_grouped_tn: (X, X, ENDS, torch.float32),
    few_rows_mixture: (
        torch.ones(2, 2),
        torch.ones(2),
        1e-6,
        torch.ones(1, 2),
        torch.ones(1),
        *(1, 1, 1, 1, "sigmoid", True, 1.0),
        *(F8[None, :2, :2], torch.ones(1, 1, 1), F8[None, :2, :1], torch.ones(1, 1, 1)),
        *(F8[:2, :2], ONE, F8[:2, :1], ONE),
        False,
    ),
    continued_tokens: (torch.zeros(2, 10, 2).long(), INT64[0].clone(), INT64[:, :1].clone(), INT64[:, 0].clone()),
    text_rows: (INT64, INT64[:, 0], INT64[:, 0], INT),
    accepted_rows: (INT64, INT64, INT64[:, 0].clone()),
    record_choices: (
        *(INT64, INT64, INT64[:, :1].clone(), INT64[0].clone(), INT64.clone(), INT64[0].clone()),
        torch.zeros(2, 2, 4).long(),
    ),
    few_rows_nt: (X, FLAT, 1e-6, F8, ONE, False, torch.ones(2, 2)),
    latent_attention: (
        X[:, :32],
        X,
        torch.ones(1, 100, 4),
        FLAT[:100],
        1e-6,
        torch.ones(2, 14),
        torch.ones(2, 14),
        SLOTS,
        CACHE.clone(),
        torch.zeros_like(PLACES),
        ENDS.expand(2),
        torch.ones(1, 2, 100),
        1.0,
    ),
    quantize: (X, 1, 128, "int8", False),
    quantize_and_transpose: (X, "int8", False),
    quantize_joined_rows_and_columns: ([X], "int8", False),
    quantize_matrices: ([X], [1], "int8", False, True),
    quantize_joined: ([X], "int8", False, True, True, X),
    quantize_rows_and_columns: (X, "int8", False, TILES),
    quantize_transposed: (X, "int8", False, X),
    quantize_with_scale: (X, torch.ones(1), "e4m3"),
    packed_attention: (*3 * (X[:, None],), STARTS, 1.0),
    packed_attention_backward: (*5 * (X[:, None],), torch.ones(1, 2), STARTS, 1.0),
    ragged_attention: (*4 * (X[:, None],), STARTS, STARTS, 2, 2, 1.0),
    read_latents: (CACHE, SLOTS, 100, torch.float32),
    requantize_transposed: (ENCODED, SCALE, False, "int8", ENDS - 1, TILES[:1]),
    rms_norm: (X, FLAT, 1e-6),
    rms_norm_backward: (X, X, FLAT, torch.ones(2), X, X, X),
    rms_norm_quantize: (X, FLAT, 1e-6, "int8", False),
    rotate_: (HEADS.clone(), ONE, ONE),
    rotate_and_copy_: (HEADS.clone(), HEADS.clone(), ONE, ONE),
    routing_plan: (ENDS[:, None] - 2, ENDS - 1),
    row_invariant_matmul_nt: (X[None], X[None], torch.float32),
    row_invariant_matmul_nt_out: (torch.zeros(1, len(X), len(X)), X[None], X[None]),
    row_invariant_scaled_nt_out: (torch.ones(2, 2), *A, *A, False),
    rotate_halves: (HEADS, HEADS, HEADS[:, 0], HEADS[:, 0]),
    sequence_balance: (X, torch.zeros(2, 1, dtype=torch.int64), 1, 1, "sigmoid"),
    sequence_balance_backward: (torch.tensor(1.0), X, X[:1], "sigmoid"),
    sparse_attention: (X[None], X, INT[:1], 100, 1.0),
    sparse_attention_backward: (*2 * (X[None],), X, INT[:1], X[None], torch.ones(1, 2), 128, 1.0),
    sparse_attention_weights: (X[None], X, INT[:1], torch.ones(1, 2), 100, 1.0),
    sparse_attention_with_lse: (X[None], X, INT[:1], 100, 1.0),
    swiglu: (X, X),
    swiglu_backward: (X, X, X),
    swiglu_backward_quantize: (X, ENCODED, ENCODED, SCALE, SCALE, torch.ones(2), *INT8, *INT8, TILES),
    swiglu_quantize: (X, X, "int8", False, torch.ones(2)),
    swiglu_quantize_and_save: (X, X, "int8", False, "int8", False, torch.ones(2)),
    sample_tokens: (X, *2 * (PLACES[:, 0].long(),), torch.ones(2), PLACES[:, 0].long(), *2 * (torch.ones(2).double(),)),
    top_keys: (X, INT[0], INT[0] + 2, 1),
    transpose_encoded: (ENCODED, X),
    unpermute: (X, PLACES, X, torch.ones(2, 1)),
    unpermute_add_: (X.clone(), X, PLACES, X, torch.ones(2, 1)),
    unpermute_backward: (X, X, PLACES, torch.ones(2, 1)),
    weighted_routing_plan: (ENDS[:, None] - 2, torch.ones(1, 1), 2),
    write_and_rotate: (
        CACHE.clone(),
        SLOTS,
        X[:, :100],
        X[:, 100:],
        FLAT[:100],
        1e-6,
        torch.ones(2, 14),
        torch.ones(2, 14),
        torch.ones(2, 1, 32),
        torch.ones(2, 1, 128),
    ),
    write_latents: (CACHE.clone(), SLOTS, X[:, :100], X[:, 100:]),
    octile.quantize: (X,),
    octile.dequantize: (Q,),
    octile.matmul_nt: (Q, Q, None, torch.ones(2, 2)),
    octile.grouped_matmul_nt: (Q, W, ENDS),
    octile.masked_grouped_matmul_nt: (W, W, ENDS),
    octile.align_groups: (X, ENDS),
    octile.grouped_wgrad: (COLUMNS, COLUMNS, ENDS, None, torch.ones(1, 128, 128)),
    mn_major: (SCALE,),
    to_ue8m0: (SCALE,),
    pack_ue8m0: (SCALE,),
    unpack_ue8m0: (PACKED, 1),
    pack_grouped_ue8m0: (SCALE, ENDS, 1),
    unpack_grouped_ue8m0: (PACKED, ENDS, 2),
    tile_128x4: (ENCODED,),
}


def test_every_operator_is_called_here():
    called = {function.__name__ for function in CALLS}
    assert set(LIBRARIES) - {"plus"} <= called  # `plus` is a test's own


def parameter(call: Callable[..., Any], i: int) -> inspect.Parameter:
    return [*inspect.signature(call).parameters.values()][i]


TENSORS = [
    pytest.param(call, i, id=f"{call.__module__.removeprefix('octile.')}.{call.__name__} {parameter(call, i).name}")
    for call, arguments in CALLS.items()
    for i, argument in enumerate(arguments)
    if isinstance(argument, Tensor | octile.ScaledTensor)
]
NEEDED = [case for case in TENSORS if "None" not in str(parameter(*case.values).annotation)]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.__module__}.{call.__name__}")
def test_the_other_arguments_are_valid(call: Callable[..., Any]):
    call(*CALLS[call])


def refuses(call: Callable[..., Any], i: int, given: object) -> None:
    arguments = list(CALLS[call])
    arguments[i] = given
    with pytest.raises(TypeError, match=f"^{parameter(call, i).name} must be a .*, not {type(given).__name__}$"):
        call(*arguments)


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(1.5, id="number"),
        pytest.param([1.5], id="list", marks=pytest.mark.slow),  # 344 cases each take a second and more
        pytest.param((SMALL, SMALL), id="tuple", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("call", "i"), TENSORS)
def test_arguments_that_are_no_tensors_are_refused(call: Callable[..., Any], i: int, given: object):
    refuses(call, i, given)


@pytest.mark.parametrize(("call", "i"), NEEDED)
def test_none_is_refused_where_a_tensor_is_needed(call: Callable[..., Any], i: int):
    refuses(call, i, None)


def test_named_arguments_are_refused_alike():
    with pytest.raises(TypeError, match="scale must be a tensor, not NoneType"):
        quantize_with_scale(X, fmt="e4m3", scale=None)
    with pytest.raises(TypeError, match="weight must be a tensor, not float"):
        swiglu_quantize(X, X, "int8", False, weight=0.5)


@pytest.mark.parametrize("name", ["b", "out"])
def test_meta_tensors_mixed_with_others_are_refused(name: str):
    b = octile.ScaledTensor(ENCODED.to("meta"), SCALE.to("meta"), (1, 128)) if name == "b" else Q
    out = torch.empty(2, 2, device="meta") if name == "out" else None
    with pytest.raises(ValueError, match=f"is on (cpu but {name} on meta|meta but a on cpu)"):
        octile.matmul_nt(Q, b, None, out)
