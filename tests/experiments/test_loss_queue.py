"""Tests of the job queue: which GPU a job gets, failed jobs, and the deadline."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments.loss import run as module
from experiments.loss.jobs import branch, job
from experiments.loss.run import Queue, main, print_state
from experiments.loss.runs import read_result, read_runs, result_file, write_result

SMALL, LARGE = (job("rate", size, "bf16", 0, 1e6) for size in ("30m", "150m"))
FAILS = job("rate", "30m", "int8_tiles", 0, 1e6)
# Replaces the process of a job: it writes its result, waits, and ends as requested.
SCRIPT = """
import gzip, json, os, signal, sys, time
def write(result):
    with gzip.open(out + ".part", "wt") as file:
        json.dump(result, file)
    os.replace(out + ".part", out)
store, asked, out = sys.argv[-3:]
job = json.load(open(asked))
stop = []
signal.signal(signal.SIGINT, lambda *_: stop.append(1))
result = {"job": job, "state": "running", "speed": [1e5], "steps": [1], "loss": [2.0], "imbalance": [[1.5]],
          "val_loss": [], "val_error": []}
if job["recipe"] == "int8_tiles":
    sys.exit("no tensor core for this")
write(result)
if store == "breaks":
    with open(os.path.dirname(out) + "/" + job["name"] + ".begun", "a") as begun:
        begun.write("1")
    if job["name"] == "breaks":
        sys.exit("the GPU has failed")
limit = time.time() + (30 if store == "slow" else 0.05)
while time.time() < limit and not stop:
    time.sleep(0.02)
write(result | {"state": "stopped" if stop else "done"})
"""


@pytest.fixture
def queue(tmp_path, monkeypatch):
    """queue(jobs, …): a queue whose jobs run SCRIPT."""
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\n{SCRIPT}")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(module, "time", SimpleNamespace(time=time.time, sleep=lambda _: time.sleep(0.01)))
    out = tmp_path / "out"
    out.mkdir()

    def make(jobs, gpus=(0,), together=(), share=2, seconds=200.0, store="quick"):
        return Queue(Path(store), out, list(jobs), list(gpus), set(together), share, time.time() + seconds)

    return make


def states(queue):
    return {result["job"]["name"]: result["state"] for result in read_runs(queue.out)}


def test_a_job_that_fails_costs_only_itself_and_leaves_its_log(queue, capsys):
    q = queue([FAILS, SMALL])
    q.run()
    assert states(q) == {FAILS.name: "failed", SMALL.name: "done"}
    (failed,) = (result for result in read_runs(q.out) if result["state"] == "failed")
    assert failed["log"] == ["no tensor core for this"]
    assert not any(result["shared"] for result in read_runs(q.out))
    print_state(q.out)
    assert "no tensor core for this" in capsys.readouterr().out


def test_a_job_that_fails_after_steps_is_started_once_more_before_the_others(queue):
    breaks = replace(SMALL, name="breaks")
    q = queue([breaks, SMALL], store="breaks")
    q.run()
    assert states(q) == {"breaks": "failed", SMALL.name: "done"}
    assert (q.out / "breaks.begun").read_text() == "11"  # twice, and not a third time
    assert (q.out / "breaks.failed.log").read_text() == (q.out / "breaks.log").read_text() == "the GPU has failed\n"
    assert read_result(q.out / "breaks.failed.gz")["state"] == "failed"
    begun = [(q.out / f"{name}.begun").stat().st_mtime_ns for name in ("breaks", SMALL.name)]
    assert begun == sorted(begun)


def test_a_job_that_fails_stays_in_the_results_if_there_is_no_time_to_start_it_once_more(queue):
    breaks = replace(SMALL, name="breaks", tokens=1e12)
    q = queue([breaks], store="breaks")
    q.run()
    assert states(q) == {"breaks": "failed"}
    assert (q.out / "breaks.begun").read_text() == "1"


def test_at_the_deadline_running_jobs_are_stopped_and_write_partial_results(queue, monkeypatch):
    q = queue([SMALL, LARGE], store="slow")

    def sleep(_: float) -> None:
        if states(q):  # the first job has begun
            q.deadline = 0.0
        time.sleep(0.01)

    monkeypatch.setattr(module.time, "sleep", sleep)
    q.run()
    assert states(q) == {SMALL.name: "stopped"}
    assert q.waiting == [LARGE]


@pytest.mark.parametrize(("options", "expected"), [({}, 1), ({"share": 2}, 2), ({"share": 3}, 3)])
def test_as_many_jobs_share_a_gpu_as_are_allowed(queue, options, expected):
    jobs = [job("rate", "30m", "bf16", seed, 1e6) for seed in range(4)]
    q = queue(jobs, together=["rate"] if options else [], store="slow", **options)
    try:
        q._start_ready_jobs()
        assert len(q.running) == expected
    finally:
        for running in q.running:
            running.process.kill()
            running.process.wait()


@pytest.mark.parametrize(("steps", "until", "expected"), [(70, 1.0, 1), (90, 1.0, 2), (20, 0.4, 1), (30, 0.4, 2)])
def test_the_next_run_of_a_gpu_starts_up_during_the_last_seconds_of_a_run(queue, steps, until, expected):
    first = replace(SMALL, name="first", tokens=1e7, until=until)  # 100 steps of 1e5 tokens, one a second
    q = queue([first], store="slow")
    try:
        q._start_ready_jobs()
        while not result_file(q.out, "first").exists():
            time.sleep(0.01)
        known = {"job": first.to_json(), "facts": {"steps_asked": 100}, "steps": [steps], "speed": [1e5]}
        write_result(result_file(q.out, "first"), known)
        q.deadline, q.waiting = time.time() + 200, [SMALL, FAILS]
        q._start_ready_jobs()
        assert len(q.running) == expected
    finally:
        for running in q.running:
            running.process.kill()
            running.process.wait()


def test_a_run_that_shared_its_gpu_is_marked(queue):
    q = queue([SMALL, FAILS, LARGE], together=["30m"])
    q.run()
    shared = {result["job"]["name"]: result["shared"] for result in read_runs(q.out)}
    assert shared == {SMALL.name: True, FAILS.name: True, LARGE.name: False}


def test_a_job_that_would_not_end_in_time_is_passed_over_for_a_shorter_one(queue):
    known = {"job": LARGE.to_json(), "state": "done", "speed": [1e3]}
    q = queue([])
    write_result(result_file(q.out, "known"), known | {"job": known["job"] | {"name": "known"}})
    q.waiting = [LARGE, SMALL]
    q._start_ready_jobs()
    assert [running.job for running in q.running] == [SMALL]
    assert q.passed_over == {LARGE.name}
    q.running[0].process.kill()
    q.running[0].process.wait()


def test_a_branch_waits_for_the_checkpoint_of_its_trunk(queue):
    trunk = replace(SMALL, name="trunk", group="trunk", until=0.4)
    q = queue([branch(trunk, "bf16"), trunk])
    q.run()
    assert states(q) == {"trunk": "done"}  # no checkpoint to continue from; the queue still ends
    (q.out / "trunk.pt").touch()
    q.run()
    assert states(q) == {"trunk": "done", "branch-30m-bf16-0": "done"}


def test_jobs_with_earlier_results_are_not_run_again(tmp_path, monkeypatch, capsys):
    done, failed, trunk, unknown = (replace(SMALL, name=name) for name in ("done", "failed", "trunk", "unknown"))
    trunk = replace(trunk, group="trunk", until=0.4)
    begun = []
    monkeypatch.setattr(module, "all_jobs", lambda *sizes: [done, failed, trunk, unknown])
    monkeypatch.setattr(Queue, "run", lambda queue: begun.extend(job.name for job in queue.waiting))
    (tmp_path / "known").mkdir()
    for one, state in ((done, "done"), (failed, "failed"), (trunk, "done")):
        result = {"job": one.to_json(), "state": state, "speed": []}
        write_result(result_file(tmp_path / "known", one.name), result)
    options = [str(tmp_path), str(tmp_path / "out"), "--seconds", "9", "--known", str(tmp_path / "known")]
    monkeypatch.setattr(sys, "argv", ["run", *options])
    main()
    assert begun == ["failed", "trunk", "unknown"]  # the checkpoint of the trunk was on another machine
    assert "not begun: failed, trunk, unknown" in capsys.readouterr().out


TRUNK = replace(SMALL, name="trunk", group="trunk", until=0.4)


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """begun(option, …): the names of the jobs that main starts, out of three jobs and a trunk."""
    jobs = [TRUNK, branch(TRUNK, "bf16"), SMALL, LARGE]
    queued = []
    monkeypatch.setattr(module, "all_jobs", lambda *sizes: jobs)
    monkeypatch.setattr(Queue, "run", lambda queue: queued.extend(job.name for job in queue.waiting))

    def run(*options):
        monkeypatch.setattr(sys, "argv", ["run", str(tmp_path), str(tmp_path / "out"), "--seconds", "9", *options])
        main()
        return queued

    return run


def test_named_jobs_run_in_their_order_with_the_trunks_that_they_need(begun):
    assert begun("--jobs", f"{LARGE.name},branch-30m-bf16-0") == [LARGE.name, "trunk", "branch-30m-bf16-0"]


def test_a_named_job_is_run_again_despite_an_earlier_result(begun, tmp_path):
    (tmp_path / "known").mkdir()
    for one in (SMALL, LARGE):
        write_result(result_file(tmp_path / "known", one.name), {"job": one.to_json(), "state": "done", "speed": []})
    assert begun("--jobs", SMALL.name, "--known", str(tmp_path / "known")) == [SMALL.name]
    assert [result["job"]["name"] for result in read_runs(tmp_path / "out")] == [LARGE.name]


def test_a_name_that_no_job_has_is_refused(begun, tmp_path, capsys):
    with pytest.raises(SystemExit):
        begun("--jobs", "rate-bf16-5")
    assert "no job is named rate-bf16-5" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_store_or_known_results_that_are_not_there_are_refused(begun, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        begun("--known", str(tmp_path / "knwon"))
    monkeypatch.setattr(sys, "argv", ["run", str(tmp_path / "strore"), str(tmp_path / "out"), "--seconds", "9"])
    with pytest.raises(SystemExit):
        main()
    errors = capsys.readouterr().err
    assert "knwon has none" in errors
    assert "there is no store" in errors
    assert not (tmp_path / "out").exists()


def test_a_finished_job_is_not_run_again(queue):
    q = queue([SMALL])
    q.run()
    assert queue([SMALL, LARGE]).waiting == [LARGE]
