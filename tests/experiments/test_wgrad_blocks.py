"""The comparison of wgrad in the telemetry of two runs."""

import json

from experiments.wgrad_blocks.telemetry import table


def save(folder, snr: float, flushed: float):
    folder.mkdir()
    of = {"step": 40, "layer": "down", "product": "wgrad"}
    rows = [
        {**of, "operand": "x", "underflows%": flushed},
        {**of, "operand": "dy", "underflows%": 99.0},
        {**of, "quantization_snr_db": snr},
        {**of, "product": "fprop", "quantization_snr_db": 99.0},
    ]
    (folder / "telemetry.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_each_layer_has_both_runs(tmp_path):
    _, layer, median = table(save(tmp_path / "tiles", 30.0, 0.5), save(tmp_path / "blocks", 29.0, 1.5))
    assert layer.split() == ["40", "down", "30", "29", "0.5", "1.5"]
    assert median.split() == ["median", "30", "29", "0.5", "1.5"]
