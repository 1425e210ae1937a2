"""Costs of decode steps with drafts, compared with measured ones, and what is lost by choosing drafts by them.

python draft_costs.py [--fit]

`octile.serve.runner.step_costs` is compared with the times in tenth_draft_steps_….txt. For these times and for rates of
acceptance from 0.3 to 0.95, the same at each position, tokens per time are compared with those of the best number of
drafts up to four: where the rate is known, and in simulated answers of 256 tokens whose numbers `DraftCount` and
`shared_count` choose. Before, the costs were 1, 1.45, 1.75, 2.05 and 2.35 for all models and numbers of requests.

--fit also fits the constants to the files of the H100, to one of them, and fewer constants.
"""

import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from statistics import mean

from octile.models.config import ModelConfig
from octile.serve.engine.draft_count import DraftCount, best_count, shared_count
from octile.serve.runner import step_costs
from octile.serve.runner.step_costs import StepCosts

MOST, SMALL_BATCH, ANSWER = 4, 8, 256
BEFORE = (1.0, 1.45, 1.75, 2.05, 2.35)
RATES = [round(0.3 + 0.05 * i, 2) for i in range(14)]
H100 = {"small": ModelConfig.small(), "v2_lite": ModelConfig.v2_lite_16b()}
MODELS = {**H100, "tiny_cpu": ModelConfig.tiny()}
CONSTANTS = "STEP", "DRAFT_PASS", "SMALL_BATCH_LATENCY", "LATENCY", "BANDWIDTH", "ROW"

Case = tuple[str, int]  # model and number of requests
Costs = Callable[[str, int], Sequence[float]]


def measured() -> dict[Case, list[float]]:
    """Seconds of steps with 0 to 4 drafts."""
    found: dict[Case, list[float]] = {}
    for name in MODELS:
        text = Path(__file__).with_name(f"tenth_draft_steps_{name}.txt").read_text()
        for requests, ms in re.findall(r"requests (\d+) drafts \d: ([\d.]+) ms", text):
            found.setdefault((name, int(requests)), []).append(float(ms) / 1e3)
    return found


@cache
def model(name: str) -> StepCosts:
    return StepCosts(replace(MODELS[name], num_nextn_predict_layers=1), True, SMALL_BATCH)


def modelled(name: str, requests: int) -> list[float]:
    return [model(name).seconds(requests, k) for k in range(1 + MOST)]


def relative(seconds: Sequence[float]) -> list[float]:
    return [s / seconds[0] for s in seconds]


def before(name: str, requests: int) -> Sequence[float]:
    return BEFORE


def errors(found: Sequence[float], expected: Sequence[float]) -> list[float]:
    return [f / e - 1 for f, e in zip(found, expected, strict=True)]


def report_errors(steps: dict[Case, list[float]], what: str, costs: Costs) -> None:
    found = [abs(e) for case, row in steps.items() for e in errors(relative(costs(*case)), relative(row))[1:]]
    print(f"{what}: {mean(found):.1%} on average, {max(found):.1%} at most of {len(found)} ratios", end="")
    if costs is modelled:
        times = [abs(e) for case, row in steps.items() for e in errors(modelled(*case), row)]
        print(f"; {mean(times):.1%} and {max(times):.1%} of {len(times)} times", end="")
    print()


def fit(steps: dict[Case, list[float]], names: Sequence[str], of_times: float) -> list[float]:
    """Fit the constants of these names by random changes, where others are 0, and set them; return those of before.

    The squared errors of ratios are minimized, and those of times with the weight of_times.
    """

    def squares(values: Sequence[float]) -> float:
        assign(names, values)
        total = 0.0
        for case, row in steps.items():
            found = modelled(*case)
            total += sum(e * e for e in errors(relative(found), relative(row)))
            total += of_times * sum(e * e for e in errors(found, row))
        return total

    draw, start = Random(0), [getattr(step_costs, name) for name in CONSTANTS]
    assign(CONSTANTS, [value if name in names else 0.0 for name, value in zip(CONSTANTS, start, strict=True)])
    values = [getattr(step_costs, name) for name in names]
    least, size = squares(values), 0.3
    for _ in range(6000):
        tried = [v * math.exp(size * draw.gauss(0, 1)) if draw.random() < 0.5 else v for v in values]
        if (found := squares(tried)) < least:
            values, least, size = tried, found, min(1.3 * size, 0.3)
        else:
            size = max(0.985 * size, 1e-4)
    assign(names, values)
    print("  ".join(f"{name} {value:.3g}" for name, value in zip(names, values, strict=True)))
    return start


def assign(names: Sequence[str], values: Sequence[float]) -> None:
    for name, value in zip(names, values, strict=True):
        setattr(step_costs, name, value)


def report_fits(steps: dict[Case, list[float]]) -> None:
    on_h100 = {case: row for case, row in steps.items() if case[0] in H100}
    fits = [("all constants, H100", on_h100, CONSTANTS, 0.1)]
    fits += [
        (f"the same, {name} alone", {case: row for case, row in on_h100.items() if case[0] == name}, CONSTANTS, 0.1)
        for name in H100
    ]
    fits += [
        ("without fixed times, ratios alone", on_h100, CONSTANTS[2:], 0.0),
        ("and without ROW", on_h100, CONSTANTS[2:5], 0.0),
    ]
    for what, fitted, names, of_times in fits:
        print(f"\nfit: {what}")
        start = fit(fitted, names, of_times)
        for name in MODELS:
            of_model = {case: row for case, row in steps.items() if case[0] == name}
            report_errors(of_model, name, modelled)
            lost = [
                mean(lost_at_known_rates(relative(row), relative(modelled(*case)))) for case, row in of_model.items()
            ]
            print(f"  lost at known rates: {' '.join(f'{share:.1%}' for share in lost)}, mean {mean(lost):.2%}")
        assign(CONSTANTS, start)


def tokens(rate: float) -> list[float]:
    return [sum(rate**i for i in range(1 + k)) for k in range(1 + MOST)]


def lost_at_known_rates(row: Sequence[float], costs: Sequence[float]) -> list[float]:
    """The share of the best number's tokens per time that is lost, at each rate."""
    chosen = [(tokens(rate), best_count(tokens(rate), costs)) for rate in RATES]
    return [1 - expected[k] / row[k] / best_speed(expected, row) for expected, k in chosen]


def best_speed(expected: Sequence[float], row: Sequence[float]) -> float:
    return max(e / ratio for e, ratio in zip(expected, row, strict=True))


def lost_in_answers(row: Sequence[float], costs: Sequence[float], requests: int, rate: float) -> float:
    """The same of 32 answers, of which as many as requests begin together and end when the first has 256 tokens."""
    draw, made, time = Random(int(100 * rate)), 0, 0.0
    for _ in range(32 // requests):
        counts, left = [DraftCount(costs) for _ in range(requests)], [ANSWER] * requests
        while min(left) > 0:  # of as many requests
            k = shared_count(counts, costs)
            time += row[k]
            for i, count in enumerate(counts):
                offered = min(k, count.count)
                accepted = next((n for n in range(offered) if draw.random() >= rate), offered)
                count.record(offered, accepted, costs)
                left[i] -= 1 + accepted
                made += 1 + accepted
    return 1 - made / requests / time / best_speed(tokens(rate), row)


def report_lost(steps: dict[Case, list[float]], what: str, costs: Costs) -> None:
    print(f"\n{what}: tokens per time that are lost, % of the best number's, mean over rates and largest")
    print(f"{'':20} {'rate known':>14} {'answers':>14}")
    for case, row in steps.items():
        of_case, ratios = relative(costs(*case)), relative(row)
        known = lost_at_known_rates(ratios, of_case)
        answers = [lost_in_answers(ratios, of_case, case[1], rate) for rate in RATES]
        print(f"{case[0]:8} {case[1]:2} requests {100 * mean(known):7.1f} {100 * max(known):6.1f}", end=" ")
        print(f"{100 * mean(answers):7.1f} {100 * max(answers):6.1f}")


def main() -> None:
    steps = measured()
    print("measured and modelled times with 1 to 4 drafts, relative to none; ms without drafts")
    for case, row in steps.items():
        both = zip(relative(row)[1:], relative(modelled(*case))[1:], strict=True)
        pairs = "   ".join(f"{found:.2f} {cost:.2f}" for found, cost in both)
        print(f"{case[0]:8} {case[1]:2} requests  {pairs}   {1e3 * row[0]:.2f} {1e3 * modelled(*case)[0]:.2f}")
    for name in "H100", "CPU":
        some = {case: row for case, row in steps.items() if (case[0] in H100) == (name == "H100")}
        report_errors(some, f"{name}, costs of before", before)
        report_errors(some, f"{name}, costs now", modelled)
    report_lost(steps, "before", before)
    report_lost(steps, "now", modelled)
    if "--fit" in sys.argv:
        report_fits(steps)


main()
