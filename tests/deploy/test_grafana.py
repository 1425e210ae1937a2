"""The dashboard: each metric and label that it asks for is exposed, and each metric is shown."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="octile[serve] is not installed")

from prometheus_client.parser import text_string_to_metric_families

from octile.serve.engine.request import FinishReason
from octile.serve.engine.stats import Stats
from octile.serve.http.metrics import Metrics

DASHBOARD = json.loads((Path(__file__).parents[2] / "deploy" / "grafana.json").read_text(encoding="utf-8"))
OF_PROMETHEUS = {"instance", "job"}  # labels that it adds to what it reads
SELECTED = re.compile(r"(octile_\w+)(?:\{([^}]*)\})?")
GROUPED = re.compile(r"by \(([^)]*)\)")
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]


def exposed() -> dict[str, set[str]]:
    """Name of each sample that a server exposes: its labels."""
    metrics = Metrics("micro", lambda: Stats(expert_tokens={3: (7, 0)}), lambda: 0.0)
    metrics.responded("/v1/completions", 200)
    metrics.ended(1.0, FinishReason.STOP, "a")
    families = text_string_to_metric_families(metrics.text()[0].decode())
    samples = [sample for family in families for sample in family.samples]
    return {sample.name: set(sample.labels) for sample in samples if not sample.name.endswith("_created")}


def queries() -> Iterator[tuple[str, str]]:
    """A name and an expression of all that is asked: of panels and of variables."""
    yield from EXPRESSIONS
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]


@pytest.mark.parametrize(("title", "expression"), list(queries()))
def test_a_metric_that_is_asked_for_is_exposed_with_its_labels(title, expression):
    samples, asked = exposed(), SELECTED.findall(expression)
    assert asked
    for name, matchers in asked:
        assert name in samples
        labels = re.findall(r"(\w+)(?:=|!)", matchers)
        assert set(labels) <= samples[name] | OF_PROMETHEUS
        grouped = [label.strip() for group in GROUPED.findall(expression) for label in group.split(",")]
        assert set(grouped) <= samples[name] | OF_PROMETHEUS


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_legend_has_labels_that_the_expression_leaves(panel):
    samples = exposed()
    for target in panel["targets"]:
        names = [name for name, _ in SELECTED.findall(target["expr"])]
        groups = GROUPED.findall(target["expr"])
        left = {each.strip() for each in groups[0].split(",")} if groups else samples[names[0]] | OF_PROMETHEUS
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= left


def test_the_share_of_errors_leaves_out_those_of_clients():
    [expression] = [expression for title, expression in EXPRESSIONS if title == "Errors"]
    errors, _, _ = expression.partition(" / ")
    assert ['status=~"5.."' in matchers for _, matchers in SELECTED.findall(errors)] == [True, True]


def test_each_metric_is_shown():
    asked = {name for _, expression in EXPRESSIONS for name, _ in SELECTED.findall(expression)}
    assert asked == set(exposed())


def test_expressions_have_no_variable_that_the_dashboard_lacks():
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]} | {"__rate_interval"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD))) - {"__all"} <= variables


def test_panels_do_not_overlap():
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) == 23


def test_panels_have_numbers_of_their_own():
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(numbers) == len(set(numbers))
