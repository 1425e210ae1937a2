"""TRL's trainers with converted models: their reference has to be converted, too."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from octile.nn.conversion import apply_recipe
from octile.nn.linear import Linear
from tests.models_of_transformers import small_model

SETTINGS = {
    "max_steps": 2,
    "logging_steps": 1,
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
}
PROMPTS = Dataset.from_list([{"prompt": f"w{i} w{i + 1} w{i + 2}"} for i in range(8)])
PAIRS = Dataset.from_list([{"prompt": f"w{i}", "chosen": " w1 w2", "rejected": " w3 w4"} for i in range(8)])

TALKS = Dataset.from_list(
    [{"messages": [{"role": "user", "content": f"w{i}"}, {"role": "assistant", "content": "w9"}]} for i in range(8)]
)
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }} <end>{% endgeneration %}"
    "{% else %}{{ m.content }} {% endif %}{% endfor %}"
)
ANSWER = {1, 11}  # the tokens <end> and w9


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<end>", *(f"w{i}" for i in range(158))])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")


@pytest.fixture
def load(tmp_path: Path) -> Callable[[], PreTrainedModel]:
    torch.manual_seed(0)
    small_model("llama").save_pretrained(tmp_path / "model")
    return lambda: AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)


def count_w1(completions: list[str], **_: Any) -> list[float]:
    return [float(completion.count("w1")) for completion in completions]


@pytest.mark.slow
@pytest.mark.parametrize("converts_reference", [True, False])
def test_grpo_trains_a_converted_model(load, tokenizer, tmp_path: Path, converts_reference: bool):
    config = GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=4, num_generations=4, max_completion_length=8,
        learning_rate=1e-2, beta=0.1, **SETTINGS,
    )  # fmt: skip
    model = apply_recipe(load())
    trainer = GRPOTrainer(model, count_w1, args=config, train_dataset=PROMPTS, processing_class=tokenizer)
    if converts_reference:  # which TRL has loaded from the model's folder
        apply_recipe(trainer.ref_model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer.train()
    assert sum(type(module) is Linear for module in trainer.model.modules()) == 14
    assert not any(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert (trainer.state.log_history[0]["kl"] == 0) == converts_reference


@pytest.mark.one_case
@pytest.mark.parametrize("converts_reference", [True, False])
def test_dpo_begins_without_a_margin_if_the_reference_is_converted(
    load, tokenizer, tmp_path: Path, converts_reference: bool
):
    config = DPOConfig(output_dir=str(tmp_path), per_device_train_batch_size=4, learning_rate=1e-2, **SETTINGS)
    model = apply_recipe(load())
    reference = copy.deepcopy(model) if converts_reference else load()
    trainer = DPOTrainer(model, reference, config, train_dataset=PAIRS, processing_class=tokenizer)
    trainer.train()
    first, second = (line["rewards/margins"] for line in trainer.state.log_history[:2])
    assert (first == 0) == converts_reference
    assert second > 0.1


ADAPTERS = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])


@pytest.mark.one_case
@pytest.mark.parametrize("adapters", [None, ADAPTERS], ids=["full", "LoRA"])
def test_sft_trains_a_converted_model_on_answers(load, tokenizer, tmp_path: Path, adapters: LoraConfig | None):
    config = SFTConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=4, learning_rate=1e-2, max_length=32,
        assistant_only_loss=True, **SETTINGS,
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    model = apply_recipe(load())
    trainer = SFTTrainer(model, args=config, train_dataset=TALKS, processing_class=tokenizer, peft_config=adapters)
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    changed = {name for name, parameter in trainer.model.named_parameters() if not torch.equal(parameter, before[name])}
    assert sum(type(module) is Linear for module in trainer.model.modules()) == 14
    assert changed
    assert adapters is None or all("lora_" in name for name in changed)
    with torch.no_grad():  # the questions have no labels
        batch = next(iter(trainer.get_train_dataloader()))
    assert {token for token in batch["labels"].flatten().tolist() if token >= 0} == ANSWER
