"""The refusal of models that octile does not load: what they are, and who serves them.

`octile convert` converts the weights of any model to FP8, and writes folders that octile does not serve.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octile.checkpoint.convert.engines import LOADER_WARNINGS, UNREAD_SCALES
from octile.command_text import quoted_path
from octile.models.hf_config import MODEL_TYPES
from octile.validation import quoted

SERVED_ELSEWHERE = frozenset({  # by vLLM, SGLang and transformers; a model of another type may be
    "gemma", "gemma2", "gemma3", "gemma3_text", "glm4", "glm4_moe", "gpt_oss", "llama", "mistral", "mixtral", "olmo2",
    "olmoe", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
})  # fmt: skip
ENGINES = "vLLM, SGLang and transformers"


def check_model_type(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse a model of another family than DeepSeek-V3's.

    Args:
        folder: its folder.
        config: content of its config.json. Without a `model_type` it is taken for a DeepSeek-V3.

    Raises:
        ValueError: it is of another family; the message says who serves it, and what trains it in FP8.
    """
    kind = config.get("model_type")
    if kind is None or kind in MODEL_TYPES:
        return
    architectures = config.get("architectures")
    name = f" ({architectures[0]})" if isinstance(architectures, list) and architectures else ""
    serve = "serve it" if kind in SERVED_ELSEWHERE else "may serve it"
    is_fp8 = _is_in_fp8_blocks(config)
    engines = "vLLM and transformers" if is_fp8 and LOADER_WARNINGS.get(kind) == UNREAD_SCALES else ENGINES
    more = f": vllm serve {quoted_path(folder)}" if is_fp8 else ""
    if kind in SERVED_ELSEWHERE and config.get("quantization_config") is None:
        more = ", and with octile.convert transformers trains it in FP8"
    raise ValueError(
        f"{folder} has a model of type {quoted(kind)}{name}, but octile loads only the types {', '.join(MODEL_TYPES)}; "
        f"{engines} {serve}{more}"
    )


def _is_in_fp8_blocks(config: Mapping[str, Any]) -> bool:
    """Whether the weights are in FP8 in blocks, as `octile convert` writes them."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        return False
    return quantization.get("quant_method") == "fp8" and quantization.get("weight_block_size") == [128, 128]
