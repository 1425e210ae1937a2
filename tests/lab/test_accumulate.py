import math

import pytest
import torch

from octile.lab.accumulate import accumulate, errors


def rows(**arguments):
    found = accumulate(**{"rows": 32, "columns": 32} | arguments)
    return {(r.k, r.data, r.promote_every): r for r in found}


def test_the_error_without_promotion_grows_with_k_and_with_promotion_it_does_not():
    found = rows(ks=(256, 1024, 4096), intervals=(128, None))
    for kind in ("normal", "positive"):
        alone = [found[k, kind, None].error for k in (256, 1024, 4096)]
        promoted = [found[k, kind, 128].error for k in (256, 1024, 4096)]
        assert alone[0] * 1.5 < alone[1] < alone[2] / 1.5
        assert max(promoted) < 1.3 * min(promoted)


def test_sums_of_one_sign_are_too_small():
    found = rows(ks=(4096,), intervals=(None,))
    positive, normal = found[4096, "positive", None], found[4096, "normal", None]
    assert positive.bias == pytest.approx(-positive.error, rel=0.1)
    assert abs(normal.bias) < normal.error / 5
    assert positive.worst > 0.06


def test_no_promotion_equals_a_promotion_after_the_end():
    found = rows(ks=(256,), data=("normal",), intervals=(256, None))
    assert found[256, "normal", 256].error == found[256, "normal", None].error


def test_errors_are_in_units_of_the_exact_rms():
    exact = torch.tensor([3.0, -4.0], dtype=torch.float64)
    rms = math.sqrt(12.5)
    assert errors(torch.tensor([3.0, -3.0]), exact) == pytest.approx((math.sqrt(0.5) / rms, 1 / rms, 0.5 / rms))


def test_unknown_data_is_refused():
    with pytest.raises(ValueError, match="'uniform'"):
        accumulate(data=("uniform",))
