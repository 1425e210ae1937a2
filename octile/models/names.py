"""A model's weights under Hugging Face's names; a loader fills the views that `to_hf` returns.

Only two things differ.  A layer's experts are stacked here, since one grouped GEMM computes them all:

    …mlp.experts.gate_up [E, 2I, D]     …mlp.experts.7.gate_proj.weight, …up_proj.weight    each [I, D]
    …mlp.experts.down    [E, D, I]      …mlp.experts.7.down_proj.weight                     [D, I]

And published checkpoints repeat the embedding and the head, which the multi-token prediction layer shares.
Shapes: E experts, D model, I intermediate.
"""

from collections.abc import Iterator, Mapping

from torch import Tensor

from octile.models.config import ModelConfig


def to_hf(state_dict: Mapping[str, Tensor], config: ModelConfig, first_expert: int = 0) -> dict[str, Tensor]:
    """Return a model's `state_dict` under the names of a published checkpoint.

    Nothing is copied: experts are views, and the prediction layer's embedding and head are the model's own tensors.

    Args:
        state_dict: the model's state dict.
        config: configuration of the whole model.
        first_expert: the number of the first of the model's experts, if it has only those of one rank.
    """
    tensors = dict(_unstacked(state_dict, first_expert))
    for shared, own in mtp_copies(config).items():
        tensors[shared] = state_dict[own]
    return tensors


def _unstacked(state_dict: Mapping[str, Tensor], first: int) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in state_dict.items():
        prefix, _, last = name.rpartition(".")
        if prefix.endswith(".experts") and last == "gate_up":
            for e, gate_up_XD in enumerate(tensor, first):
                gate_ID, up_ID = gate_up_XD.chunk(2)
                yield f"{prefix}.{e}.gate_proj.weight", gate_ID
                yield f"{prefix}.{e}.up_proj.weight", up_ID
        elif prefix.endswith(".experts") and last == "down":
            for e, down_DI in enumerate(tensor, first):
                yield f"{prefix}.{e}.down_proj.weight", down_DI
        else:
            yield name, tensor


def mtp_copies(config: ModelConfig) -> dict[str, str]:
    """Map the names of the prediction layer's copies to the names of the tensors that they copy."""
    copies = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    layers = range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers)
    return {f"model.layers.{layer}.{copy}": own for layer in layers for copy, own in copies.items()}
