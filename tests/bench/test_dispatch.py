"""Tests of what needs no GPU in the measurement of dispatch and combine."""

import pytest
import torch

from octile.bench.dispatch import CHOSEN, EXPERTS, GROUPS, LIMIT, TOKENS, choose_experts, rows
from octile.bench.goals import BOTH_WAYS, DISPATCH_FP8, dispatch_verdicts
from octile.bench.rows import compare


def test_each_token_has_different_experts_of_few_groups():
    torch.manual_seed(0)
    experts_TK, load_E = choose_experts(torch.device("cpu"))
    assert experts_TK.shape == (TOKENS, CHOSEN)
    assert load_E.sum() == TOKENS * CHOSEN
    for token in experts_TK[:64].tolist():
        assert len(set(token)) == CHOSEN
        assert len({expert // (EXPERTS // GROUPS) for expert in token}) <= LIMIT


def test_one_process_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match=r"torchrun --nproc-per-node 2 -m octile bench dispatch"):
        next(rows())


def test_the_default_number_of_sms_is_judged():
    measured = [
        compare("all_to_all_single", "dispatch FP8, 29 MB", 390, "GB/s", "copy", 390),
        compare("symmetric memory, 64 SMs (default)", "dispatch FP8, 29 MB", 312, "GB/s", "copy", 390, DISPATCH_FP8),
        compare("symmetric memory, 128 SMs", "dispatch FP8, 29 MB", 351, "GB/s", "copy", 390),
        compare("symmetric memory, 64 SMs (default)", BOTH_WAYS, 3, "Mtokens/s", "plain", 2, BOTH_WAYS),
    ]
    assert dispatch_verdicts(measured).splitlines() == [
        "dispatch FP8, vs. copy: 0.800× (symmetric memory, 64 SMs (default)): floor ≥ 0.70× met, aim ≥ 0.85× MISSED",
        "dispatch and combine, vs. plain: 1.500× (symmetric memory, 64 SMs (default)): floor ≥ 2.00× MISSED",
    ]
