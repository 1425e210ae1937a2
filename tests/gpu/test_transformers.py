"""transformers' models on a GPU: converted layers agree with the CPU, eagerly and compiled, and can be captured.

Shapes: T tokens, D model, E experts, K chosen experts, I intermediate.
"""

import copy

import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from octile.nn.conversion import apply_recipe
from octile.recipe import Recipe
from tests.integrations.test_transformers import E, assert_close, experts, results, routing

WORST = 0.03  # of a tensor's norm


def on_gpu(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).cuda()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("intermediate", [128, 96], ids=["fused", "grouped GEMMs"])
@pytest.mark.parametrize("name", ["deepseek_v3", "per_tensor"])
def test_stacked_experts(name: str, intermediate: int, compiled: bool):
    module, batch = apply_recipe(experts(intermediate), Recipe.named(name)), routing(chosen=E - 1)
    gpu = on_gpu(module)
    found = results(torch.compile(gpu, fullgraph=True) if compiled else gpu, *(t.cuda() for t in batch))
    found = {key.removeprefix("_orig_mod."): t.cpu() for key, t in found.items()}
    assert_close(found, results(module, *batch), WORST)


def qwen3_moe() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
    )
    return apply_recipe(Qwen3MoeForCausalLM(config).bfloat16().cuda())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_compiled_model_trains_as_the_eager_one(checkpointing: bool):
    losses = {}
    for compiled in (False, True):
        model = qwen3_moe().train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        tokens = torch.randint(512, (2, 128), generator=torch.Generator().manual_seed(1)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        call = torch.compile(model) if compiled else model
        losses[compiled] = []
        for _ in range(8):
            loss = call(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[compiled].append(loss.item())
    assert losses[True][-1] < losses[True][0] - 0.5
    assert losses[True] == pytest.approx(losses[False], rel=0.03)


def test_a_step_of_stacked_experts_can_be_captured_in_a_graph():
    module, (x, index, weights) = on_gpu(apply_recipe(experts())), (t.cuda() for t in routing())
    x = x.requires_grad_()

    def step() -> None:
        module(x, index, weights).sum().backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    x.grad, expected = None, x.grad / 2
    module.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    torch.testing.assert_close(x.grad, expected)
