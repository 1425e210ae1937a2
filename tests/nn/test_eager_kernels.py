"""Tests of fused kernels in other people's models: the same results as the model's own code, in the same objects."""

import copy
import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaConfig, LlamaModel, LlamaRMSNorm

from octile.nn import eager_kernels
from octile.nn.conversion import apply_recipe
from octile.nn.eager_kernels import FusedKernels, use_fused_kernels
from octile.nn.norm import RMSNorm
from octile.recipe import Recipe
from tests.models_of_transformers import small_model

EXPECTED = {  # norms and rotary embeddings of two layers
    "llama": (5, 2),
    "mistral": (5, 2),
    "qwen2": (5, 2),
    "qwen2_moe": (5, 2),
    "qwen3": (9, 2),
    "qwen3_moe": (9, 2),
    "mixtral": (5, 2),
    "olmoe": (9, 2),
    "phi3": (5, 2),
    "glm4_moe": (5, 2),  # rotates half of the channels
    "deepseek_v2": (9, 0),  # rotates pairs as complex numbers
    "deepseek_v3": (9, 0),  # rotates pairs of adjacent channels
    "gemma2": (0, 2),  # multiplies by 1 + weight
    "gemma3": (0, 2),
    "t5": (12, 0),
    "bert": (0, 0),
}
TRAINED = [name for name in EXPECTED if name not in ("t5", "bert")]


def make(name: str, dtype: torch.dtype = torch.float32, **changes: object) -> transformers.PreTrainedModel:
    """A small model whose norms have weights that are not 1."""
    torch.manual_seed(0)
    model = small_model(name, **changes)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model.to(dtype)


def batch() -> Tensor:
    return torch.randint(3, 160, (2, 16), generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, call=None) -> dict[str, Tensor]:
    """The loss and all gradients."""
    model.zero_grad()
    loss = (model if call is None else call)(input_ids=batch(), labels=batch()).loss
    loss.backward()
    return {
        "loss": loss.detach(),
        **{name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
    }


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], of_norm: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert (value - expected[name]).norm() <= of_norm * expected[name].norm(), name


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the fused kernels that are called."""
    called: list[str] = []

    def record(name: str) -> None:
        function = getattr(eager_kernels, name)
        monkeypatch.setattr(eager_kernels, name, lambda *args: (called.append(name), function(*args))[1])

    record("rms_norm")
    record("rotate_halves")
    return called


@pytest.mark.one_case
@pytest.mark.parametrize("name", EXPECTED)
def test_modules_are_recognized_by_what_they_compute(name: str):
    assert use_fused_kernels(make(name)) == FusedKernels(*EXPECTED[name])


@pytest.mark.one_case
@pytest.mark.parametrize("name", TRAINED)
def test_in_float32_loss_and_gradients_are_those_of_the_model(name: str):
    model = make(name)
    expected = step(model)
    use_fused_kernels(model)
    assert_close(step(model), expected, 1e-4)  # gradients of queries and keys are differences of near values


@pytest.mark.parametrize("name", ["llama", "qwen3", "glm4_moe"])
def test_in_bfloat16_loss_and_gradients_differ_by_roundings(name: str):
    exact = step(make(name))
    model = make(name, torch.bfloat16)
    before = step(model)
    use_fused_kernels(model)
    after = step(model)
    for key, of_exact in exact.items():
        errors = [(results[key].float() - of_exact).norm() for results in (before, after)]
        assert errors[1] <= 1.5 * errors[0] + 0.01 * of_exact.norm(), key


@pytest.mark.parametrize("name", TRAINED)
def test_each_recognized_module_calls_its_kernel(name: str, calls: list[str]):
    model = make(name)
    use_fused_kernels(model)
    model(input_ids=batch())
    norms, rotary_embeddings = EXPECTED[name]
    assert (calls.count("rms_norm"), calls.count("rotate_halves")) == (norms, rotary_embeddings)


def test_a_converted_norm_gives_the_bits_of_octiles():
    x, expected = torch.randn(2, 3, 24).bfloat16(), RMSNorm(24, eps=1e-3)
    norm = nn.ModuleList([LlamaRMSNorm(24, eps=1e-3)]).bfloat16()
    nn.init.uniform_(norm[0].weight)
    expected.weight = norm[0].weight
    use_fused_kernels(norm)
    assert torch.equal(norm[0](x), expected(x))


@pytest.mark.oldest_torch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layers"),
    [
        pytest.param("llama", 1, id="llama", marks=pytest.mark.exhaustive),
        pytest.param("qwen3_moe", 1, id="qwen3_moe"),
        pytest.param("glm4_moe", 2, id="glm4_moe", marks=pytest.mark.exhaustive),  # the first one has no experts
    ],
)
def test_under_compile_the_models_own_code_is_traced_without_graph_breaks(name: str, layers: int, calls: list[str]):
    model = make(name, num_hidden_layers=layers)
    expected = step(model)
    use_fused_kernels(model)
    torch._dynamo.reset()
    found = step(model, torch.compile(model, backend="aot_eager", fullgraph=True))
    assert not calls
    assert_close(found, expected, 1e-5)


# The objects


def test_modules_are_the_same_objects_of_their_classes_and_others_are_untouched():
    model, other, forward = make("llama"), make("llama"), LlamaRMSNorm.forward
    modules, state = list(model.modules()), dict(model.named_parameters())
    use_fused_kernels(model)
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert all(p is state[name] for name, p in model.named_parameters())
    norm, attention = model.model.norm, model.model.layers[0].self_attn
    assert isinstance(norm, LlamaRMSNorm)
    assert isinstance(attention, LlamaAttention)
    assert [type(m).__name__ for m in (norm, attention)] == ["LlamaRMSNorm", "LlamaAttention"]
    assert repr(model) == repr(other)
    assert type(other.model.norm) is LlamaRMSNorm
    assert LlamaRMSNorm.forward is forward


@pytest.mark.parametrize(
    "twin", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_has_fused_kernels_too(twin, calls: list[str]):
    model = make("qwen3")
    use_fused_kernels(model)
    expected = step(model)
    del calls[:]
    assert_close(step(twin(model)), expected, 0)
    assert set(calls) == {"rms_norm", "rotate_halves"}


def test_a_model_with_fused_kernels_is_saved_and_loaded(tmp_path: Path):
    model = make("llama")
    use_fused_kernels(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded.model.norm) is LlamaRMSNorm
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


def test_a_second_call_changes_nothing():
    model = make("llama")
    counts = use_fused_kernels(model)
    classes = [type(m) for m in model.modules()]
    assert use_fused_kernels(model) == counts
    assert [type(m) for m in model.modules()] == classes


def test_hooks_are_called():
    model, seen = make("llama"), []
    model.model.norm.register_forward_hook(lambda module, args, y: seen.append(y.shape))
    use_fused_kernels(model)
    model(input_ids=batch())
    assert seen == [(2, 16, 64)]


def test_attentions_and_hidden_states_are_still_collected():
    model = make("llama")
    model.set_attn_implementation("eager")
    use_fused_kernels(model)
    found = model(input_ids=batch(), output_attentions=True, output_hidden_states=True)
    assert (len(found.attentions), len(found.hidden_states)) == (2, 3)


def test_names_that_the_models_module_gets_later_are_seen(monkeypatch: pytest.MonkeyPatch, calls: list[str]):
    model, seen = make("llama"), []
    model.set_attn_implementation("eager")
    use_fused_kernels(model)
    attend = modeling_llama.eager_attention_forward
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", lambda *a, **k: (seen.append(1), attend(*a, **k))[1])
    model(input_ids=batch())
    assert len(seen) == calls.count("rotate_halves") == 2


@pytest.mark.parametrize("compile_", [torch.jit.script, lambda layer: torch.jit.trace(layer, torch.ones(1, 4))])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_modules_of_torchscript_are_left_as_they_are(compile_: Callable[[nn.Module], nn.Module]):
    model = nn.Sequential(compile_(nn.Linear(4, 4)))
    assert use_fused_kernels(model) == FusedKernels(0, 0)


def test_a_rotary_embedding_that_the_models_module_gets_later_is_called(
    monkeypatch: pytest.MonkeyPatch, calls: list[str]
):
    model, seen = make("llama"), []
    use_fused_kernels(model)
    rotate = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda *a, **k: (seen.append(1), rotate(*a, **k))[1])
    model(input_ids=batch())
    assert (len(seen), calls.count("rotate_halves")) == (2, 0)


def test_gradients_with_checkpointing_are_the_same():
    model = make("qwen3").train()
    use_fused_kernels(model)
    expected = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_close(step(model), expected, 0)


def test_generated_tokens_are_those_of_the_model():
    model = make("llama").eval()
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    expected = model.generate(batch(), **settings)
    use_fused_kernels(model)
    assert torch.equal(model.generate(batch(), **settings), expected)


def renaming(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator like those by which transformers renames arguments."""

    @functools.wraps(forward)
    def renamed(self, *args, embeddings=None, **kwargs):
        return forward(self, *args, **kwargs, **({} if embeddings is None else {"position_embeddings": embeddings}))

    return renamed


def test_decorators_of_a_forward_pass_are_kept(monkeypatch: pytest.MonkeyPatch, calls: list[str]):
    class Attention(modeling_llama.LlamaAttention):
        forward = renaming(renaming(modeling_llama.LlamaAttention.forward))

    monkeypatch.setattr(modeling_llama, "LlamaAttention", Attention)
    model = make("llama")
    assert use_fused_kernels(model) == FusedKernels(5, 2)
    hidden, angles = torch.randn(1, 4, model.config.hidden_size), torch.randn(2, 1, 4, model.config.head_dim)
    attention = model.model.layers[0].self_attn
    found = attention(hidden, embeddings=tuple(angles), attention_mask=None)[0]
    expected = Attention.forward(attention, hidden, position_embeddings=tuple(angles), attention_mask=None)[0]
    torch.testing.assert_close(found, expected)
    assert calls.count("rotate_halves") == 1


def test_a_decorator_without_its_function_in_a_closure_leaves_the_models_code(monkeypatch: pytest.MonkeyPatch):
    class Attention(modeling_llama.LlamaAttention):
        @functools.wraps(modeling_llama.LlamaAttention.forward)
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    monkeypatch.setattr(modeling_llama, "LlamaAttention", Attention)
    assert use_fused_kernels(make("llama")) == FusedKernels(5, 0)


# Where the model's own code runs


def test_a_replaced_forward_is_left_alone(calls: list[str]):
    model = make("llama")
    for module in (model.model.norm, model.model.layers[0].self_attn):
        module.forward = module.forward  # as accelerate does
    assert use_fused_kernels(model) == FusedKernels(4, 1)


def test_octiles_and_torchs_own_norms_are_left_alone():
    norms = nn.ModuleList([RMSNorm(8), nn.RMSNorm(8, eps=1e-6)])
    assert use_fused_kernels(norms) == FusedKernels()


def test_weights_of_another_dtype_are_multiplied_by_the_models_own_code(calls: list[str]):
    """Llama's result has the larger dtype then, as with FP32 weights under autocast."""
    norm = nn.ModuleList([LlamaRMSNorm(8)])
    use_fused_kernels(norm)
    assert norm[0](torch.ones(2, 8, dtype=torch.bfloat16)).dtype == torch.float32
    assert norm[0](torch.ones(2, 8, dtype=torch.float64)).dtype == torch.float64
    assert not calls


def test_transforms_use_the_models_own_code(calls: list[str]):
    norm = nn.ModuleList([LlamaRMSNorm(8)])
    use_fused_kernels(norm)
    x = torch.randn(3, 8)
    expected = norm[0](x)
    del calls[:]
    torch.testing.assert_close(torch.func.vmap(norm[0])(x), expected)
    assert not calls


def test_positions_of_each_sequence_are_rotated_by_their_own_angles(calls: list[str]):
    model, positions = make("llama"), torch.stack((torch.arange(16), torch.arange(16) + 5))
    expected = model(input_ids=batch(), position_ids=positions).logits
    use_fused_kernels(model)
    torch.testing.assert_close(model(input_ids=batch(), position_ids=positions).logits, expected)
    assert "rotate_halves" in calls


# Conversion


def test_convert_uses_fused_kernels_and_says_so():
    summary = apply_recipe(make("qwen3")).conversion_summary
    assert summary.endswith("; fused in eager mode: 9 norms, 2 rotary embeddings")
    assert summary.fused == FusedKernels(9, 2)


def test_a_model_is_converted_without_memory():
    with torch.device("meta"):
        model = LlamaModel(
            LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=2)
        )
        assert apply_recipe(model).conversion_summary.fused == FusedKernels(3, 1)


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma2", "deepseek_v3"])
def test_in_high_precision_a_converted_model_computes_the_same(name: str):
    model = make(name)
    expected = step(model)
    assert_close(step(apply_recipe(model, Recipe.float32())), expected, 1e-4)
