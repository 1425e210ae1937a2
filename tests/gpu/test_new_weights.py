"""New weights for a server on a GPU: captured graphs compute with them, and a trainer sends them by CUDA IPC."""

import argparse
import base64
import inspect
import multiprocessing
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch

pytest.importorskip("fastapi", reason="octile[serve] is not installed")

import octile
from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.conversion import apply_recipe
from octile.recipe import Recipe
from octile.serve import send_weights
from octile.serve.engine.config import CacheConfig, EngineConfig
from octile.serve.engine.engine import Engine
from octile.serve.engine.request import Sampling
from octile.serve.http.config import Limits
from octile.serve.process.updates import WeightsUpdates
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.weights.block_weights import tensors_of
from octile.serve.weights.live import LiveWeights
from octile.serve.weights.load import Folder
from octile.tokenizer import Tokenizer
from tests.serve.http.conftest import Served
from tests.serve.models import text

CUDA = torch.device("cuda")
KEY = "trainer"
PROMPT_SIZES = (1, 5, 64, 90, 700)


def model_of(seed: int, vocab_size: int) -> DeepseekV3:
    torch.manual_seed(seed)
    config = replace(ModelConfig.tiny(), vocab_size=vocab_size, num_nextn_predict_layers=1)
    return apply_recipe(DeepseekV3(config).bfloat16().float(), Recipe.exact()).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([inspect.getsource(argparse)], 320)


@pytest.fixture(scope="module")
def folders(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    found = []
    for seed in range(2):
        folder = tmp_path_factory.mktemp("weights") / f"model-{seed}"
        octile.save(model_of(seed, tokenizer.vocab_size), folder)
        tokenizer.save(folder)
        found.append(folder)
    return found


@pytest.fixture(scope="module", params=[0, 1], ids=["no drafts", "a draft"])
def served(folders: list[Path], request: pytest.FixtureRequest):
    config = EngineConfig(max_batch=8, max_step_tokens=512, exact=True, n_drafts=request.param)
    opened = Folder.open(folders[0])
    engine, runner = opened.load(CUDA, config, CacheConfig(gib=0.5))
    engine.tokenizer, engine.max_position = opened.tokenizer, runner.max_position
    updates = WeightsUpdates(engine, runner.updatable_weights)
    served = Served(engine, Limits(), (), None, weights_key=KEY, updates=updates)
    yield served
    served.stop()


def log_probs(folder: Path, tokens: list[int]) -> list[float]:
    with torch.no_grad():
        return octile.load(folder, device="cuda").log_probs(torch.tensor([tokens], device="cuda"))[0].tolist()


def assert_serves(served: Served, folder: Path, version: int) -> None:
    for size in PROMPT_SIZES[1:]:
        prompt = text(size, seed=size)
        body = {"model": "micro", "prompt": prompt, "max_tokens": 40, "ignore_eos": True, "logprobs": 0}
        body |= {"prompt_logprobs": 0, "return_token_ids": True}
        (choice,) = httpx.post(f"{served.url}/v1/completions", json=body, timeout=120).json()["choices"]
        expected = log_probs(folder, prompt + choice["token_ids"])
        at_prompt = zip(choice["prompt_logprobs"][1:], prompt[1:], strict=True)
        found = [at[str(token)]["logprob"] for at, token in at_prompt] + choice["logprobs"]["token_logprobs"]
        assert found == expected
        assert choice["weights_version"] == version


def train_and_send(url: str, folder: str, answers) -> None:
    """What a trainer does: it is another process on this GPU, and only its memory goes to the server."""
    try:
        model = octile.load(folder, device="cuda")
        answers.put([send_weights(url, KEY, model, in_flight) for in_flight in ("finish", "recompute")])
    except Exception as error:
        answers.put(error)


def test_a_trainer_on_the_same_gpu_sends_its_weights_and_graphs_stay_valid(served, folders):
    before = served.service.engine.stats.weights_version
    weights = served.pair.server._updates._weights.weights
    addresses = [t.data_ptr() for part in weights.parts for t in tensors_of(part)]
    assert_serves(served, folders[0], before)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    trainer = context.Process(target=train_and_send, args=(served.url, str(folders[1]), answers))
    trainer.start()
    sent = answers.get(timeout=300)
    trainer.join()
    assert not isinstance(sent, Exception), sent
    assert [each.version for each in sent] == [before + 1, before + 2]
    assert_serves(served, folders[1], before + 2)
    assert [t.data_ptr() for part in weights.parts for t in tensors_of(part)] == addresses
    headers = {"authorization": f"Bearer {KEY}"}
    body = {"model_path": str(folders[0]), "in_flight": "recompute"}
    response = httpx.post(f"{served.url}/update_weights_from_disk", json=body, headers=headers, timeout=120)
    assert response.status_code == 200, response.text
    assert_serves(served, folders[0], before + 3)


def test_a_handle_that_is_none_is_refused_and_the_server_goes_on(served, folders):
    version = served.service.engine.stats.weights_version
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    tensors = {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
    headers = {"authorization": f"Bearer {KEY}"}
    for handle, device, message in [
        (bytes(64), uuid, "cuda_ipc.handle cannot be opened: "),
        (bytes(63), uuid, "cuda_ipc.handle must be 64 bytes in base64"),
        (bytes(64), "another", "cuda_ipc.device must be the server's GPU"),
    ]:
        shared = {"handle": base64.b64encode(handle).decode(), "offset": 0, "device": device}
        body = {"config": {}, "tensors": tensors, "cuda_ipc": shared}
        response = httpx.post(f"{served.url}/update_weights_from_tensor", json=body, headers=headers, timeout=60)
        assert response.status_code == 400
        assert response.json()["error"]["message"].startswith(message)
    assert_serves(served, folders[0], version)


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_log_probabilities_of_prompts_in_graphs_are_those_of_the_model(tokenizer, batch_invariant):
    model = model_of(0, 320).cuda()
    engine = Engine(
        ModelRunner(LiveWeights(model), 64, batch_invariant=batch_invariant, max_batch=8, max_step_tokens=256),
        tokenizer,
        EngineConfig(max_batch=8, max_step_tokens=256),
    )
    sampling, scored = Sampling(9, ignore_eos=True, prompt_logprobs=0), {}
    prompts = {engine.add(prompt, sampling).id: prompt for prompt in (text(n, seed=n) for n in PROMPT_SIZES)}
    while engine.has_work:
        for output in engine.step():
            scored.setdefault(output.request_id, [entry.logprob for entry in output.prompt_logprobs])
    for request_id, prompt in prompts.items():
        if len(prompt) == 1:
            assert scored[request_id] == []
            continue
        with torch.no_grad():
            expected = model.log_probs(torch.tensor([prompt], device="cuda"))[0]
        found = torch.tensor(scored[request_id], device="cuda")
        assert torch.equal(found, expected) if batch_invariant else (found - expected).abs().mean() < 0.1
