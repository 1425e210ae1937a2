"""What the choice of one request's token launches, and what a step with it costs the host, on a CPU.

python -m benchmarks.history.sampling.choice_host_time

Launches are counted by operator: on a GPU `octile::sample_tokens` has six kernels. Views are not counted. The time is
that of the CPU in `Engine.step`, with a runner that computes nothing, and an argmax of 512 logits for `sample_tokens`.
"""

import statistics
import time
from collections import Counter
from contextlib import ExitStack
from functools import partial
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from octile.serve.engine import penalties, sampler
from octile.serve.engine.config import EngineConfig
from octile.serve.engine.engine import Engine
from octile.serve.engine.request import Request, Sampling
from octile.serve.engine.sampler import ChosenTokens, Row
from octile.serve.runner.batch import Batch, Results
from octile.tokenizer import Tokenizer

VOCABULARY, STEPS = 512, 250
WAYS: dict[str, dict[str, Any]] = {
    "logprobs 0 and logit_bias": {"logprobs": 0, "logit_bias": ((70, 1.0),)},
    "presence_penalty": {"presence_penalty": 0.5},
    "logprobs 5": {"logprobs": 5},
    "grammar": {"grammar": "start: /[a-z ]{1,2000}/"},
}
NO_LAUNCH = {  # they make views, or memory, or are copies from the host, which are counted elsewhere
    "view", "slice", "select", "unbind", "expand", "alias", "detach", "as_strided", "unsqueeze", "t", "empty",
    "empty_like", "lift_fresh", "split", "split_with_sizes", "_unsafe_view", "new_empty",
}  # fmt: skip


class Count(TorchDispatchMode):
    """Counts operators that are launched."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        self.found[name] += name not in NO_LAUNCH
        return func(*args, **(kwargs or {}))


class NoModel:
    """A runner whose logits are always the same."""

    page_size, n_pages, max_position, vocab_size = 64, 64, 4096, VOCABULARY
    can_draft, device, n_drafts, max_ahead, runs_ahead = False, torch.device("cpu"), 0, 4, True
    end_tokens, expert_tokens = (), None

    def __init__(self) -> None:
        self.results = Results(
            torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(0)), torch.empty(1, 1)
        )

    def run(self, batch: Batch) -> Results:
        return self.results


def call(calls: list[object], function: Any, *args: Any) -> Any:
    """Call a function, and append it to those that were called."""
    calls.append(function)
    return function(*args)


def launches(sampling: Sampling, engine: Engine) -> str:
    """Count what the choice of a token launches, and the copies between host and device."""
    request = Request(0, tuple(range(5, 90)), sampling, 0)
    request.tokens.extend(range(70, 110))
    if sampling.grammar:
        request.matcher = engine._grammars.compile(sampling.grammar)
    row = Row(sampling, 0, len(request.tokens), request.histories(())[0])
    found, sent = Count(), list[object]()
    with found, ExitStack() as patches:
        for module in sampler, penalties:
            for name in ("send", "send_arrays"):
                if send := getattr(module, name, None):
                    counted = partial(call, sent, send)
                    patches.enter_context(mock.patch.object(module, name, counted))
        ChosenTokens(torch.randn(1, VOCABULARY), [row])
    n_received = found.found.pop("copy_")
    kernels = +found.found - Counter(randn=1)
    return f"{kernels.total()} operators, {len(sent)} copies to the device, {n_received} from it: {dict(kernels)}"


def host_time(sampling: dict[str, Any], tokenizer: Tokenizer) -> float:
    """Return the microseconds of a step of one request, without the model and the sampling of logits."""
    engine = Engine(cast(Any, NoModel()), tokenizer, EngineConfig())
    engine.compiles_in_background = False
    engine.add([*range(5, 90)], Sampling(STEPS, 1.0, ignore_eos=True, **sampling))
    seconds = []
    while engine.has_work:
        begin = time.thread_time()
        engine.step()
        seconds.append(time.thread_time() - begin)
    engine.close()
    return 1e6 * statistics.median(seconds)


def argmax(logits: Tensor, *_: Tensor) -> Tensor:
    """Stand for `sample_tokens`."""
    return logits.argmax(-1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    tokenizer = Tokenizer.train(["the text of a test, in letters and blanks"], 320)
    engine = Engine(cast(Any, NoModel()), tokenizer)
    for name, fields in WAYS.items():
        print(f"{name}: {launches(Sampling(400, 1.0, **fields), engine)}")
    engine.close()
    with mock.patch.object(sampler, "sample_tokens", argmax):
        for name, fields in WAYS.items():
            print(f"{name}: {min(host_time(fields, tokenizer) for _ in range(9)):.0f} us a step")
