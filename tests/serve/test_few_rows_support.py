"""A runner on Hopper says why decode steps of few rows lack kernels; what it says is what the launchers answer."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from octile.kernels.cuda.gemm import request
from octile.serve.model_runner import ModelRunner
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


def new_runner(fp8: bool = True, dtype: torch.dtype = torch.bfloat16, *, of: Any = None, **changed: Any) -> ModelRunner:
    return ModelRunner(new_model(fp8, dtype, replace(SUPPORTED, **of or {})), 2, **changed)


@pytest.mark.parametrize("q_lora_rank", [None, 128])
@pytest.mark.usefixtures("hopper")
def test_a_model_with_all_kernels_is_not_warned_of(q_lora_rank: int | None, recwarn: pytest.WarningsRecorder):
    new_runner(of={"q_lora_rank": q_lora_rank}, n_drafts=1)
    assert not recwarn.list


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
    message = f"decode steps of few rows do not have all of Hopper's kernels: {reason}"
    with pytest.warns(RuntimeWarning, match=re.escape(message)):
        new_runner(**arguments)


def test_other_devices_are_not_warned_of(recwarn: pytest.WarningsRecorder):
    new_runner(of={"v_head_dim": 64})
    assert not recwarn.list


@pytest.mark.usefixtures("hopper")
def test_a_runner_that_does_not_decode_is_not_warned_of(recwarn: pytest.WarningsRecorder):
    new_runner(of={"v_head_dim": 64}, max_batch=0)
    assert not recwarn.list
