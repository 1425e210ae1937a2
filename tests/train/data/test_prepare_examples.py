"""Tests of stores of examples: what is trained on, cut, left out and held out, and which lines are refused."""

import json
import shutil
from pathlib import Path

import pytest

from octile.chat.template import ChatTemplate, Rendering
from octile.serve.http.protocol import Message
from octile.tokenizer import Tokenizer
from octile.train.data import prepare_examples as prepare_examples_module
from octile.train.data.examples import read_examples
from octile.train.data.packed_tokens import LOSS
from octile.train.data.prepare_examples import ANSWER_CUT, NO_LOSS, prepare_examples
from octile.train.data.token_store import LEFT_OUT, MANIFEST, TokenStore
from tests.train.conftest import silent_console

TEMPLATE = """\
{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""
TALK = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]}


def said(content: object) -> dict:
    return {"messages": [{"role": "assistant", "content": content}]}


def called(function: dict) -> dict:
    return {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"function": function}]}]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    Tokenizer.train(["hello good day " * 9], 300).save(folder)
    return folder


@pytest.fixture
def prepared(tokenizer, tmp_path):
    """Return prepared(rows): the store of a file with these lines, or objects, with sequences of 32 tokens."""

    def make(*rows: object) -> TokenStore:
        file = tmp_path / "x.jsonl"
        file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        return prepare_examples(file, tmp_path / "data", 32, tokenizer, held_out_sequences=1)

    return make


def texts(store: TokenStore) -> list[tuple[str, str]]:
    """The texts of the sequences of both parts, and what of them has a loss."""
    found = []
    for part in (store.train, store.val):
        decode = lambda tokens: store.tokenizer.decode(tokens.tolist())  # noqa: E731
        found += [(decode(part.tokens), decode(part.tokens[part.marks & LOSS != 0]))]
    return found


@pytest.mark.parametrize(
    ("row", "with_loss"),
    [
        ({"prompt": "hello", "completion": " day"}, " day<|end|>"),
        ({"text": "hello"}, "hello<|end|>"),
        (TALK, " good day\n\n<|end|>"),
    ],
    ids=["completion", "text", "messages"],
)
def test_the_loss_is_that_of_the_answer(prepared, row, with_loss):
    other = {"prompt": "other", "completion": "one"}
    assert with_loss in [loss for _, loss in texts(prepared(row, other))]


def chat_with_call(arguments: object) -> list[dict]:
    """Messages of a user and an assistant, who calls a function."""
    function = {"name": "f", "arguments": arguments}
    call = {"id": "1", "type": "function", "function": function}
    return [{"role": "user", "content": "hello"}, {"role": "assistant", "tool_calls": [call]}]


def template_of_calls(written: str) -> str:
    """A chat template that writes a call in this way."""
    answer = "{% generation %}{% for call in message.tool_calls %}" + written + "{% endfor %}{% endgeneration %}"
    return (
        "{% for message in messages %}{{ message.role }}{% if message.tool_calls %}"
        + answer
        + "{% endif %}{% endfor %}"
    )


CALLS = {
    "arguments": "{{ call.function.arguments | tojson }}",
    "function": "{{ call.function | tojson }}",
    "calls": "{{ message.tool_calls | tojson }}",
}
TEXTS_OF_CALLS = {
    "concatenated": "{{ '<' + call.function.arguments + '>' }}",
    "joined": "{{ '<' ~ call.function.arguments ~ '>' }}",
    "printed": "<{{ call.function.arguments }}>",
}


@pytest.mark.parametrize("written", TEXTS_OF_CALLS.values(), ids=TEXTS_OF_CALLS.keys())
def test_an_object_of_arguments_is_json_text_where_the_template_concatenates(tokenizer, tmp_path, written):
    template = ChatTemplate(Tokenizer.load(tokenizer), template_of_calls(written))
    file = tmp_path / "x.jsonl"
    file.write_text(json.dumps({"messages": chat_with_call({"a": 1, "b": ["ä"]})}))
    (example,) = read_examples(file, Tokenizer.load(tokenizer), template)
    assert Tokenizer.load(tokenizer).decode(example.tokens).endswith('<{"a": 1, "b": ["ä"]}>')


@pytest.mark.parametrize("written", CALLS.values(), ids=CALLS.keys())
def test_a_call_is_the_same_text_as_an_object_and_as_json_and_in_serving(tokenizer, tmp_path, written):
    template = ChatTemplate(Tokenizer.load(tokenizer), template_of_calls(written))
    forms = [{"a": 1, "b": ["ä"]}, '{"a":1,"b":["\\u00e4"]}']
    file = tmp_path / "x.jsonl"
    file.write_text("\n".join(json.dumps({"messages": chat_with_call(form)}) for form in forms))
    decode = Tokenizer.load(tokenizer).decode
    trained = {decode(example.tokens) for example in read_examples(file, Tokenizer.load(tokenizer), template)}
    messages = [Message.model_validate(message).plain() for message in chat_with_call(forms[1])]
    served = template.prompt(messages, Rendering(add_generation_prompt=False))
    assert trained == {decode(served.tokens)}
    assert '{"a": 1, "b": ["ä"]}' in served.text


def test_a_text_longer_than_a_sequence_is_cut_and_counted(prepared):
    store = prepared({"text": "xyz" * 40}, {"text": "hello"})
    packed = store.manifest.packed
    assert (packed.truncated, packed.longest) == (1, 122)
    assert sorted(store.manifest.tokens.values()) == [len(store.tokenizer.encode("hello")) + 2, 32]


def test_the_statistics_of_texts_count_padding_as_one_of_a_sequence(prepared):
    store = prepared({"text": "xyz" * 40}, {"text": "hello"}, {"text": "hello day"})
    texts, sequences = 3, (len(store.train) + len(store.val)) // 32
    assert sum(store.manifest.packed.padding.values()) > 0
    mean = sequences * 32 // (texts + sequences)
    assert store.manifest.text_statistics == (store.manifest.packed.max_texts, mean)


def test_the_mean_length_of_what_is_trained_on_leaves_padding_out(prepared):
    store = prepared(*({"text": letter} for letter in "abcdef"))
    assert store.manifest.packed.padding["train"] > 0
    assert store.manifest.mean_train_length == len(store.tokenizer.encode("a")) + 2


def test_the_statistics_of_texts_without_padding_have_their_own_mean_length(prepared):
    store = prepared({"text": "xyz" * 40}, {"text": "abc" * 40})
    assert store.manifest.text_statistics == (1, 32)


def test_a_text_without_a_loss_is_left_out_with_its_reason_and_named(prepared):
    cut, silent = {"prompt": "xyz" * 40, "completion": "cut"}, {"messages": [{"role": "user", "content": "hello"}]}
    store = prepared(cut, "", silent, {"text": "hello"}, {"text": "day"})
    assert store.manifest.skipped == {ANSWER_CUT: 1, NO_LOSS: 1}
    assert store.left_out(3) == {ANSWER_CUT: ["line 1"], NO_LOSS: ["line 3"]}
    assert store.manifest.packed.truncated == 1


CALL = called({"name": "f", "arguments": "{}"})["messages"][0]


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ([said("")], "1 answer is empty (in line 1) and has the loss of the end alone"),
        (
            [said("day"), {"prompt": "hello", "completion": " "}, said(" ")],
            "2 answers are empty (the first in line 2) and have the loss of the end alone",
        ),
    ],
    ids=["one", "two"],
)
def test_empty_answers_are_counted(prepared, rows, line):
    console = silent_console()
    console.print_examples(prepared(*rows, {"text": "hello"}), 32)
    assert line in console.console.file.getvalue().replace("\n", " ")


def test_answers_with_text_or_calls_and_questions_are_not_empty(prepared, tokenizer):
    (tokenizer / "chat_template.jinja").write_text(TEMPLATE + "{# tool_calls #}")
    try:
        asked = {"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": "day"}]}
        packed = prepared({"messages": [CALL]}, asked, {"text": "hello"}).manifest.packed
    finally:
        (tokenizer / "chat_template.jinja").unlink()
    assert (packed.empty_answers, packed.first_empty_answer) == (0, None)


@pytest.mark.parametrize(
    ("context", "advice"),
    [
        (500, "; to keep more of them, use --sequence-length 122\n"),
        (64, "--sequence-length 64\n"),
        (32, "122 tokens\n"),
    ],
)
def test_the_advised_sequence_is_no_longer_than_the_context_and_helps(prepared, context, advice):
    console = silent_console()
    console.print_examples(prepared({"text": "xyz" * 40}, {"text": "hello"}), context)
    assert advice in console.console.file.getvalue()


def test_the_smallest_of_few_groups_is_held_out(prepared):
    rows = [{"text": "x" * length} for length in (22, 28, 9, 25)]
    assert prepared(*rows).manifest.tokens["val"] == 11


def test_answers_to_one_prompt_are_held_out_together(prepared):
    store = prepared(*({"prompt": f"q{i % 4}", "completion": f"{i}"} for i in range(40)))
    held, trained = (
        {text[:2] for text in store.tokenizer.decode(part.tokens.tolist()).split("<|begin|>")[1:]}
        for part in (store.val, store.train)
    )
    assert held.isdisjoint(trained)


def test_conversations_that_begin_with_one_greeting_have_different_prompts(prepared):
    greeting = {"role": "assistant", "content": "hi"}
    rows = [
        {"messages": [greeting, {"role": "user", "content": c}, {"role": "assistant", "content": "d"}]} for c in "ab"
    ]
    assert prepared(*rows).manifest.documents == {"train": 1, "val": 1}


def test_the_same_file_gives_the_same_tokens(tokenizer, tmp_path, monkeypatch):
    file, digests = tmp_path / "x.jsonl", []
    file.write_text("\n".join(json.dumps({"text": f"hello {i}"}) for i in range(20)))
    for name in ("one", "two"):
        monkeypatch.setenv("OCTILE_CACHE_DIR", str(tmp_path / f"cache of {name}"))
        digests.append(prepare_examples(file, tmp_path / name, 32, tokenizer, held_out_sequences=1).digest)
    assert digests[0] == digests[1]


def test_examples_are_rendered_by_the_folders_template_which_stays_out_of_the_tokenizers_configuration(
    prepared, tokenizer
):
    file = tokenizer / "chat_template.jinja"
    file.write_text(TEMPLATE)
    try:
        store = prepared(TALK, {"text": "hello"})
    finally:
        file.unlink()
    assert "chat_template" not in store.tokenizer.config  # `prepare_tokens` copies the file
    assert "good day" in [loss for _, loss in texts(store)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "not JSON: Expecting property name"),
        ('{"messages": ' + "[" * 100_000, "its objects and lists are nested too deeply"),
        ("[1]", r"must be a JSON object with \"messages\", .*, not \[1\]"),
        ({"question": "a"}, "must have \"messages\", .*; it has 'question'"),
        ({"text": "a", "prompt": "b"}, "it has 'text', 'prompt'"),
        ({"text": 3}, "text must be a text, not 3"),
        ({"prompt": "a", "completon": "b"}, "has no completion; it has 'prompt', 'completon'"),
        ({"messages": []}, "messages must be a list of at least one message"),
        ({"messages": [{"role": "bot", "content": "a"}]}, r"messages\[0\].role must be one of system, .*, not 'bot'"),
        ({"messages": [{"from": "gpt", "value": "a"}]}, r"messages\[0\] has no role; it has 'from', 'value'"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content must be a text, not None"),
        ({"messages": [{"role": "assistant", "content": "a", "weight": 0}]}, r"messages\[0\].weight must be 1, not 0"),
        ({"text": "\ud800"}, r"text must be text that UTF-8 can encode, but has a lone surrogate, \\ud800"),
        (said([]), r"messages\[0\].content must be a text, or a list of at least one part, not \[\]"),
        (said([{"type": "text"}]), r"messages\[0\].content\[0\] must be {\"type\": \"text\", \"text\": TEXT}"),
        (said([{"type": "text", "text": {"x": 1}}]), r"messages\[0\].content\[0\] must be"),
        (called({"arguments": "{}"}), r"messages\[0\].tool_calls\[0\] must be .*\"name\": TEXT"),
        (
            called({"name": "f", "arguments": None}),
            r"tool_calls\[0\].function.arguments must be an object, .* not None",
        ),
        (called({"name": "f", "arguments": "{"}), r"tool_calls\[0\].function.arguments must be an object, .* not '{'"),
        ({**TALK, "tools": 3}, "tools must be a list of objects, not 3"),
        ({**TALK, "tools": [{}]}, "tools must be empty: the chat template does not read them"),
    ],
    ids=lambda value: str(value)[:80],
)
def test_what_is_no_example_is_refused_with_its_line(prepared, row, message):
    with pytest.raises(ValueError, match=rf"x.jsonl, line 2: .*{message}"):
        prepared({"text": "hello"}, row)


def test_a_message_that_the_plain_template_does_not_read_says_that_it_is_octiles(prepared):
    with pytest.raises(
        ValueError, match=r"must have no tool_calls: .*; the tokenizer has no chat template, so octile's"
    ):
        prepared({"text": "hello"}, {"messages": [CALL]})


def test_a_message_that_the_models_own_template_does_not_read_says_nothing_of_another(prepared, tokenizer):
    (tokenizer / "chat_template.jinja").write_text(TEMPLATE)
    try:
        with pytest.raises(ValueError, match=r"must have no tool_calls: the chat template does not read them$"):
            prepared({"text": "hello"}, {"messages": [CALL]})
    finally:
        (tokenizer / "chat_template.jinja").unlink()


def test_several_lines_that_are_no_examples_are_refused_together(prepared):
    with pytest.raises(
        ValueError, match=r"x.jsonl: 2 lines are no examples: line 1: not JSON: .*; line 3: text must be"
    ):
        prepared("{", {"text": "hello"}, {"text": 3})


@pytest.mark.parametrize(("count", "end"), [(10, r"line 10: text must be a text, not 3$"), (22, r"; and 12 more$")])
def test_ten_lines_that_are_no_examples_are_named(prepared, count, end):
    with pytest.raises(ValueError, match=rf"x.jsonl: {count} lines are no examples: line 1: .*{end}") as refused:
        prepared(*[{"text": 3}] * count)
    assert str(refused.value).count("line ") == 10


def test_a_line_that_is_too_long_is_named_with_those_before_it(prepared, monkeypatch):
    monkeypatch.setattr("octile.train.data.examples.MAX_LINE", 20)
    with pytest.raises(
        ValueError, match=r"2 lines are no examples: line 1: text must be .*; line 2: must have at most"
    ):
        prepared({"text": 3}, {"text": "hello, hello"}, {"text": 4})


def test_no_more_of_a_line_is_read_than_an_example_may_have(prepared, monkeypatch):
    monkeypatch.setattr("octile.train.data.examples.MAX_LINE", 20)
    with pytest.raises(ValueError, match=r"x.jsonl, line 2: must have at most 20 bytes, but has more$"):
        prepared({"text": "hello"}, {"text": "hello, hello"})


def test_a_byte_order_mark_and_null_fields_count_as_absent(prepared):
    message = {"role": "assistant", "content": "day", "weight": None, "tool_calls": None}
    row = {"messages": [message], "text": None, "tools": None}
    assert "day" in "".join(loss for _, loss in texts(prepared("\ufeff" + json.dumps(row), {"text": "hello"})))


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with two files of examples, a hidden one, and an empty one."""
    (tmp_path / "chats" / "more").mkdir(parents=True)
    for name, rows in {"more/p0.jsonl": ROWS[2:], "a.jsonl": ROWS[:2], ".b.jsonl": ROWS, "c.jsonl": ()}.items():
        (tmp_path / "chats" / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "chats"


def test_a_folder_has_the_examples_of_its_files_in_the_order_of_their_names(folder, tokenizer, tmp_path):
    found = prepare_examples(folder, tmp_path / "data", 32, tokenizer, held_out_sequences=1)
    one = tmp_path / "all.jsonl"
    one.write_text("\n".join(map(json.dumps, ROWS)))
    assert texts(found) == texts(prepare_examples(one, tmp_path / "other", 32, tokenizer, held_out_sequences=1))


def test_other_files_of_a_folder_are_prepared_anew(folder, tokenizer, tmp_path):
    make = lambda: prepare_examples(folder, tmp_path / "data", 32, tokenizer, held_out_sequences=1)  # noqa: E731
    settings = [make().manifest.settings["text"], make().manifest.settings["text"]]
    (folder / "a.jsonl").rename(folder / "b.jsonl")
    settings.append(make().manifest.settings["text"])
    (folder / "c.jsonl").write_text(json.dumps({"text": "more"}))
    settings.append(make().manifest.settings["text"])
    assert settings[0] == settings[1]
    assert len(set(settings)) == 3


def test_what_is_left_out_of_a_folder_is_named_by_file_and_line(folder, tokenizer, tmp_path):
    (folder / "c.jsonl").write_text("\n" + json.dumps({"messages": TALK["messages"][:1]}))
    store = prepare_examples(folder, tmp_path / "data", 32, tokenizer, held_out_sequences=1)
    assert store.left_out(3) == {NO_LOSS: ["c.jsonl, line 2"]}


def test_a_line_of_a_folder_that_is_no_example_is_refused_with_its_file(folder, tokenizer, tmp_path):
    (folder / "c.jsonl").write_text('{"question": "a"}')
    with pytest.raises(ValueError, match=r"chats/c.jsonl, line 1: must have .*; it has 'question'"):
        prepare_examples(folder, tmp_path / "data", 32, tokenizer, held_out_sequences=1)


def test_a_folder_of_examples_must_not_hold_what_is_written(folder, tokenizer):
    with pytest.raises(ValueError, match=r"data '.*chats' must not hold the folder .*data: what is written"):
        prepare_examples(folder, folder / "data", 32, tokenizer, held_out_sequences=1)


def test_too_few_examples_are_refused(prepared):
    with pytest.raises(
        ValueError, match=r"too few examples: at least two .*, and 1 can be used; left out: 1 whose answer"
    ):
        prepared({"text": "hello"}, {"prompt": "x" * 99, "completion": "a"})


ROWS = ({"prompt": "hello", "completion": " day"}, TALK, {"text": "good"}, {"text": "day hello"})


@pytest.fixture
def again(tokenizer, tmp_path, monkeypatch):
    """Return again(…): the lines that a preparation in a new folder prints, and whether it has read the examples."""
    monkeypatch.setenv("OCTILE_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "x.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    read, folders = list[Path](), iter(range(9))
    monkeypatch.setattr(
        prepare_examples_module, "read_examples", lambda *of: (read.append(of[0]), read_examples(*of))[1]
    )

    def prepare(length: int = 32, folder: Path | None = None, tokenizer: Path = tokenizer) -> tuple[str, bool]:
        lines = list[str]()
        read.clear()
        where = folder or tmp_path / f"data{next(folders)}"
        store = prepare_examples(file, where, length, tokenizer, held_out_sequences=1, say=lines.append)
        assert sorted(name.name for name in where.iterdir()) == sorted([*store.manifest.files, LEFT_OUT, MANIFEST])
        return "".join(lines), bool(read)

    return prepare


def test_examples_that_were_prepared_before_come_from_the_cache(again, tmp_path):
    assert again() == ("", True)
    says, read = again()
    assert says.startswith("tokens from the cache (")
    assert not read
    first, second = (TokenStore.open(tmp_path / f"data{n}") for n in range(2))
    assert texts(first) == texts(second)
    assert first.manifest == second.manifest


def test_examples_in_the_folder_are_used_again(again, tmp_path):
    again(folder=tmp_path / "same")
    assert again(folder=tmp_path / "same") == ("", False)


@pytest.mark.parametrize("change", ["length", "examples", "template", "template for tools", "code", "versions"])
def test_other_examples_or_settings_are_prepared_anew(again, tokenizer, tmp_path, monkeypatch, change):
    other = tmp_path / "tokenizer"
    shutil.copytree(tokenizer, other)
    again(tokenizer=other)
    if change == "examples":
        with (tmp_path / "x.jsonl").open("a") as file:
            file.write("\n" + json.dumps({"text": "more"}))
    if change == "code":
        monkeypatch.setattr(prepare_examples_module, "source_digest", lambda names: "another")
    if change == "versions":
        monkeypatch.setattr("octile.train.data.prepare.version_of", lambda package: f"{package} 99")
    if change == "template":
        (other / "chat_template.jinja").write_text(TEMPLATE)
    if change == "template for tools":
        (other / "chat_template.jinja").write_text(TEMPLATE)
        again(tokenizer=other)
        (other / "additional_chat_templates").mkdir()
        (other / "additional_chat_templates" / "tool_use.jinja").write_text(TEMPLATE)
    assert again(length=33 if change == "length" else 32, tokenizer=other) == ("", True)


def test_examples_whose_template_reads_the_clock_are_prepared_anew(again, tokenizer, tmp_path):
    dated = tmp_path / "tokenizer"
    shutil.copytree(tokenizer, dated)
    (dated / "chat_template.jinja").write_text("{{ strftime_now('%d') }}" + TEMPLATE)
    for folder in (tmp_path / "one", tmp_path / "one", tmp_path / "two"):
        assert again(tokenizer=dated, folder=folder) == ("", True)


def test_examples_that_change_while_they_are_read_are_not_cached(again, tmp_path, monkeypatch, caplog):
    def change(file: Path, *of):
        yield from read_examples(file, *of)
        file.write_text(file.read_text() + "\n" + json.dumps({"text": "more"}))

    monkeypatch.setattr(prepare_examples_module, "read_examples", change)
    again()
    assert "changed while they were read" in caplog.text
    assert not list((tmp_path / "cache" / "tokens").glob("*/manifest.json"))


@pytest.fixture
def held_out(tokenizer, tmp_path):
    """Return held_out(rows, val): the store of examples of which the second are held out."""

    def make(rows: list[dict], val: list[dict]) -> TokenStore:
        for name, lines in (("x", rows), ("val", val)):
            (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
        return prepare_examples(
            tmp_path / "x.jsonl", tmp_path / "data", 32, tokenizer, val_source=tmp_path / "val.jsonl"
        )

    return make


def test_validation_examples_are_held_out_and_nothing_else(held_out):
    (_, train), (_, val) = texts(held_out([{"text": "hello"}, {"text": "day"}], [{"text": "good"}]))
    assert sorted(train.split("<|end|>")) == ["", "day", "hello"]
    assert val == "good<|end|>"


def test_one_example_and_one_validation_example_are_enough(held_out):
    assert held_out([TALK], [{"text": "good"}]).manifest.documents == {"train": 1, "val": 1}


def test_validation_examples_with_a_prompt_that_is_trained_on_are_counted(held_out):
    asked = [{"prompt": "hello", "completion": " day"}, {"prompt": "good", "completion": " day"}]
    packed = held_out([{"prompt": "hello", "completion": " good"}], asked).manifest.packed
    assert packed.shared_prompts == 1


@pytest.mark.parametrize(("rows", "val", "named"), [([], [TALK], "data"), ([TALK], [], "val_data")])
def test_a_file_without_examples_is_refused_by_its_option(held_out, rows, val, named):
    with pytest.raises(ValueError, match=rf"^{named} '.*' has no example that can be used$"):
        held_out(rows, val)


def test_a_validation_example_that_is_left_out_is_named_as_such(held_out):
    silent = {"messages": [{"role": "user", "content": "hello"}]}
    assert held_out([TALK], [silent, TALK]).left_out(3) == {NO_LOSS: ["val_data: line 1"]}
