"""Small gates with the settings of DeepSeek-V3, V2 and V2-Lite."""

from typing import Any

import torch

from octile.nn.gate import Gate

V3: dict[str, Any] = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
V2: dict[str, Any] = {
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "group_limited_greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 16.0,
}
V2_LITE: dict[str, Any] = {"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False}


def gate(seed: int = 0, **settings: Any) -> Gate:
    torch.manual_seed(seed)
    built = Gate(32, 16, 4, **(settings or V3))
    torch.nn.init.normal_(built.weight, std=0.3)
    if built.e_score_correction_bias is not None:
        built.e_score_correction_bias.uniform_(-0.2, 0.2)
    return built
