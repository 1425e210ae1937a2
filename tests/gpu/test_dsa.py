"""Sparse attention on a GPU: captured training has the losses of eager training, and serving the model's logits."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.conversion import apply_recipe
from octile.nn.fused.index_alignment import top_k_alignment_loss
from octile.nn.fused.sparse_latent_attention import sparse_latent_attention
from octile.nn.fused.top_k_attention import top_k_attention, top_k_weights
from octile.nn.indexer import Indexer
from octile.nn.linear import Linear
from octile.recipe import Recipe
from octile.serve.runner.model_runner import ModelRunner
from octile.train.step.captured import WARM_UP_STEPS
from octile.train.strategy import single as module
from octile.train.trainer import Trainer
from tests.serve.models import Texts, text
from tests.train.conftest import MICRO, micro

STEPS = WARM_UP_STEPS + 4
SPARSE = replace(MICRO, index_n_heads=4, index_head_dim=16, index_topk=8)
# latents of 512 + 64 channels, for which Hopper has kernels, and 4 heads of the indexer, which are padded to 32
SERVED = replace(
    ModelConfig.tiny(), kv_lora_rank=512, qk_rope_head_dim=64, index_n_heads=4, index_head_dim=64, index_topk=48
)
SHARING = {"indexer_rope_interleave": True, "indexer_types": ("full", "shared")}
SHARED = replace(SERVED, **SHARING)  # the second layer attends to the top-k keys of the first
N_PAGES = 40
LENGTHS = [200, 64, 66, 30]
SIZES = [(100, 50, 0, 1), (0, 10, 63, 0), (1, 1, 1, 1), (0, 1, 2, 7), (1, 1, 0, 5), (60, 0, 0, 1), (30, 1, 0, 10)]
SIZES += [(8, 0, 0, 5)]


@pytest.mark.parametrize("stage", ["warm_up", "sparse"])
@pytest.mark.parametrize(
    ("recipe", "model"),
    [("bf16", SPARSE), ("deepseek_v3", SPARSE), ("deepseek_v3", replace(SPARSE, **SHARING))],
    ids=["bf16", "deepseek_v3", "shared keys"],
)
def test_captured_steps_have_the_losses_of_eager_steps(store, stage, recipe, model, monkeypatch):
    def losses() -> tuple[list[dict[str, float]], Trainer]:
        settings = micro(model=model, indexer_stage=stage, recipe=recipe)
        trainer = Trainer(settings, store, torch.device("cuda"))
        return [trainer.step() for _ in range(STEPS)], trainer

    ours, captured = losses()
    assert captured.captured is not None
    assert captured.captured.is_captured
    monkeypatch.setattr(module, "why_eager", lambda *_: "the test compares with it")
    theirs, _ = losses()
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(expected["loss"], rel=2e-3)
        assert mine["indexer_loss"] == pytest.approx(expected["indexer_loss"], rel=0.1)


def test_the_parts_of_training_are_those_of_a_cpu():
    generator = torch.Generator().manual_seed(0)
    b, s, h, x, g, e = 2, 70, 4, 24, 8, 32
    shapes = (b, s, g, e), (b, s, e), (b, s, g), (b, s, h, x), (b, s, h, x), (b, s, h, 16)
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    found = []
    for device in ("cpu", "cuda"):
        index_q, index_k, weights, q, k, v = (t.to(device).requires_grad_() for t in drawn)
        index_q, index_k = (t.detach().bfloat16().float().requires_grad_() for t in (index_q, index_k))  # as FP8's are
        indexer = Indexer(8, 8, g, e, 16)
        with torch.no_grad():
            top_k = indexer.top_k_keys(index_q.round(), index_k.round(), weights)
        o = top_k_attention(q, k, v, top_k, 0.2)
        p = top_k_weights(q, k, top_k, 0.2)
        loss = top_k_alignment_loss(index_q, index_k, weights, top_k, p)
        gradients = torch.autograd.grad(o.square().sum() + loss, (index_q, index_k, weights, q, k, v))
        found.append([top_k.sort(-1).values.cpu(), o.cpu(), loss.cpu(), *(t.cpu() for t in gradients)])
    assert torch.equal(found[0][0], found[1][0])
    cpu, gpu = found
    torch.testing.assert_close(gpu[1:3] + gpu[5:], cpu[1:3] + cpu[5:], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(gpu[3:5], cpu[3:5], rtol=2**-8, atol=1e-3)  # the gradients of logits are BF16


@pytest.mark.parametrize("recipe", [None, "bf16", "deepseek_v3"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 2**-6)])
def test_training_in_the_absorbed_form_is_that_of_a_cpu(recipe, dtype, bound):
    b, s, h, n, r, v, c, k = 2, 300, 6, 128, 64, 128, 512, 128
    generator = torch.Generator().manual_seed(0)
    shapes = (b, s, h, n + r), (b, s, c + r), (h * (n + v), c), (b, s, h, v)
    q, rows, weight, do = (torch.randn(shape, generator=generator) for shape in shapes)
    order = torch.rand(b, s, s, generator=generator).masked_fill(torch.ones(s, s).triu(1).bool(), -1.0)
    values, top_k = order.topk(k)
    top_k = top_k.masked_fill(values < 0, -1).int()
    found = []
    for device, kind in (("cpu", torch.float32), ("cuda", dtype)):
        layer = torch.nn.Linear(c, h * (n + v), bias=False)
        layer = layer if recipe is None else Linear.from_linear(layer, Recipe.named(recipe))
        with torch.no_grad():
            layer.weight.copy_(weight * c**-0.5)
        layer = layer.to(device)
        inputs = [t.to(dtype).to(device, kind).requires_grad_() for t in (q, rows)]
        o, weights = sparse_latent_attention(*inputs, layer, top_k.to(device), n, (n + r) ** -0.5, with_weights=True)
        gradients = torch.autograd.grad(o, (*inputs, layer.weight), do.to(dtype).to(device, kind))
        found.append([t.detach().cpu().float() for t in (o, weights, *gradients)])
    for expected, ours in zip(*found, strict=True):
        assert (ours - expected).norm() <= bound * expected.norm()


def make(fp8: bool, dtype: torch.dtype, config: ModelConfig = SERVED) -> DeepseekV3:
    torch.manual_seed(0)
    model = DeepseekV3(config).to(dtype).eval()
    return apply_recipe(model) if fp8 else model  # type: ignore[return-value]


def read_all(runner: ModelRunner) -> list[Tensor]:
    texts = Texts(runner, [text(n, i, runner.vocab_size) for i, n in enumerate(LENGTHS)])
    for sizes in SIZES:
        texts.run(*sizes)
    assert [len(logits) for logits in texts.logits] == LENGTHS
    return [logits.cpu() for logits in texts.logits]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())


@pytest.mark.parametrize("config", [SERVED, SHARED], ids=["own keys", "shared keys"])
def test_served_logits_are_those_of_the_model_in_float32(config):
    model = make(False, torch.float32, config)
    runner = ModelRunner(model.cuda(), N_PAGES, max_batch=0, max_step_tokens=0)  # experts in FP32 wait for the host
    served = read_all(runner)
    for i, logits in enumerate(served):
        with torch.no_grad():
            expected = model(torch.tensor([text(LENGTHS[i], i, SERVED.vocab_size)], device="cuda"))[0]
        assert error(logits, expected.cpu()) < 1e-3


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("cache_format", ["bf16", "fp8"])
@pytest.mark.parametrize("config", [replace(SERVED, num_hidden_layers=1), SHARED], ids=["own keys", "shared keys"])
def test_graphs_have_the_logits_of_eager_steps(fp8, cache_format, config):
    """Of one indexer: in a second one, choices between nearly equal logits may differ by the order of sums."""
    runners = [
        ModelRunner(make(fp8, torch.bfloat16, config).cuda(), N_PAGES, cache_format, n, max_step_tokens=128 * n)
        for n in (8, 0)
    ]
    assert [runner.graphs is not None for runner in runners] == [True, False]
    graphs, eager = (torch.cat(read_all(runner)) for runner in runners)
    assert error(graphs, eager) < 0.02


@pytest.mark.parametrize("cache_format", ["bf16", "fp8"])
@pytest.mark.parametrize("config", [SERVED, SHARED], ids=["own keys", "shared keys"])
def test_a_batch_invariant_runner_has_the_same_bits_however_texts_are_read(cache_format, config):
    runner = ModelRunner(make(True, torch.bfloat16, config).cuda(), N_PAGES, cache_format, 8, batch_invariant=True)
    together = read_all(runner)
    alone = Texts(runner, [text(n, i, runner.vocab_size) for i, n in enumerate(LENGTHS)])
    for i, n in enumerate(LENGTHS):
        alone.run(*(n if i == j else 0 for j in range(len(LENGTHS))))
    assert all(torch.equal(logits, alone.logits[i]) for i, logits in enumerate(together))


def test_an_indexer_without_a_kernel_is_served_without_graphs():
    model = make(False, torch.bfloat16, replace(SERVED, qk_rope_head_dim=16, index_head_dim=16)).cuda()
    with pytest.warns(RuntimeWarning, match="without CUDA graphs: 4 heads of 16 channels of the indexer have no"):
        runner = ModelRunner(model, N_PAGES, max_batch=8)
    assert runner.graphs is None
    read_all(runner)


def test_an_indexer_in_fp32_is_served_without_graphs_and_chooses_as_on_a_cpu():
    config = replace(SERVED, num_hidden_layers=1)  # in a second layer, choices between nearly equal logits may differ
    with pytest.warns(RuntimeWarning, match="without CUDA graphs"):
        gpu = ModelRunner(make(False, torch.float32, config).cuda(), N_PAGES, max_batch=8, index_format="float32")
    assert gpu.graphs is None
    cpu = ModelRunner(make(False, torch.float32, config), N_PAGES, index_format="float32")
    for found, expected in zip(read_all(gpu), read_all(cpu), strict=True):
        assert error(found, expected) < 1e-3
