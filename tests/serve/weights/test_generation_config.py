"""Tests of what `generation_config.json` gives: texts end as transformers' do, and damaged files name their field."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from octile.checkpoint.files import GENERATION_CONFIG
from octile.checkpoint.hugging_face import save
from octile.models.deepseek_v3 import DeepseekV3
from octile.serve.engine.config import CacheConfig, EngineConfig
from octile.serve.engine.engine import Engine
from octile.serve.engine.request import FinishReason, Sampling
from octile.serve.generate import generate_from
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.weights.load import Folder
from tests.serve.models import CONFIG

PROMPT = "def add("
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def plain(tokenizer, tmp_path_factory):
    """A model without the file, in FP32, as transformers computes it."""
    torch.manual_seed(0)
    config = replace(CONFIG, vocab_size=320, num_nextn_predict_layers=0)
    folder = tmp_path_factory.mktemp("plain")
    save(DeepseekV3(config), folder, "float32")
    tokenizer.save(folder)
    return folder


@pytest.fixture
def folder(plain, tmp_path):
    """A copy of the model, to which a test adds files."""
    return shutil.copytree(plain, tmp_path / "model")


def write(folder, **values) -> Folder:
    (folder / GENERATION_CONFIG).write_text(json.dumps(values))
    return Folder.open(folder)


def tokens_of_engine(engine, tokenizer, sampling):
    """The tokens of a request, and why it has ended."""
    engine.add([tokenizer.begin, *tokenizer.encode(PROMPT)], sampling)
    tokens, reason = [], None
    while engine.has_work:
        for output in engine.step():
            tokens += output.tokens
            reason = output.finish_reason
    return tokens, reason


def greedy_tokens(folder, n=40):
    opened = Folder.open(folder)
    return tokens_of_engine(opened.load(CPU, EngineConfig(), CacheConfig())[0], opened.tokenizer, Sampling(n))


def tokens_of_transformers(folder, tokenizer, n=40):
    """The new tokens of `generate`, which a token that ends the text ends, with that token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = [tokenizer.begin, *tokenizer.encode(PROMPT)]
    return model.generate(torch.tensor([prompt]), max_new_tokens=n, do_sample=False)[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def unended(plain):
    """The greedy tokens of the model without the file; none of them ends the text."""
    tokens, reason = greedy_tokens(plain)
    assert (len(tokens), reason) == (40, FinishReason.LENGTH)
    return tokens


@pytest.mark.one_case
@pytest.mark.parametrize("file", [GENERATION_CONFIG, "config.json"])
@pytest.mark.parametrize("form", [lambda token: token, lambda token: [1, 318, token]], ids=["one", "several"])
def test_the_tokens_that_end_a_text_are_those_of_transformers(folder, tokenizer, unended, file, form):
    end = next(token for i, token in enumerate(unended) if i >= 5 and token not in unended[:i])
    (folder / "octile.json").unlink()  # it has the checksum of the config.json before
    values = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps({**values, "eos_token_id": form(end)}))
    tokens, reason = greedy_tokens(folder)
    assert (tokens, reason) == (unended[: unended.index(end)], FinishReason.STOP)
    assert tokens_of_transformers(folder, tokenizer) == [*tokens, end]


def test_generate_ends_where_the_engine_does(folder, tokenizer, unended):
    end = next(token for i, token in enumerate(unended) if i >= 5 and token not in unended[:i])
    opened = write(folder, eos_token_id=end)
    text = "".join(generate_from(opened, PROMPT, Sampling(40), "cpu"))
    assert text == "".join(generate_from(folder, PROMPT, Sampling(40), "cpu"))
    assert text == tokenizer.decode(unended[: unended.index(end)])


def test_an_engine_that_a_script_makes_ends_with_the_tokens_of_the_models_configuration(tokenizer, unended):
    torch.manual_seed(0)
    end = unended[7]
    config = replace(CONFIG, vocab_size=320, num_nextn_predict_layers=0, eos_token_id=(1, end))
    engine = Engine(ModelRunner(DeepseekV3(config).eval(), n_pages=8, max_batch=0), tokenizer)
    tokens, _ = tokens_of_engine(engine, tokenizer, Sampling(40))
    assert tokens == unended[: unended.index(end)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.95}, {"temperature": 0.6, "top_p": 0.95}),
        ({"do_sample": True, "top_k": 20}, {"temperature": 1.0, "top_k": 20}),
        ({"do_sample": False, "temperature": None, "top_k": -1}, {"temperature": 0.0, "top_k": 0}),
        ({"temperature": 0}, {"temperature": 0}),
        ({"min_p": 0.05, "repetition_penalty": 1.1}, {"min_p": 0.05, "repetition_penalty": 1.1}),
    ],
)
def test_sampling_values_are_defaults(folder, values, expected):
    opened = write(folder, **values)
    assert opened.generation.sampling == expected
    assert opened.sampling(max_new_tokens=5) == Sampling(5, **expected)
    given = {"top_p": 0.5, "top_k": 3, "temperature": 2.0}
    assert opened.sampling(**given) == Sampling(**{**expected, **given})


def test_fields_that_change_texts_and_are_not_used_are_named(folder):
    opened = write(
        folder, _from_model_config=True, bos_token_id=0, num_beams=1, repetition_penalty=1.0,
        typical_p=0.9, guidance_scale=None, no_repeat_ngram_size=0, stop_strings=["end"], do_sample=False,
        temperature=0.6, transformers_version="5.0",
    )  # fmt: skip
    with pytest.warns(RuntimeWarning, match=r"not used: typical_p 0.9, stop_strings \['end'\], temperature 0.6$"):
        opened.warn_of_unused()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"eos_token_id": -1}, "eos_token_id must be at least 0, not -1"),
        ({"eos_token_id": [1, 320]}, "eos_token_id must be below vocab_size, 320, not 320"),
        ({"eos_token_id": "1"}, "eos_token_id must be a whole number or null or a list, each a whole number, not '1'"),
        ({"temperature": "hot"}, "temperature must be a number or null, not 'hot'"),
        ({"temperature": -1}, "temperature must be 0, or from"),
        ({"do_sample": False, "temperature": -1}, "temperature must be 0, or from"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, not 1.5"),
        ({"top_k": -2}, "top_k must be at least -1, not -2"),
        ({"top_k": True}, "top_k must be a whole number or null, not True"),
        ({"min_p": 2}, "min_p must be from 0 to 1, not 2"),
        ({"repetition_penalty": 0}, "repetition_penalty must be from 1.2e-38 to 3.4e+38, not 0"),
        ({"do_sample": 1}, "do_sample must be true or false or null, not 1"),
    ],
)
def test_a_damaged_field_is_named(folder, values, message):
    with pytest.raises(ValueError, match=re.escape(f"{folder / GENERATION_CONFIG}: {message}")):
        write(folder, **values)


def test_names_of_fields_are_no_commands_of_a_terminal(folder):
    opened = write(folder, **{"\x1b[31mred": 2})
    with pytest.warns(RuntimeWarning, match=r"not used: '\\x1b\[31mred' 2$"):
        opened.warn_of_unused()


def test_a_broken_link_is_refused(folder):
    (folder / GENERATION_CONFIG).symlink_to(folder / "nowhere")
    with pytest.raises(ValueError, match=f"{GENERATION_CONFIG} is no file that can be read"):
        Folder.open(folder)


def test_a_file_that_is_no_json_is_named(folder):
    (folder / GENERATION_CONFIG).write_text('{"top_p": ')
    with pytest.raises(ValueError, match=f"{GENERATION_CONFIG} is damaged: not JSON at byte"):
        Folder.open(folder)
