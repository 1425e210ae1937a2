"""Tests of guards: which rule fires when, and error messages for invalid files."""

from pathlib import Path

import pytest

from octile.lab.guards import STATISTICS, Guards, Rule, parse_rules

GOOD = '[[rule]]\nwhen = "flushed > 5%"\nthen = "warn"\n'


def row(step, value, figure="underflows%", product="wgrad", layer="mlp.up_proj", operand="x"):
    return {"step": step, "layer": layer, "product": product, "operand": operand, figure: value}


def fired(rule, *rows):
    """The steps at which a rule fires when it is shown the rows one by one."""
    guards = Guards([rule])
    return [event.step for row in rows for event in guards.check([row])]


def test_a_rule_fires_where_its_value_passes_its_bound():
    assert fired(Rule("flushed > 5%", "warn"), row(1, 4.9), row(2, 5.0), row(3, 5.1)) == [3]


@pytest.mark.parametrize(
    ("when", "value"),
    [
        ("snr_db < 20", 19.0),
        ("kurtosis >= 100", 100.0),
        ("amax <= 1e-3", 0.001),
        ("accumulation_worst_over_rms > 1%", 0.02),
    ],
)
def test_comparisons(when, value):
    rule = Rule(when, "warn")
    assert fired(rule, row(1, value, rule.statistic)) == [1]


@pytest.mark.parametrize(
    ("name", "figure"),
    [
        ("flushed", "underflows%"),
        ("saturated", "overflows%"),
        ("subnormal", "subnormals%"),
        ("underflows%", "underflows%"),
    ],
)
def test_names_of_figures(name, figure):
    assert Rule(f"{name} > 1%", "warn").statistic == figure


def test_a_rule_fires_once_and_again_after_it_ceased_to_hold():
    values = [6, 6, 6, 4, 6, 6]
    assert fired(Rule("flushed > 5%", "warn"), *(row(n, v) for n, v in enumerate(values, 1))) == [1, 5]


@pytest.mark.parametrize("recorded", [True, False])
def test_a_rule_of_a_resumed_run_fires_again_only_if_it_has_not_been_recorded(recorded):
    rule, rows = Rule("flushed > 5%", "warn", for_steps=2), [row(n, 6) for n in (1, 2, 3)]
    events = [event.record() for event in Guards([rule]).check(rows)]
    guards = Guards([rule])
    guards.replay(rows, events if recorded else [])
    assert [event.step for event in guards.check([row(4, 6)])] == ([] if recorded else [4])


def test_for_steps_counts_steps_and_not_measurements():
    rule = Rule("flushed > 5%", "warn", for_steps=50)
    assert fired(rule, *(row(step, 6) for step in range(10, 101, 10))) == [60]


def test_a_measurement_in_between_that_does_not_hold_begins_anew():
    rule = Rule("flushed > 5%", "warn", for_steps=30)
    values = {10: 6, 20: 6, 30: 1, 40: 6, 50: 6, 60: 6, 70: 6}
    assert fired(rule, *(row(step, v) for step, v in values.items())) == [70]


def test_layers_and_operands_are_tracked_separately():
    guards = Guards([Rule("flushed > 5%", "warn", for_steps=2)])
    guards.check([row(1, 6, layer="a"), row(1, 6, layer="b", operand="x"), row(1, 6, layer="b", operand="dy")])
    events = guards.check([row(2, 6, layer="a"), row(2, 1, layer="b", operand="x"), row(2, 6, layer="b", operand="dy")])
    assert [(event.layer, event.operand, event.since) for event in events] == [("a", "x", 1), ("b", "dy", 1)]


@pytest.mark.parametrize(
    ("changes", "fires"),
    [
        ({"product": "wgrad"}, True),
        ({"product": "fprop"}, False),
        ({"layers": "mlp.*"}, True),
        ({"layers": "experts.*, *.up_proj"}, True),
        ({"layers": "experts.*"}, False),
    ],
)
def test_a_rule_concerns_its_products_and_layers(changes, fires):
    assert bool(fired(Rule("flushed > 5%", "warn", **changes), row(1, 6))) == fires


@pytest.mark.parametrize("value", [None, "absent"])
def test_rows_without_the_value_are_ignored(value):
    rows = [row(1, 6), row(2, 6) | {"underflows%": None} if value is None else row(2, 6, "mse"), row(3, 6)]
    assert fired(Rule("flushed > 5%", "warn", for_steps=3), *rows) == [3]


def test_an_event_names_rule_place_and_steps():
    (event,) = Guards([Rule("flushed > 5%", "bf16")]).check([row(7, 6.25)])
    assert str(event) == (
        "guard at step 7: flushed > 5% holds since step 7 in wgrad of mlp.up_proj, operand x, where it is 6.25%: from "
        "the next step on it is computed in BF16"
    )
    assert event.record() == {
        "when": "flushed > 5%",
        "then": "bf16",
        "since": 7,
        "layer": "mlp.up_proj",
        "product": "wgrad",
        "operand": "x",
        "value": 6.25,
    }


@pytest.mark.parametrize(
    ("when", "then", "value", "shown"),
    [
        ("flushed > 0.5%", "warn", 0.78125, "0.7812%: only a warning"),
        ("quantization_snr_db < 28", "warn", 27.99961, "27.9996 dB: only a warning"),
        ("quantization_snr_db >= 28", "capture", 28.0, "28 dB: its operands are captured in the next step"),
        ("worst_over_rms > 5%", "warn", 0.05000012, "5.00001%: only a warning"),
        ("worst_over_rms > 0.05", "warn", 0.06, "0.06: only a warning"),
        ("kurtosis > 100", "warn", 123456.0, "1.235e+05: only a warning"),
    ],
)
def test_an_event_shows_its_value_with_unit_and_digits_and_says_what_follows(when, then, value, shown):
    rule = Rule(when, then)
    (event,) = Guards([rule]).check([row(7, value, rule.statistic)])
    assert str(event).endswith(f", where it is {shown}")


def test_every_figure_is_one_that_telemetry_has(tmp_path):
    import torch
    from torch import nn

    from octile.lab import telemetry
    from octile.nn.conversion import apply_recipe

    model = apply_recipe(nn.Sequential(nn.Linear(40, 8)))
    with telemetry(model) as t:
        model(torch.randn(4, 40, requires_grad=True)).sum().backward()
        names = {name for row in t.step() for name in row}
    assert set(STATISTICS) <= names


def test_a_file_of_rules(tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text(
        GOOD + '[[rule]]\nwhen = "snr_db < 10"\nproduct = "wgrad"\nlayers = "*.down"\nfor_steps = 50\nthen = "bf16"\n'
    )
    assert parse_rules(path.read_text(encoding="utf-8"), path) == (
        Rule("flushed > 5%", "warn"),
        Rule("snr_db < 10", "bf16", "wgrad", "*.down", 50),
    )


BAD = {
    "no TOML": ("when = = 1", "must be TOML: "),
    "no rule": ("", r"must hold \[\[rule\]\] tables and nothing else"),
    "something else": (GOOD + "[other]\nx = 1\n", "and nothing else; it has other"),
    "a table": ('[rule]\nwhen = "flushed > 5%"\n', r"must hold \[\[rule\]\] tables"),
    "a word": ("rule = [1]\n", r"rule 1 must be a \[\[rule\]\] table"),
    "unknown key": (GOOD + 'action = "warn"\n', "rule 1 has 'action', but a rule has only when, then, product, layers"),
    "no when": ('[[rule]]\nthen = "warn"\n', "rule 1 has no 'when'"),
    "no then": (GOOD + '[[rule]]\nwhen = "flushed > 5%"\n', "rule 2 has no 'then'"),
    "action": (GOOD.replace("warn", "stop"), "rule 1: then must be one of warn, capture, bf16, not 'stop'"),
    "product": (GOOD + 'product = "bprop"\n', "rule 1: product must be one of fprop, dgrad, wgrad, or '\\*' for any"),
    "steps": (GOOD + "for_steps = 0\n", "rule 1: for_steps must be a whole number of at least 1, not 0"),
    "true steps": (GOOD + "for_steps = true\n", "for_steps must be a whole number of at least 1, not True"),
    "number": (GOOD + "layers = 3\n", "rule 1: layers must be text, not 3"),
    "sentence": (GOOD.replace("> 5%", "is large"), "rule 1: when must be a statistic, one of > >= < <=, and a number"),
    "figure": (
        GOOD.replace("flushed", "vanished"),
        "rule 1: when names the unknown statistic 'vanished'; there are flushed, saturated",
    ),
    "bound": (GOOD.replace("5%", "5.1.2%"), "rule 1: when must contain a number"),
    "percentage": (GOOD.replace("flushed > 5%", "snr_db < 5%"), "compares snr_db, which is not in percent: write a"),
    "above all": (GOOD.replace("5%", "500%"), "rule 1: when compares flushed, which is from 0% to 100%, with 500%"),
    "below none": (GOOD.replace("5%", "-5%"), "rule 1: when compares flushed, which is from 0% to 100%, with -5%"),
    "unit": (GOOD.replace("5%", "5"), "rule 1: when compares flushed, which is in percent: write 5%"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_in_one_line(tmp_path, case):
    text, message = BAD[case]
    path = tmp_path / "rules.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as refusal:
        parse_rules(path.read_text(encoding="utf-8"), path)
    assert str(refusal.value).startswith(str(path))
    assert case == "no TOML" or "\n" not in str(refusal.value)


def test_the_documented_rule_is_one_and_every_figure_is_documented(tmp_path):
    documented = (Path(__file__).parents[2] / "docs" / "telemetry.md").read_text(encoding="utf-8")
    path = tmp_path / "rules.toml"
    path.write_text(documented.split("```toml\n")[1].split("```")[0], encoding="utf-8")
    (rule,) = parse_rules(path.read_text(encoding="utf-8"), path)
    assert rule == Rule("flushed > 5%", "warn", "wgrad", "*.experts.*", 50)
    assert all(
        name in documented for name in STATISTICS if not name.startswith(("quantization", "accumulation", "mean_"))
    )


@pytest.mark.parametrize("when", ["scale_inv_max > 0.5", "scale_inv_max < 0.9", "scale_inv_min > 0.5"])
def test_a_rule_on_scales_ignores_tiles_of_zeros(when):
    import torch
    from torch import nn

    from octile.lab import telemetry
    from octile.nn.conversion import apply_recipe

    x = torch.full((4, 256), 0.875)
    x[1, :128] = x[2] = 0  # half a token, and a whole one
    model = apply_recipe(nn.Sequential(nn.Linear(256, 8)))
    with telemetry(model) as t:
        model(x.requires_grad_()).sum().backward()
        events = Guards([Rule(when, "warn", "fprop")]).check(t.step())
    fires = [event.value for event in events if event.operand == "x"]
    assert fires == ([2.0**-9] if when == "scale_inv_max < 0.9" else [])
