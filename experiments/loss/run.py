"""Run the jobs of the experiment as a queue over the GPUs of a machine.

    python -m experiments.loss.run STORE OUT --seconds 1080            runs experiments.loss.jobs until the deadline
    python -m experiments.loss.run STORE OUT --state                   prints the state of the jobs
    python -m experiments.loss.run STORE OUT --known FOLDER            skips jobs whose results the folder has
    python -m experiments.loss.run STORE OUT --jobs rate-bf16-2,…      runs only these and those that they continue from

Each run has its own process. A GPU has one run, or `--share` runs if all are of the groups or sizes that `--together`
names; the next run starts up while the one before it makes its last steps and is evaluated. Jobs start in the order of
the list, or of `--jobs`. A job that would not end in time, judged by the speed of similar runs, is skipped for a
shorter one. A job that continues from another waits for the weights and moments that it saves. At the deadline no job
starts any more, and running ones are asked to stop and write what they have. A job that fails does not affect the
others: the end of its log is recorded. If it had made steps, it is started once more, since GPUs fail, too;
JOB.failed.gz and JOB.failed.log are those of the first time. OUT/JOB.json.gz is a run's result
(`experiments.loss.job`), OUT/JOB.log its output. A job that both `--known` and `--jobs` name is run again.
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
from experiments.loss.runs import read_result, read_runs, result_file, write_result
from octile.report.machine import machine

OVERHEAD_SECONDS = 45.0  # estimated time before the first step and after the last
STARTUP_SECONDS = 15.0  # before the last step of a run, from which on the next one may start up on its GPU
STOP_SECONDS = 60.0  # how long a stopped run may take to write its result
LOG_LINES = 30  # of a failed run, in its result


@dataclass
class Running:
    """A running job and its slots."""

    job: Job
    gpu: int
    slots: int
    process: subprocess.Popen[bytes]


class Queue:
    """Waiting and running jobs, and the GPUs that they run on."""

    def __init__(
        self, store: Path, out: Path, jobs: list[Job], gpus: list[int], together: set[str], share: int, deadline: float
    ):
        self.store, self.out, self.gpus, self.deadline = store, out, gpus, deadline
        self.together, self.slots = together, share  # of a GPU; a run takes all, or one if it shares the GPU
        self.waiting = [job for job in jobs if not result_file(out, job.name).exists()]
        self.running: list[Running] = []
        self.passed_over: set[str] = set()

    def run(self) -> None:
        """Run jobs until none is left or the deadline."""
        while time.time() < self.deadline:
            self._reap()
            self._start_ready_jobs()
            if not self.running:  # no waiting job has enough time, and what it continues from
                break
            time.sleep(0.5)
        for running in self.running:
            running.process.send_signal(signal.SIGINT)
        limit = time.time() + STOP_SECONDS
        while self.running and time.time() < limit:
            self._reap()
            time.sleep(0.2)
        for running in self.running:
            running.process.kill()
            running.process.wait()
        self._reap()

    def _start_ready_jobs(self) -> None:
        """Start every job for which there are free slots and enough time."""
        for job in list(self.waiting):
            if job.after and not (self.out / f"{job.after}.pt").exists():
                continue
            gpu = self._gpu_for(job)
            if gpu is None:
                if all(self._free_slots(gpu) == 0 for gpu in self.gpus):
                    return
                continue
            if not self._has_time_for(job):
                self.passed_over.add(job.name)
                continue
            self.waiting.remove(job)
            self.running.append(self._start(job, gpu))

    def _start(self, job: Job, gpu: int) -> Running:
        asked, result = self.out / f"{job.name}.job", result_file(self.out, job.name)
        asked.write_text(json.dumps(job.to_json()))
        environment = {"OMP_NUM_THREADS": "4", "PYTHONUNBUFFERED": "1", **os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
        with (self.out / f"{job.name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "experiments.loss.job", str(self.store), str(asked), str(result)],
                stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
            )  # fmt: skip
        return Running(job, gpu, self._slots_needed(job), process)

    def _reap(self) -> None:
        for running in list(self.running):
            if running.process.poll() is None:
                continue
            self.running.remove(running)
            if running.process.returncode:
                record_failure(self.out, running.job, running.process.returncode)
            update_result(self.out, running.job, {"shared": running.slots < self.slots})  # a shared GPU: no valid speed
            if running.process.returncode and self._had_steps(running.job):
                self._try_again(running.job)

    def _had_steps(self, job: Job) -> bool:
        return bool(read_result(result_file(self.out, job.name)).get("steps"))

    def _try_again(self, job: Job) -> None:
        """Start a job that has failed once more, before the others, so that its seed is complete."""
        if (kept := self.out / f"{job.name}.failed.gz").exists() or not self._has_time_for(job):
            return
        result_file(self.out, job.name).rename(kept)
        (self.out / f"{job.name}.log").rename(kept.with_suffix(".log"))
        self.waiting.insert(0, job)

    def _slots_needed(self, job: Job) -> int:
        return 1 if {job.size, job.group} & self.together else self.slots

    def _free_slots(self, gpu: int) -> int:
        return self.slots - sum(
            running.slots for running in self.running if running.gpu == gpu and not self._is_ending(running)
        )

    def _is_ending(self, running: Running) -> bool:
        """Whether a run has at most STARTUP_SECONDS of training left, by the speed of its last line."""
        file, job = result_file(self.out, running.job.name), running.job
        result = read_result(file) if file.exists() else {}
        if not (result.get("steps") and (asked := result.get("facts", {}).get("steps_asked"))):
            return False
        left = job.until - result["steps"][-1] / asked
        return left * job.tokens <= STARTUP_SECONDS * result["speed"][-1]

    def _gpu_for(self, job: Job) -> int | None:
        """Return the GPU with the most free slots, or None if they are too few for the job."""
        gpu = max(self.gpus, key=self._free_slots)
        return gpu if self._free_slots(gpu) >= self._slots_needed(job) else None

    def _has_time_for(self, job: Job) -> bool:
        return time.time() + self._estimated_seconds(job) <= self.deadline

    def _estimated_seconds(self, job: Job) -> float:
        """Estimate the run time from the slowest known run of its size and recipe, or of its size; 0 without one."""
        known = [result for result in read_runs(self.out) if result["job"]["size"] == job.size and result["speed"]]
        alike = [result for result in known if result["job"]["recipe"] == job.recipe] or known
        if not alike:
            return 0.0
        speed = min(sorted(result["speed"])[len(result["speed"]) // 2] for result in alike)
        return OVERHEAD_SECONDS + job.own_tokens / speed


def import_results(known: list[dict[str, Any]], out: Path) -> None:
    """Write earlier sessions' results to OUT, except of runs that did not end and of trunks, whose weights are gone."""
    for result in known:
        if result["state"] in ("done", "diverged") and not Job(**result["job"]).is_trunk:
            write_result(result_file(out, result["job"]["name"]), result)


def record_failure(out: Path, job: Job, status: int) -> None:
    """Add to a job's result that it failed, with the end of its log; its measurements stay."""
    log = (out / f"{job.name}.log").read_text(errors="replace").splitlines()[-LOG_LINES:]
    update_result(out, job, {"state": "failed", "why": f"exit status {status}", "log": log})


def update_result(out: Path, job: Job, more: dict[str, Any]) -> None:
    """Add entries to a job's result, which is created if it is missing."""
    file = result_file(out, job.name)
    result = read_result(file) if file.exists() else {"job": job.to_json(), "speed": []}
    write_result(file, result | more)


def table(found: list[dict[str, Any]]) -> str:
    """Format a line per job."""
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


def print_state(out: Path) -> None:
    """Print a line per job."""
    found = read_runs(out)
    counts = {name: sum(result["state"] == name for result in found) for name in ("running", "done", "stopped")}
    others = [result for result in found if result["state"] not in counts]
    print(table(found))
    print(", ".join(f"{n} {name}" for name, n in counts.items()) + f", {len(others)} others, of {len(all_jobs())}")
    for result in others:
        if result["state"] == "failed":
            print(f"\n{result['job']['name']}: " + "\n    ".join(result["log"][-6:]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("store", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, help="time until the deadline")
    parser.add_argument("--gpus", default="0", help="indices, such as 0,1,2")
    parser.add_argument("--together", default="", help="groups or sizes whose runs share a GPU, such as ablation,30m")
    parser.add_argument("--share", type=int, default=2, help="how many runs of --together a GPU has at once")
    parser.add_argument("--groups", default="", help=f"run only these groups, of {','.join(get_args(Group))}")
    parser.add_argument("--jobs", default="", help="run only the jobs of these names and those that they continue from")
    parser.add_argument("--tokens", type=float, default=1.0, help="factor by which every job's tokens are multiplied")
    parser.add_argument("--known", type=Path, help="folder of earlier results; jobs that ended are skipped")
    parser.add_argument("--toy", action="store_true", help="run every job with a model small enough for a CPU")
    parser.add_argument("--state", action="store_true", help="only print the state of the jobs")
    asked = parser.parse_args()
    if asked.state:
        print_state(asked.out)
        return
    if asked.seconds is None:
        parser.error("--seconds is needed: the time until the deadline")
    if not asked.store.is_dir():
        parser.error(f"there is no store {asked.store}")
    if asked.known and not read_runs(asked.known):
        parser.error(f"--known must be a folder with results, JOB.json.gz; {asked.known} has none")
    if asked.share < 1:
        parser.error(f"--share must be at least 1, not {asked.share}")
    deadline = time.time() + asked.seconds
    jobs = all_jobs("toy", ("toy",)) if asked.toy else all_jobs()
    jobs = [replace(job, tokens=job.tokens * asked.tokens) for job in jobs]
    if asked.groups:
        jobs = [job for job in jobs if job.group in asked.groups.split(",")]
    only = asked.jobs.split(",") if asked.jobs else []
    if only:
        try:
            jobs = named(jobs, only)
        except ValueError as error:
            parser.error(str(error))
    if any(job.group == "planned" for job in jobs) and machine()["commit"] is None:
        parser.error("the runs of a plan record their commit: run them in a clone, or set OCTILE_COMMIT")
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.known:
        known = [result for result in read_runs(asked.known) if result["job"]["name"] not in only]
        import_results(known, asked.out)
    gpus = [int(gpu) for gpu in asked.gpus.split(",")]
    queue = Queue(asked.store, asked.out, jobs, gpus, set(asked.together.split(",")), asked.share, deadline)
    queue.run()
    left = {job.name for job in queue.waiting}
    print(f"left out for lack of time: {', '.join(sorted(left & queue.passed_over)) or 'none'}")
    print(f"not begun: {', '.join(sorted(left - queue.passed_over)) or 'none'}")
    print_state(asked.out)


if __name__ == "__main__":
    main()
