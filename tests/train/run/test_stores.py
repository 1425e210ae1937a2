"""Runs whose checkpoints and data are in an object store: moto's S3 server, which s3fs reads and writes like S3."""

import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import s3fs
import torch

from octile.checkpoint import DistributedCheckpoints, load_checkpoint
from octile.checkpoint.store import ANSWER_WITHIN, S3_PATIENCE, Store
from octile.checkpoint.training import find_latest
from octile.cli import main
from octile.train.data.token_store import FILES, LEFT_OUT, MANIFEST
from tests.object_store import ENVIRONMENT, ObjectStore, object_store
from tests.train.conftest import estimate_memory_once, write_no_report
from tests.train.strategy.test_bad_ranks import train
from tests.train.strategy.test_torchrun import OPTIONS, losses
from tests.worlds import begin_ranks

ALONE = [*OPTIONS, "--parallel.dp=1", "--checkpoint-every=2"]


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with object_store() as store:
        yield store


@pytest.fixture
def place(server: ObjectStore, tmp_path: Path) -> str:
    """A folder of the bucket that only one test uses."""
    return f"{server.bucket}/{tmp_path.name}"


@pytest.fixture(scope="module")
def arguments(text: Path) -> list[str]:
    return [*ALONE, f"--data={text}"]


@pytest.fixture(scope="module")
def straight(arguments, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process, whose checkpoints are in its folder."""
    out = tmp_path_factory.mktemp("straight") / "run"
    with pytest.MonkeyPatch.context() as patch:
        write_no_report(patch)
        main(["train", *arguments, "--steps=8", f"--out={out}"])
    return out


@pytest.fixture(scope="module")
def run_of_four_steps(arguments, server, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of four steps, and where its checkpoints are."""
    out, place = tmp_path_factory.mktemp("four") / "run", f"{server.bucket}/four"
    with pytest.MonkeyPatch.context() as patch:
        write_no_report(patch)
        main(["train", *arguments, "--steps=4", f"--checkpoints={place}", f"--out={out}"])
    return out, place


@pytest.fixture
def begun(run_of_four_steps, server, place: str, tmp_path: Path) -> Path:
    """A run of four steps, and a copy of its checkpoints at `place`, from which it continues if that is given."""
    run, of_run = run_of_four_steps
    server.files.copy(of_run, place, recursive=True)
    return shutil.copytree(run, tmp_path / "run")


def final(place: str | Path) -> dict[str, torch.Tensor]:
    """The tensors of the newest checkpoint."""
    found = find_latest(Store(place))
    assert found is not None
    tensors, _ = load_checkpoint(found.url)
    return tensors


def check_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not one[name].equal(other[name])] == []


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The line with which the command refuses its arguments."""
    with pytest.raises(SystemExit) as ended:
        main(["train", *arguments])
    assert ended.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("octile: ")]
    return line


@pytest.mark.slow
def test_a_run_continues_from_the_store_with_the_bits_of_one_process(arguments, straight, place, tmp_path, capsys):
    run = tmp_path / "run"
    main(["train", *arguments, "--steps=4", f"--checkpoints={place}", f"--out={run}"])
    assert f"checkpoints go to {place}" in capsys.readouterr().out
    assert not (run / "checkpoints").exists()
    assert Store(place).names() == ["step_00000002", "step_00000004"]
    main(["train", "--resume", "--steps=8", f"--out={run}"])
    assert "resumed at step 4 from step_00000004" in capsys.readouterr().out
    assert Store(place).names() == ["step_00000006", "step_00000008"]
    check_same(final(place), final(straight / "checkpoints"))
    assert losses(run) == losses(straight)


@pytest.mark.slow
@pytest.mark.parametrize("url", ["memory://octile/one", pytest.param("file://{}/store", marks=pytest.mark.exhaustive)])
def test_any_file_system_of_fsspec_holds_checkpoints(arguments, straight, tmp_path, url):
    url = url.format(tmp_path)
    main(["train", *arguments, "--steps=4", f"--checkpoints={url}", f"--out={tmp_path / 'run'}"])
    main(["train", "--resume", "--steps=8", f"--out={tmp_path / 'run'}"])
    check_same(final(url), final(straight / "checkpoints"))


@pytest.mark.slow
def test_a_folder_is_found_from_another_folder(arguments, straight, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["train", *arguments, "--steps=4", "--checkpoints=elsewhere", f"--out={tmp_path / 'run'}"])
    monkeypatch.chdir("/")
    main(["train", "--resume", "--steps=8", f"--out={tmp_path / 'run'}"])
    check_same(final(tmp_path / "elsewhere"), final(straight / "checkpoints"))


@pytest.mark.slow
@pytest.mark.usefixtures("begun", "short_report")
def test_a_run_whose_folder_is_lost_continues_in_a_new_one(straight, place, tmp_path, capsys):
    main(["train", "--resume", "--steps=8", f"--checkpoints={place}", f"--out={tmp_path / 'new'}"])
    assert f"settings from {place}/step_00000004: " in " ".join(capsys.readouterr().out.split())
    check_same(final(place), final(straight / "checkpoints"))
    assert (tmp_path / "new" / "report.html").exists()


@pytest.mark.exhaustive  # one process continues from the store below, and two ranks from a folder in test_torchrun
def test_two_ranks_continue_from_the_store_after_a_kill_and_so_does_one(
    arguments, straight, server, place, tmp_path, capsys
):
    run, alone = tmp_path / "run", tmp_path / "alone"
    of_two = [*arguments, "--parallel.dp=2", "--parallel.ep=2", "--steps=8"]

    def on_two(*options: str, fault: str = "") -> list[int | None]:
        return train(tmp_path, *options, fault=fault, environment=server.environment).statuses

    options = f"--checkpoints={place}", f"--out={run}"
    assert on_two(*of_two, *options, fault="killed at step 7") == [-signal.SIGKILL, 1]
    assert {len(files) for files in shards(place)[:1]} == {2}  # a later checkpoint may still be on its way
    shutil.copytree(run, alone)
    copied = f"{place}-copied"
    server.files.copy(place, copied, recursive=True)
    assert on_two("--resume", f"--out={run}") == [0, 0]
    assert on_two(*of_two, f"--out={tmp_path / 'whole'}") == [0, 0]
    check_same(final(place), final(tmp_path / "whole" / "checkpoints"))
    one = ["--parallel.dp=1", "--parallel.ep=1"]
    main(["train", "--resume", "--steps=8", f"--checkpoints={copied}", *one, f"--out={alone}"])
    assert "parallel.dp: 2 before, 1 now" in capsys.readouterr().out
    assert losses(alone) == pytest.approx(losses(straight), rel=1e-5)


def shards(place: str) -> list[list[str]]:
    """The files of tensors of each checkpoint."""
    folders = [Store(place).folder(name).names() for name in Store(place).names()]
    return [[name for name in names if name.startswith("tensors-")] for names in folders]


def in_a_process(_: int, work: Callable[..., None], environment: dict[str, str], *arguments: object) -> None:
    """Do something as a client of the server, for `begin_ranks`."""
    os.environ |= environment
    work(*arguments)


def train_on(n_threads: int, arguments: Sequence[str]) -> None:
    torch.set_num_threads(n_threads)
    estimate_memory_once(pytest.MonkeyPatch())
    main(["train", *arguments])


def save_large(place: str) -> None:
    checkpoints = DistributedCheckpoints(place)
    checkpoints.save(2, {"w": torch.ones(15 << 20)}, {})
    checkpoints.close()


@pytest.mark.slow
@pytest.mark.parametrize("file", ["tensors-", pytest.param("octile.json", marks=pytest.mark.exhaustive)])
def test_a_kill_in_an_upload_leaves_the_last_checkpoint(arguments, straight, server, place, tmp_path, file):
    run = tmp_path / "run"
    server.stall(f"step_00000004/{file}")
    try:
        options = [*arguments, "--steps=8", f"--checkpoints={place}", f"--out={run}"]
        work = train_on, server.environment, torch.get_num_threads(), options
        (process,) = begin_ranks(in_a_process, work, 1)
        assert server.stalled.wait(120)
        while 6 not in losses(run):  # it trains on while it uploads, up to the next checkpoint
            assert process.is_alive()
            time.sleep(0.05)
        process.kill()
        process.join()
    finally:
        server.release()
    main(["train", "--resume", f"--out={run}"])
    check_same(final(place), final(straight / "checkpoints"))
    assert losses(run) == losses(straight)
    assert Store(place).names() == ["step_00000006", "step_00000008"]


@pytest.mark.slow
def test_a_refused_upload_ends_the_run_and_leaves_the_last_checkpoint(
    arguments, straight, server, place, tmp_path, capsys
):
    run = tmp_path / "run"
    server.fail("step_00000004/tensors-")
    try:
        line = refused([*arguments, "--steps=8", f"--checkpoints={place}", f"--out={run}"], capsys)
    finally:
        server.release()
    assert line.startswith(f"octile: {place}/step_00000004/tensors-00000-of-00001.safetensors cannot be written: ")
    assert Store(place).names() == ["step_00000002"]
    main(["train", "--resume", f"--out={run}"])
    check_same(final(place), final(straight / "checkpoints"))


@pytest.mark.slow
def test_a_damaged_checkpoint_in_the_store_is_passed_over(straight, server, place, begun, capsys):
    (file,) = [name for name in Store(f"{place}/step_00000004").names() if name.startswith("tensors-")]
    content = bytearray(server.files.cat_file(f"{place}/step_00000004/{file}"))
    content[-100] ^= 1
    server.files.pipe_file(f"{place}/step_00000004/{file}", bytes(content))
    main(["train", "--resume", "--steps=8", f"--checkpoints={place}", f"--out={begun}"])
    shown = capsys.readouterr()
    assert "checkpoint step_00000004 cannot be used, trying the one before" in shown.err
    assert f"{file} is damaged" in shown.err
    assert "resumed at step 2" in shown.out
    check_same(final(place), final(straight / "checkpoints"))


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_read_now_is_not_passed_over(server, place, begun, capsys):
    server.fail("step_00000004/tensors-", "GET")
    try:
        line = refused(["--resume", "--steps=8", f"--checkpoints={place}", f"--out={begun}"], capsys)
    finally:
        server.release()
    file = f"{place}/step_00000004/tensors-00000-of-00001.safetensors"
    assert line == f"octile: {file} cannot be read: AccessDenied"
    assert Store(place).names() == ["step_00000002", "step_00000004"]


@pytest.mark.slow
def test_the_parts_of_a_large_file_count_as_absent_until_all_are_there(server, place):
    checkpoints = DistributedCheckpoints(place)
    checkpoints.save(1, {"w": torch.zeros(4)}, {"value": 1})
    checkpoints.close()
    server.stall("partNumber=1")
    try:
        (process,) = begin_ranks(in_a_process, (save_large, server.environment, place), 1)
        assert server.stalled.wait(120)
        process.kill()
        process.join()
    finally:
        server.release()
    assert Store(place).names() == ["step_00000001"]
    assert load_checkpoint(f"{place}/step_00000001")[1] == {"value": 1}


@pytest.mark.slow
def test_a_run_streams_its_data_from_the_store(arguments, straight, server, place, tmp_path):
    for name in (*FILES, LEFT_OUT, MANIFEST):
        server.files.put_file(str(straight / "data" / name), f"{place}/data/{name}")
    run = tmp_path / "run"
    main(["train", *arguments, "--steps=4", f"--data={place}/data", f"--checkpoints={place}/run", f"--out={run}"])
    assert not (run / "data" / "train.npy").exists()
    shutil.rmtree(run)
    main(["train", "--resume", "--steps=8", f"--checkpoints={place}/run", f"--out={run}"])
    check_same(final(f"{place}/run"), final(straight / "checkpoints"))


@pytest.mark.usefixtures("begun")
def test_a_new_run_does_not_take_the_checkpoints_of_another(arguments, place, tmp_path, capsys):
    line = refused([*arguments, f"--checkpoints={place}", f"--out={tmp_path / 'two'}"], capsys)
    assert f"checkpoints {place!r} holds checkpoints already (step_00000004): add --resume" in line
    assert not (tmp_path / "two").exists()
    assert Store(place).names() == ["step_00000002", "step_00000004"]


def test_a_resumed_run_does_not_begin_anew_where_its_checkpoints_are_not(run_of_four_steps, begun, place, capsys):
    (begun / "summary.json").unlink()
    other = f"{place}-other"
    line = refused(["--resume", "--steps=8", f"--checkpoints={other}", f"--out={begun}"], capsys)
    assert f"{other} holds no checkpoint of this run, which wrote its checkpoints to {run_of_four_steps[1]}" in line


def test_neither_a_run_nor_a_checkpoint_is_said_at_once(place, tmp_path, capsys):
    line = refused(["--resume", f"--checkpoints={place}", f"--out={tmp_path / 'run'}"], capsys)
    assert f"holds no run, and checkpoints {place!r} holds none of one" in line


def test_a_server_that_does_not_answer_is_said(tmp_path, monkeypatch, capsys):
    for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_MAX_ATTEMPTS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("s3fs.core.S3FileSystem.retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    line = refused(["--resume", "--checkpoints=s3://octile/run", f"--out={tmp_path / 'run'}"], capsys)
    assert line.startswith(
        "octile: --checkpoints 's3://octile/run' cannot be used: s3://octile/run cannot be reached: "
    )
    assert 'Could not connect to the endpoint URL: "http://127.0.0.1:1/octile' in line
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def silent(monkeypatch) -> Iterator[str]:
    """The address of a server that accepts connections and never answers; clients of S3 use it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": url}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("octile.checkpoint.store.S3_PATIENCE", {**S3_PATIENCE, "read_timeout": 0.5})
        s3fs.S3FileSystem.clear_instance_cache()
        yield url
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "begins"),
    [
        pytest.param(
            ("--checkpoints=s3://octile/run",),
            "--checkpoints 's3://octile/run' cannot be used: s3://octile/run cannot ",
            marks=pytest.mark.exhaustive,  # as in a resumed run
        ),
        (("--resume", "--checkpoints=s3://octile/run"), "--checkpoints 's3://octile/run' cannot be used: s3://octile/"),
        pytest.param(
            ("--data=s3://octile/data",),
            "--data 's3://octile/data' cannot be read: s3://octile/data cannot be reached",
            marks=pytest.mark.exhaustive,  # as a host that never answers, below
        ),
    ],
    ids=["checkpoints", "resume", "data"],
)
def test_an_endpoint_that_never_answers_is_named_within_seconds(arguments, silent, tmp_path, capsys, options, begins):
    own = [] if "--resume" in options else arguments
    line = refused([*own, *options, f"--out={tmp_path / 'run'}"], capsys)
    assert line.startswith(f"octile: {begins}")
    assert f'Read timeout on endpoint URL: "{silent}/octile' in line
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_host_that_never_answers_is_refused_within_seconds(arguments, silent, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("octile.checkpoint.store.ANSWER_WITHIN", 1)
    line = refused([*arguments, f"--data={silent}/data", f"--out={tmp_path / 'run'}"], capsys)
    assert (
        line == f"octile: --data '{silent}/data' cannot be read: {silent}/data cannot be reached: no answer within 1 s"
    )


def test_the_patience_for_a_first_answer_is_below_15_seconds():
    attempts = S3_PATIENCE["retries"]["total_max_attempts"]
    assert attempts * S3_PATIENCE["read_timeout"] + 1 < ANSWER_WITHIN < 15  # a pause of a second between two
    assert S3_PATIENCE["connect_timeout"] <= S3_PATIENCE["read_timeout"]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        (
            "http://127.0.0.1:1/x",
            "http://127.0.0.1:1/x/manifest.json cannot be read: Cannot connect to host 127.0.0.1:1",
        ),
        ("ftp://127.0.0.1:1", "ftp://127.0.0.1:1 cannot be reached: Connection refused"),
        ("s3://no-such-bucket/x", "s3://no-such-bucket/x cannot be read: the bucket 'no-such-bucket' does not exist"),
        ("s3://octile/x", "s3://octile/x is not a finished token store: it has no manifest.json"),
        ("nowhere://x", "Protocol not known: nowhere"),
    ],
)
def test_data_that_cannot_be_reached_are_refused_by_their_option(arguments, server, tmp_path, capsys, url, says):
    line = refused([*arguments, f"--data={url}", f"--out={tmp_path / 'run'}"], capsys)
    assert line.startswith(f"octile: --data {url!r} cannot be read: {says}")
    assert not (tmp_path / "run").exists()


def test_checkpoints_in_a_bucket_that_does_not_exist_are_said_to_be(server, tmp_path, capsys):
    place = "s3://no-such-bucket/run"
    line = refused(["--resume", f"--checkpoints={place}", f"--out={tmp_path / 'run'}"], capsys)
    assert line == (
        f"octile: --checkpoints {place!r} cannot be used: {place} cannot be read: the bucket 'no-such-bucket' does not "
        "exist"
    )


def deny(server: ObjectStore, bucket: str) -> None:
    """Make a bucket in which nobody may write."""
    server.files.mkdir(bucket)
    statement = {"Effect": "Deny", "Principal": "*", "Action": "s3:PutObject", "Resource": f"arn:aws:s3:::{bucket}/*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    server.files.call_s3("put_bucket_policy", Bucket=bucket, Policy=policy)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("nowhere://run", "cannot be used: Protocol not known: nowhere"),
        ("", "is empty: name a folder or a URL"),
        ("s3://", "cannot be used: s3:// has nothing after the protocol: name a bucket or a folder"),
        ("file:///", "cannot be used: file:/// has nothing after the protocol"),
        ("http://127.0.0.1:1/run", "cannot be used: nothing can be written by this protocol"),
        ("s3://denied/run", "cannot be written: Forbidden"),
        ("s3://no-such-bucket/run", "cannot be written: The specified bucket does not exist"),
        ("/dev/null/run", "cannot be used: Not a directory"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_any_work(arguments, server, tmp_path, capsys, place, message):
    if "denied" in place:
        deny(server, "denied")
    line = refused([*arguments, f"--checkpoints={place}", f"--out={tmp_path / 'run'}"], capsys)
    assert message in line
    assert line.startswith("octile: --checkpoints ")
    assert not (tmp_path / "run").exists()
    assert not server.files.exists("no-such-bucket")


def test_a_place_where_nothing_can_be_removed_is_refused_before_any_work(arguments, server, place, tmp_path, capsys):
    server.fail("access-", "DELETE")
    try:
        line = refused([*arguments, f"--checkpoints={place}", f"--out={tmp_path / 'run'}"], capsys)
    finally:
        server.release()
    assert line == f"octile: --checkpoints {place!r} cannot be used: AccessDenied"
    assert not (tmp_path / "run").exists()


def test_a_missing_package_is_named(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    line = refused([*arguments, "--checkpoints=s3://octile/run", f"--out={tmp_path / 'run'}"], capsys)
    assert line == "octile: --checkpoints 's3://octile/run' cannot be used: Install s3fs to access S3"
