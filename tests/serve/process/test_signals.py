"""Tests of what garbage collections of a server leave out."""

import atexit
import gc

import pytest

from octile.serve.process.signals import freeze_loaded


class Node:
    """Refers to itself, so that only the garbage collector ends it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.slow
def test_collections_leave_out_what_was_loaded_and_find_what_came_after():
    loaded = Node()
    try:
        freeze_loaded()
        later = Node()
        visited = {id(found) for found in gc.get_objects()}
        assert id(loaded) not in visited
        assert id(later) in visited
    finally:
        gc.unfreeze()


@pytest.mark.slow
def test_at_exit_extension_modules_find_nothing_that_is_left_out(monkeypatch):
    at_exit = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    freeze_loaded()
    for function in at_exit:
        function()
    assert gc.get_freeze_count() == 0
