"""Tests of flash-attn-4 on a CPU: when it is used, and its calls, with a module in its place."""

import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from octile.kernels import attention as kernels
from octile.kernels import flash_attn_4
from octile.kernels.attention import CUDNN, EFFICIENT, FLASH, FLASH_ATTN_4
from octile.ops.attention import attention, attention_backward, ragged_attention
from octile.ops.packed_attention import packed_attention, packed_attention_backward

SCALE = 0.3
SUPPORTED = {"dtype": torch.bfloat16, "channels": (192, 128), "tokens": 1024, "causal": True}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """installed(version, capability): the version of the package, or None, and a GPU of that compute capability."""

    def simulate(found: str | None = "4.0.0b36", capability: tuple[int, int] = (9, 0)) -> None:
        def version(package: str) -> str:
            assert package == "flash-attn-4"
            if found is None:
                raise PackageNotFoundError(package)
            return found

        monkeypatch.setattr(flash_attn_4, "version", version)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        flash_attn_4.why_not_on.cache_clear()

    flash_attn_4.load.cache_clear()
    yield simulate
    flash_attn_4.why_not_on.cache_clear()
    flash_attn_4.load.cache_clear()


def operands(dtype: torch.dtype, channels: tuple[int, int], tokens: int, causal: bool) -> tuple[Tensor, Tensor, bool]:
    """q and v on a GPU, without memory, and causal."""
    with FakeTensorMode():
        q, v = (torch.empty(2, tokens, 3, width, dtype=dtype, device="cuda") for width in channels)
    return q, v, causal


def texts(dtype: torch.dtype, channels: tuple[int, int], rows: int) -> tuple[Tensor, Tensor]:
    """q and v of texts on a GPU, without memory."""
    with FakeTensorMode():
        q, v = (torch.empty(rows, 3, width, dtype=dtype, device="cuda") for width in channels)
    return q, v


@pytest.mark.parametrize("change", [{}, {"channels": (128, 128)}, {"tokens": 5001}], ids=str)
@pytest.mark.parametrize("version", ["4.0.0b36", "4.0.0b40", "4.0.0", "4.1.2"])
def test_it_is_used_where_it_was_measured_to_be_faster(installed, version: str, change: dict[str, Any]):
    installed(version)
    assert flash_attn_4.why_not(*operands(**SUPPORTED | change)) is None


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.float16},
        {"channels": (64, 64)},
        {"channels": (192, 192)},
        {"channels": (128, 192)},
        {"tokens": 1023},
        {"causal": False},
    ],
    ids=str,
)
def test_it_is_not_used_for_other_calls(installed, change: dict[str, Any]):
    installed()
    assert flash_attn_4.why_not(*operands(**SUPPORTED | change)) == (
        "it is used for causal attention in BF16 with 192/128 or 128 channels and at least 1024 tokens only"
    )


@pytest.mark.parametrize(
    ("version", "capability", "reason"),
    [
        (None, (9, 0), 'it is not installed: pip install "octile[flash-attn-4]"'),
        ("4.0.0b35", (9, 0), '4.0.0b35 is installed, which is older than 4.0.0b36: pip install "octile[flash-attn-4]"'),
        ("4.0.0b36", (8, 9), "it was measured on Hopper (sm_90) only"),
        ("4.0.0b36", (10, 0), "it was measured on Hopper (sm_90) only"),
    ],
)
def test_why_it_is_not_used_on_a_machine(installed, version: str | None, capability: tuple[int, int], reason: str):
    installed(version, capability)
    assert flash_attn_4.why_not_on(torch.device("cuda")) == reason
    assert flash_attn_4.why_not(*operands(**SUPPORTED)) == reason


ONLY = "it is used for {} only".format
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "channels", "rows", "n", "is_used"),
    [
        (BF16, (192, 128), 1024, 1, True),
        (BF16, (192, 128), 1024, 256, True),
        (BF16, (192, 128), 1024, 257, False),
        (BF16, (192, 128), 1023, 1, False),
        (BF16, (128, 128), 1024, 1, False),
        (torch.float16, (192, 128), 1024, 1, False),
    ],
)
def test_the_prompts_that_it_is_used_for(installed, dtype, channels, rows: int, n: int, is_used: bool):
    installed()
    reason = ONLY("up to 256 prompts in BF16 with 192/128 channels and at least 1024 rows together")
    assert flash_attn_4.why_not_prompts(*texts(dtype, channels, rows), torch.zeros(n + 1)) == (
        None if is_used else reason
    )


@pytest.mark.parametrize(
    ("dtype", "channels", "rows", "n", "mean", "is_used"),
    [
        (BF16, (192, 128), 1024, 4, None, True),
        (BF16, (192, 128), 1024, 5, None, False),
        (BF16, (192, 128), 1024, 256, 256, True),  # most of them may be empty
        (BF16, (192, 128), 1024, 1, 255, False),
        (BF16, (128, 128), 2**16, 256, None, True),
        (BF16, (128, 128), 2**17, 257, None, False),
        (BF16, (128, 128), 2**17, 257, 4096, False),
        (BF16, (192, 128), 1023, 1, 4096, False),
        (BF16, (64, 64), 1024, 1, 4096, False),
        (torch.float16, (192, 128), 1024, 1, 4096, False),
    ],
)
def test_the_packed_texts_that_it_is_used_for(
    installed, dtype, channels, rows: int, n: int, mean: int | None, is_used: bool
):
    installed()
    reason = ONLY(
        "up to 256 packed texts (in every sequence as many as in that with the most) in BF16 with 192/128 or 128 "
        "channels, at least 1024 rows, and 256 a text on average"
    )
    assert flash_attn_4.why_not_packed(*texts(dtype, channels, rows), torch.zeros(n + 1), mean) == (
        None if is_used else reason
    )


def test_texts_are_left_to_another_kernel_where_it_is_not_installed(installed):
    installed(None)
    q, v = texts(torch.bfloat16, (192, 128), 1024)
    reason = 'it is not installed: pip install "octile[flash-attn-4]"'
    starts = torch.zeros(3)
    assert flash_attn_4.why_not_prompts(q, v, starts) == flash_attn_4.why_not_packed(q, v, starts, 512) == reason


def test_it_is_not_used_for_training_in_deterministic_mode(installed):
    installed()
    operands_of_texts = texts(torch.bfloat16, (192, 128), 1024)
    torch.use_deterministic_algorithms(True)
    try:
        assert flash_attn_4.why_not(*operands(**SUPPORTED)) == "its backward pass adds in no fixed order"
        reason = "its backward pass adds in no fixed order"
        assert flash_attn_4.why_not_packed(*operands_of_texts, torch.zeros(3), 512) == reason
        assert flash_attn_4.why_not_prompts(*operands_of_texts, torch.zeros(3)) is None
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("backend", [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], ids=lambda b: b.name)
def test_it_is_not_used_where_flash_attention_or_cudnn_is_excluded(installed, backend: SDPBackend):
    installed()
    with sdpa_kernel(backend):
        assert flash_attn_4.why_not(*operands(**SUPPORTED)) == "torch's sdpa_kernel excludes FlashAttention or cuDNN"


@pytest.mark.parametrize(
    ("version", "of_torch", "expected"),
    [
        ("4.0.0b36", CUDNN, FLASH_ATTN_4),
        ("4.0.0b36", FLASH, FLASH),  # sdpa_kernel excludes cuDNN
        ("4.0.0b36", EFFICIENT, EFFICIENT),
        (None, CUDNN, CUDNN),
    ],
)
def test_it_takes_the_place_of_cudnn_alone(installed, monkeypatch, version: str | None, of_torch: int, expected: Any):
    installed(version)
    monkeypatch.setattr(kernels, "_chosen_by_torch", lambda *_: of_torch)
    q, v, _ = operands(**SUPPORTED)
    assert kernels.choose_for_training(q, q, v, SCALE) == (expected, 0)
    assert kernels.choose(q, q, v, SCALE) == (of_torch, 0)


def test_the_extra_asks_for_the_oldest_version_that_is_used_and_is_in_no_other_extra():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    (requirement,) = extras.pop(flash_attn_4.PACKAGE)
    assert requirement.startswith(f"{flash_attn_4.PACKAGE}[cu13]>={flash_attn_4.MIN_VERSION};")
    assert not [line for lines in extras.values() for line in lines if flash_attn_4.PACKAGE in line]


def test_a_library_that_cannot_be_imported_is_reported(installed, monkeypatch):
    installed()

    def fail(name: str):
        raise OSError(f"no shared library for {name}")

    monkeypatch.setattr(flash_attn_4, "import_module", fail)
    message = (
        r"flash-attn-4 4\.0\.0b36 is installed, but cannot be imported \(OSError: no shared library for "
        r'flash_attn\.cute\.interface\): repair it \(pip install "octile\[flash-attn-4\]"\) or remove it'
    )
    for _ in range(2):
        with pytest.raises(ImportError, match=message):
            flash_attn_4.forward(*torch.zeros(3, 1, 8, 2, 16), SCALE)


def test_a_version_without_a_function_is_reported_before_a_call(installed, monkeypatch):
    installed("4.1.0")
    monkeypatch.setattr(flash_attn_4, "import_module", lambda name: SimpleNamespace(_flash_attn_fwd=fwd))
    with pytest.raises(ImportError, match=r"4\.1\.0 is installed, but cannot be imported \(.*_flash_attn_bwd"):
        flash_attn_4.load()


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    return_lse: bool = False,
    out: Tensor | None = None,
    **texts: Any,
) -> tuple[Tensor | None, ...]:
    assert causal
    if out is not None:
        rows, keys = texts["max_seqlen_q"], texts["max_seqlen_k"]
        assert (rows, keys) == (len(q), len(k))  # bounds of any length
        ragged_attention(out, q, k, v, texts["cu_seqlens_q"], texts["cu_seqlens_k"], rows, keys, softmax_scale)
        return out, None, None, None, None
    assert return_lse
    if texts:
        return *packed_attention(q, k, v, texts["cu_seqlens_q"], softmax_scale), None, None, None
    return *attention(q, k, v, softmax_scale), None, None, None


def bwd(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, *, softmax_scale: float, causal: bool,
    dq: Tensor, dk: Tensor, dv: Tensor, **texts: Any,
) -> None:  # fmt: skip
    assert causal
    if texts:
        gradients = packed_attention_backward(dout, q, k, v, out, lse, texts["cu_seqlens_q"], softmax_scale)
    else:
        gradients = attention_backward(dout, q, k, v, out, lse, softmax_scale)
    for found, expected in zip((dq, dk, dv), gradients, strict=True):
        assert found.is_contiguous()
        found.copy_(expected)


@pytest.fixture
def library(installed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in the place of flash-attn-4's, which computes by octile's operators."""
    monkeypatch.setitem(
        sys.modules, "flash_attn.cute.interface", SimpleNamespace(_flash_attn_fwd=fwd, _flash_attn_bwd=bwd)
    )


def test_the_operators_give_it_their_operands_and_return_its_results(library, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    q, k, kv, do = (torch.randn(2, 7, 3, width, generator=generator) for width in (24, 24, 40, 16))
    v = kv[..., 24:]  # a view, as latent attention's values are
    o, lse = attention(q, k, v, SCALE)
    gradients = attention_backward(do, q, k, v, o, lse, SCALE)
    monkeypatch.setattr(kernels, "choose_for_training", lambda *_: (FLASH_ATTN_4, 0))
    found = attention.kernels["cuda"](q, k, v, SCALE), attention_backward.kernels["cuda"](do, q, k, v, o, lse, SCALE)
    for ours, theirs in zip((*found[0], *found[1]), (o, lse, *gradients), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.is_contiguous()


def test_it_gets_the_starts_of_prompts_and_writes_their_results(library, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 3, width, generator=generator) for n, width in ((5, 24), (9, 24), (9, 16)))
    starts = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 6, 9], dtype=torch.int32)
    expected, found = torch.empty(5, 3, 16), torch.empty(7, 3, 16)
    ragged_attention(expected, q, k, v, *starts, 3, 6, SCALE)
    monkeypatch.setattr(flash_attn_4, "why_not_prompts", lambda *_: None)
    ragged_attention.kernels["cuda"](found[1:-1], q, k, v, *starts, 3, 6, SCALE)
    assert torch.equal(found[1:-1], expected)


def test_it_gets_the_starts_of_packed_texts_and_returns_their_results(library, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(9, 3, width, generator=generator) for width in (24, 24, 16, 16))
    starts = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    o, lse = packed_attention(q, k, v, starts, SCALE)
    gradients = packed_attention_backward(do, q, k, v, o, lse, starts, SCALE)
    means = []
    monkeypatch.setattr(flash_attn_4, "why_not_packed", lambda q, v, cu_seqlens, mean: means.append(mean))
    forward, backward = (operator.kernels["cuda"] for operator in (packed_attention, packed_attention_backward))
    found = *forward(q, k, v, starts, SCALE), *backward(do, q, k, v, o, lse, starts, SCALE)
    for ours, theirs in zip(found, (o, lse, *gradients), strict=True):
        assert torch.equal(ours, theirs)
    forward(q, k, v, starts, SCALE, 300)
    backward(do, q, k, v, o, lse, starts, SCALE, 301)
    assert means == [None, None, 300, 301]
