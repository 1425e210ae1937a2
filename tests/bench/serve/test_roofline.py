"""The routed experts that a step of `octile bench serve` reads, on a CPU and a miniature model."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from octile.bench.serve.random_weights import random_weights
from octile.bench.serve.roofline import Bandwidths, copy_row, decode_bytes, experts_read
from octile.models.config import ModelConfig
from octile.ops.latent_cache import PAGE
from octile.scaled import ScaledTensor
from octile.serve.engine.config import EngineConfig
from octile.serve.engine.engine import Engine
from octile.serve.engine.request import Sampling
from octile.serve.model.feed_forward import ExpertLoad
from octile.serve.runner.graphs import PrefillGraphs
from octile.serve.runner.kv_cache import CacheFormat, KVCache
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.weights.block_weights import AttentionWeights, MoEWeights, Projections, Weight
from octile.serve.weights.weights import ServedWeights
from octile.tokenizer import MIN_VOCAB_SIZE, Tokenizer
from tests.bench.serve.test_engine import SMALL
from tests.serve.models import CONFIG, new_model


def decoding(requests: int) -> tuple[ModelRunner, Engine]:
    """A runner whose steps have graphs, and an engine in which all requests decode."""
    runner = ModelRunner(random_weights(SMALL.config, torch.device("cpu")), n_pages=16)
    runner.graphs = SimpleNamespace(run=lambda layout: pytest.fail("a graph counts nothing"))  # type: ignore
    runner.prefill_graphs = PrefillGraphs(runner.forward, None, 256)
    runner._max_rows = 8
    engine = Engine(runner, Tokenizer.train([], MIN_VOCAB_SIZE), EngineConfig(max_batch=8))
    for seed in range(requests):
        engine.add([seed, 7, 9], Sampling(max_new_tokens=9, seed=seed, ignore_eos=True))
    graphs, runner.graphs = runner.graphs, None
    while len(engine.step()) < requests:
        pass
    runner.graphs = graphs
    return runner, engine


def test_the_experts_of_one_row_are_those_that_a_row_chooses():
    mixtures = sum(SMALL.config.is_moe(layer) for layer in range(SMALL.config.num_hidden_layers))
    assert experts_read(*decoding(1)) == mixtures * SMALL.config.num_experts_per_tok


def test_an_expert_that_several_rows_choose_is_read_once(monkeypatch: pytest.MonkeyPatch):
    runner, engine = decoding(6)
    chosen, count = list[tuple[int, int]](), ExpertLoad.count

    def collect(load: ExpertLoad, layer: int, experts_TK: Tensor, slots_T: Tensor) -> None:
        chosen.extend((layer, expert) for expert in experts_TK[slots_T >= 0].flatten().tolist())
        count(load, layer, experts_TK, slots_T)

    monkeypatch.setattr(ExpertLoad, "count", collect)
    n_read = experts_read(runner, engine)
    assert n_read == len(set(chosen)) < len(chosen)
    assert isinstance(runner.prefill_graphs, PrefillGraphs)


def test_a_gate_that_is_not_counted_is_no_result(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ExpertLoad, "count", lambda *arguments: None)
    with pytest.raises(RuntimeError, match=r"chooses 2 experts of each layer, but \[0\] were counted"):
        experts_read(*decoding(2))


@pytest.mark.parametrize("published", [None, 3.35e12])
def test_the_unit_of_a_copys_speed_is_that_of_its_device(published: float | None):
    rows = [copy_row("", Bandwidths(published, 3.0e12), torch.device(kind)) for kind in ("cuda", "cpu")]
    assert [(row.value, row.unit) for row in rows] == [(3000.0, "GB/s"), (3e6, "MB/s")]


DIRECT = replace(CONFIG, q_lora_rank=None, topk_method="greedy", n_group=1, n_shared_experts=2, num_hidden_layers=4)


def held(part: object) -> Iterator[Weight]:
    """All weights of a part of a model that a decode step reads, whichever experts it chooses."""
    if isinstance(part, Tensor | ScaledTensor):
        yield part
    elif isinstance(part, tuple):
        for item in part:
            yield from held(item)
    elif is_dataclass(part):
        for field in fields(part):
            if not (isinstance(part, AttentionWeights) and field.name == "kv_up"):  # of the naive form
                yield from held(getattr(part, field.name))


def nbytes(part: object) -> int:
    tensors = [t for w in held(part) for t in ((w.data, w.scale) if isinstance(w, ScaledTensor) else (w,))]
    return sum(t.nbytes for t in tensors)


def expert_bytes(weights: ServedWeights, expert: int) -> int:
    """The bytes of one expert in all layers."""
    mixtures = [block.mlp for block in weights.blocks if isinstance(block.mlp, MoEWeights)]

    def one(w: Weight) -> Weight:
        return ScaledTensor(w.data[expert], w.scale[expert], w.block) if isinstance(w, ScaledTensor) else w[expert]

    return sum(nbytes((*(one(w) for w in mixture.x.weights), one(mixture.down))) for mixture in mixtures)


def served(config: ModelConfig, fp8: bool) -> ServedWeights:
    model = new_model(fp8, torch.bfloat16, config)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = buffer.float()  # as in published checkpoints
    return ServedWeights.of_model(model)


@pytest.mark.parametrize("config", [CONFIG, DIRECT])
@pytest.mark.parametrize("fp8", [False, True])
def test_weights_are_those_that_serving_holds(config: ModelConfig, fp8: bool):
    weights = served(config, fp8)
    without_experts = replace(
        weights,
        blocks=tuple(
            replace(block, mlp=replace(block.mlp, x=Projections((), ()), down=torch.empty(0)))
            if isinstance(block.mlp, MoEWeights)
            else block
            for block in weights.blocks
        ),
    )
    found = decode_bytes(config, [1], 0, fp8)
    of_weights = sum(n for kind, n in found.items() if kind not in ("embedding", "cache"))
    assert of_weights == sum(nbytes(getattr(without_experts, part)) for part in ("blocks", "norm", "head"))
    assert found["head"] == weights.head.nbytes
    assert found["embedding"] == weights.embedding[0].nbytes


@pytest.mark.parametrize("fp8", [False, True])
def test_routed_experts_are_those_that_are_read(fp8: bool):
    mixtures = DIRECT.num_hidden_layers - DIRECT.first_k_dense_replace
    of_one = expert_bytes(served(DIRECT, fp8), 5)
    assert decode_bytes(DIRECT, [1], 3 * mixtures, fp8)["routed experts"] == 3 * of_one


@pytest.mark.parametrize("cache_format", ["bf16", "fp8", "float32"])
def test_the_cache_has_a_row_of_each_position_in_each_layer(cache_format: CacheFormat):
    c = CONFIG
    pages = KVCache(c.num_hidden_layers, 1, c.kv_lora_rank, c.qk_rope_head_dim, cache_format, torch.device("cpu"))
    found = decode_bytes(c, [1, 70, 29], 2, cache_format=cache_format)
    assert found["cache"] == 100 * pages.nbytes // PAGE
    assert found["embedding"] == 3 * 2 * c.hidden_size


def test_a_published_model():
    found = decode_bytes(ModelConfig.v2_lite_16b(), [1024], 26 * 6)
    matrices = 3 * 2048 * 1408
    assert found["routed experts"] == 26 * 6 * (matrices + 4 * matrices // 128**2)
    assert found["cache"] == 1024 * 27 * 2 * 576
    assert sum(found.values()) == pytest.approx(2.75e9, rel=0.01)


@pytest.mark.parametrize(
    ("config", "lengths", "experts", "message"),
    [
        (CONFIG, [], 0, "lengths must have a positive number"),
        (CONFIG, [3, 0], 0, "lengths must have a positive number"),
        (CONFIG, [1], 9, "experts_read must be from 0 to 8"),
        (CONFIG, [1], -1, "experts_read must be from 0 to 8"),
        (replace(CONFIG, index_n_heads=4, index_head_dim=32, index_topk=64), [1], 2, "config must have no indexer"),
    ],
)
def test_what_cannot_be_counted_is_refused(config: ModelConfig, lengths: list[int], experts: int, message: str):
    with pytest.raises(ValueError, match=message):
        decode_bytes(config, lengths, experts)


def test_an_unknown_cache_format_is_refused():
    with pytest.raises(ValueError, match="cache_format must be"):
        decode_bytes(CONFIG, [1], 2, cache_format="int4")  # type: ignore[arg-type]
