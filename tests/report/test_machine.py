"""Tests of the description of the machine on which something was measured."""

import subprocess

import torch

from octile import __version__
from octile.report import machine as module
from octile.report.machine import describe_machine, machine, version_of


def git(folder, *arguments):
    names = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", "-C", folder, *names, *arguments], check=True, capture_output=True)


def test_versions_are_those_of_the_imported_packages():
    found = machine()
    assert (found["octile"], found["torch"], found["threads"]) == (__version__, torch.__version__, 1)


def test_the_gpu_is_left_out_for_work_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    assert machine()["gpu"] == "a GPU"
    assert machine(torch.device("cpu"))["gpu"] is None


def test_the_description_names_the_gpu_before_the_cpu():
    found = {"gpu": "a GPU", "cpu": "a CPU", "threads": 2, "torch": "2.13"}
    assert describe_machine(found) == "a GPU, 2 threads, torch 2.13"
    assert describe_machine(found | {"gpu": None, "threads": 1}) == "a CPU, 1 thread, torch 2.13"


def test_the_commit_is_that_of_the_source_tree_and_marks_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SOURCE", tmp_path)
    (tmp_path / "a").write_text("1")
    git(tmp_path, "init")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-m", "a")
    commit = machine()["commit"]
    assert len(commit) >= 12
    (tmp_path / "a").write_text("2")
    assert machine()["commit"] == commit + "+"


def test_the_commit_of_a_repository_around_an_installed_package_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SOURCE", tmp_path / "site-packages")
    (tmp_path / "site-packages").mkdir()
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "-m", "a")
    assert machine()["commit"] is None


def test_a_tree_without_history_has_the_commit_that_the_environment_names(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SOURCE", tmp_path)
    monkeypatch.setenv("OCTILE_COMMIT", "4bd1b5f0a1c2+")
    assert machine()["commit"] == "4bd1b5f0a1c2+"
    monkeypatch.setenv("OCTILE_COMMIT", "")
    assert machine()["commit"] is None


def test_a_tree_with_history_has_its_own_commit_whatever_the_environment_names(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SOURCE", tmp_path)
    monkeypatch.setenv("OCTILE_COMMIT", "4bd1b5f0a1c2")
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "-m", "a")
    assert machine()["commit"] != "4bd1b5f0a1c2"


def test_a_missing_package_has_no_version():
    assert version_of("torch") is not None
    assert version_of("no-such-package") is None
