"""`octile bench serve`: how fast `octile serve` answers.

engine.py           on a GPU, the engine alone with a model of 16B parameters, vs. transformers
ranks.py            by torchrun, expert-parallel decoding, and nothing else
endpoint.py         the server with one client, with many, with more than it takes, and with drafts
random_weights.py   their models' weights
peer/               `octile bench serve --peer vllm`: engine and server vs. vLLM's, and nothing else
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from octile.bench import goals
from octile.bench.rows import LEGEND, Row, table_with
from octile.bench.serve import endpoint, engine, ranks
from octile.parallel.device import take_own_gpu

REFUSED = "refused with 503: at once the server takes as many requests as --limits.in-flight says, 256 if not given."


def rows(run: Path | None) -> Iterator[Row]:
    """Yield what clients of a server of this run see; on a GPU then the speed of the engine with a larger model.

    Without a run, on the ranks that torchrun has started, yield the speed of a larger model that is expert parallel.

    Raises:
        ImportError: a package of the extra `serve` is missing, and there is a run.
        FileNotFoundError: there is no model or no tokenizer.
        RuntimeError: the server ends early.
        ValueError: the ranks do not divide the experts, or a machine has fewer GPUs than ranks.
    """
    if run is None:
        device = take_own_gpu("serve on several ranks is measured with a GPU for each")
        yield from ranks.rows(ranks.V2_LITE, device)
        return
    yield from endpoint.rows(run)
    if torch.cuda.is_available():
        yield from engine.rows(engine.V2_LITE, torch.device("cuda"))


def show(rows: Sequence[Row]) -> str:
    """Format the table, and on a machine that has goals the verdicts on them."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    table = table_with(LEGEND, rows)
    if any(row.case == endpoint.CROWD_CASE for row in rows):
        table += f"\n{REFUSED}"
    return "\n\n".join(filter(None, (table, goals.serve_verdicts(rows, gpu))))
