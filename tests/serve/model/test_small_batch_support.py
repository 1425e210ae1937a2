"""Why decode steps of few rows lack kernels on Hopper is what the launchers answer, and a server says it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from octile.kernels.cuda.gemm import request
from octile.serve.engine.config import CacheConfig, EngineConfig
from octile.serve.engine.request import Sampling
from octile.serve.generate import generate_from
from octile.serve.model.small_batch_support import why_not_few_rows
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.weights.load import Folder, Phase
from tests.serve.models import CONFIG, new_model

# DeepSeek's channels, and matrices of whole blocks
SUPPORTED = replace(
    CONFIG,
    q_lora_rank=None,
    num_attention_heads=2,
    kv_lora_rank=512,
    qk_nope_head_dim=64,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=256,
    moe_intermediate_size=128,
)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "why_not_on", lambda device: None)


def reasons(
    fp8: bool = True, dtype: torch.dtype = torch.bfloat16, *, of: Any = None, drafts: bool = False, **changed: Any
) -> str | None:
    runner = ModelRunner(new_model(fp8, dtype, replace(SUPPORTED, **of or {})), 2, n_drafts=int(drafts), **changed)
    return why_not_few_rows(runner.forward, drafts)


@pytest.mark.parametrize("q_lora_rank", [None, 128])
@pytest.mark.usefixtures("hopper")
def test_a_model_with_all_kernels(q_lora_rank: int | None):
    assert reasons(of={"q_lora_rank": q_lora_rank}, drafts=True) is None


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"of": {"kv_lora_rank": 384}}, "layer 0: queries and latents: heads have 64 + 64 channels and latents 384"),
        ({"of": {"v_head_dim": 64}}, "layer 0: attention to cached positions: values have 64 channels"),
        ({"of": {"moe_intermediate_size": 64}}, "layer 1: the projections of the SwiGLU layer or of the experts are"),
        ({"of": {"hidden_size": 144}}, "layer 1: the mixture of experts: 144, 128 or 128 columns are no"),
        ({"cache_format": "fp8"}, "layer 0: attention to cached positions: the cache is torch.uint8"),
        (
            {"fp8": False},
            "layer 0: the projections of attention are not in FP8; layer 0: the projections of the SwiGLU",
        ),
        ({"dtype": torch.float32}, "activations are torch.float32, not torch.bfloat16"),
        ({"batch_invariant": True}, "in batch-invariant mode steps of all sizes sum in the same order"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.usefixtures("hopper")
def test_reasons(arguments: dict[str, Any], reason: str):
    assert (reasons(**arguments) or "").startswith(reason)


def test_other_devices_have_none():
    assert reasons(of={"v_head_dim": 64}) is None


@pytest.mark.parametrize("phase", [None, "decode", "prefill"])
@pytest.mark.usefixtures("hopper")
def test_what_decodes_for_a_server_says_it(folder: Path, phase: Phase | None, recwarn: pytest.WarningsRecorder):
    Folder.open(folder).load(torch.device("cpu"), EngineConfig(max_batch=2), CacheConfig(gib=0.01), phase)
    said = [str(warning.message) for warning in recwarn.list]
    expected = "decode steps of few rows do not have all of Hopper's kernels: activations are torch.float32"
    assert [message.startswith(expected) for message in said] == ([] if phase == "prefill" else [True])


@pytest.mark.usefixtures("hopper")
def test_one_text_is_generated_without_it(folder: Path, recwarn: pytest.WarningsRecorder):
    assert list(generate_from(folder, "one", Sampling(2, ignore_eos=True), "cpu"))
    assert not recwarn.list
