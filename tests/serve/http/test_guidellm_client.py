"""guidellm, the load generator of the vLLM project, measures the server."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("fastapi", reason="octile[serve] is not installed")
pytest.importorskip("guidellm", reason="guidellm is not installed")


def options(**values) -> list[str]:
    return [part for name, value in values.items() for part in (f"--{name}", json.dumps(value))]


@pytest.mark.exhaustive  # it takes seconds to start; what it needs besides OpenAI's client is tested in test_usage.py
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_its_requests_are_answered_with_the_tokens_that_they_ask_for(served, folder, tmp_path, path, stream):
    report = tmp_path / "report.json"
    given = options(
        backend={"kind": "openai_http", "target": served.url, "request_format": path, "stream": stream},
        profile={"kind": "concurrent", "streams": 4},
        constraint={"kind": "max_requests", "count": 20},
        data={"kind": "synthetic_text", "prompt_tokens": 16, "output_tokens": 8},
        tokenizer={"kind": "hf_auto", "model": str(folder)},
        output={"kind": "json", "path": str(report)},
    )
    command = [sys.executable, "-m", "guidellm", "run", *given, "--disable-console"]
    subprocess.run(command, check=True, capture_output=True)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert (requests["errored"], requests["incomplete"], len(requests["successful"])) == ([], [], 20)
    assert {request["output_tokens"] for request in requests["successful"]} == {8}
