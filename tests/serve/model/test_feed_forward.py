"""The second half of a block compared with the model's layers, for a SwiGLU layer and a mixture."""

from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.dispatcher import LocalDispatcher
from octile.serve.model.expert_load import PARTS, ExpertLoad
from octile.serve.model.feed_forward import FeedForward
from octile.serve.model.gemms import Gemms
from octile.serve.ranks.tensor_parallel import ALONE
from octile.serve.weights.weights import ServedWeights
from tests.serve.models import CONFIG, new_model

DENSE, MIXTURE = 0, 1  # layers
FP8 = pytest.mark.parametrize("fp8", [False, True], ids=["float32", "fp8"])
K, E = CONFIG.num_experts_per_tok, CONFIG.n_routed_experts


@cache
def model_of(fp8: bool) -> tuple[DeepseekV3, ServedWeights]:
    """A model and its weights."""
    model = new_model(fp8)
    return model, ServedWeights.of_model(model)


def feed_forward(weights: ServedWeights, batch_invariant: bool = False, load: ExpertLoad | None = None) -> FeedForward:
    gemms = Gemms(weights.dtype, weights.power_of_2, batch_invariant)
    return FeedForward(CONFIG, gemms, LocalDispatcher(), ALONE, load, None)


def rows(n: int) -> Tensor:
    return torch.randn(n, CONFIG.hidden_size, generator=torch.Generator().manual_seed(n))


@FP8
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("layer", [DENSE, MIXTURE])
@given(n=st.integers(1, 40))
@torch.no_grad()
def test_rows_get_what_the_models_layer_adds_to_them(fp8: bool, batch_invariant: bool, layer: int, n: int):
    model, weights = model_of(fp8)
    block, x_TD = model.model.layers[layer], rows(n)
    expected = block.mlp(block.post_attention_layernorm(x_TD[None]))[0]
    into = x_TD.clone()
    found = feed_forward(weights, batch_invariant).add(into, layer, weights.blocks[layer], torch.zeros(n).long())
    assert found is into
    # a mixture in FP8 multiplies by the weights of experts before it quantizes, and this layer of the model afterwards
    most = 0.08 if fp8 and layer == MIXTURE else 1e-5
    assert (found - x_TD - expected).norm() <= most * expected.norm()


@FP8
@pytest.mark.parametrize("layer", [DENSE, MIXTURE])
def test_the_bits_of_a_row_do_not_depend_on_others_in_batch_invariant_mode(fp8: bool, layer: int):
    _, weights = model_of(fp8)
    of, w, x_TD = feed_forward(weights, batch_invariant=True), weights.blocks[layer], rows(33)
    together = of.add(x_TD.clone(), layer, w, torch.zeros(33).long())
    for part in (slice(0, 1), slice(7, 23), slice(32, 33)):
        alone = of.add(x_TD[part].clone(), layer, w, torch.zeros(len(x_TD[part])).long())
        assert torch.equal(alone, together[part])


def test_rows_that_are_written_nowhere_are_computed_and_not_counted():
    _, weights = model_of(False)
    load = ExpertLoad([MIXTURE], E, PARTS, torch.device("cpu"))
    of, w = feed_forward(weights, load=load), weights.blocks[MIXTURE]
    slots = torch.tensor([3, -1, 0, -1, 7])
    found = of.add(rows(5), MIXTURE, w, slots)
    load.end_step()
    assert sum(load.in_window[MIXTURE]) == 3 * K
    assert torch.equal(found, feed_forward(weights).add(rows(5), MIXTURE, w, slots))
