"""Built-in rewards, and those of a user's file with its errors."""

import pytest

from octile.rl.rewards import Rewards, accuracy, has_format


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<think> a </think> 1 2", 1),
        ("<think> a </think>\n1 2\n", 1),
        ("no thoughts </think> 1 2", 1),
        ("<think> 1 2 </think> 1 3", 0),
        ("<think> a </think> 1 2 .", 0),
        ("1 2", 0),
        ("<think> 1 2", 0),
        ("<think> a </think> 1 2 </think> 3", 0),
        ("", 0),
    ],
)
def test_accuracy_is_that_of_what_follows_the_last_end_of_thoughts(completion, expected):
    assert accuracy("", completion, " 1 2") == expected


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (" <think> a\nb </think> 1 2\n", 1),
        ("<think>a</think>b", 1),
        ("<think> </think> 1", 0),
        ("<think> a </think> ", 0),
        ("a <think> a </think> 1", 0),
        ("<think> a <think> b </think> 1", 0),
        ("<think> a </think> 1 </think> 1", 0),
        ("<think> a", 0),
        ("", 0),
    ],
)
def test_format_is_thoughts_and_an_answer(completion, expected):
    assert has_format("", completion, "") == expected


def test_format_of_a_long_completion_is_found_at_once():
    assert has_format("", "<think> " + "a " * 20_000, "") == 0


@pytest.mark.parametrize(
    ("completion", "expected"),
    [("<think> a </think> 1", 1.0), ("<think> a </think> 2", 0.1), ("</think> 1", 0.9), ("1", 0.0)],
)
def test_a_right_answer_earns_more_than_the_format(completion, expected):
    found = Rewards()("", completion, "1")
    assert found["reward"] == pytest.approx(expected)
    assert found.keys() == {"reward", "accuracy", "format"}


def test_a_reward_of_a_file_gets_prompt_completion_and_answer(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("FACTOR = 2\ndef reward(prompt, completion, answer):\n    return FACTOR * len(prompt + answer)\n")
    rewards = Rewards(file)
    assert rewards.parts == ()
    assert rewards("ab", "unused", "c") == {"reward": 6.0}


@pytest.mark.parametrize("expression", ["2", "2.0", "numpy.float32(2)", "numpy.float64(2)", "numpy.int64(2)"])
def test_numbers_of_python_and_numpy_are_rewards(tmp_path, expression):
    file = tmp_path / "own.py"
    file.write_text(f"import numpy\ndef reward(prompt, completion, answer):\n    return {expression}\n")
    found = Rewards(file)("", "", "")["reward"]
    assert (type(found), found) == (float, 2)


def test_a_file_may_define_dataclasses(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Score:\n    value: float\n"
        "def reward(prompt, completion, answer):\n    return Score(0.5).value\n"
    )
    assert Rewards(file)("", "", "") == {"reward": 0.5}


@pytest.mark.parametrize(
    "source",
    [
        "def reward(*texts):\n    return 1",
        "def reward(prompt, completion, answer, scale=1.0):\n    return scale",
        "class Reward:\n    def __call__(self, p, c, a):\n        return 1\nreward = Reward()",
    ],
)
def test_what_can_be_called_with_three_arguments_is_a_reward(tmp_path, source):
    file = tmp_path / "own.py"
    file.write_text(source)
    assert Rewards(file)("", "", "") == {"reward": 1.0}


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ("return 1 / 0", RuntimeError, "raised ZeroDivisionError: division by zero"),
        ("return 'a'", TypeError, "must return a number, not 'a'"),
        ("return None", TypeError, "must return a number, not None"),
        ("return True", TypeError, "must return a number, not True"),
        ("return float('nan')", ValueError, "must return a finite number up to ±1e+15, not nan"),
        ("return -1e20", ValueError, "must return a finite number up to ±1e+15, not -1e+20"),
        ("return 10**400", ValueError, "must return a finite number up to ±1e+15, not 10^60 or more"),
        ("raise SystemExit('no license')", RuntimeError, "raised SystemExit: no license"),
    ],
)
def test_an_error_of_a_function_names_file_prompt_and_exception(tmp_path, body, error, message):
    file = tmp_path / "own.py"
    file.write_text(f"def reward(prompt, completion, answer):\n    {body}\n")
    with pytest.raises(error) as caught:
        Rewards(file)("1 + 1 =", "", "")
    assert str(caught.value) == f"reward {str(file)!r} for the prompt '1 + 1 =' {message}"


@pytest.mark.parametrize(
    ("name", "text", "error", "message"),
    [
        ("none.py", None, FileNotFoundError, "does not exist: name a Python file"),
        ("own.txt", "a = 1", ValueError, "must be a Python file, whose name ends in .py"),
        ("own.py", "a = b", ValueError, "cannot be run: NameError: name 'b' is not defined"),
        ("own.py", "def reward(", ValueError, "cannot be run: SyntaxError"),
        ("own.py", "import sys\nsys.exit(0)", ValueError, "cannot be run: SystemExit: 0"),
        ("own.py", "reward = 3", ValueError, r"must define a function reward\(prompt, completion, answer\)"),
        (
            "own.py",
            "def reward(prompts, completions, **kwargs): return [0.0]",
            ValueError,
            r"three arguments prompt, completion, answer, not reward\(prompts, completions, \*\*kwargs\): too many",
        ),
        ("own.py", "def reward(a, b, c, d): return 0.0", ValueError, r"not reward\(a, b, c, d\): missing a required"),
        (
            "own.py",
            "async def reward(a, b, c): return 0.0",
            ValueError,
            "must define reward with def, not with async def",
        ),
    ],
)
def test_a_file_without_a_function_is_refused(tmp_path, name, text, error, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(error, match=message):
        Rewards(tmp_path / name)
