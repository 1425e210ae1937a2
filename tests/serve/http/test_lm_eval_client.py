"""lm-eval's `local-completions` evaluates a served model on a task of its own."""

import json
import math

import pytest
import torch

pytest.importorskip("fastapi", reason="octile[serve] is not installed")
pytest.importorskip("lm_eval", reason="lm-eval is not installed")

import lm_eval
from lm_eval.tasks import TaskManager

import octile
from octile.serve.engine.config import CacheConfig, EngineConfig
from octile.serve.http.config import Limits
from octile.serve.weights.load import Folder
from tests.serve.http.conftest import Served
from tests.serve.models import exact_model

pytestmark = pytest.mark.exhaustive  # test_echo.py has what it needs of the server

GENERATED = """
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: [")"], max_gen_toks: 12}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOSEN = """
output_type: multiple_choice
doc_to_choice: choices
target_delimiter: ""
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
ROLLED = """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}]
"""
CHOICES = [" return x", "%", " é", " if", "M"]


@pytest.fixture(scope="module")
def exact(tokenizer, tmp_path_factory):
    """The folder of a model whose server has the log-probabilities of `DeepseekV3.log_probs`, bit for bit."""
    folder = tmp_path_factory.mktemp("lm_eval") / "exact"
    octile.save(exact_model(vocab_size=tokenizer.vocab_size), folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="module")
def of_model(exact):
    """Its server."""
    opened = Folder.open(exact)
    config = EngineConfig(max_batch=4, max_step_tokens=64, exact=True)
    engine, runner = opened.load(torch.device("cpu"), config, CacheConfig(gib=0.05))
    engine.tokenizer, engine.max_position = opened.tokenizer, runner.max_position
    served = Served(engine, Limits(), (), None)
    yield served
    served.stop()


@pytest.fixture(scope="module")
def model(exact):
    return octile.load(exact)


@pytest.fixture(scope="module")
def questions(model, tokenizer):
    """Four questions, of which the last choice is the model's most likely token."""
    found = []
    for i in range(100):
        text = f"def f{i}(x):"
        tokens = tokenizer.encode(text)
        with torch.no_grad():
            best = model(torch.tensor([tokens]))[0, -1].argmax().item()
        likely = tokenizer.decode([best])
        if tokenizer.encode(text + likely) == [
            *tokens,
            best,
        ]:  # not a part of a character, nor one with the text before
            found.append({"question": text, "choices": [*CHOICES, likely], "answer": 1})
    return found[:4]


@pytest.fixture(scope="module")
def log_probs(model):
    """The log-probability of each token but the first, and whether it is the most likely one there."""

    @torch.no_grad()
    def scored(tokens: list[int]) -> list[tuple[float, bool]]:
        text = torch.tensor([tokens])
        is_best = model(text)[0, :-1].argmax(-1) == text[0, 1:]
        return list(zip(model.log_probs(text)[0].tolist(), is_best.tolist(), strict=True))

    return scored


@pytest.fixture
def evaluate(folder, tmp_path, monkeypatch):
    """Evaluate a server on a task of questions: the results, and the sample of each question."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")

    def evaluated(served, task: str, questions: list[dict], **options) -> tuple[dict, list[dict]]:
        data = tmp_path / "questions.jsonl"
        data.write_text("".join(json.dumps(question) + "\n" for question in questions))
        reads = f"task: ours\ndataset_path: json\ndataset_kwargs: {{data_files: {data}}}\ntest_split: train"
        (tmp_path / "ours.yaml").write_text(f'{reads}\ndoc_to_text: "{{{{question}}}}"{task}')
        server = {"model": "micro", "base_url": f"{served.url}/v1/completions", "tokenizer": str(folder)}
        answer = lm_eval.simple_evaluate(
            model="local-completions",
            model_args={**server, "max_length": 128, "max_retries": 1, **options},
            tasks=["ours"],
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
            bootstrap_iters=0,
        )
        return answer["results"]["ours"], answer["samples"]["ours"]

    return evaluated


ONE, CONCURRENT = {}, {"num_concurrent": 3}


@pytest.mark.parametrize("options", [ONE, CONCURRENT, {"batch_size": 2}], ids=["one", "concurrent", "batch"])
def test_generated_answers_are_scored(served, evaluate, options):
    """The engine repeats the prompt."""
    questions = [{"question": f"f{i}(x):", "answer": f"f{i}(x" if i else "g"} for i in range(4)]
    results, _ = evaluate(served, GENERATED, questions, **options)
    assert results["exact_match,none"] == 0.75


@pytest.mark.parametrize(
    "options",
    [ONE, CONCURRENT, {"batch_size": 3}, {"tokenized_requests": False}],
    ids=["one", "concurrent", "batch", "texts"],
)
def test_choices_have_the_log_likelihoods_of_the_model(of_model, questions, log_probs, tokenizer, evaluate, options):
    results, samples = evaluate(of_model, CHOSEN, questions, **options)
    begin = [] if options.get("tokenized_requests", True) else [tokenizer.begin]  # which the server puts before a text
    n_right = n_greedy = 0
    for question, sample in zip(questions, samples, strict=True):
        context = len(begin + tokenizer.encode(question["question"]))
        texts = [begin + tokenizer.encode(question["question"] + choice) for choice in question["choices"]]
        scores = [log_probs(tokens)[context - 1 :] for tokens in texts]
        found = [(sum(score for score, _ in scored), all(is_best for _, is_best in scored)) for scored in scores]
        assert [response for (response,) in sample["resps"]] == found
        n_right += max(found) == found[question["answer"]]
        n_greedy += sum(is_greedy for _, is_greedy in found)
    assert results["acc,none"] == n_right / 4
    assert begin or n_greedy >= 4


def test_a_text_has_the_perplexity_of_the_model(of_model, log_probs, tokenizer, evaluate):
    text = "def add(x, y): return x + y"
    results, _ = evaluate(of_model, ROLLED, [{"question": text}])
    total = sum(score for score, _ in log_probs([tokenizer.begin, *tokenizer.encode(text)]))
    assert results["word_perplexity,none"] == pytest.approx(math.exp(-total / len(text.split())))
