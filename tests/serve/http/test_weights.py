"""New weights for a running server over HTTP: from a folder, and from another process."""

import asyncio
import json
import shutil
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import get_args

import httpx
import pytest
import torch

import octile
from octile.checkpoint.packed import LABEL
from octile.serve import send_weights
from octile.serve.engine.config import CacheConfig, EngineConfig, InFlight
from octile.serve.http.config import Limits
from octile.serve.process.messages import CancelUpdate
from octile.serve.process.updates import WeightsUpdates
from octile.serve.weights import replaceable
from octile.serve.weights.load import Folder
from tests.serve.http.conftest import Served, wait_until
from tests.serve.models import exact_model, text
from tests.serve.test_live import train

KEY = "the-key-of-the-trainer"
PROMPT = text(90)
PATHS = ["update_weights_from_disk", "update_weights_from_tensor"]


def model_of(steps: int, **changes):
    """The model after some steps of training; its parameters are numbers of BF16, as those of a folder."""
    model = exact_model(vocab_size=320, **changes)
    train(model, steps)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


@pytest.fixture(scope="module")
def folders(tokenizer, tmp_path_factory) -> list[Path]:
    """The folders of a model before and after training."""
    found = []
    for steps in (0, 2):
        folder = tmp_path_factory.mktemp("weights") / f"model-{steps}"
        octile.save(model_of(steps), folder)
        tokenizer.save(folder)
        found.append(folder)
    return found


@pytest.fixture
def served(folders):
    """A server in exact mode."""
    with torch.no_grad():
        config = EngineConfig(max_batch=4, max_step_tokens=40, exact=True)
        engine, runner = Folder.open(folders[0]).load(torch.device("cpu"), config, CacheConfig(gib=0.05))
    engine.tokenizer, engine.max_position = Folder.open(folders[0]).tokenizer, runner.max_position
    updates = WeightsUpdates(engine, runner.updatable_weights)
    served = Served(engine, Limits(drain=1.0), (), None, weights_key=KEY, updates=updates)
    yield served
    served.stop()


def update(served: Served, folder: Path, key: str | None = KEY, **fields) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body = {"model_path": str(folder), **fields}
    return httpx.post(f"{served.url}/update_weights_from_disk", json=body, headers=headers, timeout=60)


def ask(served: Served, **fields) -> dict:
    body = {"model": "micro", "prompt": PROMPT, "ignore_eos": True, "return_token_ids": True, "logprobs": 0, **fields}
    response = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def log_probs(folder: Path, tokens: list[int]) -> list[float]:
    with torch.no_grad():
        return octile.load(folder).log_probs(torch.tensor([tokens]))[0].tolist()


def assert_serves(served: Served, folder: Path, version: int) -> None:
    """The server answers with the weights of a folder and names their version."""
    choice = ask(served, prompt_logprobs=0, max_tokens=8)
    expected = log_probs(folder, PROMPT + choice["token_ids"])
    at_prompt = [at[str(token)]["logprob"] for at, token in zip(choice["prompt_logprobs"][1:], PROMPT[1:], strict=True)]
    assert at_prompt + choice["logprobs"]["token_logprobs"] == expected
    assert choice["weights_version"] == version
    (model,) = httpx.get(f"{served.url}/v1/models").json()["data"]
    assert model["weights_version"] == version


@pytest.mark.slow
def test_after_an_update_all_is_that_of_the_new_weights_at_the_same_addresses(served, folders):
    weights = served.pair.server._updates._weights.weights
    addresses = [weights.embedding.data_ptr(), weights.blocks[1].mlp.down.data.data_ptr()]
    assert_serves(served, folders[0], 0)
    assert log_probs(folders[0], PROMPT) != log_probs(folders[1], PROMPT)
    for version, folder in enumerate((folders[1], folders[0]), 1):
        response = update(served, folder)
        answer = response.json()
        assert (response.status_code, answer["success"], answer["weights_version"]) == (200, True, version)
        assert answer["bytes"] > 100_000
        assert 0 < answer["write_seconds"] < answer["seconds"]
        ask(served, max_tokens=1)  # its prefix is not that of the old weights
        assert_serves(served, folder, version)
    assert addresses == [weights.embedding.data_ptr(), weights.blocks[1].mlp.down.data.data_ptr()]
    metrics = httpx.get(f"{served.url}/metrics").text
    assert 'octile_weights_version{model_name="micro"} 2.0' in metrics
    assert 'octile_weights_update_seconds_count{model_name="micro"} 2.0' in metrics
    assert 'octile_http_responses_total{path="/update_weights_from_disk",status="200"} 2.0' in metrics


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", get_args(InFlight))
def test_requests_in_flight_end_or_go_on_as_the_trainer_chooses(served, folders, in_flight):
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, served, max_tokens=200)
        wait_until(lambda: served.service.engine.stats.generated_tokens > 3)
        assert update(served, folders[1], in_flight=in_flight).status_code == 200
        choice = answer.result()
    tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    old, new = (log_probs(folder, PROMPT + tokens)[-200:] for folder in folders)
    if in_flight == "finish":
        assert (choice["weights_version"], "weights_versions" in choice, logprobs == old) == (0, False, True)
    else:
        (first, second), n = choice["weights_versions"], choice["weights_versions"][1]["first_token"]
        assert (first, second["version"], choice["weights_version"]) == ({"version": 0, "first_token": 0}, 1, 1)
        assert logprobs[:n] == old[:n]
        assert (logprobs[n:] == new[n:]) == (in_flight == "recompute")
        assert choice.get("old_latents", False) == (in_flight == "continue")
    assert_serves(served, folders[1], 1)


@pytest.mark.slow
def test_requests_that_wait_begin_with_the_new_weights(served, folders):
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(ask, served, max_tokens=120, seed=i) for i in range(4)]
        wait_until(lambda: served.service.engine.stats.running == 4)
        answers += [pool.submit(ask, served, max_tokens=3) for _ in range(2)]
        wait_until(lambda: served.service.engine.stats.waiting == 2)
        assert update(served, folders[1]).status_code == 200
        versions = [answer.result()["weights_version"] for answer in answers]
    assert versions == [0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("key", "message"), [(None, "the weights key is missing"), ("other", "the weights key is not")]
)
def test_another_key_is_refused(served, path, key, message):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    response = httpx.post(f"{served.url}/{path}", json={"model_path": "/"}, headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["message"].startswith(message)


@pytest.mark.parametrize("path", PATHS)
def test_a_server_without_a_key_says_how_to_allow_updates(serve, path):
    response = httpx.post(f"{serve(api_keys=('clients',)).url}/{path}", headers={"authorization": "Bearer clients"})
    assert response.status_code == 403
    assert "--weights-key" in response.json()["error"]["message"]


def damaged(tmp_path: Path, folder: Path) -> Path:
    copy = shutil.copytree(folder, tmp_path / "damaged")
    file = copy / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    return copy


def with_nan(tmp_path: Path, folder: Path) -> Path:
    model = octile.load(folder)
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    octile.save(model, tmp_path / "nan")
    return tmp_path / "nan"


def of_another(tmp_path: Path, weights: str = "fp8", **changes) -> Path:
    octile.save(model_of(0, **changes), tmp_path / "other", weights=weights)
    return tmp_path / "other"


def of_another_recipe(tmp_path: Path, folder: Path) -> Path:
    copy = shutil.copytree(folder, tmp_path / "recipe")
    config = json.loads((copy / "config.json").read_text())
    del config["octile_recipe"]
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "octile.json").unlink()
    return copy


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda tmp_path, folder: tmp_path / "nowhere", "no checkpoint at "),
        (damaged, "is damaged"),
        (with_nan, "model.norm.weight in "),
        (lambda tmp_path, _: of_another(tmp_path, intermediate_size=256), "intermediate_size in "),
        (lambda tmp_path, _: of_another(tmp_path, rope_theta=500.0), "rope_theta in "),
        (lambda tmp_path, _: of_another(tmp_path, "bf16"), "must have weights of the recipe 'exact'"),
        (of_another_recipe, "must have weights of the recipe 'exact'"),
    ],
    ids=["no folder", "damaged", "NaN", "shapes", "configuration", "formats", "recipe"],
)
def test_what_cannot_be_served_leaves_the_old_weights_in_use(served, folders, tmp_path, make, message):
    response = update(served, make(tmp_path, folders[1]), in_flight="recompute")
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert_serves(served, folders[0], 0)
    assert update(served, folders[1]).status_code == 200


def test_weights_that_cannot_be_written_any_more_end_the_server(served, folders, monkeypatch):
    def fail(written, reader):
        raise ValueError("model.safetensors is damaged")

    monkeypatch.setattr(replaceable, "write_parts", fail)
    response = update(served, folders[1])
    assert response.status_code == 500
    assert "the engine has only some of them: model.safetensors is damaged" in response.json()["error"]["message"]
    served.thread.join(30)
    assert isinstance(served.error, RuntimeError)


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"in_flight": "abort"}, "in_flight must be 'finish', 'recompute' or 'continue', not 'abort'"),
        ({"flush_cache": False}, "flush_cache must be true, not false"),
        ({"abort_all_requests": True}, "abort_all_requests must be false, not true"),
        ({"weight_version": "3"}, "weight_version is unknown, or not supported here"),
    ],
)
def test_a_field_that_would_change_the_update_is_refused(served, folders, fields, message):
    response = update(served, folders[1], **fields)
    assert (response.status_code, response.json()["error"]["message"]) == (400, message)


def test_a_second_update_is_refused_while_one_runs(served, folders, monkeypatch):
    weights, may_open = served.pair.server._updates._weights, threading.Event()
    right = weights.open

    def wait_and_open(source):
        may_open.wait(30)
        return right(source)

    monkeypatch.setattr(weights, "open", wait_and_open)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(update, served, folders[1])
        wait_until(lambda: served.service.engine.is_updating)
        second = update(served, folders[1])
        assert (second.status_code, second.json()["error"]["code"]) == (409, "update_runs")
        ask(served, max_tokens=2)  # meanwhile the engine steps
        may_open.set()
        assert first.result().status_code == 200
    assert update(served, folders[0]).status_code == 200


@pytest.mark.slow
def test_one_of_two_updates_that_come_together_is_refused(served, folders):
    async def post_both() -> list[httpx.Response]:
        """In the server's event loop, where both requests are read in the same turns."""
        transport, headers = httpx.ASGITransport(served.server.config.loaded_app), {"authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(transport=transport, base_url=served.url, headers=headers) as client:
            posts = (client.post("/update_weights_from_disk", json={"model_path": str(path)}) for path in folders)
            return await asyncio.gather(*posts)

    answers = asyncio.run_coroutine_threadsafe(post_both(), served.server._loop).result(60)
    # Which is read first is open: each is checked in a thread.
    statuses = [answer.status_code for answer in answers]
    assert sorted(statuses) == [200, 409]
    assert_serves(served, folders[statuses.index(200)], 1)


@pytest.mark.slow
def test_an_update_whose_client_leaves_before_it_is_written_is_canceled(served, folders):
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, served, max_tokens=300)
        wait_until(lambda: served.service.engine.stats.generated_tokens > 3)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{served.url}/update_weights_from_disk",
                json={"model_path": str(folders[1])},
                headers={"authorization": f"Bearer {KEY}"},
                timeout=httpx.Timeout(60, read=0.1),
            )
        wait_until(lambda: not served.service.engine.is_updating)
        assert answer.result()["weights_version"] == 0
    assert_serves(served, folders[0], 0)


@pytest.mark.slow
def test_an_update_whose_time_is_over_is_canceled_and_what_it_opens_later_is_closed(served, folders, monkeypatch):
    weights, may_open, closed = served.pair.server._updates._weights, threading.Event(), threading.Event()
    right = weights.open

    def wait_and_open(source):
        may_open.wait(30)
        return replace(right(source), close=closed.set)

    monkeypatch.setattr(weights, "open", wait_and_open)
    monkeypatch.setattr(served.service, "limits", replace(served.service.limits, seconds=0.05))
    response = update(served, folders[1])
    message = "the update took longer than 0.05 seconds, the limit of this server: the old weights stay in use"
    assert (response.status_code, response.json()["error"]["message"]) == (504, message)
    assert not served.service.engine.is_updating
    monkeypatch.undo()
    may_open.set()
    assert closed.wait(30)
    assert_serves(served, folders[0], 0)
    assert update(served, folders[1]).json()["weights_version"] == 1


@pytest.mark.slow
def test_an_update_that_is_written_when_its_time_is_over_is_answered_when_it_ends(served, folders, monkeypatch):
    right, sender, sent = replaceable.write_parts, served.service.engine._sender, []
    send = sender.send

    def record_and_send(message):
        sent.append(message)
        send(message)

    def write_late(written, reader):
        if CancelUpdate() not in sent:
            served.advance(served.service.limits.seconds)
        wait_until(lambda: CancelUpdate() in sent)
        right(written, reader)

    monkeypatch.setattr(sender, "send", record_and_send)
    monkeypatch.setattr(replaceable, "write_parts", write_late)
    response = update(served, folders[1])
    assert (response.status_code, response.json()["weights_version"]) == (200, 1)
    monkeypatch.undo()
    assert_serves(served, folders[1], 1)


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", [pytest.param("finish", marks=pytest.mark.exhaustive), "recompute"])
def test_a_trainer_sends_its_weights(served, folders, in_flight):
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, served, max_tokens=200)
        wait_until(lambda: served.service.engine.stats.generated_tokens > 3)
        sent = send_weights(served.url, KEY, octile.load(folders[1]), in_flight)
        versions = answer.result().get("weights_versions", [])
    assert (sent.version, sent.nbytes > 100_000, len(versions)) == (1, True, 2 * (in_flight == "recompute"))
    assert_serves(served, folders[1], 1)


@pytest.mark.slow
def test_what_a_trainer_sends_is_checked_as_a_folder_is(served, folders, monkeypatch):
    model = octile.load(folders[1])
    with pytest.raises(PermissionError, match="answers 401: the weights key is not one of this server's"):
        send_weights(served.url, "other", model)
    with pytest.raises(ValueError, match="must have weights of the recipe 'exact'"):
        send_weights(served.url, KEY, model, weights="bf16")
    with pytest.raises(ValueError, match=rf"intermediate_size in {LABEL} must be 200, as the served model's, not 256"):
        send_weights(served.url, KEY, model_of(0, intermediate_size=256))
    with torch.no_grad():
        model.model.norm.weight[3] = torch.inf
    with pytest.raises(ValueError, match=rf"model\.norm\.weight in {LABEL} must be finite, but it holds NaN or Inf"):
        send_weights(served.url, KEY, model)
    assert_serves(served, folders[0], 0)


def test_a_key_that_cannot_be_sent_is_refused_and_not_shown():
    with pytest.raises(ValueError, match=r"^key must be printable ASCII without blanks at its ends") as refused:
        send_weights("http://127.0.0.1:1", "secret\n", exact_model())
    assert "secret" not in str(refused.value)


def test_weights_are_sent_to_this_machine_without_the_proxy_of_the_environment(served, folders, monkeypatch):
    with monkeypatch.context() as environment:
        for name in ("no_proxy", "NO_PROXY"):
            environment.delenv(name, raising=False)
        environment.setenv("http_proxy", "http://127.0.0.1:1")
        environment.setattr(urllib.request, "_opener", None)  # which has the proxy of its first use
        assert send_weights(served.url, KEY, octile.load(folders[1])).version == 1


def sent_body(**fields) -> dict:
    tensors = {"model.norm.weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
    return {"config": {}, "tensors": tensors, "shared_memory": "/nowhere", **fields}


def layout(**fields) -> dict:
    return {"tensors": {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **fields}}}


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "shared_memory must be the path of a file on the server's machine, not '/nowhere'"),
        ({"shared_memory": "/\0"}, "shared_memory must be the path of a file on the server's machine, not '/\\x00'"),
        ({"shared_memory": None}, "shared_memory or cuda_ipc must be given, and not both"),
        (
            {"shared_memory": None, "cuda_ipc": {"handle": "AA==", "offset": 0, "device": "GPU-0"}},
            "cuda_ipc needs a server on a GPU, not on cpu",
        ),
        ({"cuda_ipc": {"handle": "AA==", "offset": -8, "device": "GPU-0"}}, "cuda_ipc.offset must be at least 0"),
        ({"cuda_ipc": {"handle": "AA==", "offset": 2, "device": "GPU-0"}}, "cuda_ipc.offset must be a multiple of 8"),
        ({"serialized_named_tensors": ["gASV"]}, "serialized_named_tensors is unknown, or not supported here"),
        ({"tensors": {}}, "tensors must not be empty"),
        (layout(shape=[-4]), "tensors.w.shape.0 must be at least 0"),
        (layout(shape=[8], file=True), f"{LABEL}: w must have 32 bytes"),
        (layout(dtype="pickle", file=True), f"{LABEL}: w must have a dtype of F64, F32"),
        (layout(data_offsets=[1, 17], file=True), f"{LABEL}: w must have 16 bytes"),
        (layout(data_offsets=[0, 99], file=True), "shared_memory must have 99 bytes, not 16"),
    ],
)
def test_a_buffer_that_cannot_be_read_is_refused(served, folders, tmp_path, fields, message):
    entry = fields.get("tensors", {}).get("w", {})
    if entry.pop("file", False):
        fields = {**fields, "shared_memory": str(tmp_path / "buffer")}
        size = entry["data_offsets"][1] if entry["data_offsets"][1] < 99 else 16
        (tmp_path / "buffer").write_bytes(bytes(size))
    headers = {"authorization": f"Bearer {KEY}"}
    response = httpx.post(f"{served.url}/update_weights_from_tensor", json=sent_body(**fields), headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(message)
    assert not served.service.engine.is_updating
