"""Where a prompt ends: within a thought, or not."""

import pytest

from octile.chat.thought import ends_inside


@pytest.mark.parametrize(
    ("prompt", "continued", "inside"),
    [
        ("<user>a<assistant><think>", "", True),
        ("<user>a<assistant><think>\n", "", True),
        ("<user>a<assistant></think>", "", False),
        ("<user>what is <think>?<assistant>", "", False),
        ("<user>a<assistant></think><think>one", "<think>one", True),
        ("<user>a<assistant><think>\none", " one ", True),
        ("<user>a<assistant></think>one", "one", False),
        ("<user>a<assistant><think>b</think>one", "<think>b</think>one", False),
    ],
)
def test_a_prompt_ends_within_a_thought_that_is_not_closed(prompt, continued, inside):
    assert ends_inside(prompt, continued) is inside
