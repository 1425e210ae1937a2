"""Tests of tools/list_stale_records.py: it counts the commits since a record and those that change its code."""

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = "benchmarks/results"
AUTHOR = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")


@pytest.fixture
def stale(script):
    return script("list_stale_records")


@pytest.fixture
def repository(stale, tmp_path, monkeypatch):
    """A repository of three commits with two records of the first one: "changed", whose code the second one changes."""

    def commit(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
        for arguments in (("add", "."), (*AUTHOR, "commit", "-qm", path)):
            subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)

    monkeypatch.setattr(stale, "ROOT", tmp_path)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    commit("code/a.py", "1")
    first = stale._git("rev-parse", "HEAD")
    commit("code/a.py", "2")
    (tmp_path / RESULTS).mkdir(parents=True)
    commit(f"{RESULTS}/changed.json", json.dumps({"machine": {"commit": first, "date": "2026-11-20"}}))
    records = {"changed": (None, ("code",)), "unchanged": (first, ("code/b.py",))}
    monkeypatch.setattr(stale, "RECORDS", records)


def test_commits_and_changes_are_counted(stale, repository):
    found = {record.name: (record.commits, record.changes) for record in stale.find_records()}
    assert found == {"changed": (2, 1), "unchanged": (2, 0)}


def test_the_date_is_that_of_the_measurement_or_else_of_the_commit(stale, repository):
    found = {record.name: record.date for record in stale.find_records()}
    assert found["changed"] == "2026-11-20"
    assert found["unchanged"] == stale._git("log", "-1", "--format=%cs")


def test_the_table_lists_records_whose_code_has_changed(stale, repository):
    *rows, others = stale.table(stale.find_records()).splitlines()
    assert [row.split()[0] for row in rows if row] == ["record", "changed"]
    assert others == "unchanged since: unchanged"


def test_json_has_all_records(stale, repository, capsys):
    stale.main(["--json"])
    found = json.loads(capsys.readouterr().out)
    assert [(record["name"], record["changes"]) for record in found] == [("changed", 1), ("unchanged", 0)]


def test_a_commit_that_is_not_there_is_an_error(stale, repository, monkeypatch):
    monkeypatch.setattr(stale, "RECORDS", {"lost": ("0123456", ("code",))})
    with pytest.raises(ValueError, match="commit 0123456 of lost is not in this clone"):
        stale.find_records()


@pytest.mark.slow
def test_a_record_of_a_tree_with_changes_counts_from_its_commit(stale):
    """Its JSON has a + after the commit."""
    assert all(record.commit[-1] != "+" for record in stale.find_records())


def test_every_record_of_the_repository_is_listed(stale):
    files = {path.stem for path in (ROOT / RESULTS).iterdir() if path.suffix in (".json", ".txt")}
    assert files == set(stale.RECORDS)


def test_the_code_of_every_record_exists(stale):
    paths = {path for _, code in stale.RECORDS.values() for path in code}
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_a_record_has_one_commit(stale):
    for name, (commit, _) in stale.RECORDS.items():
        path = ROOT / RESULTS / f"{name}.json"
        measured = json.loads(path.read_text()).get("machine", {}).get("commit") if path.exists() else None
        assert (commit is None) == (measured is not None)
