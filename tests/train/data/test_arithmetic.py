"""The additions of `--data arithmetic`: right and wrong examples."""

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from octile.rl.rewards import Rewards
from octile.train.data.arithmetic import LEVELS, NUMBERS, WRONG_SHARE, Problem, draw_problem, examples, solve
from octile.train.data.corpus import content_digest, open_corpus

problems = st.tuples(*[st.sampled_from(NUMBERS)] * 2)


def test_a_problem_is_solved_column_by_column():
    problem = Problem(47, 38)
    assert (problem.prompt, problem.level) == ("4 7 + 3 8 =", 1)
    assert solve(problem) == " <think> 7 + 8 = 1 5 , 4 + 3 + 1 = 8 </think> 8 5"
    assert solve(problem, is_wrong=True) == " <think> 7 + 8 = 1 6 , 4 + 3 + 1 = 8 </think> 8 6"


@given(problems)
def test_right_completions_earn_all_and_wrong_ones_the_format_alone(summands):
    problem = Problem(*summands)
    right, wrong = (Rewards()(problem.prompt, solve(problem, is_wrong), problem.answer) for is_wrong in (False, True))
    assert (right["accuracy"], right["format"]) == (1, 1)
    assert (wrong["accuracy"], wrong["format"]) == (0, 1)


@given(problems)
def test_the_level_is_the_number_of_columns_whose_sum_has_two_digits(summands):
    problem = Problem(*summands)
    columns = solve(problem).split("</think>")[0].split(",")
    assert problem.level == sum(len(column.split("=")[1].split()) == 2 for column in columns)


def test_problems_of_all_levels_are_drawn_equally_often():
    rng = random.Random(0)
    drawn = Counter(draw_problem(rng).level for _ in range(900))
    assert all(abs(drawn[level] - 300) < 60 for level in LEVELS)


def test_examples_have_each_problem_once_and_are_always_the_same_and_mostly_wrong():
    texts = list(examples())
    assert texts == list(examples())
    prompts = [text.partition("=")[0] for text in texts]
    assert len(set(prompts)) == len(prompts) == len(NUMBERS) ** 2
    right = {Problem(a, b).prompt + solve(Problem(a, b)) for a in NUMBERS for b in NUMBERS}
    assert abs(sum(text not in right for text in texts) / len(texts) - WRONG_SHARE) < 0.02


def test_the_examples_are_a_corpus():
    corpus = open_corpus("arithmetic")
    assert list(corpus.texts()) == list(examples())
    assert content_digest("arithmetic") == content_digest("arithmetic")
