"""The server's Deployment of Kubernetes, as far as that can be tested without a cluster."""

import pytest

pytest.importorskip("fastapi", reason="octile[serve] is not installed")

from octile.serve.http.app import OPEN_PATHS
from tests.deploy.commands import DEPLOY, options_of

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
SERVICE, DEPLOYMENT = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))
POD = DEPLOYMENT["spec"]["template"]
CONTAINER = POD["spec"]["containers"][0]
OF_IMAGE = ["octile", "serve", "/model", "--host", "0.0.0.0", "--port", "8000"]
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def test_its_arguments_are_options_of_octile_after_those_of_the_image():
    options = options_of([*OF_IMAGE, *CONTAINER["args"]])
    assert (options.model_name, options.port) == ("my-model", CONTAINER["ports"][0]["containerPort"])


def test_a_pod_ends_later_than_the_server_has_drained():
    seconds = float(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = options_of([*OF_IMAGE, *CONTAINER["args"]]).limits.drain
    assert POD["spec"]["terminationGracePeriodSeconds"] > seconds + drain + 10


@pytest.mark.parametrize("probe", PROBES)
def test_a_probe_asks_a_path_that_needs_no_key(probe):
    asked = CONTAINER[probe]["httpGet"]
    assert asked["path"] in OPEN_PATHS
    assert asked["port"] == CONTAINER["ports"][0]["name"]


def test_service_and_deployment_select_the_pods():
    assert SERVICE["spec"]["selector"] == DEPLOYMENT["spec"]["selector"]["matchLabels"] == POD["metadata"]["labels"]
    assert SERVICE["spec"]["ports"][0]["targetPort"] == CONTAINER["ports"][0]["name"]
