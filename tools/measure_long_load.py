"""Serve a mixed load for minutes, and measure memory and pauses.

    python -m tools.measure_long_load v2_lite 600
    python -m tools.measure_long_load tiny 30

The model has random FP8 weights, of V2-Lite's shape or of the preset `tiny`. The requests are those of
`tests/serve/http/test_mixed_load.py`: texts, chats, schemas, tools, scored and repeated prompts, several choices, and
clients that leave; one in eight has a prompt of 2,000 letters. So many clients are there at a time (--clients), each
with one request.

A row a minute has the requests that have ended, their tokens, the requests with a wrong answer or none, the longest
pause, the resident memory of the server's processes, and that of the GPU with this process's. Requests that end after
the last full minute are in a row of their own. A pause is a time in which no stream gets an event, although one has
begun and not ended. This process is part of it: its own longest delay stands beside it. What has grown since the first
minute follows, by process and mapping. The first 20 seconds count for wrong answers only, which are listed at the end.
"""

import argparse
import json

from octile.cli import run_script
from octile.extras import require
from octile.serve.http.command import PACKAGES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["tiny", "v2_lite"])
    parser.add_argument("seconds", type=float)
    parser.add_argument("--clients", type=int, default=64)
    asked = parser.parse_args()
    for name, value in ("seconds", asked.seconds), ("--clients", asked.clients):
        if not value > 0:
            parser.error(f"{name} must be above 0, not {value:g}")
    require(*PACKAGES, "llguidance", extra="serve")
    require("httpx", extra="test")

    from octile.bench.rows import align_columns
    from tools.long_load import HEAD, growth, measure

    load = measure(asked.model, asked.clients, asked.seconds)
    rows = [["minute", *HEAD], *([str(i), *minute.cells()] for i, minute in enumerate(load.minutes, 1))]
    print(align_columns(rows, right=set(rows[0])))
    for n_bytes, pid, name in growth(load.minutes[0], load.minutes[-1]):
        print(f"grown since the first minute: {n_bytes / 2**20:.0f} MiB of process {pid}, {name}")
    print("wrong:", json.dumps(load.wrong) if load.wrong else "none")


if __name__ == "__main__":
    run_script(main)
