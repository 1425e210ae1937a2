import pytest

from octile.bench import lab


@pytest.fixture(scope="module")
def rows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lab, "SIZE", 64)
        patch.setattr(lab, "SEQUENCES", 1)
        patch.setattr(lab, "LENGTH", 16)
        patch.setattr(lab, "ROUNDS", 1)
        patch.setattr(lab, "STEP_ROUNDS", 1)
        return list(lab.rows())


@pytest.mark.slow
def test_both_forms_of_the_model_are_compared_with_a_gemm(rows):
    speeds = [row for row in rows if row.unit == "GFLOP/s"]
    assert [row.what for row in speeds] == ["native", "vectorized"] * len(lab.CASES)
    assert all(row.value > 0 and row.against is not None for row in speeds)
    assert "wgmma" in lab.show(rows)


@pytest.mark.slow
def test_telemetrys_cost_is_that_of_a_measured_step_spread_over_all(rows):
    measured, added = rows[-2:]
    assert (measured.unit, added.unit) == ("ms", "%")
    assert added.value == pytest.approx(measured.against.ratio - 1)  # 100 per cent of it at every 100th step
