"""Grouped GEMMs in high precision as operators; tests/nn tests their results."""

import pytest
import torch

from octile.ops.high_precision import high_precision_grouped_nt, high_precision_grouped_tn

ENDS = torch.tensor([3, 3, 8], dtype=torch.int32)


@pytest.mark.parametrize("channels", [13, 16])
def test_opcheck_passes(channels: int):
    x, w, dy = torch.randn(9, channels), torch.randn(3, 11, channels), torch.randn(9, 11)
    torch.library.opcheck(high_precision_grouped_nt.overload, (x, w, ENDS))
    torch.library.opcheck(high_precision_grouped_nt.overload, (dy, w.mT, ENDS))
    torch.library.opcheck(high_precision_grouped_tn.overload, (dy, x, ENDS))
