"""The counts of several ranks."""

from octile.serve.stats import Stats


def test_counts_of_ranks_are_added_and_steps_are_those_of_the_rank_with_the_most():
    first = Stats(waiting=1, running=2, n_pages=10, steps=7, steps_ahead=3, requests=5, expert_tokens={1: (1, 2)})
    second = Stats(running=1, n_pages=10, steps=4, steps_ahead=4, requests=2, expert_tokens={1: (10, 20)})
    assert Stats.of_ranks([first, second]) == Stats(
        waiting=1, running=3, n_pages=20, steps=7, steps_ahead=4, requests=7, expert_tokens={1: (11, 22)}
    )


def test_experts_that_are_not_counted_have_no_sum():
    assert Stats.of_ranks([Stats(requests=1), Stats(requests=2)]) == Stats(requests=3)
