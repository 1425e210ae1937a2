"""Tests of the option --seeds: a number of seeds or a list of them."""

import pytest

from octile.train.compare.comparison import baseline_seeds, parse_seeds


@pytest.mark.parametrize(
    ("text", "first", "seeds"),
    [("1", 0, (0,)), ("3", 0, (0, 1, 2)), ("2", 7, (7, 8)), ("0,7, 9", 0, (0, 7, 9)), ("5,", 0, (5,))],
)
def test_a_number_is_a_count_and_a_list_names_seeds(text, first, seeds):
    assert parse_seeds(text, first) == seeds


@pytest.mark.parametrize(
    ("text", "first", "message"),
    [
        ("", 0, "seeds must be how many"),
        ("two", 0, "or which"),
        ("-1", 0, "not '-1'"),
        ("1,,2", 0, "seeds must be how many"),
        ("1.5", 0, "not '1.5'"),
        ("0", 0, "at least one"),
        ("3,3", 0, "names one twice"),
        ("0,1", 4, "leave out seed 4"),
    ],
)
def test_other_texts_are_refused(text, first, message):
    with pytest.raises(ValueError, match=message):
        parse_seeds(text, first)


def test_bf16_never_has_fewer_than_two_seeds():
    assert baseline_seeds((4,)) == (4, 5)
    assert baseline_seeds((4, 9, 2)) == (4, 9, 2)
