"""A folder with random weights is one that octile and transformers load."""

import pytest
import torch

from octile.bench.serve.peer.random_folder import V2_LITE, letter_tokenizer, write_random_folder
from octile.checkpoint.hugging_face import has_fp8_weights, load
from octile.models.config import ModelConfig
from octile.tokenizer import Tokenizer
from tests.train.conftest import MICRO


@pytest.mark.one_case
@pytest.mark.parametrize("weights", ["fp8", "bf16"])
def test_both_formats_have_roundings_of_the_same_values(tmp_path, weights):
    write_random_folder(tmp_path, MICRO, weights)
    assert has_fp8_weights(tmp_path) == (weights == "fp8")
    state = load(tmp_path).state_dict()
    down = next(value for name, value in state.items() if name.endswith("mlp.down_proj.weight"))
    assert down.std().item() == pytest.approx(0.024, rel=0.1)
    again = tmp_path / "again"
    write_random_folder(again, MICRO, "bf16")
    other = next(value for name, value in load(again).state_dict().items() if name.endswith("mlp.down_proj.weight"))
    assert torch.allclose(down, other, rtol=2**-4, atol=1e-4)


@pytest.mark.one_case
@pytest.mark.parametrize("vocab_size", [258, 320, 20_000, 102_400])
def test_its_tokenizer_has_as_many_tokens_as_the_model(vocab_size, tmp_path):
    letter_tokenizer(vocab_size).save(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.begin, tokenizer.end) == (vocab_size, 0, 1)
    assert tokenizer.decode(tokenizer.encode("Any text, ä")) == "Any text, ä"


@pytest.mark.slow
def test_nearly_all_of_its_tokens_are_text():
    tokenizer = letter_tokenizer(V2_LITE.vocab_size)
    assert all(tokenizer.decode([token]).isalpha() for token in range(258, V2_LITE.vocab_size, 97))


def test_transformers_reads_its_tokenizer(tmp_path):
    transformers = pytest.importorskip("transformers")
    write_random_folder(tmp_path, MICRO, "bf16")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id) == (MICRO.vocab_size, 0, 1)


def test_v2_lite_has_a_dense_layer_of_whole_blocks():
    assert (V2_LITE.intermediate_size, ModelConfig.v2_lite_16b().intermediate_size) == (11008, 10944)
    assert V2_LITE.intermediate_size % 128 == V2_LITE.moe_intermediate_size % 128 == 0
