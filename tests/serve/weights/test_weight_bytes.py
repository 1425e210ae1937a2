"""The bytes of weights by a configuration; `tests/bench/serve/test_roofline.py` has those of the main model."""

import pytest

from octile.serve.weights.weight_bytes import weight_bytes
from tests.bench.serve.test_roofline import DIRECT, nbytes, served
from tests.serve.models import CONFIG


@pytest.mark.parametrize("config", [CONFIG, DIRECT])
@pytest.mark.parametrize("fp8", [False, True])
def test_multi_token_prediction_has_the_bytes_that_serving_holds(config, fp8):
    assert sum(weight_bytes(config, fp8).mtp.values()) == nbytes(served(config, fp8).mtp)
