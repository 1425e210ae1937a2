"""The counts of several ranks."""

from octile.serve.engine.stats import ChangedStats, Stats


def test_counts_of_ranks_are_added_and_steps_are_those_of_the_rank_with_the_most():
    first = Stats(waiting=1, running=2, n_pages=10, steps=7, steps_ahead=3, requests=5, expert_tokens={1: (1, 2)})
    second = Stats(running=1, n_pages=10, steps=4, steps_ahead=4, requests=2, expert_tokens={1: (10, 20)})
    assert Stats.of_ranks([first, second]) == Stats(
        waiting=1, running=3, n_pages=20, steps=7, steps_ahead=4, requests=7, expert_tokens={1: (11, 22)}
    )


def test_experts_that_are_not_counted_have_no_sum():
    assert Stats.of_ranks([Stats(requests=1), Stats(requests=2)]) == Stats(requests=3)


def test_the_tokens_of_experts_are_summed_when_they_are_read():
    first, second = ({layer: (layer, 2) for layer in (3, 4)} for _ in range(2))
    tokens = Stats.of_ranks([Stats(expert_tokens=first), Stats(expert_tokens=second)]).expert_tokens
    first[4] = (10, 20)
    assert (len(tokens), [*tokens.items()]) == (2, [(3, (6, 4)), (4, (14, 22))])


def test_the_tokens_of_experts_are_sent_when_they_have_changed():
    old, new = {1: (1, 2)}, {1: (3, 4)}
    counted = [Stats(steps=i, expert_tokens=tokens) for i, tokens in enumerate((old, old, new, new))]
    changed, before, sent = ChangedStats(iter(counted).__next__), Stats(), []
    for expected in counted:
        sent.append(changed.next())
        before = sent[-1].after(before)
        assert before == expected
    assert [stats.expert_tokens for stats in sent] == [old, None, new, None]


def test_the_tokens_of_several_ranks_are_sent_when_those_of_one_have_changed():
    first, second = Stats(expert_tokens={1: (1, 2)}), Stats(expert_tokens={1: (3, 4)})
    ranks = [first, first]
    changed = ChangedStats(lambda: Stats.of_ranks(ranks))
    sent = [changed.next().expert_tokens, changed.next().expert_tokens]
    ranks[1] = second
    sent += [changed.next().expert_tokens, changed.next().expert_tokens]
    assert sent == [{1: (2, 4)}, None, {1: (4, 6)}, None]


def test_experts_that_are_not_counted_have_no_tokens_at_the_receiver():
    assert ChangedStats(Stats).next().after(Stats()).expert_tokens is None
