from octile.bench import lab


def test_both_forms_of_the_model_are_measured_beside_a_product(monkeypatch):
    monkeypatch.setattr(lab, "SIZE", 64)
    rows = list(lab.rows())
    assert [row.what for row in rows] == ["native", "vectorised"] * len(lab.CASES)
    assert all(row.value > 0 and row.against is not None for row in rows)
    assert "wgmma" in lab.show(rows)
