"""Results that real tensor cores gave, replayed. `python -m octile.lab.probe --golden FILE` writes such a file."""

from pathlib import Path

import pytest

from octile.lab.probe.compare import modelled
from octile.lab.probe.golden import replay
from tests.lab.products import same_bits

FILES = sorted((Path(__file__).parent / "golden").glob("*.safetensors"))


@pytest.mark.skipif(not FILES, reason="no GPU has answered yet: tests/lab/golden holds no results")
def test_the_model_gives_what_the_hardware_gave():
    for path in FILES:
        for case, a, b, c, d in replay(path):
            assert same_bits(modelled(a, b, c, case.row), d), f"{case} of {path.name}"
