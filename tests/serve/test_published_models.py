"""Small models of the structure of published ones: the engine's greedy texts are those of transformers' `generate`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    PreTrainedModel,
)

from octile.serve.engine.config import CacheConfig, EngineConfig
from octile.serve.engine.request import Sampling
from octile.serve.weights.load import Folder
from octile.tokenizer import Tokenizer
from tests.models.test_config import (
    PUBLISHED_GLM_5,
    PUBLISHED_GLM_52,
    PUBLISHED_KIMI_K2,
    PUBLISHED_MOONLIGHT,
    PUBLISHED_V31,
)
from tests.serve.models import text

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SHORT = {"original_max_position_embeddings": 16}
MODELS = {
    "V3.1": {**PUBLISHED_V31, **SIZES, "q_lora_rank": 24, "rope_scaling": {**PUBLISHED_V31["rope_scaling"], **SHORT}},
    "Moonlight": {**PUBLISHED_MOONLIGHT, **SIZES},
    "Kimi-K2": {
        **PUBLISHED_KIMI_K2,
        **SIZES,
        "q_lora_rank": 24,
        "rope_scaling": {**PUBLISHED_KIMI_K2["rope_scaling"], **SHORT},
    },
}
MODELS["GLM-5"] = {  # with fewer heads more keys have logits of 0, and the order of equal ones is not fixed
    **PUBLISHED_GLM_5,
    **SIZES,
    "q_lora_rank": 24,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 24,
    "head_dim": 8,
    "qk_head_dim": 24,
    "pad_token_id": 1,
}
MODELS["GLM-5.2"] = {
    **PUBLISHED_GLM_52,
    **{key: MODELS["GLM-5"][key] for key in MODELS["GLM-5"].keys() - {"max_position_embeddings", "rope_parameters"}},
    "num_hidden_layers": 5,
    "indexer_types": ["full", "shared", "full", "shared", "shared"],
    "mlp_layer_types": ["dense", *4 * ["sparse"]],
}
N_NEW = 40


def save_transformers_model(config: dict[str, Any], tokenizer: Tokenizer, folder: Path) -> PreTrainedModel:
    """Save a random model as transformers does, under the model type of the configuration, and return it."""
    torch.manual_seed(0)
    given = {key: value for key, value in config.items() if key not in ("model_type", "quantization_config")}
    of_glm = config["model_type"] == "glm_moe_dsa"
    model = (
        GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**given)) if of_glm else DeepseekV3ForCausalLM(DeepseekV3Config(**given))
    )
    model.eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("e_score_correction_bias"):
                tensor.uniform_(-0.1, 0.1)
            elif tensor.dim() == 1:
                tensor.uniform_(0.5, 1.5)
            else:
                tensor.normal_(std=1.0 if "embed" in name else tensor.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    tokenizer.save(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "model_type": config["model_type"]}))
    return model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:rope_scaling")  # a context that is not extended to the model's
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive if name == "GLM-5" else ()) for name in MODELS]
)  # GLM-5.2 has layers as GLM-5's, too
def test_greedy_texts_are_those_of_transformers(name, tokenizer, tmp_path):
    theirs = save_transformers_model(MODELS[name], tokenizer, tmp_path)
    prompts = [[0, *text(n, seed=n, vocab_size=320)] for n in (3, 20, 70)]
    engine_config = EngineConfig(index_format="float32" if "index_topk" in MODELS[name] else "e4m3")  # as transformers
    engine, _ = Folder.open(tmp_path).load(torch.device("cpu"), engine_config, CacheConfig())
    requests = [engine.add(prompt, Sampling(N_NEW, ignore_eos=True)) for prompt in prompts]
    found: dict[int, list[int]] = {request.id: [] for request in requests}
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += output.tokens
    for request, prompt in zip(requests, prompts, strict=True):
        tokens = torch.tensor([prompt])
        how = {"max_new_tokens": N_NEW, "do_sample": False, "eos_token_id": None}
        expected = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), **how)
        assert found[request.id] == expected[0, len(prompt) :].tolist()
