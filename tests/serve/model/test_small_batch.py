"""Decode steps of few rows compute what other steps do, with operators that take several of theirs together."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from octile.kernels.cuda.gemm import request
from octile.models.config import ModelConfig
from octile.scaled import ScaledTensor
from octile.serve.engine.config import CacheConfig, EngineConfig
from octile.serve.engine.request import Sampling
from octile.serve.generate import generate_from
from octile.serve.model import small_batch
from octile.serve.model.gemms import Gemms
from octile.serve.model.small_batch import why_kernels_lack
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.runner.step import Step
from octile.serve.weights.block_weights import MoEWeights
from octile.serve.weights.load import Folder, Phase
from octile.serve.weights.weights import ServedWeights
from tests.serve.models import CONFIG, Texts, new_model, text

# queries whose rows are whole blocks, so that the projections of a block's input are one matrix
DIRECT = replace(CONFIG, q_lora_rank=None, num_attention_heads=8)
COMPRESSED = replace(CONFIG, q_lora_rank=128)
# experts of whole blocks, so that gate and up are one matrix
BLOCKS = replace(DIRECT, moe_intermediate_size=128)
CONFIGS = pytest.mark.parametrize("config", [DIRECT, COMPRESSED, BLOCKS], ids=["direct", "compressed", "blocks"])


def decode(config: ModelConfig, fp8: bool) -> list[Tensor]:
    """Read two prompts, and then single tokens of both."""
    texts = Texts(ModelRunner(new_model(fp8, config=config), 8), [text(70), text(20, 1)]).run(60, 12)
    for _ in range(6):
        texts.run(1, 1)
    return texts.logits


@pytest.mark.one_case
@CONFIGS
@pytest.mark.parametrize("fp8", [False, True])
def test_logits_are_those_of_other_steps(config: ModelConfig, fp8: bool, monkeypatch: pytest.MonkeyPatch):
    expected, steps = decode(config, fp8), []

    def is_small_batch(step: Step, batch_invariant: bool) -> bool:
        steps.append(len(step.tokens))
        return not step.prefills and len(step.tokens) == len(step.lengths)

    monkeypatch.setattr(small_batch, "can_take_small_batches", lambda *_: True)
    monkeypatch.setattr(small_batch, "is_small_batch", is_small_batch)
    for found, of_text in zip(decode(config, fp8), expected, strict=True):
        torch.testing.assert_close(found, of_text, rtol=1e-4, atol=1e-4)
    assert steps


@CONFIGS
@pytest.mark.parametrize("fp8", [False, True])
def test_projections_that_are_one_matrix(config: ModelConfig, fp8: bool):
    of_layers = [block.attention for block in ServedWeights.of_model(new_model(fp8, config=config)).blocks]
    assert all(small_batch.has_small_batch_products(of) for of in of_layers)


def test_projections_that_are_not():
    attention = ServedWeights.of_model(new_model(True)).blocks[0].attention
    assert not small_batch.has_small_batch_products(attention)
    joined = ServedWeights.of_model(new_model(True, config=DIRECT)).blocks[0].attention
    assert isinstance(joined.o, ScaledTensor)
    assert not small_batch.has_small_batch_products(replace(joined, o=joined.o.dequantize()))


def test_feed_forwards_whose_matrices_are_fp8_and_joined():
    forward = ModelRunner(new_model(True, config=BLOCKS), 1).forward
    mlps = [block.mlp for block in forward.weights.blocks]
    assert all(small_batch.has_small_batch_feed_forward(forward.feed_forward, mlp) for mlp in mlps)


def test_a_gate_in_fp32_is_none_in_batch_invariant_mode():
    forward = ModelRunner(new_model(True, torch.bfloat16, BLOCKS), 1, batch_invariant=True).forward
    mlp = forward.weights.blocks[-1].mlp
    assert isinstance(mlp, MoEWeights)
    assert small_batch.has_small_batch_feed_forward(forward.feed_forward, replace(mlp, gate=mlp.gate.bfloat16()))
    assert not small_batch.has_small_batch_feed_forward(forward.feed_forward, replace(mlp, gate=mlp.gate.float()))


@pytest.mark.parametrize(("fp8", "config"), [(True, DIRECT), (False, BLOCKS)], ids=["not joined", "not FP8"])
def test_mixtures_that_are_not(fp8: bool, config: ModelConfig):
    forward = ModelRunner(new_model(fp8, config=config), 1).forward
    assert not small_batch.has_small_batch_feed_forward(forward.feed_forward, forward.weights.blocks[-1].mlp)


def test_experts_are_counted(monkeypatch: pytest.MonkeyPatch):
    def tokens_of_experts() -> Mapping[int, tuple[int, ...]]:
        runner = ModelRunner(new_model(True, config=BLOCKS), 8, expert_window=8)
        texts = Texts(runner, [text(20)])
        texts.run(12)
        for _ in range(8):
            texts.run(1)
        assert runner.forward.feed_forward.expert_load is not None
        return runner.forward.feed_forward.expert_load.in_window

    expected = tokens_of_experts()
    monkeypatch.setattr(small_batch, "can_take_small_batches", lambda *_: True)
    monkeypatch.setattr(small_batch, "is_small_batch", lambda step, _: not step.prefills)
    assert tokens_of_experts() == expected
    assert any(any(of_layer) for of_layer in expected.values())


def step(rows: int, attending: int, *prefills: Any) -> Step:
    numbers = torch.zeros(rows, dtype=torch.int64)
    pages, lengths = torch.zeros(attending, 1, dtype=torch.int32), torch.ones(attending, dtype=torch.int32)
    return Step(numbers, numbers, numbers, pages, lengths, None, prefills)


def test_steps_of_up_to_eight_decode_rows_have_few_rows():
    assert [small_batch.is_small_batch(step(n, n), False) for n in (0, 1, 8, 9)] == [False, True, True, False]
    assert [small_batch.is_small_batch(step(n, n), True) for n in (0, 1, 2)] == [False, True, False]


@pytest.mark.parametrize("of_step", [step(8, 8, object()), step(8, 4)], ids=["a prompt's rows", "padded to all rows"])
def test_other_steps_do_not(of_step: Step):
    assert not small_batch.is_small_batch(of_step, False)


GEMMS = Gemms(torch.bfloat16, power_of_2=False, batch_invariant=False)


@pytest.mark.parametrize(
    ("changed", "device", "expected"),
    [
        ({}, "cuda", True),
        ({}, "cpu", False),
        ({"gemms": replace(GEMMS, batch_invariant=True)}, "cuda", True),
        ({"gemms": replace(GEMMS, dtype=torch.float32)}, "cuda", False),
        ({"index": object()}, "cuda", False),
        ({"tp": SimpleNamespace(size=2)}, "cuda", False),
    ],
)
def test_models_that_take_small_batches(changed: dict[str, object], device: str, expected: bool):
    attention: Any = SimpleNamespace(**{"gemms": GEMMS, "index": None, "tp": SimpleNamespace(size=1)} | changed)
    assert small_batch.can_take_small_batches(attention, torch.device(device)) == expected


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
    forward = runner.forward
    return why_kernels_lack(forward.weights, forward.attention, forward.feed_forward, drafts)


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
        ({"batch_invariant": True, "fp8": False}, "layer 0: the projections of attention are not in FP8"),
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
    expected = "small-batch decode steps do not have all of Hopper's kernels: activations are torch.float32"
    assert [message.startswith(expected) for message in said] == ([] if phase == "prefill" else [True])


@pytest.mark.usefixtures("hopper")
def test_one_text_is_generated_without_it(folder: Path, recwarn: pytest.WarningsRecorder):
    assert list(generate_from(folder, "one", Sampling(2, ignore_eos=True), "cpu"))
    assert not recwarn.list
