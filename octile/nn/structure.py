"""Recognition of other people's modules by what they compute, on a few numbers, and not by their names."""

import ast
import copy
import functools
import inspect
import textwrap
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octile.nn.fused.fusion import has_hooks, is_forward_replaced, own_names
from octile.nn.linear import Linear
from octile.nn.mlp import MLP, FeedForward, GateUpMLP, SwiGLU
from octile.nn.norm import RMSNorm
from octile.ops.rope import rotate_halves

_CONDITIONAL = (  # what may not run what it contains, or run it several times, or later
    *(ast.If, ast.IfExp, ast.For, ast.While, ast.Try, ast.TryStar, ast.Match, ast.BoolOp, ast.Lambda, ast.FunctionDef),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.ClassDef, ast.AsyncFunctionDef),
)

_ONLY_COMPUTE = (nn.Linear, Linear, nn.LayerNorm, nn.RMSNorm, RMSNorm)
_ONLY_READ = (  # methods of a tensor
    *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze", "expand"),
    *("transpose", "permute", "movedim", "swapaxes", "swapdims", "t", "contiguous", "clone"),
    *("chunk", "split", "tensor_split", "unbind", "narrow", "select", "to", "type_as", "float", "bfloat16", "half"),
)

# signs, zeros, small values and values beyond any limit that a model clamps its activations to, in every combination
_VALUES = (-1000.0, -30.0, -3.0, -0.5, 0.0, 0.25, 1.0, 6.0, 25.0, 1000.0)


def is_swiglu(activation: Callable[[Tensor], Tensor]) -> bool:
    """Whether activation computes silu(gate) · up from rows that have the values of gate first: [R, 2I] → [R, I]."""
    gate, up = _gate_and_up()
    try:
        with torch.no_grad():
            result = activation(torch.cat((gate, up), dim=-1))
    except Exception:  # of another library, and about the numbers that are tried here
        return False
    return _equal(result, F.silu(gate) * up)


def swiglu_class(module: nn.Module) -> type[SwiGLU] | None:
    """Return which of octile's feed-forward layers computes what a module does with its linear layers; None: none.

    The module may have these layers, named as in that class, and an activation, and nothing else that holds parameters.
    Its forward pass is run with functions in place of the layers, which return a few numbers.
    """
    kind = next((kind for kind in (MLP, GateUpMLP, FeedForward) if _has_layers(module, kind)), None)
    return kind if kind is not None and _computes_swiglu(module, kind) else None


def _has_layers(module: nn.Module, kind: type[SwiGLU]) -> bool:
    layers = [module._modules.get(name) for name in kind.fusable_layers]
    others = [child for name, child in module._modules.items() if name not in kind.fusable_layers]
    tensors = [*module._parameters, *module._buffers]
    tensors += [name for child in others if child for name in child.state_dict()]
    names = {*own_names(type(module)), *vars(module), *module._modules}  # which those of octile's class would precede
    if names.intersection(own_names(kind)) or tensors or is_forward_replaced(module):
        return False
    return all(isinstance(layer, nn.Linear) for layer in layers)


def _computes_swiglu(module: nn.Module, kind: type[SwiGLU]) -> bool:
    if len(inspect.signature(type(module).forward).parameters) != 2:  # self and x
        return False
    gate, up = _gate_and_up()
    x, y = (torch.arange(10 * n, dtype=torch.float32, device="cpu").view(10, n) for n in (3, 4))
    has_one_for_both = kind is GateUpMLP
    results = (torch.cat((gate, up), dim=-1), y) if has_one_for_both else (gate, up, y)
    expected = (x, F.silu(gate) * up) if has_one_for_both else (x, x, F.silu(gate) * up)
    inputs: dict[str, object] = {}

    def layer(name: str, result: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda t: (inputs.__setitem__(name, t), result)[1]  # type: ignore[func-returns-value]

    tried = copy.copy(module)
    others = {name: copy.deepcopy(child) for name, child in module._modules.items() if name not in kind.fusable_layers}
    stand_ins = {name: layer(name, result) for name, result in zip(kind.fusable_layers, results, strict=True)}
    for training in (True, False):  # in training dropout shows, and either mode may compute something else
        inputs.clear()
        tried.__dict__ |= {"_modules": others | stand_ins, "training": training}
        for child in others.values():
            if child is not None:
                child.train(training)
        try:
            with torch.no_grad():
                found = type(module).forward(tried, x)
        except Exception:  # of another library, and about the numbers that are tried here
            return False
        read = all(_equal(inputs.get(name), t) for name, t in zip(kind.fusable_layers, expected, strict=True))
        if not (read and _equal(found, y)):
            return False
    return True


def called_on_one_input(module: nn.Module) -> list[str]:
    """Return the names of linear layers that every forward pass of a module calls on its first argument, in order.

    They are found in the source of the forward pass: calls `self.NAME(argument)` that no condition and no loop
    contains, of an argument that is never assigned. Without a source there are none.
    """
    layers = {name for name, child in module._modules.items() if isinstance(child, nn.Linear)}
    if is_forward_replaced(module):
        return []
    return [name for name in _unconditional_calls(type(module).forward) if name in layers]


def is_called_in_a_row(module: nn.Module, names: Sequence[str]) -> bool:
    """Whether a forward pass writes nothing and switches no mode between its calls of layers; see its source.

    Args:
        names: some of `called_on_one_input`, at least one.
    """
    called = _called_in_the_row(type(module).forward, tuple(names))
    others = None if called is None else [module._modules.get(name) for name in called.difference(names)]
    return others is not None and all(_writes_nothing(child) for child in others)


@functools.cache
def _called_in_the_row(forward: Callable[..., Any], names: tuple[str, ...]) -> frozenset[str] | None:
    """Return the attributes of self that are called in the statements from the first to the last of self.NAME.

    None if these do more than assign to variables, such as `self.NAME(x).view(shape)`: besides attributes of self, they
    may call methods of results that are known to write nothing.
    """
    method = _method_of(forward)
    assert method is not None  # the calls were found in it
    owner = method.args.args[0].arg

    def name_of_owner(f: ast.expr) -> str | None:
        if isinstance(f, ast.Attribute) and isinstance(f.value, ast.Name) and f.value.id == owner:
            return f.attr
        return None

    def calls(statement: ast.stmt) -> list[ast.Call]:
        return [node for node in ast.walk(statement) if isinstance(node, ast.Call)]

    def calls_layer(statement: ast.stmt) -> bool:
        return any(name_of_owner(call.func) in names for call in calls(statement))

    calling = [i for i, statement in enumerate(method.body) if calls_layer(statement)]
    found = set[str]()
    for statement in method.body[calling[0] : calling[-1] + 1]:
        if not (isinstance(statement, ast.Assign) and all(isinstance(t, ast.Name) for t in statement.targets)):
            return None
        for call in calls(statement):
            name = name_of_owner(call.func)
            if name is not None:
                found.add(name)
            elif not _only_reads(call):
                return None
    return frozenset(found)


def _only_reads(call: ast.Call) -> bool:
    """Whether a call is of a method of a call's result, by its name one that writes nothing."""
    f = call.func
    is_method = isinstance(f, ast.Attribute) and isinstance(f.value, ast.Call) and f.attr in _ONLY_READ
    return is_method and not any(keyword.arg in (None, "out") for keyword in call.keywords)


def _writes_nothing(module: nn.Module | None) -> bool:
    """Whether a module is known to write nothing: a linear layer or a norm, without hooks."""
    if module is None or has_hooks(module):
        return False
    return type(module) in _ONLY_COMPUTE or eps_of_rms_norm(module) is not None


def _method_of(forward: Callable[..., Any]) -> ast.FunctionDef | None:
    """Parse the source of a method with an argument; None if there is no source, or if it is more than the method."""
    try:
        (method,) = ast.parse(textwrap.dedent(inspect.getsource(forward))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    return method if isinstance(method, ast.FunctionDef) and len(method.args.args) > 1 else None


@functools.cache
def _unconditional_calls(forward: Callable[..., Any]) -> list[str]:
    """Return the names of the attributes of self that a method always calls with its first argument alone."""
    method = _method_of(forward)
    if method is None:
        return []
    owner, argument = (parameter.arg for parameter in method.args.args[:2])
    names = [node for node in ast.walk(method) if isinstance(node, ast.Name)]
    if any(name.id in (owner, argument) and not isinstance(name.ctx, ast.Load) for name in names):
        return []
    found: list[str] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, _CONDITIONAL):
            return
        for child in ast.iter_child_nodes(node):
            visit(child)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == owner
            and [type(a) is ast.Name and a.id for a in node.args] == [argument]
            and not node.keywords
        ):
            found.append(node.func.attr)

    for statement in method.body:
        visit(statement)
        if any(isinstance(node, ast.Return) for node in ast.walk(statement)):  # what follows may not be reached
            break
    return found if len(set(found)) == len(found) else []


def eps_of_rms_norm(module: nn.Module) -> str | None:
    """Return the name of a module's attribute eps if it computes x / √(mean(x²) + eps) · weight; None: it does not.

    The module may have a weight [D] and nothing else that holds parameters. Its forward pass is run on a few rows in
    FP32 and in BF16, of which it may round anything to BF16; a multiple of the weight, such as 1 + weight, shows.
    """
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 1 or len(module._parameters) > 1 or module._buffers or module._modules:
        return None
    eps = next((name for name in ("variance_epsilon", "eps") if isinstance(vars(module).get(name), float)), None)
    if eps is None or len(inspect.signature(type(module).forward).parameters) != 2:  # self and x
        return None
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([0.0, 1e-3, 1.0, 100.0], device="cpu").view(2, 2, 1)
    x = torch.randn(2, 2, len(weight), generator=generator, device="cpu") * scales
    tried = copy.copy(module)
    roundings = ((torch.float32, 1e-5), (torch.bfloat16, 2.0**-6))
    for (dtype, rounding), training in product(roundings, (True, False)):  # in training dropout shows
        drawn = torch.randn(len(weight), generator=generator, device="cpu").to(dtype)
        tried.__dict__ |= {"_parameters": {"weight": drawn}, "training": training}
        try:
            with torch.no_grad():
                found = type(module).forward(tried, x.to(dtype))
        except Exception:  # of another library, and about the numbers that are tried here
            return None
        expected = F.rms_norm(x.to(dtype).float(), drawn.shape, drawn.float(), vars(module)[eps])
        if not _equal(found, expected, rounding) or found.dtype != dtype:
            return None
    return eps


class RotaryFunction(NamedTuple):
    """What a function (q, k, cos, sin) computes as `octile.ops.rope.rotate_halves` does.

    Attributes:
        rotates_all: where cos and sin have as many channels as q and k.
        rotates_part: where they have fewer.
    """

    rotates_all: bool
    rotates_part: bool


def rotary_functions(forward: Callable[..., Any]) -> list[tuple[str, RotaryFunction]]:
    """Return the rotary embeddings that a forward pass calls by their global names, and what they compute.

    These are functions whose first parameters are q, k, cos and sin. If one of them computes something else, none is
    returned: which of them runs may depend on the model's configuration, as in DeepSeek-V3.
    """
    code, names = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    candidates = [name for name in (code.co_names if code else ()) if _takes(names.get(name), "q", "k", "cos", "sin")]
    found = [(name, RotaryFunction(*(_rotates_halves(names[name], r) for r in (8, 4)))) for name in candidates]
    return found if all(any(function) for _, function in found) else []


def _takes(function: object, *parameters: str) -> bool:
    """Whether a function's first parameters have these names, and the others defaults."""
    if not callable(function) or isinstance(function, type):
        return False
    try:
        taken = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of a built-in function
        return False
    first, others = taken[: len(parameters)], taken[len(parameters) :]
    return [p.name for p in first] == list(parameters) and all(p.default is not p.empty for p in others)


def _rotates_halves(function: Callable[..., Any], rotary_channels: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 3, 5, 8), (2, 1, 5, 8), (2, 5, rotary_channels), (2, 5, rotary_channels)
    for dtype, *rounding in ((torch.float32, 1e-5, 1e-5), (torch.bfloat16, 2.0**-6, 2.0**-4)):
        q, k, cos, sin = (torch.randn(shape, generator=generator, device="cpu").to(dtype) for shape in shapes)
        try:
            with torch.no_grad():
                found = function(q, k, cos, sin)
        except Exception:  # of another library, and about the numbers that are tried here
            return False
        if not isinstance(found, tuple) or len(found) != 2 or any(getattr(t, "dtype", None) != dtype for t in found):
            return False
        expected = rotate_halves(*(t.float() for t in (q, k, cos, sin)))
        if not all(_equal(t, e, *rounding) for t, e in zip(found, expected, strict=True)):
            return False
    return True


def _gate_and_up() -> tuple[Tensor, Tensor]:
    """Return gate and up [10, 10], so that their elements are all pairs of the values."""
    values = torch.tensor(_VALUES, device="cpu", dtype=torch.float32)
    gate, up = torch.meshgrid(values, values, indexing="ij")
    return gate.contiguous(), up.contiguous()


def _equal(found: object, expected: Tensor, rtol: float = 1e-5, atol: float = 1e-30) -> bool:
    if not isinstance(found, Tensor) or found.shape != expected.shape or found.device != expected.device:
        return False
    return torch.allclose(found.float(), expected, rtol=rtol, atol=atol)
