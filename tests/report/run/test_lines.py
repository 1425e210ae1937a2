"""Which lines of metrics.jsonl and telemetry.jsonl are whole."""

import json

import pytest

from octile.report.run.lines import parse_line

GUARD = {"when": "snr < 3", "then": "bf16", "since": 2, "layer": "a", "product": "fprop", "operand": None, "value": 1.0}
METRICS = [
    {"step": 3, "loss": 2.5, "main_loss": None, "skipped": 0, "note": "any text"},
    {"step": 3, "val_loss": 2.5, "val_tokens": 1024},
    {"step": 3, "guard": GUARD},
    {"step": 3, "expert_load": {"a": [1, 2, 3]}},
    {"step": 3, "tile_scales": {"x": {"log2": [-3, -2], "count": [1, 5]}}},
    {"step": 3, "spike": {"loss": 9.0, "sequence_losses": [9.0]}},
    {"step": 3, "stopped": "the loss is nan at step 3"},
]
TELEMETRY = {
    "step": 3,
    "layer": "a",
    "product": "fprop",
    "operand": "x",
    "cur_amax": 1.5,
    "snr_db": None,
    "top_channels": [[3, 2.0], [4, None]],
    "scale_histogram": {"-3": 5},
}


@pytest.mark.parametrize("line", METRICS)
def test_whole_measurements_are_read(line):
    assert parse_line(json.dumps(line).encode()) == parse_line(json.dumps(line)) == line


def test_whole_telemetry_is_read():
    assert parse_line(json.dumps(TELEMETRY), is_telemetry=True) == TELEMETRY


@pytest.mark.parametrize("text", [b"\xff{}", b"{", b"[1]", b"null", b"[" * 100_000, b'{"loss": 2.0}'])
def test_what_is_no_object_with_a_step_is_damaged(text):
    assert parse_line(text) is None
    assert parse_line(text, is_telemetry=True) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", True),
        ("main_loss", "2.5"),
        ("guard", 3),
        ("guard", {k: v for k, v in GUARD.items() if k != "layer"}),
        ("guard", {**GUARD, "since": "2"}),
        ("expert_load", [1, 2]),
        ("expert_load", {"a": 3}),
        ("tile_scales", {"x": {"lpg2": [1], "count": [1]}}),
        ("tile_scales", {"x": {"log2": [1, 2], "count": [1]}}),
        ("tile_scales", {"x": {"log2": ["1"], "count": [1]}}),
        ("spike", None),
        ("stopped", 3),
        ("loss", {"a": 1}),
    ],
)
def test_a_measurement_of_another_type_is_damaged(key, value):
    assert parse_line(json.dumps({"step": 3, "loss": 2.5, key: value})) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [("layer", 3), ("product", ["fprop"]), ("operand", 3), ("cur_amax", "1.5"), ("top_channels", 1), ("laxer", "a")],
)
def test_telemetry_of_another_type_is_damaged(key, value):
    assert parse_line(json.dumps({**TELEMETRY, key: value}), is_telemetry=True) is None


@pytest.mark.parametrize("key", ["layer", "product"])
def test_telemetry_without_a_layer_or_gemm_is_damaged(key):
    assert parse_line(json.dumps({k: v for k, v in TELEMETRY.items() if k != key}), is_telemetry=True) is None
