"""The configuration of Prometheus."""

import pytest

from octile.serve.http.command import Options
from tests.deploy.commands import DEPLOY


def test_it_reads_the_path_and_the_port_of_a_server():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"] == [{"targets": [f"{Options().host}:{Options().port}"]}]
