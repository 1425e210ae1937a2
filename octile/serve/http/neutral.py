"""Fields of other servers that octile does not have, with the values that change nothing: with these they are accepted.

null is one of them for every field. A value that is not listed asks for something, and is refused.

Sources: the request bodies of vLLM and SGLang, and OpenAI's API reference.
"""

from __future__ import annotations

from collections.abc import Mapping

Values = tuple[object, ...]

VLLM: Mapping[str, Values] = {
    "use_beam_search": (False,),
    "length_penalty": (1.0,),  # of a beam search
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "truncation_side": ("left", "right"),  # of prompts that are truncated
    "allowed_token_ids": (),
    "priority": (0,),
    "return_tokens_as_token_ids": (False,),
    "return_token_offsets": (False,),
    "cache_salt": (),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "vllm_xargs": ({},),
    "repetition_detection": (),
    "thinking_token_budget": (-1,),
    "logprob_token_ids": (),
}
VLLM_COMPLETIONS: Mapping[str, Values] = {
    "prompt_embeds": (),
    "add_special_tokens": (True,),
}
VLLM_MEDIA: Mapping[str, Values] = {"media_io_kwargs": ({},), "mm_processor_kwargs": ({},)}
VLLM_CHAT: Mapping[str, Values] = {
    "echo": (False,),
    "add_special_tokens": (False,),
    "return_prompt_text": (False,),
    "return_assistant_tokens_mask": (False,),
    "include_reasoning": (True,),
    **VLLM_MEDIA,
}
TOKENIZE: Mapping[str, Values] = VLLM_MEDIA
STRUCTURED_OUTPUTS: Mapping[str, Values] = {
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
    "disable_fallback": (False,),
    "whitespace_pattern": (),
    "structural_tag": (),
}
SGLANG: Mapping[str, Values] = {
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "routed_experts_start_len": (0,),
    "return_cached_tokens_details": (False,),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "stop_regex": (),
    "no_stop_trim": (False,),
    "lora_path": (),
    "session_params": (),
    "custom_params": (),
    "custom_logit_processor": (),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "routed_dp_rank": (),
    "disagg_prefill_dp_rank": (),
    "data_parallel_rank": (),
    "extra_key": (),
    "custom_labels": ({},),
    "rid": (),  # request_id here
    "session_id": (),
}
SGLANG_CHAT: Mapping[str, Values] = {
    "task": (),
    "stream_reasoning": (True,),
    "max_dynamic_patch": (),
    "min_dynamic_patch": (),
    "use_audio_in_video": (False,),
    "separate_reasoning": (True,),
    "return_prompt_token_ids": (False,),
    "return_meta_info": (False,),
    "images_config": (),
    "ngram_corpus_id": (),
    "input_ids": (),
}
OPENAI: Mapping[str, Values] = {
    "moderation": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory", "24h"),  # of a cache that octile does not have
}

COMPLETIONS: Mapping[str, Values] = {**VLLM, **VLLM_COMPLETIONS, **SGLANG, **OPENAI}
CHAT: Mapping[str, Values] = {**VLLM, **VLLM_CHAT, **SGLANG, **SGLANG_CHAT, **OPENAI}


RESPONSE_ITEMS: Mapping[str, Values] = {"async": (), "async_": (), "caller": (), "namespace": ()}  # of OpenAI's tools
RESPONSES: Mapping[str, Values] = {
    **VLLM,
    **OPENAI,
    "stream_options": ({}, {"include_obfuscation": False}),
    "prompt": (),  # one of OpenAI's that is kept
    "max_tool_calls": (),  # of tools that OpenAI runs
    "context_management": ({},),
    "previous_input_messages": (),
    "enable_response_messages": (False,),
    "include_reasoning": (True,),
    "access_programs": (),
    "background_options": (),
    "image": (),
    **VLLM_MEDIA,
}


def is_neutral(value: object, values: Values) -> bool:
    """Whether a field's value changes nothing; an empty list or text is no more than null."""
    if value is None or value == "" or value == []:
        return True
    return any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in values)
