"""How many files of octile a reader has to know to follow a chat through `octile serve`."""

from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings", reason="the walk of a GEMM in the same tool needs it")
pytest.importorskip("fastapi", reason="octile[serve] is not installed")

from tools.count_frames import files_of_chats

MAX_FILES = 45


@pytest.mark.exhaustive  # the server takes seconds to start
def test_a_warm_chat_enters_few_files(tmp_path: Path) -> None:
    """A chat of two tokens, over all processes; the first one also enters the files of routing and block weights."""
    _, warm = files_of_chats(tmp_path)
    assert {"serve/http/app.py", "serve/engine/engine.py", "serve/model/forward.py"} <= {*warm}  # of both processes
    assert len(warm) <= MAX_FILES, "\n".join(warm)
