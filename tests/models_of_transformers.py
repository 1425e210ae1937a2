"""Small models of transformers with random weights, one of each architecture that tests of conversions need."""

import pytest
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
FALCON = WITHOUT_GROUPS | {"new_decoder_architecture": True, "num_kv_heads": 2, "tie_word_embeddings": False}
LOCAL_EXPERTS = SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2}
INDEXER = DEEPSEEK | {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}
GATED_DELTA_NET = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
SHARED_EXPERT = EXPERTS | {"shared_expert_intermediate_size": 32}
LLAMA4 = HEADS_OF_16 | {"num_local_experts": 4, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2}
WHISPER = {
    "vocab_size": 160, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "num_mel_bins": 16,
    "max_source_positions": 32, "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip
JAMBA = SMALL | {
    "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
    "expert_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 8, "use_mamba_kernels": False,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
LLAMA4_VISION = VISION | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
QWEN_VISION = {
    "depth": 2, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 48, "patch_size": 16,
    "num_position_embeddings": 16,
}  # fmt: skip
QWEN2_VISION = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 14}
MLLAMA_VISION = VISION | {
    "attention_heads": 2, "num_global_layers": 1, "vision_output_dim": 64, "intermediate_layers_indices": [0],
    "supported_aspect_ratios": [[1, 1]],
}  # fmt: skip
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
TOKENS = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}

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
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", SMALL | {"num_experts": 4, "num_experts_per_tok": 2}),
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
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", SHARED_EXPERT | GATED_DELTA_NET),
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", SMALL | GATED_DELTA_NET),
    "qwen3_5_moe, vision": (
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5MoeConfig",
        {"text_config": SHARED_EXPERT | GATED_DELTA_NET, "vision_config": QWEN_VISION, **TOKENS},
    ),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", LOCAL_EXPERTS | {"head_dim": 16}),
    "llama4": ("Llama4ForCausalLM", "Llama4TextConfig", LLAMA4),
    "llama4, vision": (
        "Llama4ForConditionalGeneration",
        "Llama4Config",
        {"text_config": LLAMA4, "vision_config": LLAMA4_VISION, "image_token_index": 3},
    ),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", WHISPER),
    "mistral3, vision": (
        "Mistral3ForConditionalGeneration",
        "Mistral3Config",
        {
            "text_config": HEADS_OF_16 | {"model_type": "mistral"},
            "vision_config": VISION | {"model_type": "pixtral", "head_dim": 16},
            "image_token_index": 3,
        },
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        {
            "text_config": HEADS_OF_16 | MROPE,
            "vision_config": QWEN_VISION | {"deepstack_visual_indexes": [0]},
            **TOKENS,
        },
    ),
    "granitemoe": ("GraniteMoeForCausalLM", "GraniteMoeConfig", LOCAL_EXPERTS),
}
# Architectures that have no layer that the others lack.
MORE_ARCHITECTURES: dict[str, tuple[str, str, dict[str, object]]] = {
    "cohere": ("CohereForCausalLM", "CohereConfig", SMALL),
    "cohere2": ("Cohere2ForCausalLM", "Cohere2Config", SMALL),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"vocab_size": 160, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "deepseek_v32": ("DeepseekV32ForCausalLM", "DeepseekV32Config", INDEXER),
    "ernie4_5_moe": (
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5_MoeConfig",
        SMALL | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1},
    ),
    "exaone4": ("Exaone4ForCausalLM", "Exaone4Config", SMALL),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", HEADS_OF_16),
    "gemma3, vision": (
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {"text_config": HEADS_OF_16, "vision_config": VISION, "mm_tokens_per_image": 4},
    ),
    "glm4": ("Glm4ForCausalLM", "Glm4Config", HEADS_OF_16),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", INDEXER),
    "granite": ("GraniteForCausalLM", "GraniteConfig", SMALL),
    "jamba": ("JambaForCausalLM", "JambaConfig", JAMBA),
    "llava": (
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "text_config": SMALL | {"model_type": "llama"},
            "vision_config": VISION | {"model_type": "clip_vision_model"},
            "image_token_index": 3,
        },
    ),
    "minimax_m2": ("MiniMaxM2ForCausalLM", "MiniMaxM2Config", LOCAL_EXPERTS | {"head_dim": 16}),
    "mllama": (
        "MllamaForConditionalGeneration",
        "MllamaConfig",
        {"text_config": SMALL | {"cross_attention_layers": [1]}, "vision_config": MLLAMA_VISION},
    ),
    "mpt": ("MptForCausalLM", "MptConfig", {"vocab_size": 160, "d_model": 64, "n_layers": 2, "n_heads": 4}),
    "nemotron": ("NemotronForCausalLM", "NemotronConfig", HEADS_OF_16),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", SMALL),
    "phi": ("PhiForCausalLM", "PhiConfig", SMALL),
    "phimoe": ("PhimoeForCausalLM", "PhimoeConfig", LOCAL_EXPERTS),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        {"text_config": SMALL | MROPE, "vision_config": QWEN2_VISION, **TOKENS},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        {"text_config": SMALL | MROPE, "vision_config": QWEN_VISION | {"fullatt_block_indexes": [1]}, **TOKENS},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3VLMoeConfig",
        {
            "text_config": EXPERTS | {"head_dim": 16} | MROPE,
            "vision_config": QWEN_VISION | {"deepstack_visual_indexes": [0]},
            **TOKENS,
        },
    ),
    "seed_oss": ("SeedOssForCausalLM", "SeedOssConfig", HEADS_OF_16),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", SMALL),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", SMALL),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", SMALL),
}
# Models whose checkpoints hold the experts of a layer in one tensor [E, N, K], which stays in high precision.
STACKED_EXPERTS = ("gpt_oss", "granitemoe", "llama4", "llama4, vision", "qwen3_vl_moe")
every_architecture = pytest.mark.parametrize(
    "name", [*ARCHITECTURES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE_ARCHITECTURES)]
)


def small_model(name: str, **changes: object) -> PreTrainedModel:
    """Return the model of this architecture with changed settings, in float32 on the CPU."""
    model, config, settings = (ARCHITECTURES | MORE_ARCHITECTURES)[name]
    return getattr(transformers, model)(getattr(transformers, config)(**settings | changes))


def gpt2() -> PreTrainedModel:
    """Return a GPT-2, whose linear layers are `Conv1D`."""
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))


def falcon() -> PreTrainedModel:
    """Return a Falcon, whose linear layers are `FalconLinear`."""
    return transformers.FalconForCausalLM(transformers.FalconConfig(**FALCON))
