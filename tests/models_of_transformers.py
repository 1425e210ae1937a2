"""Small models of transformers with random weights, one of each architecture that tests of conversions need."""

import transformers
from transformers import PreTrainedModel

SMALL = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS_OF_16 = SMALL | {"head_dim": 16}
EXPERTS = SMALL | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WITHOUT_GROUPS = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
DEEPSEEK = SMALL | {
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "num_key_value_heads": 4, "q_lora_rank": 32,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip
GPT2 = {"vocab_size": 160, "n_embd": 64, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
T5 = {"vocab_size": 160, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}

# name → class, configuration class, settings
ARCHITECTURES: dict[str, tuple[str, str, dict[str, object]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", SMALL),
    "llama, tied": ("LlamaForCausalLM", "LlamaConfig", SMALL | {"tie_word_embeddings": True}),
    "llama, classification": ("LlamaForSequenceClassification", "LlamaConfig", SMALL),
    "llama, tokens": ("LlamaForTokenClassification", "LlamaConfig", SMALL),
    "llama, QA": ("LlamaForQuestionAnswering", "LlamaConfig", SMALL),
    "mistral": ("MistralForCausalLM", "MistralConfig", HEADS_OF_16),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", SMALL),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", HEADS_OF_16),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", EXPERTS | {"shared_expert_intermediate_size": 32}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", EXPERTS | {"head_dim": 16}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", HEADS_OF_16 | {"num_local_experts": 4}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", "DeepseekV2Config", DEEPSEEK),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", DEEPSEEK),
    "glm4_moe": ("Glm4MoeForCausalLM", "Glm4MoeConfig", DEEPSEEK | {"head_dim": 16}),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", EXPERTS),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", SMALL),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", HEADS_OF_16),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", HEADS_OF_16),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", WITHOUT_GROUPS),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {**WITHOUT_GROUPS, "ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 64},
    ),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "bert": ("BertForMaskedLM", "BertConfig", WITHOUT_GROUPS),
    "bert, pretraining": ("BertForPreTraining", "BertConfig", WITHOUT_GROUPS),
    "bert, classification": ("BertForSequenceClassification", "BertConfig", WITHOUT_GROUPS),
    "bert, tokens": ("BertForTokenClassification", "BertConfig", WITHOUT_GROUPS),
    "bert, QA": ("BertForQuestionAnswering", "BertConfig", WITHOUT_GROUPS),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", WITHOUT_GROUPS),
    "roberta, classification": ("RobertaForSequenceClassification", "RobertaConfig", WITHOUT_GROUPS),
}


def small_model(name: str, **changes: object) -> PreTrainedModel:
    """Return the model of `ARCHITECTURES` with this name and changed settings, in float32 on the CPU."""
    model, config, settings = ARCHITECTURES[name]
    return getattr(transformers, model)(getattr(transformers, config)(**settings | changes))


def gpt2() -> PreTrainedModel:
    """Return a GPT-2, whose linear layers are `Conv1D`."""
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))
