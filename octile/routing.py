"""The settings of a gate, and which fit together; without torch, for `ModelConfig`, the gate and its kernels.

E experts are divided into G groups of one size. A token may go to the experts of `topk_group` groups and chooses K of
them, so the number of groups must divide E, and `topk_group` groups must hold K experts. V3's gate ranks a group by the
sum of its two best experts, so each group that it ranks needs two.

Sources: DeepSeek-V3 (arXiv 2412.19437) §2.1.2, DeepSeek-V2 (arXiv 2405.04434) §2.2.2.
"""

from typing import Literal, get_args

TopkMethod = Literal["noaux_tc", "group_limited_greedy", "greedy"]
ScoringFunc = Literal["sigmoid", "softmax"]

EPS = 1e-20  # added to the sum of a token's weights by which they are divided


def check_routing(
    n_experts: int,
    n_chosen: int,
    n_group: int,
    topk_group: int,
    topk_method: str,
    scoring_func: str,
    names: tuple[str, str] = ("n_experts", "n_chosen"),
) -> None:
    """Check the settings of a gate.

    Args:
        names: the caller's names for the number of experts and of chosen experts, for error messages.

    Raises:
        ValueError: a setting is unknown, or does not fit the others.
    """
    experts, chosen = names
    numbers = {experts: n_experts, chosen: n_chosen, "n_group": n_group, "topk_group": topk_group}
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1, not {number}")
    words = {"topk_method": (topk_method, TopkMethod), "scoring_func": (scoring_func, ScoringFunc)}
    for name, (word, known) in words.items():
        if word not in get_args(known):
            raise ValueError(f"{name} must be {' or '.join(get_args(known))}, not {word!r}")
    if n_chosen > n_experts:
        raise ValueError(f"{chosen} must be at most {experts}, {n_experts}, not {n_chosen}")
    if n_experts % n_group:
        raise ValueError(f"n_group must divide the {n_experts} {experts}, not be {n_group}")
    if topk_group > n_group:
        raise ValueError(f"topk_group must be at most n_group, {n_group}, not {topk_group}")
    if topk_method == "greedy" or topk_group == n_group:  # a token may go to every expert
        return
    group = n_experts // n_group
    if n_chosen > topk_group * group:
        raise ValueError(f"{chosen} is {n_chosen}, but topk_group allows {topk_group * group}")
    if topk_method == "noaux_tc" and group < 2:
        raise ValueError(
            f"n_group must be at most {n_experts // 2}, so that each group has two of the {n_experts} {experts} that "
            f"noaux_tc ranks it by, not {n_group}"
        )


def choice_of(topk_method: str, n_chosen: int, n_group: int, topk_group: int) -> tuple[int, int, int, int]:
    """Return by what a gate with checked settings chooses: K, G, topk_group, and how many best experts rank a group.

    These are the arguments n_chosen, n_group, topk_group and best of `octile.ops.gate.gate`.
    """
    groups = (1, 1) if topk_method == "greedy" else (n_group, topk_group)
    return n_chosen, *groups, 2 if topk_method == "noaux_tc" and groups[1] < groups[0] else 1
