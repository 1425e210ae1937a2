"""The form of what a benchmark finds: others read it."""

import json

from octile.bench.rows import Row, beside, machine, write


def test_a_ratio_is_ours_over_the_peers():
    assert beside("case", "what", 3.0, "TFLOP/s", "peer", 2.0).against.ratio == 1.5


def test_the_file_has_the_rows_and_what_they_were_measured_on(tmp_path):
    write(tmp_path / "rows.json", [Row("a", "b", 1.0, "s"), beside("a", "c", 2.0, "s", "p", 4.0)])
    content = json.loads((tmp_path / "rows.json").read_text())
    assert content["rows"][0] == {"case": "a", "what": "b", "value": 1.0, "unit": "s", "against": None}
    assert content["rows"][1]["against"] == {"peer": "p", "value": 4.0, "ratio": 0.5}
    assert content["machine"] == machine()
