"""Parameter counts of a configuration: how many it has, and how many a token uses.

The real modules are counted, on torch's meta device, which allocates no values: 671B parameters take a second.

    total    the main model, as published; the multi-token prediction layer is counted separately
    active   total without the routed experts that a token is not sent to. The embedding counts in full, although a
             token reads one row of it: the published 37.6B, 21.4B and 2.7B count it so
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from octile.models.config import ModelConfig

KINDS = {  # of a parameter, by the first of these parts that its name contains
    "embed_tokens": "embedding",
    "lm_head": "head",
    "norm": "norms",
    "indexer": "indexer",
    "eh_proj": "MTP projection",
    "self_attn": "attention projections",
    ".shared_experts": "shared experts",
    ".experts": "routed experts",
    ".gate.": "gate",
    ".mlp.": "dense MLP",
}
# kinds whose parameters are all matrices of hidden layers, which Muon updates
HIDDEN_MATRICES = ("attention projections", "shared experts", "routed experts", "dense MLP", "MTP projection")


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by kind of module.

    Attributes:
        main: parameters of the main model.
        main_active: those of the main model that a token uses.
        mtp: parameters of the multi-token prediction layer, without the embedding and the head that it shares.
        mtp_active: those of the multi-token prediction layer that a token uses.
    """

    main: dict[str, int]
    main_active: dict[str, int]
    mtp: dict[str, int]
    mtp_active: dict[str, int]

    @property
    def total(self) -> int:
        """All parameters without those of multi-token prediction."""
        return sum(self.main.values())

    @property
    def active(self) -> int:
        """The parameters that one token uses, the whole embedding included, without those of multi-token prediction."""
        return sum(self.main_active.values())


@lru_cache(256)  # plans and runs ask for the same models again and again
def count_parameters(config: ModelConfig) -> ParameterCount:
    """Count a configuration's parameters without allocating them. The count of equal configurations is shared."""
    main, mtp = Counter[str](), Counter[str]()
    for layer, kind, numel in _parameters(config):
        (mtp if layer == config.num_hidden_layers else main)[kind] += numel
    return ParameterCount(dict(main), _used(main, config), dict(mtp), _used(mtp, config))


def kind_of(name: str) -> str:
    """Return the kind of a parameter by its name, that of the model or of a checkpoint."""
    return next(kind for part, kind in KINDS.items() if part in name)


def _parameters(config: ModelConfig) -> Iterator[tuple[int | None, str, int]]:
    """Yield the layer, the kind and the number of elements of every parameter."""
    from octile.models.meta import meta_model  # late: it loads torch

    for name, parameter in meta_model(config).named_parameters():
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else None
        yield layer, kind_of(name), parameter.numel()


def _used(numel: Counter[str], config: ModelConfig) -> dict[str, int]:
    return {
        kind: n * config.num_experts_per_tok // config.n_routed_experts if kind == "routed experts" else n
        for kind, n in numel.items()
    }
