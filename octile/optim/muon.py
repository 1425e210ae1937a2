"""Muon for the matrices of hidden layers, and AdamW for everything else, in one optimizer.

Muon steps along the momentum of a matrix's gradient, but with all singular values made about 1, so that a few
directions do not dominate the step.

    matrices of hidden layers                                        Muon (`muon_update.py`)
    norms, biases, embeddings, output heads, routers                 AdamW (`adamw.py`)

The state of a matrix is its momentum: 2 bytes a parameter in BF16, where AdamW's two moments have 4.

Source: K. Jordan, "Muon: An optimizer for hidden layers in neural networks"
(https://kellerjordan.github.io/posts/muon/); Moonlight (arXiv 2502.16982), whose size of the step lets both have the
learning rate and weight decay of AdamW; `torch.optim.Muon`, which updates one 2-D parameter after the other.
"""

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from octile.layer_roles import CONV1D, HEAD, role_of
from octile.nn.moe import Experts
from octile.optim import gradient
from octile.optim.adamw import DEEPSEEK_V3, AdamW, Found
from octile.optim.muon_update import MatrixGroup, muon_
from octile.optim.row_shards import check_placements, row_shard_of
from octile.optim.state import MATRIX_KINDS, check_decay, has_scales, new_state
from octile.optim.storage import shard
from octile.recipe import OptimizerFormats

AdjustLr = Literal["match_rms_adamw", "original"]
ADJUST_LR = ("match_rms_adamw", "original")
ADAMW_ROLES = frozenset({HEAD, "embedding", "norm", "gate", "indexer weights", "gate of GatedDeltaNet"})


class Muon(AdamW):
    """Muon for matrices and AdamW for all other parameters, with FP32 masters and a choice of storage formats.

        optimizer = Muon(muon_groups(model, weight_decay=0.1), lr=1e-3)

    A group with `use_muon=True` has matrices [N, K] and stacks of matrices [E, N, K], such as the weights of experts.
    With `merged=2` the rows of each are those of two matrices, one after the other, as in `octile.nn.Experts.gate_up`.
    The groups with `use_muon=False` are AdamW's.

    Masters, gradients, `skip` and `gradient_scale` are as in `AdamW`. The momentum has the format of `exp_avg`.
    Newton–Schulz runs in BF16, with matrices of the same shape in a batch. Where each rank has rows of a matrix, by
    FSDP2 or by `octile.parallel.ShardedState`, a rank receives some whole matrices and returns rows of the results;
    experts of a stack stay on their rank. All ranks must then make the same steps. The host does not wait for a GPU.

    Args:
        params: groups of parameters, each with `use_muon`, as `muon_groups` makes them.
        lr: learning rate of both, at least 0; each group may have its own. A tensor [] as in `AdamW`.
        momentum: decay rate of the momentum of matrices, in [0, 1). The step is Nesterov's.
        betas, eps: AdamW's.
        weight_decay: the decoupled weight decay of both.
        adjust_lr_fn: the factor of a matrix's learning rate. "match_rms_adamw": 0.2·√max(N, K), with which its step is
            about as large as AdamW's, so that one learning rate serves both; "original": √max(1, N/K). N must then be
            the outputs; GPT-2's Conv1D and the experts of gpt-oss and Llama-4 have the inputs there.
        formats: the storage formats, without scales.

    Raises:
        TypeError: as for `AdamW`.
        ValueError: as for `AdamW`; or a group has no `use_muon`, `adjust_lr_fn` is another, or `formats` has scales.
            A parameter for Muon has other dimensions, or rows that `merged` does not divide, or is a DTensor that is
            sharded otherwise than along dimension 0.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float | Tensor,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        adjust_lr_fn: AdjustLr = "match_rms_adamw",
        formats: OptimizerFormats = DEEPSEEK_V3,
    ) -> None:
        self.formats = formats
        settings = {"momentum": momentum, "adjust_lr_fn": adjust_lr_fn, "merged": 1}
        own = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        torch.optim.Optimizer.__init__(self, params, {**own, **settings})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with its own settings; see torch.optim.Optimizer. Raises as the constructor does."""
        _check_settings({**self.defaults, **param_group}, self.formats)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_matrices(group)
        except ValueError:
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of `state_dict()` bit for bit.

        Raises:
            ValueError: as for `AdamW`; or other groups are Muon's.
        """
        saved, own = ([g.get("use_muon") for g in groups] for groups in (state_dict["param_groups"], self.param_groups))
        if saved != own:
            raise ValueError(f"state_dict has groups with use_muon {saved}, this optimizer {own}")
        super().load_state_dict(state_dict)

    def _kinds(self, group: dict[str, Any]) -> tuple[str, ...]:
        return MATRIX_KINDS if group["use_muon"] else super()._kinds(group)

    def _update(self, found: list[Found], skip: Tensor | None, gradient_scale: Tensor | None) -> None:
        others = [one for one in found if not one.group["use_muon"]]
        if others:
            super()._update(others, skip, gradient_scale)
        self._update_matrices([one for one in found if one.group["use_muon"]], skip, gradient_scale)

    def _update_matrices(self, found: list[Found], skip: Tensor | None, gradient_scale: Tensor | None) -> None:
        groups: dict[int, MatrixGroup] = {}
        for param, grad, settings in found:
            if not self.state[param]:
                self.state[param] = new_state(param, self.formats, MATRIX_KINDS)
            state = self.state[param]
            numbers = (settings[key] for key in ("merged", "lr", "momentum", "weight_decay", "adjust_lr_fn"))
            group = groups.setdefault(id(settings), MatrixGroup([], [], [], [], [], *numbers))
            group.weights.append(shard(state.get("master", param)).detach())
            group.gradients.append(shard(gradient.load(grad)).detach())
            group.momentum_buffers.append(shard(state["momentum_buffer"]))
            group.copies.append(shard(param).detach() if "master" in state else None)
            group.row_shards.append(row_shard_of(param))
        muon_(list(groups.values()), skip, gradient_scale)
        increment_version([param for param, _, _ in found])


def muon_groups(model: nn.Module, weight_decay: float, updated: nn.Module | None = None) -> list[dict[str, Any]]:
    """Return the parameter groups of `Muon`: matrices of hidden layers for Muon, and `param_groups` of the others.

    Muon's are the weights of linear layers and of stacked experts, except output heads and routers, which
    `octile.layer_roles` knows by their names, and weights that are tied to an embedding. All others are AdamW's. Shared
    parameters occur once, frozen ones not at all, and an empty group is left out.

    Args:
        model: the model.
        weight_decay: that of all parameters but norms, biases and others with one dimension.
        updated: has the parameters to update under the model's names, such as `ShardedState.parts`; None: the model.
    """
    merged_of = _matrices(model)
    trained = [(n, p) for n, p in (model if updated is None else updated).named_parameters() if p.requires_grad]
    others = [p for n, p in trained if n not in merged_of]
    groups: list[dict[str, Any]] = [
        *(
            {
                "params": [p for n, p in trained if merged_of.get(n) == merged],
                "weight_decay": weight_decay,
                "use_muon": True,
                "merged": merged,
            }
            for merged in (1, 2)
        ),
        {"params": [p for p in others if p.dim() >= 2], "weight_decay": weight_decay, "use_muon": False},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0, "use_muon": False},
    ]
    return [group for group in groups if group["params"]]


def _matrices(model: nn.Module) -> dict[str, int]:
    """The names of the matrices of hidden layers, and how many matrices have their rows in each."""
    found: dict[str, int] = {}
    others: set[Tensor] = set()  # parameters that another module uses otherwise
    name_of: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False):
            if _is_matrix(path, module, name, parameter):
                found[name_of[parameter]] = 2 if isinstance(module, Experts) and name == "gate_up" else 1
            else:
                others.add(parameter)
    return {name: merged for name, merged in found.items() if name not in {name_of[p] for p in others}}


def _is_matrix(path: str, module: nn.Module, name: str, parameter: Tensor) -> bool:
    if parameter.dim() == 3:
        return "experts" in path.split(".")
    is_linear = isinstance(module, nn.Linear) or type(module).__name__ == CONV1D.partition(" ")[0]
    role = role_of(path, is_linear)
    return parameter.dim() == 2 and is_linear and (role is None or role.name not in ADAMW_ROLES)


def _check_settings(group: dict[str, Any], formats: OptimizerFormats) -> None:
    if not isinstance(group.get("use_muon"), bool):
        raise ValueError(
            "each group of parameters must have use_muon, True or False: make them with octile.optim.muon_groups"
        )
    if has_scales(formats) or formats.master != "float32":
        raise ValueError(f"formats must have float32 masters and no scales for Muon, not {formats}")
    if type(group["merged"]) is not int or group["merged"] < 1:
        raise ValueError(f"merged must be a number of matrices, not {group['merged']!r}")
    if not 0 <= group["momentum"] < 1:
        raise ValueError(f"momentum must be in [0, 1), not {group['momentum']}")
    check_decay("momentum", "momentum_buffer", group["momentum"], formats)
    if group["adjust_lr_fn"] not in ADJUST_LR:
        raise ValueError(f"adjust_lr_fn must be one of {', '.join(ADJUST_LR)}, not {group['adjust_lr_fn']!r}")


def _check_matrices(group: dict[str, Any]) -> None:
    for param in group["params"] if group["use_muon"] else ():
        shape = list(param.shape)
        if len(shape) not in (2, 3):
            raise ValueError(f"a parameter of Muon must be [N, K] or [E, N, K], not {shape}: use_muon=False for it")
        if shape[-2] % group["merged"]:
            raise ValueError(f"merged must divide the rows of a parameter {shape}, not {group['merged']}")
        check_placements(param)
