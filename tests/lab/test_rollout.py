"""`octile lab rollout`, and what it counts. The equality itself is tested in tests/serve/test_exact.py."""

import json
import math
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from octile.checkpoint import hugging_face
from octile.checkpoint.hugging_face import load, save
from octile.lab import rollout
from octile.lab.pages.rollout import describe, describe_drafts
from octile.lab.rollout import (
    Agreement,
    Difference,
    DraftCounts,
    Text,
    compare,
    draw_prompts,
    find_difference,
    first_to_search,
)
from octile.models.deepseek_v3 import DeepseekV3
from octile.recipe import Recipe
from octile.serve.engine.engine import Engine
from octile.serve.engine.stats import Stats
from octile.serve.model import forward
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.weights.load import Folder
from octile.serve.weights.weights import ServedWeights
from octile.tokenizer import Tokenizer
from tests.serve.models import exact_model
from tests.test_cli import call, refused

OPTIONS = ("--tokens", "60", "--new-tokens", "20", "--text", "text.txt")
FEW = ("--tokens", "6", "--new-tokens", "2", "--text", "text.txt")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Folders of models of both recipes, and a text."""
    root = tmp_path_factory.mktemp("rollout")
    words = " ".join(f"word{i % 97} of {i}" for i in range(12_000))
    (root / "text.txt").write_text(words)
    tokenizer = Tokenizer.train([words[:20_000]], 300)
    for name, recipe, n_mtp in (
        ("exact", Recipe.exact(), 1),
        ("usual", Recipe.deepseek_v3(), 1),
        ("no drafts", Recipe.exact(), 0),
    ):
        model = exact_model(recipe=recipe, vocab_size=tokenizer.vocab_size, num_nextn_predict_layers=n_mtp)
        save(model, root / name)
        tokenizer.save(root / name)
    return root


@pytest.mark.slow
def test_weights_of_the_recipe_agree_in_all_bits(capsys, folders, monkeypatch):
    monkeypatch.chdir(folders)
    monkeypatch.setenv("FORCE_COLOR", "1")
    code, out, err = call(capsys, "lab", "rollout", "exact", *OPTIONS, "--drafts", "1", "--json")
    found = json.loads(out)
    assert (code, found["mode"], found["difference"], err) == (0, "exact", None, "")
    assert [each["equal"] == each["tokens"] for each in found["agreement"]] == [True, True]
    assert found["agreement"][1]["tokens"] == 60
    drafts = found["drafts"]
    assert 0 <= drafts["accepted"] <= drafts["verified"] > 0
    assert drafts["acceptance_rate"] == drafts["accepted"] / drafts["verified"]
    assert drafts["tokens_per_step"] == 60 / (60 - drafts["accepted"])


@pytest.mark.slow
def test_usual_weights_differ_and_the_first_block_that_does_is_named(capsys, folders, monkeypatch):
    monkeypatch.chdir(folders)
    code, out, _ = call(capsys, "lab", "rollout", "usual", *OPTIONS)
    assert code == 0
    assert "engine:   default, 32 texts at once, 3 texts" in out
    assert "log-probabilities differ. The first difference is in text 0, position" in out.replace("\n", " ")


def test_in_exact_mode_a_difference_is_a_failure(capsys, folders, monkeypatch):
    monkeypatch.chdir(folders)
    monkeypatch.setattr(forward, "rms_norm", lambda x, weight, eps: (x * weight, x))
    code, out, err = call(capsys, "lab", "rollout", "exact", *FEW, "--json")
    assert code == 1
    assert json.loads(out)["difference"]["where"] == "norm"
    assert err == "octile: exact is served in exact mode, but not with the bits of training\n"


@pytest.mark.slow
def test_drafts_are_counted_where_there_are_some(capsys, folders, monkeypatch):
    monkeypatch.chdir(folders)
    _, out, _ = call(capsys, "lab", "rollout", "usual", *FEW, "--drafts", "1")
    assert re.search(r"^drafts:   .* tokens per step of a text$", out, re.MULTILINE)
    _, out, _ = call(capsys, "lab", "rollout", "usual", *FEW)
    assert "drafts:" not in out


def test_drafts_are_described_by_their_share_and_the_tokens_of_a_step():
    counts = DraftCounts.of(Stats(generated_tokens=1200, drafted_tokens=1000, accepted_tokens=400))
    assert counts == DraftCounts(1000, 400, 0.4, 1.5)
    assert describe_drafts(counts) == "40.0% of 1,000 accepted, 1.50 tokens per step of a text"
    assert describe_drafts(DraftCounts.of(Stats(generated_tokens=3))) == (
        "none was verified, 1.00 tokens per step of a text"
    )


@pytest.mark.slow
def test_the_steps_are_shown_on_a_terminal(capsys, folders, monkeypatch):
    monkeypatch.chdir(folders)
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, out, err = call(capsys, "lab", "rollout", "usual", *FEW)
    assert all(step in err and step not in out for step in ("sampling", "prefilling", "training", "searching"))


@pytest.mark.slow
def test_the_cache_has_the_pages_of_the_texts_and_is_freed_before_training(capsys, folders, monkeypatch):
    monkeypatch.chdir(folders)
    runners: list[weakref.ref[ModelRunner]] = []

    def load_engine(*arguments: Any) -> tuple[Engine, ModelRunner]:
        engine, runner = serve(*arguments)
        runners.append(weakref.ref(runner))
        lengths = [len(prompt) + 2 for prompt in draw_prompts(range(20_000), 3, seed=0)]
        assert runner.n_pages == sum(sorted(-(-n // 64) for n in lengths)[-2:])
        return engine, runner

    def load_model(*arguments: Any, **options: Any) -> DeepseekV3:
        assert runners[0]() is None
        return load(*arguments, **options)

    serve = Folder.load
    monkeypatch.setattr(Folder, "load", load_engine)
    monkeypatch.setattr(hugging_face, "load", load_model)
    assert call(capsys, "lab", "rollout", "exact", *FEW, "--max-batch", "2", "--json")[0] == 0
    assert runners


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--max-step-tokens", "1"), "--max-step-tokens must be at least --max-batch × (1 + --drafts) = 32, not 1"),
        (("--drafts", "1"), "--drafts must be 0, not 1"),
        (("--new-tokens", "512"), "--new-tokens must be less than the model's max_position_embeddings, 512, not 512"),
    ],
)
def test_an_option_that_does_not_fit_is_named_before_weights_are_read(capsys, folders, monkeypatch, options, error):
    monkeypatch.chdir(folders)
    monkeypatch.delattr(ServedWeights, "read")
    assert error in refused(capsys, "lab", "rollout", "no drafts", *OPTIONS, *options)


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


def test_equal_bits_are_not_equal_values(monkeypatch):
    texts = [Text([3, 4], [5], [0.5], [zero]) for zero in (-0.0, 0.0)]
    monkeypatch.setattr(rollout, "training_log_probs", lambda model, text: torch.tensor([-0.0, 0.5]))
    prompts, decoded = compare(exact_model(), texts)
    assert (prompts.equal, prompts.largest, decoded.equal) == (1, 0.0, 2)
    assert [text.differs for text in texts] == [False, True]


def test_texts_that_differ_are_searched_first():
    texts = [Text([3], differs=i in (2, 5)) for i in range(9)]
    assert first_to_search(texts, 4) == [2, 5, 0, 1]


def test_only_the_given_texts_are_searched(monkeypatch):
    model, texts = exact_model(), [Text([3, 4]), Text([5, 6]), Text([7, 8])]
    runner = ModelRunner(model, 1, batch_invariant=True)
    monkeypatch.setattr(forward, "rms_norm", lambda x, weight, eps: (x * weight, x))
    found = find_difference(model, runner, texts, [1, 2])
    assert found is not None
    assert (found.text, found.where) == (1, "norm")
    assert find_difference(model, runner, texts, []) is None


def test_one_prompt_in_three_has_the_common_beginning():
    prompts = draw_prompts(list(range(1000)), 9, seed=0)
    assert [prompt[:80] == list(range(80)) for prompt in prompts] == [True, False, False] * 3
    assert prompts == draw_prompts(list(range(1000)), 9, seed=0)
    assert all(1 <= len(prompt) <= 280 for prompt in prompts)
    assert draw_prompts(list(range(1000)), 9, seed=0, longest=90) == [prompt[:90] for prompt in prompts]


@pytest.mark.parametrize(
    ("equal", "difference", "summary"),
    [
        (7, None, "all bits of all log-probabilities, and of what all blocks compute of the first texts."),
        (6, None, "1 log-probability differs, though none in the texts that were read alone, at most 8"),
        (
            7,
            Difference(2, 5, "block 1", (3, 64), 0.5),
            "difference is in text 2, position 5: 3 of 64 values",
        ),
        (5, Difference(0, 1, "norm", (1, 64), 0.5), "2 log-probabilities differ. The first difference.*of the norm"),
        (
            7,
            Difference(0, 1, "norm", (1, 64), 0.5),
            "of all log-probabilities, but not of what blocks compute. The first",
        ),
    ],
)
def test_what_is_summary(equal, difference, summary):
    assert re.search(summary, describe([Agreement("decoded", 7, equal, 0.0, 0.0, 0.0)], difference))
