"""Shared by the tests of reinforcement learning: the folder of a model that is not trained, of the recipe exact."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from octile.checkpoint.hugging_face import save
from octile.recipe import Recipe
from octile.tokenizer import Tokenizer
from octile.train.data.arithmetic import examples
from tests.report.conftest import draw_no_figures
from tests.serve.models import exact_model

REWARD = "def reward(prompt, completion, answer):\n    return len(set(completion)) / 10\n"


@pytest.fixture(scope="module", autouse=True)
def without_figures() -> Iterator[None]:
    """Leave the figures of reports empty; those of a run are drawn in tests/report/test_rl.py."""
    with pytest.MonkeyPatch.context() as patch:
        draw_no_figures(patch)
        yield


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(list(examples())[:200], 300)


def save_model(tokenizer: Tokenizer, folder: Path, recipe: Recipe) -> Path:
    save(exact_model(recipe=recipe, vocab_size=tokenizer.vocab_size, num_nextn_predict_layers=0), folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="session")
def exact_folder(tokenizer, tmp_path_factory) -> Path:
    return save_model(tokenizer, tmp_path_factory.mktemp("rl") / "exact", Recipe.exact())


@pytest.fixture(scope="session")
def usual_folder(tokenizer, tmp_path_factory) -> Path:
    return save_model(tokenizer, tmp_path_factory.mktemp("rl") / "usual", Recipe.deepseek_v3())


@pytest.fixture(scope="session")
def reward_file(tmp_path_factory) -> Path:
    """A reward that differs between the completions of a model that is not trained."""
    file = tmp_path_factory.mktemp("reward") / "reward.py"
    file.write_text(REWARD)
    return file
