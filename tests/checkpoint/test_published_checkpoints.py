"""Published checkpoints: the tensors of DeepSeek-V3, Moonlight and Kimi-K2, and miniatures of V3 to GLM-5.2.

The names, dtypes and shapes are written out here once more, as the index and the headers of those checkpoints have
them, and compared with what octile reads and writes.
"""

import json
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV32Config, DeepseekV32ForCausalLM

from octile.checkpoint import load, load_weights, save
from octile.checkpoint.convert import convert_checkpoint
from octile.checkpoint.hugging_face import ROTARY_FREQUENCIES, storage_specs
from octile.checkpoint.shards import Shards
from octile.checkpoint.tensor_file import TensorFile
from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import DeepseekV3
from octile.models.meta import meta_model
from octile.models.names import to_hf
from octile.serve.weights.weights import ServedWeights
from tests.checkpoint.micro_model import MICRO
from tests.models.test_config import OF_MOONSHOT, PUBLISHED, PUBLISHED_MOONLIGHT, PUBLISHED_V3

TENSORS = {"V3": 91_991, "V3.1": 91_991, "Moonlight": 5_344, "Kimi-K2": 139_644}  # in the indexes of V3 and Kimi-K2
PARAMETERS = {"V3": 684_489_845_504, "Kimi-K2": 1_026_408_232_448}  # as published, without scales and frequencies
SIZES = {  # of every miniature
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "moe_intermediate_size": 4,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "q_lora_rank": 4,
    "kv_lora_rank": 4,
    "qk_nope_head_dim": 2,
    "qk_rope_head_dim": 2,
    "v_head_dim": 2,
}
V3 = {**PUBLISHED_V3, **SIZES}
UE8M0 = {**PUBLISHED_V3["quantization_config"], "scale_fmt": "ue8m0"}
SMALL = {  # few layers and experts, and weights of several blocks
    **V3,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "hidden_size": 200,
    "intermediate_size": 260,
    "moe_intermediate_size": 140,
}
INDEXER = {"index_head_dim": 8, "index_n_heads": 40, "index_topk": 64}
SMALL_V31 = {**SMALL, "quantization_config": UE8M0}
SMALL_V32 = {**SMALL_V31, **INDEXER, "model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"]}
SMALL_GLM = {**SMALL_V32, "model_type": "glm_moe_dsa", "architectures": ["GlmMoeDsaForCausalLM"]}
SMALL_GLM |= {"indexer_rope_interleave": True}
SMALL_GLM_52 = {**SMALL_GLM, "indexer_types": ["full", "shared"], "index_topk_freq": 2, "index_skip_topk_offset": 1}
RELEASES = {"V3": SMALL, "V3.1": SMALL_V31, "V3.2": SMALL_V32, "GLM-5": SMALL_GLM, "GLM-5.2": SMALL_GLM_52}
EVERY_RELEASE = pytest.mark.parametrize("published", RELEASES.values(), ids=RELEASES)


def published_tensors(config: dict) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """The name, dtype and shape of every tensor of a published checkpoint, those of scales included."""
    d, vocab, heads = config["hidden_size"], config["vocab_size"], config["num_attention_heads"]
    q, kv, rope = config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, v = config["qk_nope_head_dim"], config["v_head_dim"]
    layers, drafting = config["num_hidden_layers"], config["num_nextn_predict_layers"]

    def fp8(name: str, n: int, k: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        if "quantization_config" not in config:
            yield f"{name}.weight", "BF16", (n, k)
            return
        yield f"{name}.weight", "F8_E4M3", (n, k)
        yield f"{name}.weight_scale_inv", "F32", (-(-n // 128), -(-k // 128))

    def mlp(name: str, intermediate: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        yield from fp8(f"{name}.gate_proj", intermediate, d)
        yield from fp8(f"{name}.up_proj", intermediate, d)
        yield from fp8(f"{name}.down_proj", d, intermediate)

    yield "model.embed_tokens.weight", "BF16", (vocab, d)
    for i in range(layers + drafting):  # the last is the multi-token prediction layer, if there is one
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", "BF16", (d,)
        yield f"{layer}.post_attention_layernorm.weight", "BF16", (d,)
        attention = f"{layer}.self_attn"
        if q is None:
            yield from fp8(f"{attention}.q_proj", heads * (nope + rope), d)
        else:
            yield from fp8(f"{attention}.q_a_proj", q, d)
            yield f"{attention}.q_a_layernorm.weight", "BF16", (q,)
            yield from fp8(f"{attention}.q_b_proj", heads * (nope + rope), q)
        yield from fp8(f"{attention}.kv_a_proj_with_mqa", kv + rope, d)
        yield f"{attention}.kv_a_layernorm.weight", "BF16", (kv,)
        yield from fp8(f"{attention}.kv_b_proj", heads * (nope + v), kv)
        yield from fp8(f"{attention}.o_proj", d, heads * v)
        if config["vocab_size"] == OF_MOONSHOT["vocab_size"]:
            yield f"{attention}{ROTARY_FREQUENCIES}", "F32", (rope // 2,)
        if "index_topk" in config and config.get("indexer_types", [])[i : i + 1] != ["shared"]:
            index_heads, index_dim = config["index_n_heads"], config["index_head_dim"]
            yield from fp8(f"{attention}.indexer.wq_b", index_heads * index_dim, q)
            yield from fp8(f"{attention}.indexer.wk", index_dim, d)
            yield f"{attention}.indexer.k_norm.weight", "F32", (index_dim,)
            yield f"{attention}.indexer.k_norm.bias", "F32", (index_dim,)
            yield f"{attention}.indexer.weights_proj.weight", "BF16", (index_heads, d)
        if i < config["first_k_dense_replace"]:
            yield from mlp(f"{layer}.mlp", config["intermediate_size"])
            continue
        yield f"{layer}.mlp.gate.weight", "BF16", (config["n_routed_experts"], d)
        yield f"{layer}.mlp.gate.e_score_correction_bias", "F32", (config["n_routed_experts"],)
        for e in range(config["n_routed_experts"]):
            yield from mlp(f"{layer}.mlp.experts.{e}", config["moe_intermediate_size"])
        yield from mlp(f"{layer}.mlp.shared_experts", config["n_shared_experts"] * config["moe_intermediate_size"])
    yield "model.norm.weight", "BF16", (d,)
    yield "lm_head.weight", "BF16", (vocab, d)
    if not drafting:
        return
    yield f"model.layers.{layers}.embed_tokens.weight", "BF16", (vocab, d)
    yield f"model.layers.{layers}.enorm.weight", "BF16", (d,)
    yield f"model.layers.{layers}.hnorm.weight", "BF16", (d,)
    yield f"model.layers.{layers}.eh_proj.weight", "BF16", (d, 2 * d)
    yield f"model.layers.{layers}.shared_head.norm.weight", "BF16", (d,)
    yield f"model.layers.{layers}.shared_head.head.weight", "BF16", (vocab, d)


DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}


def random_tensors(config: dict) -> dict[str, Tensor]:
    """Tensors with the names, dtypes and shapes of a published checkpoint; V3.1's scales are powers of two."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, dtype, shape in published_tensors(config):
        values = torch.randn(shape, generator=generator)
        if name.endswith("_scale_inv"):
            log2 = values - 6
            values = torch.exp2(log2.round() if "scale_fmt" in config["quantization_config"] else log2)
        tensors[name] = values.to(DTYPES[dtype])
    layer = f"model.layers.{config['num_hidden_layers']}"
    tensors[f"{layer}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{layer}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return tensors


@pytest.fixture
def publish(tmp_path: Path, hf_folder: Callable[..., Path]) -> Callable[[dict], tuple[Path, dict[str, Tensor]]]:
    """publish(config): a checkpoint in two files, each with the scales of the other's weights, and its tensors."""

    def write(config: dict) -> tuple[Path, dict[str, Tensor]]:
        tensors = random_tensors(config)
        shards: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        for i, name in enumerate(name for name in tensors if not name.endswith("_scale_inv")):
            shards[i % 2][name] = tensors[name]
            if (scale := f"{name}_scale_inv") in tensors:
                shards[1 - i % 2][scale] = tensors[scale]
        return hf_folder(tmp_path / "published", config, list(shards)), tensors

    return write


def stored(folder: Path) -> dict[str, Tensor]:
    shards = Shards(folder)
    return {name: shards.read(name) for name in shards.specs}


def changed(before: dict[str, Tensor], after: dict[str, Tensor], same: Callable[[Tensor, Tensor], bool]) -> list[str]:
    """The names of the tensors that are not in both, or not with the same bits."""
    return [n for n in before.keys() | after.keys() if not (n in before and n in after and same(before[n], after[n]))]


def dequantized(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without scales: FP8 weights times their scales."""
    values = {}
    for name, tensor in tensors.items():
        if (scale := tensors.get(f"{name}_scale_inv")) is not None:
            n, k = tensor.shape
            expanded = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
            values[name] = tensor.float() * expanded
        elif not name.endswith("_scale_inv"):
            values[name] = tensor
    return values


@cache
def own_tensors(name: str) -> Mapping[str, Tensor]:
    """The tensors of octile's model of a published configuration, without data, by their names in a checkpoint."""
    config = ModelConfig.from_hf(PUBLISHED[name])
    return to_hf(meta_model(config).state_dict(), config)


@pytest.mark.slow
@pytest.mark.parametrize("name", TENSORS)
def test_a_published_model_is_stored_with_its_names_dtypes_and_shapes(name):
    tensors = own_tensors(name)
    weights = "fp8" if "quantization_config" in PUBLISHED[name] else "bf16"
    written = {n: s for n, t in tensors.items() for n, s in storage_specs(n, tuple(t.shape), weights).items()}
    expected = {n: (dtype, shape) for n, dtype, shape in published_tensors(PUBLISHED[name])}
    assert len(expected) == TENSORS[name]
    stored = {n: of for n, of in expected.items() if not n.endswith(ROTARY_FREQUENCIES)}
    assert {n: (spec.dtype, spec.shape) for n, spec in written.items()} == stored


@pytest.mark.one_case
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_published_model_has_its_number_of_parameters(name):
    assert sum(t.numel() for t in own_tensors(name).values()) == PARAMETERS[name]


@pytest.mark.slow
def test_glm_52_has_as_many_tensors_and_parameters_as_published():
    """Without the copies of embedding and head in the last layer, which its checkpoint lacks and octile writes."""
    own = {id(tensor): tensor for tensor in own_tensors("GLM-5.2").values()}
    assert (len(own), sum(tensor.numel() for tensor in own.values())) == (59_585, 753_329_940_480)


@pytest.mark.slow
def test_every_tensor_of_all_62_layers_is_read_and_written_back(tmp_path, publish, same):
    folder, before = publish({**V3, "n_routed_experts": 16})
    save(load(folder), tmp_path / "again")
    assert changed(before, stored(tmp_path / "again"), same) == []


@pytest.mark.one_case
@EVERY_RELEASE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_release_is_written_back_bit_for_bit(tmp_path, publish, same, published, dtype):
    folder, before = publish(published)
    save(load(folder, dtype=dtype), tmp_path / "again")
    assert changed(before, stored(tmp_path / "again"), same) == []


@pytest.mark.one_case
@EVERY_RELEASE
def test_every_key_of_a_published_configuration_is_written_back(tmp_path, publish, published):
    save(load(publish(published)[0]), tmp_path / "again")
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    del written["quantization_config"]["modules_to_not_convert"]  # transformers needs it
    assert {key: written[key] for key in published} == published


def test_rotary_frequencies_of_a_checkpoint_are_neither_read_nor_written(tmp_path, hf_folder, same):
    config = {**PUBLISHED_MOONLIGHT, **SMALL, "q_lora_rank": None, "num_nextn_predict_layers": 0}
    del config["quantization_config"]
    before = {f"model.layers.{i}{ROTARY_FREQUENCIES}": torch.full((1,), 7.0) for i in range(2)}
    model = DeepseekV3(ModelConfig.from_hf(config)).bfloat16()
    own = {name: t.clone().contiguous() for name, t in to_hf(model.state_dict(), model.config).items()}
    save(load(hf_folder(tmp_path / "published", config, [{**before, **own}])), tmp_path / "again", weights="bf16")
    again = stored(tmp_path / "again")
    assert changed({n: t.to(again[n].dtype) for n, t in own.items()}, again, same) == []


@pytest.mark.one_case
@EVERY_RELEASE
def test_every_release_is_served(publish, published):
    folder, before = publish(published)
    read = ServedWeights.read(folder, torch.float32).blocks[0].attention.o
    name = "model.layers.0.self_attn.o_proj.weight"
    assert torch.equal(read.data.view(torch.uint8), before[name].view(torch.uint8))
    assert torch.equal(read.scale, before[f"{name}_scale_inv"])


@pytest.mark.one_case
@EVERY_RELEASE
def test_every_release_is_converted_with_all_its_tensors(tmp_path, publish, same, published):
    folder, before = publish(published)
    convert_checkpoint(folder, tmp_path / "float32", "float32")
    assert changed(dequantized(before), stored(tmp_path / "float32"), same) == []
    convert_checkpoint(tmp_path / "float32", tmp_path / "fp8", "fp8")
    again = stored(tmp_path / "fp8")
    assert {n: (t.dtype, t.shape) for n, t in again.items()} == {n: (t.dtype, t.shape) for n, t in before.items()}


@pytest.mark.parametrize("into", ["new model", "model"])
def test_one_weight_at_a_time_is_in_memory_beside_the_model(publish, monkeypatch, into):
    folder, _ = publish(SMALL)
    read, alive, most = TensorFile.read, [], 0

    def counted(file: TensorFile, name: str) -> Tensor:
        nonlocal most
        tensor = read(file, name)
        if not name.endswith("_scale_inv"):
            alive.append(weakref.ref(tensor))
            most = max(most, sum(weight() is not None for weight in alive))
        return tensor

    model = DeepseekV3(ModelConfig.from_hf(SMALL))
    monkeypatch.setattr(TensorFile, "read", counted)
    load(folder) if into == "new model" else load_weights(model, folder)
    assert (len(alive) > 50, most) == (True, 1)


def test_an_indexer_in_a_layer_that_shares_another_ones_keys_is_refused(publish):
    folder, _ = publish(SMALL_GLM)
    (folder / "config.json").write_text(json.dumps(SMALL_GLM_52))
    with pytest.raises(ValueError, match=r"holds model\.layers\.1\.self_attn\.indexer\..*, which the model of its"):
        load(folder)


# DeepSeek-V3.2's sparse attention


def test_an_indexer_in_a_model_without_sparse_attention_is_refused(publish):
    folder, _ = publish(SMALL_V32)
    (folder / "config.json").write_text(json.dumps(SMALL_V31))
    with pytest.raises(ValueError, match=r"indexer\..*, which the model of its config\.json does not have"):
        load(folder)


def test_a_model_of_dense_attention_gives_its_weights_to_one_with_indexers(publish):
    folder, before = publish(SMALL)
    model = DeepseekV3(replace(ModelConfig.from_hf(SMALL), **INDEXER))
    drawn = [p.clone() for indexer in model.indexers() for p in indexer.parameters()]
    load_weights(model, folder)
    norm = before["model.layers.0.self_attn.q_a_layernorm.weight"]
    assert torch.equal(model.model.layers[0].self_attn.q_a_layernorm.weight, norm.float())
    assert all(
        torch.equal(p, q) for p, q in zip((p for i in model.indexers() for p in i.parameters()), drawn, strict=True)
    )


def test_a_model_that_gets_indexers_is_announced_as_a_deepseek_v32():
    config = replace(ModelConfig.from_hf(SMALL), **INDEXER).to_hf()
    assert (config["model_type"], config["architectures"]) == ("deepseek_v32", ["DeepseekV32ForCausalLM"])
    assert ModelConfig.from_hf(config).index_topk == 64


@pytest.mark.parametrize("length", [40, 64])
def test_logits_up_to_index_topk_tokens_are_those_of_transformers_sparse_attention(tmp_path, length):
    torch.manual_seed(0)
    config = replace(MICRO, num_nextn_predict_layers=0, max_position_embeddings=64).to_hf()
    config |= {**INDEXER, "index_head_dim": 16, "model_type": "deepseek_v32"}
    theirs = DeepseekV32ForCausalLM(DeepseekV32Config(**config)).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    save(ours, tmp_path / "ours", weights="float32")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    assert isinstance(again, DeepseekV32ForCausalLM)
    tokens = torch.randint(0, MICRO.vocab_size, (2, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens).logits
        gaps = [(logits - expected).abs().amax() for logits in (ours(tokens), again(tokens).logits)]
    assert max(gaps) <= 1e-5 * expected.abs().amax()
