"""How large the cache of a served model is."""

import inspect
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from octile.checkpoint.hugging_face import save
from octile.models.deepseek_v3 import DeepseekV3
from octile.serve.engine.config import CacheConfig, EngineConfig, ParallelConfig
from octile.serve.engine.request import FinishReason, Sampling
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.weights import load
from octile.serve.weights.load import FREE_SHARE, Folder
from tests.serve.models import CONFIG, new_model, save_untrained
from tests.train.conftest import MICRO

FREE = 2**30
INDEXED = replace(CONFIG, index_n_heads=4, index_head_dim=32, index_topk=64)


def n_pages(monkeypatch, max_batch: int, n_drafts: int, free: int = FREE) -> int:
    """The pages of a cache on a GPU with so many bytes free, for texts that are longer than it."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    config = replace(CONFIG, max_position_embeddings=2**30)
    weights = SimpleNamespace(config=config, device=torch.device("cuda"))
    engine = EngineConfig(max_batch, max_step_tokens=2**16, n_drafts=n_drafts)
    return Folder(Path(), config, None)._n_pages(weights, "bf16", engine, None)


@pytest.mark.parametrize(("max_batch", "n_drafts"), [(1, 0), (4096, 0), (4096, 2)])
def test_graphs_have_their_logits_before_the_cache_has_its_share(monkeypatch, max_batch, n_drafts):
    weights = SimpleNamespace(config=CONFIG)
    places = FREE_SHARE * (FREE - ModelRunner.bytes_of_graphs(weights, max_batch, n_drafts, 512))
    assert n_pages(monkeypatch, max_batch, n_drafts) == int(places) // ModelRunner.bytes_per_page(weights, "bf16", 512)


@pytest.mark.parametrize(("of_text", "spared"), [(100, 100), (2**24, None)])
def test_the_cache_of_a_prefill_process_spares_a_text_and_has_the_memory_of_decodings_graphs(
    monkeypatch, of_text, spared
):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (FREE, FREE))
    config = replace(CONFIG, max_position_embeddings=64 * of_text)
    folder = Folder(Path(), config, None)
    weights = SimpleNamespace(config=config, device=torch.device("cuda"))
    whole = int(FREE_SHARE * FREE) // ModelRunner.bytes_per_page(weights, "bf16", 512)
    found = folder._n_pages(weights, "bf16", EngineConfig(4096, 4096), None, "prefill")
    assert whole - found == (spared or whole // 2)


def test_the_logits_of_graphs():
    weights = SimpleNamespace(config=CONFIG)
    logits = CONFIG.vocab_size * 256
    assert ModelRunner.bytes_of_graphs(weights, 256, 0, 512) == (2 * 4 + 2 + 4) * logits
    assert ModelRunner.bytes_of_graphs(weights, 256, 3, 512) == (2 * 2 * 4 + 2 + 4) * 4 * logits  # four rows a request


def test_the_logits_of_graphs_with_indexers():
    weights, logits = SimpleNamespace(config=INDEXED), CONFIG.vocab_size * 256
    assert ModelRunner.bytes_of_graphs(weights, 256, 0, 512) == (2 * 2 * 4 + 2 + 4) * logits + 4 * 512 * 256
    assert ModelRunner.bytes_of_graphs(weights, 256, 0, 64) == (2 * 4 + 2 + 4) * logits


@pytest.mark.parametrize(
    ("longest", "room", "n_pages"),
    [
        (512, 20, 20),  # texts of all 256 positions that a row attends to, and of more
        (256, 20, 23),  # no text is longer than what a row attends to: 224 bytes a position and layer, not 260
        (512, 4, 4),  # the cache has no place for one
        (512, 3.9, 4),  # with the indexer's keys it would have three pages, and need none
    ],
)
def test_pages_have_the_indexers_keys_only_if_texts_need_them(longest, room, n_pages):
    config = replace(INDEXED, index_topk=256, max_position_embeddings=longest)
    weights = SimpleNamespace(config=config, device=torch.device("cpu"), mtp=None)
    with_keys = ModelRunner.bytes_per_page(weights, "bf16", 257)
    gib = room * with_keys / 2**30
    assert Folder(Path(), config, None)._n_pages(weights, "bf16", EngineConfig(), gib) == n_pages


@pytest.mark.parametrize(
    ("phase", "max_batch", "max_step_tokens"), [(None, 64, 2048), ("prefill", 0, 2048), ("decode", 64, 0)]
)
def test_each_phase_has_its_own_graphs(monkeypatch, tokenizer, tmp_path, phase, max_batch, max_step_tokens):
    folder = save_untrained(replace(MICRO, num_nextn_predict_layers=0), tokenizer, tmp_path)
    made = []

    class Recorder(ModelRunner):
        def __init__(self, *arguments):
            made.append(inspect.signature(ModelRunner).bind(*arguments).arguments)
            super().__init__(*arguments)

    monkeypatch.setattr(load, "ModelRunner", Recorder)
    Folder.open(folder).load(torch.device("cpu"), EngineConfig(), CacheConfig(), phase)
    assert [(of["max_batch"], of["max_step_tokens"]) for of in made] == [(max_batch, max_step_tokens)]


@pytest.mark.parametrize("n_drafts", [0, 1])
def test_the_multi_token_prediction_layer_is_read_and_cached_for_drafts_alone(tokenizer, tmp_path, n_drafts):
    folder = Folder.open(save_untrained(MICRO, tokenizer, tmp_path))
    runner = folder.load(torch.device("cpu"), EngineConfig(n_drafts=n_drafts), CacheConfig())[1]
    assert runner.can_draft is (n_drafts > 0)
    assert len(runner.cache.layers) == MICRO.num_hidden_layers + n_drafts


@pytest.mark.parametrize("names_the_ends", ["config.json", "generation_config.json"])
def test_added_tokens_end_texts_where_a_file_names_them(tokenizer, tmp_path, names_the_ends):
    n = tokenizer.vocab_size
    torch.manual_seed(0)
    model = DeepseekV3(replace(MICRO, vocab_size=n + 2, num_nextn_predict_layers=0)).eval()
    row = model.lm_head.weight[0].detach().clone()
    with torch.no_grad():
        model.lm_head.weight.zero_()[n:] = torch.stack((row, -row))  # one of the two is always the most likely token
    save(model, tmp_path, weights="float32")
    tokenizer.save(tmp_path)
    added = {str(n + i): {"content": f"<|end {i}|>", "special": True} for i in range(2)}
    changes = {"tokenizer_config.json": {"added_tokens_decoder": added}, names_the_ends: {"eos_token_id": [n, n + 1]}}
    for name, change in changes.items():
        found = json.loads((tmp_path / name).read_text()) if (tmp_path / name).exists() else {}
        (tmp_path / name).write_text(json.dumps({**found, **change}))
    (tmp_path / "octile.json").unlink()
    engine, _ = Folder.open(tmp_path).load(torch.device("cpu"), EngineConfig(), CacheConfig())
    engine.add([0, 5, 9], Sampling(8))
    assert [(output.tokens, output.finish_reason) for output in engine.step()] == [((), FinishReason.STOP)]


def test_a_gpu_without_room_for_the_graphs_is_named(monkeypatch):
    with pytest.raises(MemoryError, match="the cache has 0 GiB, but one page takes"):
        n_pages(monkeypatch, 4096, 2, free=2**20)


def test_a_cache_that_is_smaller_than_a_page_is_refused():
    weights = SimpleNamespace(config=CONFIG, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"^cache.gib must have room for one page of 4.01e-05 GiB, not 1e-06"):
        Folder(Path(), CONFIG, None)._n_pages(weights, "bf16", EngineConfig(), 1e-6)


@pytest.mark.parametrize(
    ("layers", "ep", "redundant", "message"),
    [
        (1, 2, 0, "parallel.ep must be 1, not 2: the model has no experts to spread over ranks"),
        (2, 3, 0, r"3 ranks do not divide 8 experts \+ 0 \(parallel.redundant_experts\)"),
        (2, 2, 3, r"2 ranks do not divide 8 experts \+ 3 \(parallel.redundant_experts\)"),
        (2, 2, 10, r"redundant_experts must be at most 8, with which each of the 2 ranks has each expert, not 10"),
    ],
)
def test_experts_that_cannot_be_spread_are_refused(layers, ep, redundant, message):
    folder = Folder(Path(), replace(CONFIG, num_hidden_layers=layers), None)  # the first layer has no experts
    with pytest.raises(ValueError, match=message):
        folder.check_parallel(ParallelConfig(ep, redundant_experts=redundant))


def test_an_indexer_that_the_model_has_not_is_refused_before_weights_are_read():
    engine = EngineConfig(index_format="float32")
    with pytest.raises(ValueError, match=r"engine.index_format must be e4m3, not float32: the model has no indexer"):
        Folder(Path(), CONFIG, None).load(torch.device("cpu"), engine, CacheConfig())


def test_heads_that_a_group_cannot_divide_are_refused(tmp_path):
    save(new_model(fp8=True), tmp_path, weights="fp8")
    folder = Folder(tmp_path, CONFIG, None)
    with pytest.raises(ValueError, match=r"parallel.tp must divide the model's 4 heads, but is 8"):
        folder.check_parallel(ParallelConfig(8, 8))
    with pytest.raises(ValueError, match=r"but is 2: 2 heads × 48 channels of queries = 96"):
        folder.check_parallel(ParallelConfig(2, 2))
    save(new_model(fp8=False), tmp_path / "bf16", weights="bf16")
    replace(folder, path=tmp_path / "bf16").check_parallel(ParallelConfig(4, 4))


def test_shared_experts_that_cannot_be_routed_are_refused(tmp_path):
    config = replace(CONFIG, n_shared_experts=2)
    save(new_model(fp8=True, config=config), tmp_path, weights="fp8")
    folder, routed = Folder(tmp_path, config, None), {"shared_experts": "routed"}
    with pytest.raises(ValueError, match=r"2 ranks do not divide 8 experts \+ 2 that are shared \+ 1 \(para"):
        folder.check_parallel(ParallelConfig(2, redundant_experts=1, **routed))
    with pytest.raises(ValueError, match=r"2 shared experts are one MLP in FP8, .* a multiple of 128, not 64"):
        folder.check_parallel(ParallelConfig(2, **routed))
    save(new_model(fp8=False, config=config), tmp_path / "bf16", weights="bf16")
    folder = replace(folder, path=tmp_path / "bf16")
    folder.check_parallel(ParallelConfig(2, **routed))
    with pytest.raises(ValueError, match=r"engine.batch_invariant must be False, not True, if shared experts"):
        folder.check_parallel(ParallelConfig(2, **routed), batch_invariant=True)


@pytest.mark.parametrize("active", [3, 7])
def test_active_experts_beyond_what_ranks_need_and_have_are_refused(active):
    folder = Folder(Path(), CONFIG, None)
    message = rf"active_experts must be from 4, with which all 8 experts .* to 6, the copies of a rank, not {active}$"
    with pytest.raises(ValueError, match=message):
        folder.check_parallel(ParallelConfig(2, redundant_experts=4, active_experts=active))
    for accepted in (4, 6):
        folder.check_parallel(ParallelConfig(2, redundant_experts=4, active_experts=accepted))


def test_experts_that_ranks_divide_are_accepted():
    Folder(Path(), CONFIG, None).check_parallel(ParallelConfig(5, redundant_experts=2))
    Folder(Path(), CONFIG, None).check_parallel(ParallelConfig(2, redundant_experts=8))
    Folder(Path(), replace(CONFIG, num_hidden_layers=1), None).check_parallel(ParallelConfig())
