"""Every candidate of `tools.time_wgrad` computes the weights' gradients."""

import pytest
import torch

from tests.kernels.triton.conftest import dot_of_bfloat16, exact_conversions, gpu  # noqa: F401  (the interpreter)
from tools.time_wgrad import Shape, exact_product, launch, main, operands


@pytest.mark.one_case
@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "TMA"])
@pytest.mark.usefixtures("gpu")
def test_the_kernel_is_right_with_any_tile(tma: bool):
    dy, x, offs = operands(Shape("toy", 300, 4, 72, 40), "cpu")
    offs[-1] = 290
    x[290:] = float("nan")  # rows of no group
    exact = exact_product(dy, x, offs)
    for tile in ((64, 32, 32), (32, 64, 64)):
        sizes = dict(zip(("TILE_M", "TILE_N", "BLOCK_K"), tile, strict=True))
        torch.testing.assert_close(launch(dy, x, offs, sizes, tma), exact, rtol=1e-5, atol=1e-5)


def test_help_says_what_the_ratio_is(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "above 1 is faster" in capsys.readouterr().out
