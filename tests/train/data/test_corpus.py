"""Tests of reading a corpus: which files are text, their order, and what is refused."""

import errno
import json
import os
import re
import stat
import sys
import sysconfig
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octile.train.data.corpus import MAX_WHOLE_FILE, check_source, content_digest, open_corpus, span_length


def write(root: Path, **texts: str | bytes) -> Path:
    """Write files below `root`; two underscores in a name stand for a slash."""
    for name, text in texts.items():
        file = root / (name.replace("__", "/") + ".txt")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode() if isinstance(text, str) else text)
    return root


def test_a_folder_is_read_recursively_in_the_order_of_names(tmp_path):
    write(tmp_path, b="second", a__z="first", c="third")
    assert list(open_corpus(tmp_path).texts()) == ["first", "second", "third"]


def test_texts_can_be_read_again(tmp_path):
    corpus = open_corpus(write(tmp_path, a="one", b="two"))
    assert list(corpus.texts()) == list(corpus.texts())


def test_hidden_files_and_folders_are_left_out(tmp_path):
    write(tmp_path, a="seen")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("ref")
    (tmp_path / ".profile").write_text("export")
    assert list(open_corpus(tmp_path).texts()) == ["seen"]


@pytest.mark.parametrize("content", [b"caf\xe9", b"PK\x03\x04\x00\x00"], ids=["not UTF-8", "NUL"])
def test_what_is_not_text_is_left_out_and_named(tmp_path, content):
    corpus = open_corpus(write(tmp_path, a="text", b=content))
    assert (list(corpus.texts()), corpus.left_out) == (["text"], [("not_text", "b.txt")])


def test_a_broken_link_is_left_out_and_named(tmp_path):
    write(tmp_path, a="text")
    (tmp_path / "b").symlink_to(tmp_path / "nowhere")
    assert open_corpus(tmp_path).left_out == [("unreadable", "b")]


@pytest.mark.parametrize(("kind", "mode"), [("pipe", stat.S_IFIFO), ("socket", stat.S_IFSOCK)])
def test_what_is_no_regular_file_is_left_out_and_named(tmp_path, kind, mode):
    write(tmp_path, a="text")
    os.mknod(tmp_path / "b.txt", mode | 0o600)
    assert open_corpus(tmp_path).left_out == [(kind, "b.txt")]


def test_a_link_to_a_device_is_left_out_and_named(tmp_path):
    write(tmp_path, a="text")
    (tmp_path / "b.txt").symlink_to("/dev/zero")
    assert open_corpus(tmp_path).left_out == [("device", "b.txt")]


def test_a_pipe_in_a_package_is_left_out_and_named(environment):
    os.mkfifo(environment / "other" / "pipe.py")
    assert ("pipe", "site-packages/other/pipe.py") in open_corpus("packages").left_out


def test_a_file_of_the_kernel_is_left_out_and_named(tmp_path):
    write(tmp_path, a="text")
    (tmp_path / "b.txt").symlink_to("/proc/self/status")
    assert open_corpus(tmp_path).left_out == [("file_of_the_kernel", "b.txt")]


def test_hidden_files_and_folders_are_named(tmp_path):
    write(tmp_path, a="text", **{".git__HEAD": "ref", "b__.profile": "export", "b__c": "text"})
    assert open_corpus(tmp_path).left_out == [("hidden", ".git"), ("hidden", "b/.profile.txt")]


def test_a_link_to_a_folder_is_left_out_and_named(tmp_path):
    write(tmp_path, text__a="text", other__b="more")
    (tmp_path / "text" / "link").symlink_to(tmp_path / "other")
    assert open_corpus(tmp_path / "text").left_out == [("linked_folder", "link")]


def refuse(monkeypatch, function: str, path: Path) -> None:
    """Make a function of `os` raise for a path what it raises for a user without permission; root has it always."""
    original = getattr(os, function)

    def call(argument=".", *args, **kwargs):
        if argument in (path, str(path)):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return original(argument, *args, **kwargs)

    monkeypatch.setattr(os, function, call)


def test_a_folder_that_cannot_be_read_is_left_out_and_named(tmp_path, monkeypatch):
    write(tmp_path, a="text", locked__b="more")
    refuse(monkeypatch, "scandir", tmp_path / "locked")
    assert open_corpus(tmp_path).left_out == [("unreadable_folder", "locked")]


def test_a_link_into_a_folder_that_cannot_be_read_is_left_out_and_named(tmp_path, monkeypatch):
    write(tmp_path, text__a="text", locked__b="more")
    (tmp_path / "text" / "link").symlink_to(tmp_path / "locked" / "b.txt")
    refuse(monkeypatch, "stat", tmp_path / "text" / "link")
    assert open_corpus(tmp_path / "text").left_out == [("unreadable", "link")]


def test_a_source_below_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    refuse(monkeypatch, "stat", tmp_path / "link")
    message = f"^data {str(tmp_path / 'link')!r} cannot be read: Permission denied$"
    with pytest.raises(PermissionError, match=message):
        check_source(tmp_path / "link")


def test_a_source_without_read_permission_is_named(tmp_path, monkeypatch):
    write(tmp_path, a="text")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    message = f"^data {str(tmp_path / 'a.txt')!r} cannot be read: Permission denied$"
    with pytest.raises(PermissionError, match=message):
        check_source(tmp_path / "a.txt")


@pytest.mark.parametrize("named", [".", "data"], ids=["run", "tokens"])
def test_the_tokens_of_a_run_are_no_text(tmp_path, named):
    (tmp_path / "data").mkdir()
    for name in ("manifest.json", "tokenizer.json", "train.npy", "val.npy"):
        (tmp_path / "data" / name).touch()
    with pytest.raises(ValueError, match=f"holds the tokens of a run, no text: give them as file://{tmp_path}/data$"):
        check_source(tmp_path / named)


def test_a_run_whose_tokens_are_read_from_a_url_is_refused(tmp_path):
    for name in ("manifest.json", "tokenizer.json"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=rf"no text: give them as the url in {tmp_path}/manifest\.json$"):
        check_source(tmp_path)


def test_a_folder_named_data_that_cannot_be_entered_is_left_to_the_reader(tmp_path, monkeypatch):
    def refuse(path: Path) -> bool:
        if path.parent.name == "data":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return os.path.isfile(path)

    write(tmp_path, a="text")
    (tmp_path / "data").mkdir()
    monkeypatch.setattr(Path, "is_file", refuse)  # as it does where a folder has no right x; root may enter all
    check_source(tmp_path)


def test_a_pipe_as_source_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"pipe' is a pipe: name a regular file or a folder$"):
        check_source(tmp_path / "pipe")


@pytest.mark.parametrize("source", ["/proc", "/proc/self/pagemap"])
def test_a_source_in_a_folder_of_the_kernel_is_refused(source):
    with pytest.raises(ValueError, match=rf"^data '{source}' lies in a folder of the kernel \(/proc or /sys\)"):
        check_source(source)


def test_a_file_among_others_is_one_document(tmp_path):
    text = "a line\n" * 10_000
    assert list(open_corpus(write(tmp_path, a=text, b="other")).texts()) == [text, "other"]


def test_a_text_is_cut_into_about_64_spans(tmp_path):
    corpus = open_corpus(write(tmp_path, a="a line of text\n" * 10_000) / "a.txt")
    assert 56 <= len(list(corpus.in_spans(span_length(150_000)).texts())) <= 64


def test_spans_end_at_line_ends(tmp_path):
    corpus = open_corpus(write(tmp_path, a="a line of text\n" * 200) / "a.txt")
    assert [len(span) for span in corpus.in_spans(1024).texts()] == [1035, 1035, 930]


def test_a_text_that_is_no_longer_than_a_span_is_whole(tmp_path):
    assert list(open_corpus(write(tmp_path, a="1234\n6789")).in_spans(9).texts()) == ["1234\n6789"]


def test_spans_have_the_name_of_their_file_and_a_number(tmp_path):
    corpus = open_corpus(write(tmp_path, a="1\n2\n", b="3")).in_spans(2)
    assert list(corpus.read()) == [("a.txt, span 1", "1\n2\n"), ("b.txt", "3")]


def test_a_very_long_file_in_a_folder_is_cut(tmp_path):
    corpus = open_corpus(write(tmp_path, a="a line of text\n" * (MAX_WHOLE_FILE // 10)))
    assert len(list(corpus.texts())) > 1


@given(text=st.text(st.sampled_from("ab\n\r\u2028é😀"), min_size=1, max_size=5000), length=st.integers(1, 100))
def test_concatenated_spans_equal_the_file(tmp_path_factory, text, length):
    file = tmp_path_factory.mktemp("text") / "book.txt"
    file.write_bytes(text.encode())
    assert "".join(open_corpus(file).in_spans(length).texts()) == text


def test_repeated_and_empty_documents_are_left_out_and_named(tmp_path):
    corpus = open_corpus(write(tmp_path, a="one", b="one", c=" \n", d="", e="two"))
    left_out = list(corpus.left_out)
    assert [document.text for document in corpus.documents(left_out)] == ["one", "two"]
    assert sorted(left_out) == [("duplicate", "b.txt"), ("empty", "c.txt"), ("empty", "d.txt")]


def test_stdlib_is_the_source_of_this_interpreter():
    assert Path(json.__file__).read_text() in set(open_corpus("stdlib").texts())


def test_stdlib_leaves_out_packages_tests_and_other_files(tmp_path, monkeypatch):
    for name in ["os.py", "email/mime.py", "README.txt", "site-packages/a.py", "test/b.py", "ctypes/test/c.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert list(open_corpus("stdlib").texts()) == ["email/mime.py", "os.py"]


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """A standard library and a folder of packages, which is on the path of this interpreter."""
    lines = [f"def function_{n}(argument):  # a line like that of a person" for n in range(40)]
    packages = tmp_path / "site-packages"
    files = {
        tmp_path / "lib" / "one.py": lines[:20],
        tmp_path / "lib" / "test" / "test_one.py": lines[20:],
        packages / "other" / "two.py": lines[10:],
        packages / "other" / "tests" / "copy.py": [*lines[:20], "# another version"],
        packages / "other" / "guide.rst": ["Words that describe how this is to be used, one after the other."] * 8,
        packages / "other" / "table.csv": ["1,2,3"] * 100,
        packages / "other" / "vendor" / "three.py": ["import something_that_is_not_of_this_package"] * 10,
        packages / "other-1.0.dist-info" / "METADATA": ["What the package is there for, in words of its author"] * 9,
    }
    for file, content in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(content))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(packages)])
    return packages


def test_packages_are_the_source_and_documentation_of_the_library_and_of_what_is_installed(environment):
    names = [name for name, _ in open_corpus("packages").read()]
    folder = "site-packages/other"
    assert names == ["lib/one.py", f"{folder}-1.0.dist-info/METADATA", f"{folder}/guide.rst", f"{folder}/two.py"]


def test_a_package_file_that_repeats_an_earlier_one_is_left_out_and_named(environment):
    left_out = open_corpus("packages").left_out
    assert ("repeated", "site-packages/other/tests/copy.py") in left_out
    assert ("translated or vendored", "site-packages/other/vendor/three.py") in left_out


def test_a_missing_path_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere' is no file or folder"):
        open_corpus(tmp_path / "nowhere")


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no files"):
        open_corpus(tmp_path)


def test_a_folder_without_text_is_refused_with_its_count(tmp_path):
    write(tmp_path, a=b"\xff", b=b"\xfe")
    with pytest.raises(ValueError, match="holds no UTF-8 text: 2 not text of 2 files"):
        open_corpus(tmp_path)


class FakeDataset:
    """The part of `datasets.Dataset` that a corpus uses."""

    def __init__(self, rows: list[dict[str, str | None]], **dtypes: str):
        self.rows, self.features = rows, {name: SimpleNamespace(dtype=dtype) for name, dtype in dtypes.items()}

    def select_columns(self, names: list[str]) -> list[dict[str, str | None]]:
        return [{name: row[name] for name in names} for row in self.rows]


@pytest.fixture
def hub(monkeypatch):
    """Replace the package `datasets`: it returns hub.dataset and records its arguments in hub.asked."""
    module = ModuleType("datasets")

    def load_dataset(name: str, config: str | None, split: str):
        module.asked = (name, config, split)
        return module.dataset

    module.load_dataset = load_dataset
    module.dataset = FakeDataset([{"text": "one", "id": "1"}, {"text": None, "id": "2"}], text="string", id="string")
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("hf:imdb", ("imdb", None, "train")),
        ("hf:org/name", ("org/name", None, "train")),
        ("hf:org/name/part", ("org/name", "part", "train")),
        ("hf:org/name:test", ("org/name", None, "test")),
        ("hf:org/name/part:train[:1%]#text", ("org/name", "part", "train[:1%]")),
    ],
)
def test_a_hub_source_names_dataset_config_and_split(hub, source, asked):
    open_corpus(source)
    assert hub.asked == asked


def test_the_hub_column_named_text_is_used_and_missing_rows_are_empty(hub):
    assert list(open_corpus("hf:org/name").texts()) == ["one", ""]


def test_a_hub_column_can_be_named(hub):
    assert list(open_corpus("hf:org/name#id").texts()) == ["1", "2"]


def test_the_only_column_of_strings_is_used(hub):
    hub.dataset = FakeDataset([{"story": "once", "stars": None}], story="large_string", stars="int64")
    assert list(open_corpus("hf:org/name").texts()) == ["once"]


def test_ambiguous_columns_are_refused_with_their_names(hub):
    hub.dataset = FakeDataset([], question="string", answer="string")
    with pytest.raises(ValueError, match=r"name the text column.*\['question', 'answer'\]"):
        open_corpus("hf:org/name")


def test_an_unknown_column_is_refused_with_the_known_ones(hub):
    with pytest.raises(ValueError, match=r"'body' is not a column of text; these are: \['text', 'id'\]"):
        open_corpus("hf:org/name#body")


def test_a_failure_of_the_hub_is_reported_in_one_line(hub, monkeypatch):
    def load_dataset(*args, **kwargs):
        raise FileNotFoundError("no such dataset\nand a long explanation")

    monkeypatch.setattr(hub, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"could not be loaded: no such dataset$"):
        open_corpus("hf:org/name")


def test_a_hub_source_without_the_package_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="needs the package `datasets`"):
        open_corpus("hf:org/name")


def test_a_malformed_hub_source_is_refused():
    with pytest.raises(ValueError, match="must have the form hf:OWNER/NAME"):
        open_corpus("hf:")


@pytest.mark.parametrize(
    "name", ["../..", "org/..", ".hidden/name", "org/name.", "a--b/name", "org/a b", "o/" + "n" * 97]
)
def test_a_malformed_name_of_the_hub_is_refused_at_once(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "datasets", None)  # nothing of it is needed to say so
    with pytest.raises(ValueError, match=rf"^data 'hf:{re.escape(name)}' is malformed: '.*' is no name of the Hugging"):
        check_source(f"hf:{name}")


@pytest.mark.parametrize("source", ["none", "hf:", ""])
def test_messages_name_the_option_that_was_given(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((FileNotFoundError, ValueError), match=r"^--text "):
        open_corpus(source, "--text")


def test_a_folder_without_files_is_named_with_its_option(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"^data '{tmp_path}': the folder {tmp_path} holds no files"):
        open_corpus(tmp_path)


def test_a_folder_without_text_is_named_with_its_option(tmp_path):
    (tmp_path / "a").write_bytes(b"\0")
    with pytest.raises(ValueError, match=f"^data '{tmp_path}' holds no UTF-8 text"):
        open_corpus(tmp_path)


def test_an_empty_name_is_not_the_current_folder():
    with pytest.raises(ValueError, match=r"^data is empty"):
        open_corpus("")


def test_the_digest_of_a_source_is_that_of_names_and_contents(tmp_path):
    first, second, other = (write(tmp_path / name, a__b="text", c=b"\xff") for name in ("first", "second", "other"))
    (other / "c.txt").write_bytes(b"\xfe")
    assert content_digest(first) == content_digest(second) != content_digest(other)
    (second / "c.txt").rename(second / "d.txt")
    assert content_digest(first) != content_digest(second)


def test_a_pipe_in_a_folder_is_not_opened_for_the_digest(tmp_path):
    write(tmp_path, a="text")
    before = content_digest(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert content_digest(tmp_path) != before


def test_a_file_of_the_kernel_is_not_opened_for_the_digest(tmp_path):
    (tmp_path / "a.txt").symlink_to("/proc/sys/kernel/random/uuid")  # each time that it is read it has another text
    assert content_digest(tmp_path) == content_digest(tmp_path)


def test_the_digest_of_packages_is_not_that_of_their_folder(environment):
    assert content_digest("packages") != content_digest(environment.parent)


def test_the_digest_of_packages_changes_with_a_file_of_a_package(environment):
    before = content_digest("packages")
    (environment / "other" / "guide.rst").write_text("Other words that describe how this is to be used.\n" * 8)
    assert content_digest("packages") != before


def test_the_digest_of_a_dataset_is_that_of_its_rows(hub):
    before = content_digest("hf:org/name")
    assert content_digest("hf:org/name#text") == before != content_digest("hf:org/name#id")
    hub.dataset.rows[1]["text"] = "two"
    assert content_digest("hf:org/name") != before
