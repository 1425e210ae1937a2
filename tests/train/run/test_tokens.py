"""Tests of what is refused as data and validation data, and of what a run says of them."""

import json
from pathlib import Path

import pytest

from octile.train.run.tokens import check_data, prepare_tokens
from tests.train.conftest import micro, silent_console

TEXT = "".join(f"{n} times {n} is {n * n}\n" for n in range(400))


@pytest.fixture
def files(tmp_path, monkeypatch) -> Path:
    """A folder with a text, a copy of it, other texts, and examples; it is the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(TEXT)
    (tmp_path / "copy.txt").write_text(TEXT)
    (tmp_path / "val.txt").write_text(TEXT.replace("times", "by"))
    (tmp_path / "chats.jsonl").write_text(json.dumps({"text": "hello"}))
    (tmp_path / "link").symlink_to("texts")
    return tmp_path


@pytest.mark.parametrize(
    ("data", "val_data", "error", "message"),
    [
        ("texts", "none.txt", FileNotFoundError, "val_data 'none.txt' is no file or folder"),
        ("texts", "chats.jsonl", ValueError, r"val_data 'chats.jsonl' must be text, as data 'texts' is, but it is ex"),
        ("chats.jsonl", "val.txt", ValueError, r"val_data 'val.txt' must be examples, as data 'chats.jsonl' is"),
        ("texts", "texts", ValueError, "val_data 'texts' must hold nothing of data 'texts', which is trained on"),
        ("stdlib", "stdlib", ValueError, "val_data 'stdlib' must hold nothing of data 'stdlib'"),
        ("texts", "texts/a.txt", ValueError, "val_data 'texts/a.txt' must hold nothing of data 'texts'"),
        ("texts/a.txt", "link", ValueError, "val_data 'link' must hold nothing of data 'texts/a.txt'"),
        ("texts/a.txt", "copy.txt", ValueError, "val_data 'copy.txt' must hold nothing of .*, but the two files have"),
        ("texts", "s3://bucket/data", ValueError, "val_data must be text or examples, not the URL of tokens, 's3:"),
        ("s3://bucket/data", "val.txt", ValueError, "val_data must not be given for the tokens of a URL: 's3://buc"),
    ],
)
@pytest.mark.usefixtures("files")
def test_validation_data_that_cannot_be_used_are_refused(data, val_data, error, message):
    with pytest.raises(error, match=f"^{message}"):
        check_data(micro(data=data, val_data=val_data))


@pytest.mark.usefixtures("files")
def test_validation_data_of_the_same_kind_are_taken():
    check_data(micro(data="texts", val_data="val.txt"))


@pytest.mark.parametrize(("n", "is_said"), [(3, True), (100_000, False)])
def test_a_run_says_that_a_validation_measures_a_part_of_the_validation_data(files, n, is_said):
    console = silent_console()
    config = micro(data="texts", val_data="val.txt", val_sequences=n)
    store = prepare_tokens(config, files / "data", console)
    printed = " ".join(console.console.file.getvalue().split())
    windows = (len(store.val) - 1) // (config.sequence_length - 1)
    said = f"a validation measures 3 of the {windows} sequences of val_data: --val-sequences {windows} measures all"
    assert (said in printed) == is_said
    assert "held out (all of val.txt, " in printed
    assert "so little text is held out" not in printed
