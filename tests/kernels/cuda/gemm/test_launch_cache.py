"""Tests of the launch cache: a cached launch equals the launch that an empty cache would prepare.

GEMMs run one after the other, each differing from the first in a few properties: shapes,
strides, alignment, dtypes, blocks, wrong arguments. Whatever the cache holds of the earlier ones, each must give the
kernel, the launch and the error that it gives with an empty cache.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("cuda.bindings")

from octile.kernels.cuda.gemm import launch_cache, launch_plan, num_sms, request
from octile.kernels.cuda.gemm.config import GemmConfig, Schedule, Store
from octile.kernels.cuda.gemm.cost_model import Chip, Problem
from octile.kernels.cuda.gemm.request import GemmRequest, Operand
from octile.kernels.cuda.jit import prepared, tensor_map
from octile.kernels.cuda.jit.prepared import BoundedCache
from octile.kernels.triton import grouped as triton_grouped
from octile.kernels.triton import matmul as triton_matmul
from octile.ops import matmul
from octile.ops.grouped import (
    grouped_matmul_nt,
    grouped_matmul_nt_out,
    grouped_wgrad,
    grouped_wgrad_out,
    masked_grouped_matmul_nt,
    masked_grouped_matmul_nt_out,
)
from octile.ops.matmul import matmul_nt, matmul_nt_out
from tests.kernels.cuda.emulated import config

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LOWEST_ADDRESS = 2**22  # where Linux loads a program that is not relocated, whose heap follows it
TILE, BLOCK = (1, 128), (128, 128)


class FakeKernel:
    """A kernel of one problem that records its launches and counts the prepared ones."""

    device = 0

    def __init__(self, problem: Problem, constants: dict[str, int | bool], launches: list[Any]) -> None:
        self.problem, self.constants, self.launches = problem, constants, launches

    def current_stream(self) -> int:
        return 7

    def in_context(self) -> Any:
        return nullcontext()

    def ready(self, *arguments: Any) -> Any:
        return lambda: self.launches.append((self.problem, self.constants, arguments))


@pytest.fixture(autouse=True, scope="module")
def gpu() -> Iterator[list[Any]]:
    """A GPU of 132 SMs that accepts and records any launch, with one kernel for each kind of GEMM."""
    launches: list[Any] = []
    decided: list[Problem] = []

    def choose(p: Problem, chip: Chip) -> GemmConfig:
        decided.append(p)
        options = {name: getattr(p, name) for name in ("schedule", "store", "out_float", "accumulate", "zero_rest")}
        kinds = {name: getattr(p, name) for name in ("a_scales", "b_scales", "a_e5m2", "b_e5m2")}
        parts, staged = 2 if p.schedule is Schedule.DENSE and p.k > 128 else 1, int(p.store is Store.TMA)
        return config(128, 64, split_k=parts, staged_boxes=staged, **options, **kinds)

    def k_major(data: Tensor) -> Tensor:
        *batch, rows, columns = data.shape
        return data.new_empty(*batch, rows, -(-columns // 16) * 16)[..., :columns].copy_(data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request, "why_not_on", lambda device: None)
        patch.setattr(launch_plan, "choose", choose)
        patch.setattr(launch_plan, "_k_major", k_major)
        patch.setattr(
            launch_cache.specialize, "load", lambda _, constants, *others: FakeKernel(decided[-1], constants, launches)
        )
        patch.setattr(num_sms, "chip", lambda device: Chip(132))
        patch.setattr(tensor_map, "encode", lambda described, pointer: (described, pointer))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        for module, names in (
            (triton_matmul, ["launch"]),
            (triton_grouped, ["launch", "launch_masked", "launch_wgrad"]),
        ):
            for name in names:
                patch.setattr(module, name, lambda *arguments: launches.append("Triton"))
        request._why_unsupported.cache_clear()
        yield launches
    request._why_unsupported.cache_clear()


@contextmanager
def empty_launch_cache() -> Iterator[None]:
    """Run the body with an empty launch cache, and restore the previous one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_cache, "_prepared", BoundedCache(64))
        patch.setattr(launch_cache, "_repeated", BoundedCache(64))
        patch.setattr(prepared, "_launches", BoundedCache(64))
        patch.setattr(launch_cache, "_workspaces", {})
        yield


FIELDS: dict[str, tuple[list[Any], list[Any]]] = {  # values that a valid GEMM may have; further values of invalid ones
    "kind": (["dense", "grouped", "masked", "wgrad"], []),
    "m": ([16, 3], [1]),
    "n": ([24, 130], [8]),
    "k": ([128, 160], [120]),
    "groups": ([2, 1], [3]),
    "a_dtype": ([E4M3, E5M2], [torch.int8, torch.float16]),
    "b_dtype": ([E4M3, E5M2], [torch.int8, torch.float16]),
    "a_block": ([TILE], [BLOCK, (200, 200), (1, 200), (1, 64)]),
    "b_block": ([BLOCK, TILE], [(200, 200), (128, 200), (128,)]),
    "a_gap": ([0, 16], [3]),  # elements after each row
    "b_gap": ([0, 16], [3]),
    "a_past": ([0, 16], [4]),  # elements before the first row
    "b_past": ([0, 16], [4]),
    "a_scales_first": ([True], [False]),  # column-major, as quantization writes them
    "b_scales_first": ([True], [False]),
    "a_scales_past": ([0, 4], [1]),
    "b_scales_past": ([0, 4], [1]),
    "scales_dtype": ([torch.float32], [torch.int32]),
    "out": ([True, False], []),  # given
    "out_dtype": ([torch.bfloat16, torch.float32], [torch.float16]),
    "out_gap": ([0], [8, 1]),
    "out_past": ([0, 8], [2, 1]),
    "accumulate": ([False, True], []),
    "sizes_dtype": ([torch.int32], [torch.int64]),
    "sizes_step": ([1], [2]),
    "bound": ([None], [1]),
    "wrong": ([None], ["a's scale", "b's scale", "k", "out", "sizes"]),
}
Spec = dict[str, Any]

base = st.fixed_dictionaries({name: st.sampled_from(usual) for name, (usual, _) in FIELDS.items()})
change = st.sampled_from([(name, value) for name, (usual, unusual) in FIELDS.items() for value in [*usual, *unusual]])
changes = st.lists(change, min_size=1, max_size=2).map(dict)


def matrix(shape: tuple[int, ...], dtype: torch.dtype, gap: int = 0, past: int = 0) -> Tensor:
    """A matrix with `gap` elements after each row, `past` elements after a 16-byte aligned address."""
    *batch, rows, columns = shape
    stride = columns + gap
    whole = torch.zeros(past + math.prod(batch) * rows * stride, dtype=dtype)
    return whole.as_strided(shape, (rows * stride, stride, 1)[-len(shape) :], past)


def scales(s: Spec, name: str, shape: tuple[int, ...]) -> Tensor:
    block, first, past, dtype = (
        s[key] for key in (f"{name}_block", f"{name}_scales_first", f"{name}_scales_past", "scales_dtype")
    )
    one_more = s["wrong"] == f"{name}'s scale"
    *batch, rows, columns = shape
    r, c = block if len(block) == 2 else (1, 1)
    sides = (-(-rows // r) + one_more, -(-columns // c))
    if first:
        return matrix((*batch, *sides[::-1]), dtype, -sides[0] % 4, past).mT
    return matrix((*batch, *sides), dtype, past=past)


def make(s: Spec) -> Tensor:
    """Call an operator's CUDA kernel; return its result."""
    m, n, k, g, kind, wrong = s["m"], s["n"], s["k"], s["groups"], s["kind"], s["wrong"]
    a_shape = (g, m, k) if kind == "masked" else (m, k)
    b_shape = (n, k + (wrong == "k")) if kind in ("dense", "wgrad") else (g, n, k + (wrong == "k"))
    a = matrix(a_shape, s["a_dtype"], s["a_gap"], s["a_past"])
    b = matrix(b_shape, s["b_dtype"], s["b_gap"], s["b_past"])
    a_scale, b_scale = scales(s, "a", a_shape), scales(s, "b", b_shape)
    out_shape = {"dense": (m, n), "grouped": (m, n), "masked": (g, m, n), "wgrad": (g, m, n)}[kind]
    out_shape = (*out_shape[:-1], n + (wrong == "out"))
    out = matrix(out_shape, s["out_dtype"], s["out_gap"], s["out_past"]) if s["out"] else None
    sizes = torch.zeros(s["sizes_step"] * (g + (wrong == "sizes")), dtype=s["sizes_dtype"])[:: s["sizes_step"]]
    operands = (a, a_scale, s["a_block"], b, b_scale, s["b_block"])
    if kind == "wgrad":
        operands = (a.mT, a_scale.mT, s["a_block"][::-1], b.mT, b_scale.mT, s["b_block"][::-1])
    new, into = {
        "dense": (matmul_nt, matmul_nt_out),
        "grouped": (grouped_matmul_nt, grouped_matmul_nt_out),
        "masked": (masked_grouped_matmul_nt, masked_grouped_matmul_nt_out),
        "wgrad": (grouped_wgrad, grouped_wgrad_out),
    }[kind]
    groups = [] if kind == "dense" else [sizes]
    if out is None:
        return new.kernels["cuda"](*operands, *groups, s["out_dtype"])
    into.kernels["cuda"](out, *operands, *groups, *([s["accumulate"]] if kind in ("dense", "wgrad") else []))
    return out


def outcome(spec: Spec, launches: list[Any]) -> Any:
    """The outcome of a GEMM: an error, or its launches and result, with addresses reduced to their alignment."""
    launches.clear()
    num_sms.set_num_sms(spec["bound"])
    try:
        out = make(spec)
    except (TypeError, ValueError) as error:
        return type(error), str(error)
    finally:
        num_sms.set_num_sms(None)
    returned = None if out is None else (out.shape, out.stride(), out.dtype)
    if launches == ["Triton"]:
        return "Triton"
    ((problem, constants, (*shape, arguments, stream, programmatic)),) = launches
    return (
        problem,
        constants,
        shape,
        [_without_address(argument) for argument in arguments],
        stream,
        programmatic,
        returned,
    )


def _without_address(argument: Any) -> Any:
    if isinstance(argument, tuple):
        described, pointer = argument
        return described, pointer % 16
    is_address = isinstance(argument, int) and argument >= LOWEST_ADDRESS
    return f"address {argument % 16}" if is_address else argument


def key_of(a: Any, b: Any, sizes: Tensor | None = None, out: Tensor | None = None) -> object:
    return launch_cache.launch_key(GemmRequest(Schedule.DENSE, Operand(*a), Operand(*b), torch.float32, out, sizes))[0]


@pytest.mark.slow
@settings(max_examples=400)
@given(first=base, others=st.lists(changes, min_size=1, max_size=4))
def test_the_launch_cache_changes_no_launch(gpu, first: Spec, others: list[Spec]):
    specs = [first, first, *(first | other for other in others), first]
    expected = []
    for spec in specs:
        with empty_launch_cache():
            expected.append(outcome(spec, gpu))
    with empty_launch_cache():
        for spec, what in zip(specs, expected, strict=True):
            assert outcome(spec, gpu) == what


@pytest.mark.parametrize("name", ["a", "a_scale", "b", "b_scale", "sizes", "out"])
@pytest.mark.parametrize("differs", ["shape", "strides", "dtype", "alignment"])
def test_tensors_that_differ_in_one_property_have_different_keys(name: str, differs: str):
    if (name, differs) == ("sizes", "alignment"):
        return  # read one by one
    buffer = torch.zeros(64)
    tensors = {each: buffer.as_strided((4, 8), (8, 1)) for each in ("a", "a_scale", "b", "b_scale", "sizes", "out")}
    other = {
        "shape": buffer.as_strided((4, 7), (8, 1)),
        "strides": buffer.as_strided((4, 8), (9, 1)),
        "dtype": buffer.view(torch.int32).as_strided((4, 8), (8, 1)),
        "alignment": buffer.as_strided((4, 8), (8, 1), 1),
    }[differs]

    def key(t: dict[str, Tensor]) -> object:
        operands = (t["a"], t["a_scale"], TILE), (t["b"], t["b_scale"], TILE)
        return key_of(*operands, t["sizes"], t["out"])

    assert key(tensors) == key(dict(tensors))
    assert key(tensors) != key(tensors | {name: other})


def test_a_tensor_on_another_device_has_a_different_key():
    x, elsewhere = torch.zeros(4, 8), torch.zeros(4, 8)
    elsewhere.get_device = lambda: 1  # type: ignore[method-assign]
    keys = [key_of((x, x, TILE), (x, x, TILE), x, x)]
    for place in range(6):
        a, a_scale, b, b_scale, sizes, out = (elsewhere if place == i else x for i in range(6))
        keys.append(key_of((a, a_scale, TILE), (b, b_scale, TILE), sizes, out))
    assert len(set(keys)) == 7


def test_different_blocks_have_different_keys():
    x = torch.zeros(4, 8)
    blocks = [*product([TILE, BLOCK, (128,), (1,), (1, 128, 128), (128, 128, 128)], repeat=2)]
    assert len({key_of((x, x, a), (x, x, b)) for a, b in blocks}) == len(blocks)


def test_fewer_sms_have_a_different_key():
    x = torch.zeros(4, 8)
    arguments = ((x, x, TILE), (x, x, TILE))
    every = key_of(*arguments)
    num_sms.set_num_sms(5)
    try:
        assert key_of(*arguments) != every
    finally:
        num_sms.set_num_sms(None)


def test_the_flops_of_launches_count_towards_sms_that_are_left_free(gpu):
    spec = {name: usual[0] for name, (usual, _) in FIELDS.items()}
    with empty_launch_cache():
        for _ in range(2):  # the second one is cached
            end, left = num_sms.leave_free(8, 1), num_sms.left_free
            make(spec)
            assert (left, num_sms.left_free) == (8, 0)
            end()


@pytest.mark.parametrize("kind", FIELDS["kind"][0])
def test_how_many_flops_count(gpu, kind: str):
    spec = {name: usual[0] for name, (usual, _) in FIELDS.items()} | {"kind": kind}
    if kind == "wgrad":
        spec["b_block"] = TILE
    groups = spec["groups"] if kind == "masked" else 1
    flops = 2 * groups * spec["m"] * spec["n"] * spec["k"]
    with empty_launch_cache():
        ends = [num_sms.leave_free(count, flops) for count in (8, 4)]
        make(spec)
        left = num_sms.left_free
        for end in ends:
            end()
    assert left == 4  # the first one has ended, the second one has not begun


def test_only_launches_without_copies_are_cached(monkeypatch):
    hits: list[bool] = []

    def launch_cached(p: GemmRequest) -> Tensor | None:
        found = launch_cache.launch_cached(p)
        hits.append(found is not None)
        return found

    monkeypatch.setattr(matmul, "launch_cached", launch_cached)
    spec = {name: usual[0] for name, (usual, _) in FIELDS.items()} | {"k": 160}
    for change in ({"a_scales_first": False}, {"kind": "grouped", "sizes_step": 2}, {"a_block": BLOCK}):
        with empty_launch_cache():
            make(spec | change)
            make(spec | change)
    assert hits == [False] * 6
    with empty_launch_cache():
        make(spec)
        make(spec)
    assert hits[6:] == [False, True]


REPEATED: dict[str, Any] = {  # arguments of matmul_nt_out
    "out": matrix((16, 128), torch.float32),
    "a": matrix((16, 128), E4M3),
    "a_scale": matrix((1, 16), torch.float32).mT,
    "a_block": TILE,
    "b": matrix((128, 128), E4M3),
    "b_scale": matrix((1, 128), torch.float32).mT,
    "b_block": TILE,
    "accumulate": False,
}
VIEWS = {  # at the same addresses, by the property in which they differ
    "rows of a": {"a": REPEATED["a"][:8]},
    "shape of a": {"a": REPEATED["a"].view(8, 256)},
    "strides of a": {"a": REPEATED["a"].as_strided((16, 128), (112, 1))},
    "format of a": {"a": REPEATED["a"].view(E5M2)},
    "dtype of a": {"a": REPEATED["a"].view(torch.int8)},
    "strides of b": {"b": REPEATED["b"].as_strided((128, 128), (64, 1))},
    "dtype of a's scale": {"a_scale": REPEATED["a_scale"].view(torch.int32)},
    "rows of a's scale": {"a_scale": REPEATED["a_scale"][:15]},
    "strides of out": {"out": REPEATED["out"].as_strided((16, 128), (64, 1))},
    "dtype of out": {"out": REPEATED["out"].view(torch.int32)},
    "accumulate": {"accumulate": True},
}


def repeat(launches: list[Any], times: int, changes: dict[str, Any]) -> Any:
    """Repeat the GEMM of `REPEATED` with changes; return its last launch, without addresses, or the error."""
    launches.clear()
    try:
        for _ in range(times):
            matmul_nt_out.kernels["cuda"](*(REPEATED | changes).values())
    except (TypeError, ValueError) as error:
        return type(error), str(error)
    if launches[-1] == "Triton":
        return "Triton"
    problem, constants, (*shape, arguments, _, _) = launches[-1]
    return problem, constants, shape, [_without_address(argument) for argument in arguments]


def test_a_request_at_known_addresses_is_repeated_without_its_key(gpu, monkeypatch):
    with empty_launch_cache():
        expected = repeat(gpu, 2, {})
        monkeypatch.setattr(launch_cache, "launch_key", None)
        assert repeat(gpu, 2, {}) == expected


@pytest.mark.parametrize("differs", VIEWS)
def test_another_request_at_known_addresses_is_not_taken_for_a_repeated_one(gpu, differs: str):
    with empty_launch_cache():
        expected = repeat(gpu, 1, VIEWS[differs])
    with empty_launch_cache():
        repeated = repeat(gpu, 3, {})
        assert repeat(gpu, 3, VIEWS[differs]) == expected
        assert repeat(gpu, 1, {}) == repeated != expected


def test_a_tensor_on_another_device_is_not_taken_for_a_repeated_one():
    tensors = [value for value in REPEATED.values() if isinstance(value, Tensor)]
    guards = launch_cache._guards(tensors)
    assert guards.check(*tensors)
    for i, tensor in enumerate(tensors):
        assert not guards.check(*tensors[:i], tensor.to("meta"), *tensors[i + 1 :])


def test_a_matrix_is_repeatedly_multiplied_with_itself(gpu):
    same = {"b": REPEATED["a"], "b_scale": REPEATED["a_scale"], "out": REPEATED["out"][:, :16]}
    with empty_launch_cache():
        assert repeat(gpu, 1, same) == repeat(gpu, 3, same)
        assert not launch_cache._repeated


def test_repeated_requests_write_separate_results(gpu):
    operands = [*REPEATED.values()][1:7]
    with empty_launch_cache():
        results = [matmul_nt.kernels["cuda"](*operands, torch.float32) for _ in range(4)]
    addresses = [f"{out.data_ptr()}" for out in results]
    assert len({*addresses}) == 4
    assert all(address in f"{launch}" for address, launch in zip(addresses, gpu[-4:], strict=True))


def test_cached_launches_skip_the_checks_and_others_do_not(monkeypatch):
    checked: list[int] = []
    monkeypatch.setattr(matmul, "check_request", lambda _: checked.append(1))
    x = matrix((16, 128), E4M3)
    scale = torch.zeros(1, 16).mT
    with empty_launch_cache():
        results = [matmul_nt.kernels["cuda"](x, scale, TILE, x, scale, TILE, torch.float32) for _ in range(3)]
    assert len(checked) == 1
    assert len({out.data_ptr() for out in results}) == 3
