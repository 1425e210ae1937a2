from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import octile
from octile.nn.conversion import apply_recipe
from octile.nn.indexer import Indexer, quantize_index, weight_factor
from octile.nn.linear import Linear
from octile.nn.mla import MLA
from octile.nn.rope import Rope
from octile.ops.index_rows import hadamard, rotate_first
from octile.recipe import Recipe

D, L, G, E, R, TOPK = 48, 24, 4, 32, 8, 6
ROPE = Rope(R)
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()  # all numbers from 0 to 448


def cos_sin(start: int, end: int):
    return ROPE.cos_sin(torch.arange(start, end))


def make_indexer(seed=0, topk=TOPK) -> Indexer:
    torch.manual_seed(seed)
    indexer = Indexer(D, L, G, E, topk)
    for parameter in indexer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return indexer


def make_mla(topk=TOPK, seed=0) -> MLA:
    indexer = make_indexer(seed, topk)
    dims = {"q_lora_rank": L, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": R, "v_head_dim": 12}
    mla = MLA(D, 3, **dims, indexer=indexer)
    for name, parameter in mla.named_parameters():
        if parameter.dim() > 1 and "indexer" not in name:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return mla


def published_logits(indexer: Indexer, x: Tensor, latent: Tensor) -> Tensor:
    """The logits [S, S] of one text in float64, as in DeepSeek's inference/model.py but for the pairs of the rotation,
    which are channels i and i + R / 2."""
    x, latent, n = x.double(), latent.double(), len(x)

    def rotate(v: Tensor, position: int) -> Tensor:
        pairs = torch.complex(v[: R // 2], v[R // 2 : R])
        rotated_pairs = pairs * torch.exp(1j * position * ROPE.frequencies().double())
        v = torch.cat((rotated_pairs.real, rotated_pairs.imag, v[R:]))
        signs = [[(-1.0) ** bin(i & j).count("1") for j in range(E)] for i in range(E)]  # Sylvester's matrix
        return torch.tensor(signs, dtype=torch.float64) @ v * E**-0.5

    def in_fp8(v: Tensor) -> Tensor:
        scale = 2.0 ** torch.log2(v.abs().max() / 448).ceil()
        nearest = (E4M3 - (v / scale).abs()[:, None]).abs().argmin(1)
        return E4M3[nearest] * v.sign() * scale

    k = x @ indexer.wk.weight.double().T
    k = (k - k.mean(-1, keepdim=True)) / (k.var(-1, keepdim=True, correction=0) + 1e-6).sqrt()
    k = k * indexer.k_norm.weight.double() + indexer.k_norm.bias.double()
    q = (latent @ indexer.wq_b.weight.double().T).view(n, G, E)
    weights = x @ indexer.weights_proj.weight.double().T * G**-0.5
    keys = [in_fp8(rotate(k[t], t)) for t in range(n)]
    logits = torch.zeros(n, n, dtype=torch.float64)
    for s in range(n):
        for h in range(G):
            query = in_fp8(rotate(q[s, h], s))
            for t in range(n):
                logits[s, t] += weights[s, h] * E**-0.5 * max(float(query @ keys[t]), 0.0)
    return logits


def inputs(seed=0, batch=2, length=20) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, D, generator=generator), torch.randn(batch, length, L, generator=generator)


@pytest.mark.one_case
@torch.no_grad()
@pytest.mark.parametrize("seed", range(3))
def test_top_k_keys_are_those_of_the_published_indexer(seed):
    indexer, (x, latent) = make_indexer(seed), inputs(seed)
    top_k = indexer.top_k_keys(*indexer(x, latent, cos_sin(0, 20)))
    for b in range(2):
        logits = published_logits(indexer, x[b], latent[b])
        for s in range(20):
            k = min(TOPK, s + 1)
            best = logits[s, : s + 1].sort(descending=True, stable=True).indices[:k]  # of equal ones the first
            assert sorted(top_k[b, s].tolist()) == [-1] * (TOPK - k) + best.sort().values.tolist()


@torch.no_grad()
def test_logits_are_as_large_as_those_of_the_published_indexer():
    # the alignment loss compares their softmax with attention's, while the choice of keys is the same at any scale
    indexer, (x, latent) = make_indexer(), inputs(length=8)
    q, k, weights = indexer(x[:1], latent[:1], cos_sin(0, 8))
    logits = torch.einsum("sg,sgt->st", weights[0], torch.einsum("sge,te->sgt", q[0], k[0]).relu())
    torch.testing.assert_close(logits, published_logits(indexer, x[0], latent[0]).float(), rtol=1e-4, atol=1e-5)


def test_the_factor_of_the_weights_of_deepseek_v32_is_the_published_one():
    assert weight_factor(64, 128) == pytest.approx(64**-0.5 * 128**-0.5, rel=1e-12)


@torch.no_grad()
def test_queries_after_cached_keys_choose_the_same():
    indexer, (x, latent) = make_indexer(), inputs()
    whole = indexer(x, latent, cos_sin(0, 20))
    last = indexer(x[:, 15:], latent[:, 15:], cos_sin(15, 20))
    keys = whole.k.to(torch.bfloat16).float()  # which holds their values exactly
    assert torch.equal(indexer.top_k_keys(last.q, keys, last.weights), indexer.top_k_keys(*whole)[:, 15:])


@torch.no_grad()
def test_choices_in_parts_of_the_queries_are_the_same(monkeypatch):
    indexer, (x, latent) = make_indexer(), inputs()
    index = indexer(x, latent, cos_sin(0, 20))
    whole = indexer.top_k_keys(*index)
    monkeypatch.setattr("octile.nn.indexer.MAX_LOGITS", 70)
    assert torch.equal(indexer.top_k_keys(*index), whole)


@torch.no_grad()
@pytest.mark.parametrize(("warm_up", "length"), [(True, 20), (False, TOPK)])
def test_all_keys_are_top_k_keys_in_the_warm_up_and_of_short_texts(warm_up, length):
    indexer, (x, latent) = make_indexer(), inputs(length=length)
    indexer.warm_up = warm_up
    assert indexer.top_k_keys(*indexer(x, latent, cos_sin(0, length))) is None


@torch.no_grad()
def test_values_are_those_of_fp8_and_survive_a_second_quantization():
    indexer, (x, latent) = make_indexer(), inputs()
    q = indexer(x, latent, cos_sin(0, 20)).q
    data, scale = quantize_index(q)
    assert torch.equal(data.float() * scale[..., None], q)
    assert torch.equal(torch.exp2(scale.log2().round()), scale)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_are_those_of_the_rotations(interleaved):
    indexer, (x, latent) = make_indexer(), inputs(batch=1)
    indexer.interleaved = interleaved
    (found,) = torch.autograd.grad(indexer(x, latent, cos_sin(0, 20)).q.square().sum() / 2, indexer.wq_b.weight)
    q = F.linear(latent, indexer.wq_b.weight).unflatten(-1, (G, E))
    rotated = hadamard(rotate_first(q, *cos_sin(0, 20), interleaved))
    values = indexer(x, latent, cos_sin(0, 20)).q.detach()
    torch.testing.assert_close(found, torch.autograd.grad((rotated * values).sum(), indexer.wq_b.weight)[0])


def test_gradients_pass_through_the_rounding():
    indexer, (x, latent) = make_indexer(), inputs()
    index = indexer(x.requires_grad_(), latent.requires_grad_(), cos_sin(0, 20))
    (index.q.square().sum() + index.k.square().sum() + index.weights.sum()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in indexer.parameters())
    assert (x.grad, latent.grad) == (None, None)


def test_the_norm_of_keys_stays_in_float32():
    indexer = make_indexer().to(torch.bfloat16)
    assert (indexer.k_norm.weight.dtype, indexer.wk.weight.dtype) == (torch.float32, torch.bfloat16)


# attention with an indexer


@torch.no_grad()
def test_with_as_many_keys_as_tokens_attention_is_dense():
    mla, (x, _) = make_mla(topk=20).eval(), inputs()
    found = mla(x, cos_sin(0, 20))
    mla.indexer = None
    assert torch.equal(found, mla(x, cos_sin(0, 20)))


@torch.no_grad()
def test_attention_reads_the_top_k_keys_alone():
    mla, (x, _) = make_mla().eval(), inputs()
    *_, compressed = mla._projections(x)
    top_k = mla.indexer.top_k_keys(*mla.indexer(x, compressed, cos_sin(0, 20)))
    before = mla(x, cos_sin(0, 20))[0, 19]
    unseen = next(t for t in range(19) if t not in top_k[0, 19])
    mla.indexer.top_k_keys = lambda *_: top_k
    changed = x.clone()
    changed[0, unseen] = 100.0
    assert torch.equal(mla(changed, cos_sin(0, 20))[0, 19], before)


@pytest.mark.parametrize("warm_up", [False, True])
def test_the_alignment_loss_trains_the_indexer_alone(warm_up):
    mla, (x, _) = make_mla(), inputs()
    mla.indexer.warm_up = warm_up
    mla(x.requires_grad_(), cos_sin(0, 20))
    mla.indexer.pop_alignment_loss().backward()
    trained = {name for name, p in mla.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert trained == {f"indexer.{name}" for name, _ in mla.indexer.named_parameters()}
    assert x.grad is None


def test_attentions_loss_does_not_train_the_indexer():
    mla, (x, _) = make_mla(), inputs()
    mla(x, cos_sin(0, 20)).square().sum().backward()
    assert all((p.grad is None) == name.startswith("indexer.") for name, p in mla.named_parameters())


def test_the_alignment_loss_is_popped_once_and_computed_in_training_alone():
    mla, (x, _) = make_mla(), inputs()
    mla(x, cos_sin(0, 20))
    assert mla.indexer.pop_alignment_loss() > 0
    assert mla.indexer.pop_alignment_loss() == 0
    mla.eval()(x, cos_sin(0, 20))
    assert mla.indexer.pop_alignment_loss() == 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradients_are_the_same_under_activation_checkpointing(use_reentrant):
    def gradients(run) -> list[Tensor]:
        mla, (x, _) = make_mla(), inputs()
        y = run(mla, x.requires_grad_())
        (y.square().sum() + mla.indexer.pop_alignment_loss()).backward()
        return [p.grad for p in mla.parameters()]

    of_call = gradients(lambda mla, x: mla(x, cos_sin(0, 20)))
    of_checkpoint = gradients(lambda mla, x: checkpoint(mla, x, cos_sin(0, 20), use_reentrant=use_reentrant))
    torch.testing.assert_close(of_checkpoint, of_call)


def results(mla: MLA) -> dict[str, Tensor]:
    """The output, the alignment loss and the gradients of their sum, by name."""
    x = inputs()[0].requires_grad_()
    y = mla(x, cos_sin(0, 20))
    loss = mla.indexer.pop_alignment_loss()
    (y.square().sum() + loss).backward()
    gradients = {name: p.grad for name, p in mla.named_parameters()}
    return {"y": y.detach(), "loss": loss.detach(), "x": x.grad, **gradients}


def test_sparse_attention_is_masked_attention_in_float64():
    mla = make_mla()
    found = results(mla)
    x = inputs()[0].double().requires_grad_()
    *_, compressed = mla._projections(x.float())
    top_k = mla.indexer.top_k_keys(*mla.indexer(x.float(), compressed, cos_sin(0, 20)))
    wide = make_mla().double()
    wide.indexer.top_k_keys = lambda *_: top_k  # those of FP32: a last bit may change them
    wide.indexer.forward = lambda *_: ()
    wide.indexer.align_top_k = lambda index, top_k, weights, o: o
    y = wide(x, cos_sin(0, 20))
    y.square().sum().backward()
    expected = {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in wide.named_parameters()}}
    for name, exact in expected.items():
        if not name.startswith("indexer."):
            torch.testing.assert_close(found[name].double(), exact, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("recipe", [None, "bf16"])
def test_a_layer_with_a_hook_is_called_and_has_the_same_results(recipe: str | None):
    absorbed, called = make_mla(), make_mla()
    if recipe is not None:  # in float32, so that the order of products is the only difference
        for mla in (absorbed, called):
            apply_recipe(mla, replace(Recipe.named(recipe), compute=torch.float32))
    calls: list[nn.Module] = []
    called.kv_b_proj.register_forward_hook(lambda module, *_: calls.append(module))
    found, expected = results(absorbed), results(called)
    assert len(calls) == 1
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-4, msg=lambda m, n=name: n + m)


def test_a_layer_that_was_replaced_is_called():
    class Doubled(nn.Module):
        def __init__(self, layer: nn.Linear):
            super().__init__()
            self.layer, self.weight, self.bias = layer, layer.weight, None

        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.layer(x)

    replaced, doubled = make_mla().eval(), make_mla().eval()
    replaced.kv_b_proj = Doubled(replaced.kv_b_proj)
    with torch.no_grad():
        doubled.kv_b_proj.weight *= 2
        torch.testing.assert_close(*(mla(inputs()[0], cos_sin(0, 20)) for mla in (replaced, doubled)))


def test_training_multiplies_by_the_weight_that_serving_dequantizes():
    mla, rounded = make_mla().eval(), make_mla().eval()
    for model in (mla, rounded):
        model.kv_b_proj = Linear.from_linear(model.kv_b_proj, Recipe.deepseek_v3())
    with torch.no_grad():
        rounded.kv_b_proj.weight.copy_(octile.quantize(mla.kv_b_proj.weight, block=(128, 128)).dequantize())
        rounded.kv_b_proj.use_recipe(replace(Recipe.bf16(), compute=torch.float32))
        found, expected = (model(inputs()[0], cos_sin(0, 20)) for model in (mla, rounded))
    assert torch.equal(found, expected)


@pytest.mark.oldest_torch
@pytest.mark.slow
def test_compiled_training_has_the_results_of_eager_training():
    mla, compiled = make_mla(), make_mla()
    found = results(mla)
    compiled.forward = torch.compile(compiled.forward, backend="aot_eager", fullgraph=True)
    for name, expected in results(compiled).items():
        torch.testing.assert_close(expected, found[name])


def test_an_indexer_needs_compressed_queries():
    dims = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": R, "v_head_dim": 12}
    with pytest.raises(ValueError, match="q_lora_rank must be a number where there is an indexer"):
        MLA(D, 3, q_lora_rank=None, **dims, indexer=make_indexer())
