"""Prefill and decode processes on GPUs, which hand pages over by CUDA IPC: on one GPU, or on one each."""

from dataclasses import replace

import pytest
import torch

from octile.checkpoint.hugging_face import save
from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import DeepseekV3
from octile.serve.disaggregated.router import Router
from octile.serve.engine.config import CacheConfig, EngineConfig, ProcessesConfig
from octile.serve.engine.request import Sampling
from octile.serve.weights.load import Folder
from octile.tokenizer import Tokenizer
from tests.serve.models import adding

MODEL = replace(ModelConfig.tiny(), max_position_embeddings=1024, num_nextn_predict_layers=1)
GPU = torch.device("cuda")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("apart") / "tiny"
    torch.manual_seed(0)
    save(DeepseekV3(MODEL), folder, weights="fp8")
    Tokenizer.train(["def area(width, height): return width * height"], MODEL.vocab_size).save(folder)
    return folder


@pytest.mark.parametrize(("cache_format", "n_drafts"), [("bf16", 0), ("fp8", 0), ("bf16", 1)])
def test_texts_are_those_of_one_engine(folder, cache_format, n_drafts):
    engine = EngineConfig(max_batch=16, batch_invariant=True, n_drafts=n_drafts)
    cache = CacheConfig(format=cache_format, gib=0.25)
    single, _ = Folder.open(folder).load(GPU, engine, cache)
    router = Router(folder, ProcessesConfig(prefill=1, decode=1), GPU, engine, cache)
    submit = adding(router)
    try:
        for i, length in enumerate((1, 63, 64, 65, 130, 700)):
            prompt = [3 + (7 * i + 5 * j) % 300 for j in range(length)]
            for add in (single.add, submit):
                add(prompt, Sampling(40, seed=i, temperature=float(i % 2), ignore_eos=True))
        assert finish(router, 6) == finish(single, 6)
    finally:
        router.close()


def finish(engine, n_requests: int) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {i: [] for i in range(n_requests)}
    ended = 0
    while ended < n_requests:
        for output in engine.step():
            tokens[output.request_id] += output.tokens
            ended += output.finish_reason is not None
    return tokens
