"""docs/real_models.md shows what octile prints for the published configurations, and options that octile has."""

import json
import re
import shlex
from pathlib import Path

import pytest

from octile import cli
from octile.options.parse import parse
from tests.models.test_config import PUBLISHED_KIMI_K2, PUBLISHED_V3
from tests.train_commands import config_of

PAGE = (Path(__file__).parents[1] / "docs" / "real_models.md").read_text(encoding="utf-8")
CODE = re.sub(r"\\\n\s*", "", "\n".join(line[4:] for line in PAGE.splitlines() if line.startswith("    ") or not line))
SHOWN = re.findall(r"^\$ octile (.*)\n((?:.+\n)+)", CODE, re.MULTILINE)
COMMANDS = re.findall(r"^(?:torchrun .* -m )?octile ((?!train).*)", CODE, re.MULTILINE)
(TRAIN,) = re.findall(r"^torchrun --nnodes (\d+) --nproc-per-node (\d+) .* -m octile train (.*)", CODE, re.MULTILINE)
SMALL = ("convert Qwen3-30B-A3B", "convert Llama-3.1-8B")
CONFIGS = {  # the keys of published files that decide the shapes
    "DeepSeek-V3": PUBLISHED_V3,
    "Kimi-K2-Instruct": PUBLISHED_KIMI_K2,
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "tie_word_embeddings": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "Llama-3.1-8B": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "shown"),
    [pytest.param(*one, marks=() if one[0] in SMALL else pytest.mark.slow, id=one[0]) for one in SHOWN],
)
def test_the_page_shows_what_a_command_prints(command, shown, tmp_path, monkeypatch, capsys):
    for name, config in CONFIGS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.main(shlex.split(command)) in (0, None)
    words = " ".join(" ".join(capsys.readouterr()).split())
    end = 0
    for part in re.split(r"^…$", shown, flags=re.MULTILINE):  # what is printed between two of them is shown whole
        text = " ".join(part.split())
        start = words.find(text, end)
        assert start >= 0, f"{text!r} is not printed, or not in this order: {words}"
        end = start + len(text)
    assert end == len(words.strip()) or shown.rstrip().endswith("…"), f"not shown: {words[end:]}"


@pytest.mark.parametrize("command", COMMANDS)
def test_octile_has_the_options_of_a_command(command):
    name, *options = shlex.split(command)
    parse(cli.COMMANDS[name].load().Options, options, name).build()


def test_the_ranks_of_the_command_can_train(monkeypatch):
    nodes, of_each, options = TRAIN
    arguments = shlex.split(options)
    assert arguments[:2] == ["--init-from", "DeepSeek-V3"]  # whose shape the preset has
    config_of(arguments[2:], int(nodes) * int(of_each), monkeypatch)
