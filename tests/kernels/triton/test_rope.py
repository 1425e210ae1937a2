"""The rotary kernels equal the reference bit for bit, except for the order in which heads are summed."""

import pytest
import torch
from torch import Tensor

from octile.kernels.triton import rope
from octile.ops.rope import latent_keys, latent_keys_backward, rotate_, rotate_and_copy_, rotate_halves
from tests.kernels.triton.comparison import assert_same
from tests.kernels.triton.gpus import any_gpu

pytestmark = [pytest.mark.usefixtures("gpu"), any_gpu]
Shape = tuple[int, int, int, int, int, int]  # B, S, H, N, R, V
every_shape = pytest.mark.parametrize(
    "shape",
    [(2, 5, 3, 10, 8, 6), (1, 2, 19, 128, 64, 128), (1, 3, 2, 7, 12, 5), (1, 2, 2, 4, 0, 4), (0, 2, 2, 4, 4, 4)],
    ids=str,
)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def _tensors(shape: Shape, dtype: torch.dtype) -> list[Tensor]:
    """q, kv, the rotary key, dv, all views; cos and sin."""
    torch.manual_seed(0)
    b, s, h, n, r, v = shape
    q, dv = torch.randn(b, h, s, n + r).transpose(1, 2), torch.randn(b, h, s, v).transpose(1, 2)
    kv, k_rope = torch.randn(b, s, h, n + v + 1)[..., 1:], torch.randn(b, s, r + 3)[..., 3:]
    angle = torch.randn(s, r // 2)
    return [*(t.to(dtype) for t in (q, kv, k_rope, dv)), angle.cos(), angle.sin()]


@every_shape
@every_dtype
def test_in_place(shape: Shape, dtype: torch.dtype):
    q, *_, cos, sin = _tensors(shape, dtype)
    expected = q.clone()
    rotate_(expected, cos, sin)
    rope.launch(q, cos, sin)
    assert_same([q.contiguous()], [expected.contiguous()])


@every_shape
@every_dtype
def test_in_place_with_a_copy(shape: Shape, dtype: torch.dtype):
    q, kv, *_, cos, sin = _tensors(shape, dtype)
    out = torch.cat((kv, q), dim=-1).transpose(1, 2).contiguous().transpose(1, 2)  # all but R channels stay
    expected = q.clone(), out.clone()
    rotate_and_copy_(*expected, cos, sin)
    rope.launch(q, cos, sin, out)
    assert_same([q.contiguous(), out.contiguous()], [t.contiguous() for t in expected])


@every_shape
@every_dtype
def test_keys(shape: Shape, dtype: torch.dtype):
    _, kv, k_rope, _, cos, sin = _tensors(shape, dtype)
    assert_same([rope.launch_keys(kv, k_rope, cos, sin, shape[3])], [latent_keys(kv, k_rope, cos, sin, shape[3])])


@every_shape
@every_dtype
def test_gradients_of_keys(shape: Shape, dtype: torch.dtype):
    dk, _, _, dv, cos, sin = _tensors(shape, dtype)
    found, expected = rope.launch_keys_backward(dk, dv, cos, sin), latent_keys_backward(dk, dv, cos, sin)
    assert_same(found[:1], expected[:1])
    assert (found[1].shape, found[1].dtype) == (expected[1].shape, dtype)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2.0**-7, "atol": 1e-2}
    torch.testing.assert_close(found[1], expected[1], **tolerance)


@pytest.mark.one_case
@pytest.mark.each_pair
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("heads", [(3, 1), (17, 2), (2, 9)], ids=str)
@pytest.mark.parametrize("channels", [(8, 8), (24, 12), (6, 0), (10, 10)], ids=str)
@every_dtype
def test_halves(channels: tuple[int, int], heads: tuple[int, int], transposed: bool, dtype: torch.dtype):
    torch.manual_seed(0)
    x, r = channels
    q, k = (torch.randn(2, 5, h, x).to(dtype).transpose(1, 2) for h in heads)
    cos, sin = torch.randn(2, 5, r).to(dtype), torch.randn(1, 5, r + 1).to(dtype)[..., 1:].expand(2, -1, -1)
    found, expected = rope.launch_halves(q, k, cos, sin, transposed), rotate_halves(q, k, cos, sin, transposed)
    assert_same([t.contiguous() for t in found], [t.contiguous() for t in expected])
    assert [t.stride() for t in found] == [t.stride() for t in expected]


def test_halves_of_views_with_gaps_and_without_rows():
    q, k = torch.randn(2, 3, 5, 20)[..., 1:9], torch.randn(2, 5, 4, 8).transpose(1, 2)[:, ::2]
    cos, sin = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    assert_same(rope.launch_halves(q, k, cos, sin, False), rotate_halves(q, k, cos, sin))
    nothing = [t[:, :, :0] for t in (q, k)] + [t[:, :0] for t in (cos, sin)]
    assert_same(rope.launch_halves(*nothing, False), rotate_halves(*nothing))
