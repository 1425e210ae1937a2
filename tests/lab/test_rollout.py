"""`octile lab rollout`, and what it counts. The equality itself is tested in tests/serve/test_exact.py."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from octile.checkpoint.hugging_face import save
from octile.lab.pages.rollout import describe
from octile.lab.rollout import Agreement, Difference, Text, compare, draw_prompts
from octile.recipe import Recipe
from octile.tokenizer import Tokenizer
from tests.serve.models import exact_model
from tests.test_cli import call, refused

OPTIONS = ("--tokens", "60", "--new-tokens", "20", "--text", "text.txt")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Folders of models of both recipes, and a text."""
    root = tmp_path_factory.mktemp("rollout")
    words = " ".join(f"word{i % 97} of {i}" for i in range(12_000))
    (root / "text.txt").write_text(words)
    tokenizer = Tokenizer.train([words[:20_000]], 300)
    for name, recipe in (("exact", Recipe.exact()), ("usual", Recipe.deepseek_v3())):
        save(exact_model(recipe=recipe, vocab_size=tokenizer.vocab_size), root / name)
        tokenizer.save(root / name)
    return root


def test_weights_of_the_recipe_agree_in_all_bits(capsys, folders, monkeypatch):
    monkeypatch.chdir(folders)
    code, out, _ = call(capsys, "lab", "rollout", "exact", *OPTIONS, "--drafts", "1", "--json")
    found = json.loads(out)
    assert (code, found["mode"], found["difference"]) == (0, "exact", None)
    assert [each["equal"] == each["tokens"] for each in found["agreement"]] == [True, True]
    assert found["agreement"][1]["tokens"] == 60


def test_usual_weights_differ_and_the_first_block_that_does_is_named(capsys, folders, monkeypatch):
    monkeypatch.chdir(folders)
    code, out, _ = call(capsys, "lab", "rollout", "usual", *OPTIONS)
    assert code == 0
    assert "engine:   default, 32 texts at once, 3 texts" in out
    assert "log-probabilities differ. The first difference is in text 0, position" in out.replace("\n", " ")


def test_exact_mode_is_refused_for_usual_weights(capsys, folders, monkeypatch):
    monkeypatch.chdir(folders)
    assert "their recipe is 'deepseek_v3'" in refused(capsys, "lab", "rollout", "usual", "--mode", "exact")


def test_the_divergence_is_estimated_from_decoded_tokens():
    model = exact_model()
    text = Text([3, 4], [5, 6])
    with torch.no_grad():
        exact = model.log_probs(torch.tensor([[3, 4, 5, 6]]))[0].tolist()
    text.read, text.decoded = exact[:1], [exact[1], exact[2] - 0.5]
    prompts, decoded = compare(model, [text])
    assert prompts == Agreement("prompts", 1, 1, 0.0, 0.0, None)
    assert (decoded.tokens, decoded.equal) == (2, 1)
    assert decoded.largest == pytest.approx(0.5, abs=1e-6)
    assert decoded.kl == pytest.approx((math.exp(0.5) - 1.5) / 2, abs=1e-6)


def test_one_prompt_in_three_has_the_common_beginning():
    prompts = draw_prompts(list(range(1000)), 9, seed=0)
    assert [prompt[:80] == list(range(80)) for prompt in prompts] == [True, False, False] * 3
    assert prompts == draw_prompts(list(range(1000)), 9, seed=0)
    assert all(1 <= len(prompt) <= 280 for prompt in prompts)


@pytest.mark.parametrize(
    ("equal", "difference", "summary"),
    [
        (7, None, "all bits of all log-probabilities, and of what all blocks compute of the first texts."),
        (6, None, "1 log-probability differs, though none where a text is read alone"),
        (
            7,
            Difference(2, 5, "block 1", (3, 64), 0.5),
            "difference is in text 2, position 5: 3 of 64 values",
        ),
        (5, Difference(0, 1, "norm", (1, 64), 0.5), "2 log-probabilities differ. The first difference.*of the norm"),
    ],
)
def test_what_is_summary(equal, difference, summary):
    assert re.search(summary, describe([Agreement("decoded", 7, equal, 0.0, 0.0, 0.0)], difference))
