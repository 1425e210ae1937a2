"""What octile and transformers do with each architecture: small random models are converted, trained, saved and loaded.

The models are those of `tests.models_of_transformers`, eight times as wide: all layers then have whole blocks of
128×128, as published models have, which vLLM and SGLang need of the layers that they merge.
"""

import copy
import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from octile.checkpoint.convert import convert_checkpoint
from octile.checkpoint.convert.plan import choose_actions
from octile.checkpoint.convert.share import share_of
from octile.checkpoint.convert.tensor import Action
from octile.checkpoint.shards import Shards
from octile.checkpoint.tensor_file import TensorSpec
from octile.nn.conversion import apply_recipe
from tests.models_of_transformers import ARCHITECTURES, MORE_ARCHITECTURES, falcon, gpt2
from tools.architectures.loading import patterns

ALL = {**ARCHITECTURES, **MORE_ARCHITECTURES}
REFUSED = {"falcon": falcon, "gpt2": gpt2}
WIDTHS = (
    *("d_ff", "d_kv", "d_model", "decoder_ffn_dim", "embed_dim", "encoder_ffn_dim", "ffn_dim", "head_dim"),
    *("hidden_size", "index_head_dim", "intermediate_size", "intermediate_size_mlp", "kv_lora_rank"),
    *("linear_key_head_dim", "linear_value_head_dim", "moe_intermediate_size", "mrope_section", "n_embd"),
    *("out_hidden_size", "projector_input_dim", "projector_output_dim", "q_lora_rank", "qk_nope_head_dim"),
    *("shared_expert_intermediate_size", "v_head_dim", "vision_output_dim", "vocab_size", "word_embed_proj_dim"),
)
TIMES = 8
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
}  # fmt: skip
# heads of 128 + 64 channels, which attention kernels of both engines have
DEEPSEEK = {
    "moe_layer_freq": 1,
    "qk_rope_head_dim": 64,
    "rope_parameters": YARN,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
# What published configurations have besides, and engines need of the models.
SETTINGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm_moe_dsa"), DEEPSEEK),
    **{name: {"full_attention_interval": 2} for name in ("qwen3_next", "qwen3_5")},
    **{name: {"position_embedding_type": "absolute"} for name in ALL if name.startswith(("bert", "roberta"))},
    "deepseek_v2": {**DEEPSEEK, "topk_method": "greedy", "scoring_func": "softmax"},
    "exaone4": {
        "sliding_window": 4096,
        "sliding_window_pattern": "LG",
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma2": {"hidden_act": "gelu_pytorch_tanh"},
    "minimax_m2": {"rotary_dim": 64, "scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True},
    "olmoe": {"num_key_value_heads": 4},
    "phi": {"num_key_value_heads": 4, "partial_rotary_factor": 0.5, "intermediate_size": 4 * 512},
    "qwen2_vl": {"vision_config": {"in_chans": 3}},
    "qwen3_5_moe, vision": {"text_config": {"full_attention_interval": 2}},
    "qwen3_vl_moe": {"text_config": {"norm_topk_prob": True}},
}


def model_of(name: str) -> PreTrainedModel:
    """Return the model of an architecture with random weights, in BF16."""
    torch.manual_seed(0)
    kind, config, settings = ALL[name]
    given = copy.deepcopy(_merged(_widened(settings), SETTINGS.get(name, {})))
    return getattr(transformers, kind)(getattr(transformers, config)(**given)).bfloat16()


def _merged(settings: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    nested = {key: _merged(settings[key], value) for key, value in more.items() if key.endswith("_config")}
    return {**settings, **more, **nested}


def _widened(settings: Mapping[str, Any]) -> dict[str, Any]:
    def value(key: str, given: Any) -> Any:
        if isinstance(given, dict):
            return _widened(given)
        if key in WIDTHS:
            return [TIMES * each for each in given] if isinstance(given, list) else TIMES * given
        return given

    return {key: value(key, given) for key, given in settings.items()}


def write_folders(name: str, folder: Path) -> None:
    """Write a model as `save_pretrained` does, into FOLDER/bf16, and what `octile convert` makes of it, FOLDER/fp8."""
    model_of(name).save_pretrained(folder / "bf16")
    convert_checkpoint(folder / "bf16", folder / "fp8", "fp8")


def digest_of(folder: Path) -> str:
    """Return a digest of what engines read of a folder besides values: names, dtypes, shapes, the quantization."""
    specs = {name: [spec.dtype, *spec.shape] for name, spec in Shards(folder).specs.items()}
    config = json.loads((folder / "config.json").read_text("utf-8"))
    text = json.dumps([specs, config["quantization_config"], config["architectures"]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def examine(name: str, folder: Path) -> dict[str, Any]:
    """Convert, train, save and load the model of an architecture, whose folders `write_folders` wrote.

    Returns:
        the cells of octile's and transformers' columns, the digest of the FP8 folder, and `default_shares`.
    """
    model = apply_recipe(model_of(name).float())
    summary = model.conversion_summary
    total = summary.converted + sum(summary.skipped.values())
    return {
        "model_type": model.config.model_type,
        "converted": [summary.converted, total],
        "skipped": dict(summary.skipped),
        "trains": why_not_trained(model),
        "saves": why_not_saved(model),
        "transformers": why_not_loaded(type(model), folder / "fp8"),
        "digest": digest_of(folder / "fp8"),
        "default": default_shares(name),
    }


def default_shares(name: str) -> dict[str, Any] | None:
    """Count the parameters in FP8 of an architecture at the default size of its configuration, without weights.

    Returns:
        the number of parameters; their shares that `octile.convert` quantizes and that `octile convert` stores in FP8,
        in percent; None where transformers makes no model of its default configuration.
    """
    kind, config, _ = ALL[name]
    default = getattr(transformers, config)()
    try:
        with torch.device("meta"):
            model = getattr(transformers, kind)(default).bfloat16()
    except TypeError:  # a size that a model needs is None
        return None
    once = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}  # a tied weight has two names
    stored = revert_weight_conversion(model, {n: t for n, t in model.state_dict().items() if n in once})
    specs = {name: TensorSpec.of(tensor.dtype, tuple(tensor.shape)) for name, tensor in stored.items()}
    settings = {**default.to_dict(), "architectures": [kind]}
    actions = choose_actions(specs, settings, "fp8", ())
    folder = share_of([name for name, action in actions.items() if action is Action.QUANTIZE], specs, settings)
    trained = apply_recipe(model).conversion_summary.quantized
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trained": round(100 * trained.parameters, 1),
        "stored": round(100 * folder.parameter_share, 1),
    }


def why_not_trained(model: PreTrainedModel) -> str:
    """Take a step on the mean square of the model's result, and return what is wrong; "" if its loss is lower then."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    losses = []
    for _ in range(2):
        torch.manual_seed(0)  # the same dropout
        try:
            loss = model(**inputs_of(model))[0].square().mean()
        except AttributeError as error:  # of a model that transformers cannot run, converted or not
            return f"transformers' own code fails: {error}"
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if bad := [n for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]:
        return f"gradients that are not finite: {', '.join(patterns(bad))}"
    return "" if losses[1] < losses[0] else f"a loss of {losses[0]:.4g}, and of {losses[1]:.4g} after a step"


def inputs_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return a batch of two texts of 16 tokens; of Whisper, of sounds."""
    tokens = torch.randint(8, 160, (2, 16), generator=torch.Generator().manual_seed(0))
    if model.config.model_type == "whisper":
        frames = 2 * model.config.max_source_positions
        return {"input_features": torch.randn(2, model.config.num_mel_bins, frames), "decoder_input_ids": tokens}
    decoder = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    return {"input_ids": tokens, **decoder}


def why_not_saved(model: PreTrainedModel) -> str:
    """Save a model, load it, and return what differs from it; "" if no name, dtype or bit does."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        found = type(model).from_pretrained(folder, dtype="auto").state_dict()
    expected = model.state_dict()
    if names := found.keys() ^ expected.keys():
        return f"other names: {', '.join(patterns(names))}"
    different = [n for n, t in expected.items() if t.dtype != found[n].dtype or not torch.equal(t, found[n])]
    return f"other values: {', '.join(patterns(different))}" if different else ""


def why_not_loaded(kind: type[PreTrainedModel], folder: Path) -> str:
    """Load an FP8 folder by transformers' own loader, and return what is wrong; "" if it finds all and nothing else.

    Its check for a GPU is left out, without which it would dequantize.
    """
    validate, FineGrainedFP8HfQuantizer.validate_environment = (
        FineGrainedFP8HfQuantizer.validate_environment,
        lambda self, *_, **__: None,
    )
    try:
        model, info = kind.from_pretrained(folder, output_loading_info=True)
    finally:
        FineGrainedFP8HfQuantizer.validate_environment = validate
    if not any(parameter.dtype == torch.float8_e4m3fn for parameter in model.parameters()):
        return "no FP8 weights"
    return "; ".join(f"{key}: {', '.join(patterns(map(str, names)))}" for key, names in info.items() if names)
