"""How many draft tokens a request has in its next step: more where they are accepted, none where they are not.

A draft is accepted only if those before it are, so each position of a step's drafts has a rate of its own: the share of
drafts there that were accepted where all before them were. With the rates r₁, r₂, … a step with k drafts is expected to
yield

    E(k) = 1 + r₁ + r₁·r₂ + … + r₁·…·r_k    tokens

and takes c(k) times as long as one without drafts. The count is the k with the most tokens per time, E(k) / c(k). The
costs c(k) depend on the model and on how many requests run (`Runner.step_costs`).

A request begins as if of four drafts at each position 80% had been accepted: DeepSeek-V3 reports 85 to 90% for the
first one, octile's records have 68 and 93%. A rate is the mean of these four and of what was seen, and from 16 on an
exponential average. Where nothing is accepted, one to five steps show it if a draft costs half a step or more, and up
to 18 where it costs a seventh. Positions that the count leaves out are not seen any more. Therefore, after 64 steps, or
16 without drafts, the rate of the first of them is raised to where its draft would just pay, and the next draft there
decides. If it is rejected, twice as many steps pass before the next trial, up to 512.

The count depends on the request's own drafts and on how many requests run, and not on how long steps take in fact. So a
request that is alone takes the same steps each time, and ranks that share a request agree.

Source: E(k) / c(k) is the speed-up of Leviathan et al. (arXiv 2211.17192) §3.3, here with a rate for each position.
"""

from __future__ import annotations

from collections.abc import Sequence

PRIOR, PRIOR_SEEN = 0.8, 4  # rate of each position at first, and how many drafts it stands for
SEEN = 16  # drafts after which a rate is an exponential average
FIRST_TRIAL, TRIAL, MAX_TRIAL = 16, 64, 512  # steps before the first position, or another one, is tried again
ROUNDING = 1e-9  # up to which speeds are equal; of equal ones the count with more drafts is taken


class DraftCount:
    """The draft count of one request.

    Attributes:
        count: drafts of its next step, from 0 to most.
        expected: E(k) of each k from 0 to most, in tokens.

    Args:
        costs: c(k) of each k from 0 to most, at first; most is at least 1.
    """

    def __init__(self, costs: Sequence[float]):
        most = len(costs) - 1
        self._costs = costs
        self._rates = [PRIOR] * most
        self._seen = [PRIOR_SEEN] * most
        self._steps, self._trials = 0, _trials(most)  # with fewer drafts than most; after how many a position is tried
        self._limit = most  # of the count: during a trial one more than before it
        self._tried: float | None = None  # the rate of its position before the trial
        self._choose()

    def record(self, offered: int, accepted: int, costs: Sequence[float]) -> None:
        """Take in a step of the request, in which the model has verified its drafts, and choose the count anew.

        Args:
            offered: drafts that were verified; 0: none.
            accepted: those before the first that was rejected.
            costs: c(k) of the next step.
        """
        self._costs = costs
        if offered >= self._limit > accepted and self._tried is not None:
            self._rates[self._limit - 1] = self._tried  # the trial has failed
        for i in range(min(accepted + 1, offered)):
            self._seen[i] = min(self._seen[i] + 1, SEEN)
            self._rates[i] += (float(i < accepted) - self._rates[i]) / self._seen[i]
        if offered == accepted > 0:
            self._trials = _trials(len(self._rates))
        if offered >= self._limit:
            self._limit, self._tried = len(self._rates), None
        before = self.count
        self._choose()
        stops_drafting = self.count == 0 and before > 0
        if self.count == len(self._rates) or stops_drafting:
            self._steps = 0
            return
        self._steps += 1
        if self._steps >= self._trials[self.count]:
            self._try_one_more()

    def _choose(self) -> None:
        self.expected = _expected(self._rates)
        self.count = best_count(self.expected[: self._limit + 1], self._costs)

    def _try_one_more(self) -> None:
        """Raise the rate of the first position that is left out to where its draft would just pay, if it can."""
        if self._tried is not None:  # the last trial's draft was not made, since the costs have risen, for example
            self._rates[self._limit - 1] = self._tried
            self._limit, self._tried = len(self._rates), None
            self._choose()
        k, expected, self._steps = self.count, self.expected, 0
        if k == len(self._rates):
            return
        self._trials[k] = min(2 * self._trials[k], MAX_TRIAL)
        reached = expected[k] - expected[k - 1] if k else 1.0  # the probability that all k drafts are accepted
        gain = expected[k] * (self._costs[k + 1] / self._costs[k] - 1)
        if gain <= reached:
            self._rates[k], self._tried = max(self._rates[k], gain / reached), self._rates[k]
            self._limit = k + 1
            self._choose()


def best_count(expected: Sequence[float], costs: Sequence[float]) -> int:
    """Return the count of drafts with the most tokens per time, of equal ones the largest.

    Args:
        expected: tokens of a step with 0, 1, … drafts, of one request or summed over several.
        costs: c(k) of as many drafts, or of more.
    """
    best = 0
    for k in range(1, len(expected)):
        if expected[k] * costs[best] >= expected[best] * costs[k] * (1 - ROUNDING):
            best = k
    return best


def shared_count(requests: Sequence[DraftCount], costs: Sequence[float]) -> int:
    """Return how many drafts a step makes of which all requests have as many rows.

    It is the count with the most tokens of all requests per time, where each has no more drafts than its own count. A
    step of one request has the request's own.

    Args:
        requests: requests of the step.
        costs: c(k) of a step of so many requests.
    """
    most = max((request.count for request in requests), default=0)
    if most == min((request.count for request in requests), default=0):
        return most
    sums = [sum(request.expected[min(k, request.count)] for request in requests) for k in range(most + 1)]
    return best_count(sums, costs)


def _trials(most: int) -> list[int]:
    return [FIRST_TRIAL, *[TRIAL] * (most - 1)]


def _expected(rates: Sequence[float]) -> list[float]:
    expected, reached = [1.0], 1.0
    for rate in rates:
        reached *= rate
        expected.append(expected[-1] + reached)
    return expected
