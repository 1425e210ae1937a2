"""A queue of training runs over the GPUs of a machine.

    python -m experiments.loss.run STORE OUT --seconds 1080         runs experiments.loss.jobs, and ends by itself
    python -m experiments.loss.run STORE OUT --state [RESULTS]         prints where they stand; RESULTS.json gathers all
    python -m experiments.loss.run STORE OUT --known RESULTS.json …    goes on from what another day's runs gave
    python -m experiments.loss.run STORE OUT --jobs rate-bf16-2 …      runs these, and what they go on from, alone

One process a run, one run a GPU, or two of the groups and sizes that `--together` names. Jobs begin in the order of the
list; one that would not end in time, by the speed of those like it, is passed over for a shorter one, and one that goes
on from another waits for what that leaves. At the deadline nothing new begins and what runs is asked to stop, which
keeps what it has. A job that fails costs only itself: the end of its log is kept. OUT/JOB.json is a run's result
(`experiments.loss.job`), OUT/JOB.log what it said. Of what `--known` has, a job that `--jobs` names is run again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from experiments.loss.jobs import Group, Job, all_jobs, named

ROOM = 2  # of a GPU: a run takes all of it, or half
READY = 45.0  # seconds until the first step, where nothing is known yet, and after the last
GRACE = 60.0  # seconds in which a stopped run writes what it has
LOG_LINES = 30


@dataclass
class Running:
    job: Job
    gpu: int
    room: int
    process: subprocess.Popen[bytes]


class Queue:
    """Jobs, GPUs, and what runs where."""

    def __init__(self, store: Path, out: Path, jobs: list[Job], gpus: list[int], together: set[str], deadline: float):
        self.store, self.out, self.gpus, self.together, self.deadline = store, out, gpus, together, deadline
        self.waiting = [job for job in jobs if not (out / f"{job.name}.json").exists()]
        self.running: list[Running] = []
        self.passed_over: set[str] = set()

    def run(self) -> None:
        """Until nothing is left to do, or the deadline."""
        while time.time() < self.deadline:
            self._reap()
            self._begin()
            if not self.running:  # whatever waits has no time, or nothing to go on from
                break
            time.sleep(0.5)
        for running in self.running:
            running.process.send_signal(signal.SIGINT)
        limit = time.time() + GRACE
        while self.running and time.time() < limit:
            self._reap()
            time.sleep(0.2)
        for running in self.running:
            running.process.kill()
            running.process.wait()
        self._reap()

    def _begin(self) -> None:
        """Every job that there is room and time for."""
        for job in list(self.waiting):
            if job.after and not (self.out / f"{job.after}.pt").exists():
                continue
            gpu = self._room_for(job)
            if gpu is None:
                if all(self._free(gpu) == 0 for gpu in self.gpus):
                    return
                continue
            if time.time() + self._needs(job) > self.deadline:
                self.passed_over.add(job.name)
                continue
            self.waiting.remove(job)
            self.running.append(self._start(job, gpu))

    def _start(self, job: Job, gpu: int) -> Running:
        asked, result = self.out / f"{job.name}.job", self.out / f"{job.name}.json"
        asked.write_text(json.dumps(job.to_json()))
        environment = {"OMP_NUM_THREADS": "4", "PYTHONUNBUFFERED": "1", **os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
        with (self.out / f"{job.name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "experiments.loss.job", str(self.store), str(asked), str(result)],
                stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
            )  # fmt: skip
        return Running(job, gpu, self._takes(job), process)

    def _reap(self) -> None:
        for running in list(self.running):
            if running.process.poll() is None:
                continue
            self.running.remove(running)
            if running.process.returncode:
                note_failure(self.out, running.job, running.process.returncode)
            note(self.out, running.job, {"shared": running.room < ROOM})  # then its tokens/s are no speed

    def _takes(self, job: Job) -> int:
        return 1 if {job.size, job.group} & self.together else ROOM

    def _free(self, gpu: int) -> int:
        return ROOM - sum(running.room for running in self.running if running.gpu == gpu)

    def _room_for(self, job: Job) -> int | None:
        """The GPU with the most room, if that is enough."""
        gpu = max(self.gpus, key=self._free)
        return gpu if self._free(gpu) >= self._takes(job) else None

    def _needs(self, job: Job) -> float:
        """Seconds, by the slowest known run of its size and recipe, or of its size; 0 if there is none."""
        known = [result for result in results(self.out) if result["job"]["size"] == job.size and result["speed"]]
        alike = [result for result in known if result["job"]["recipe"] == job.recipe] or known
        if not alike:
            return 0.0
        speed = min(sorted(result["speed"])[len(result["speed"]) // 2] for result in alike)
        return READY + job.own_tokens / speed


def take_over(known: list[dict[str, Any]], out: Path) -> None:
    """Writes results of another day as OUT's own: of runs that ended, and left nothing for others to go on from."""
    for result in known:
        if result["state"] in ("done", "diverged") and result["job"].get("until", 1.0) == 1.0:
            (out / f"{result['job']['name']}.json").write_text(json.dumps(result))


def note_failure(out: Path, job: Job, status: int) -> None:
    """Writes into a job's result that it failed, and the end of its log; what it had measured stays."""
    said = (out / f"{job.name}.log").read_text(errors="replace").splitlines()[-LOG_LINES:]
    note(out, job, {"state": "failed", "why": f"exit status {status}", "log": said})


def note(out: Path, job: Job, more: dict[str, Any]) -> None:
    """Adds to a job's result, which there may not be yet."""
    file = out / f"{job.name}.json"
    result = json.loads(file.read_text()) if file.exists() else {"job": job.to_json(), "speed": []}
    beside = file.with_suffix(".part")  # who reads at this moment sees one or the other
    beside.write_text(json.dumps(result | more))
    beside.replace(file)


def results(out: Path) -> list[dict[str, Any]]:
    """What there is of every job that was begun."""
    return [json.loads(file.read_text()) for file in sorted(out.glob("*.json"))]


def table(found: list[dict[str, Any]]) -> str:
    from octile.bench.rows import align_columns

    rows = [["job", "state", "steps", "tokens/s", "loss", "held out", "±", "max/mean load", "why"]]
    for result in found:
        steps, val = result.get("steps") or [0], result.get("val_loss") or []
        asked = result.get("facts", {}).get("steps_asked", "?")
        loads = result.get("imbalance") or [[]]
        rows.append([
            result["job"]["name"],
            result["state"],
            f"{steps[-1]} of {asked}",
            f"{sorted(result['speed'])[len(result['speed']) // 2]:,}" if result["speed"] else "",
            f"{result['loss'][-1]:.4f}" if result.get("loss") else "",
            f"{val[-1]:.4f}" if val else "",
            f"{result['val_error'][-1]:.4f}" if val else "",
            f"{max(loads[-1]):.2f}" if loads[-1] else "",
            result.get("why", "")[:60],
        ])  # fmt: skip
    return align_columns(rows, right={"steps", "tokens/s", "loss", "held out", "±", "max/mean load"})


def state(out: Path, gathered: Path | None) -> None:
    """Prints a line a job, and writes all results into one file."""
    found = results(out)
    counts = {name: sum(result["state"] == name for result in found) for name in ("running", "done", "stopped")}
    others = [result for result in found if result["state"] not in counts]
    print(table(found))
    print(", ".join(f"{n} {name}" for name, n in counts.items()) + f", {len(others)} others, of {len(all_jobs())}")
    for result in others:
        if result["state"] == "failed":
            print(f"\n{result['job']['name']}: " + "\n    ".join(result["log"][-6:]))
    if gathered is not None:
        gathered.parent.mkdir(parents=True, exist_ok=True)
        gathered.write_text(json.dumps({"results": found}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("store", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, help="until the deadline")
    parser.add_argument("--gpus", default="0", help="their numbers: 0,1,2")
    parser.add_argument("--together", default="", help="groups or sizes of which two runs share a GPU: ablation,30m")
    parser.add_argument("--groups", default="", help=f"of these alone: {','.join(get_args(Group))}")
    parser.add_argument("--jobs", default="", help="these alone, by their names, and what they go on from")
    parser.add_argument("--tokens", type=float, default=1.0, help="every job's, times this")
    parser.add_argument("--known", type=Path, help="results of jobs that are not run again, if they ended")
    parser.add_argument("--toy", action="store_true", help="every job with a model for a CPU")
    parser.add_argument("--state", nargs="?", type=Path, const=Path(), help="only say where the jobs stand")
    asked = parser.parse_args()
    if asked.state is not None:
        state(asked.out, asked.state if asked.state.name else None)
        return
    if asked.seconds is None:
        parser.error("--seconds is needed: when nothing new shall begin")
    deadline = time.time() + asked.seconds
    jobs = all_jobs("toy", ("toy",)) if asked.toy else all_jobs()
    jobs = [replace(job, tokens=job.tokens * asked.tokens) for job in jobs]
    if asked.groups:
        jobs = [job for job in jobs if job.group in asked.groups.split(",")]
    again = asked.jobs.split(",") if asked.jobs else []
    if again:
        try:
            jobs = named(jobs, again)
        except ValueError as error:
            parser.error(str(error))
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.known:
        known = json.loads(asked.known.read_text())["results"]
        take_over([result for result in known if result["job"]["name"] not in again], asked.out)
    gpus = [int(gpu) for gpu in asked.gpus.split(",")]
    queue = Queue(asked.store, asked.out, jobs, gpus, set(asked.together.split(",")), deadline)
    queue.run()
    left = {job.name for job in queue.waiting}
    print(f"left out for want of time: {', '.join(sorted(left & queue.passed_over)) or 'none'}")
    print(f"not begun: {', '.join(sorted(left - queue.passed_over)) or 'none'}")
    state(asked.out, None)


if __name__ == "__main__":
    main()
