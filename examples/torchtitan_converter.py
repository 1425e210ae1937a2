"""octile as a model converter for torchtitan: a function of a model and a configuration that returns a model.

    python examples/torchtitan_converter.py --steps 50

torchtitan builds a model, applies converters to it, and then parallelizes it. `to_octile` is such a converter. Releases
before April 2026 take an object with `convert` and `post_optimizer_hook`, as `OctileConverter` has. Later releases
change the model's configuration before they build it (pytorch/torchtitan#3032); call `to_octile` after that.

The decoder below has torchtitan's names (attention.wq, feed_forward.w1, output). Its head is called `output`, which
octile does not recognize as a head, so the filter excludes it. torchtitan is not needed to run this file.
"""

import argparse
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import octile
from octile.cli import run_script


@dataclass
class OctileConfig:
    """recipe: see docs/recipes.md. filter_fqns: layers whose names contain one of these are not converted."""

    recipe: str = "deepseek_v3"
    filter_fqns: list[str] = field(default_factory=lambda: ["output"])


def to_octile(model: nn.Module, config: OctileConfig) -> nn.Module:
    """Convert the model's linear layers to FP8, except those that the configuration names."""

    def is_converted(fqn: str, layer: nn.Module) -> bool:
        return not any(part in fqn for part in config.filter_fqns)

    return octile.convert(model, octile.Recipe.named(config.recipe), filter=is_converted)


class OctileConverter:
    """`to_octile` as an object with the two methods that torchtitan's trainer calls in releases before April 2026."""

    def __init__(self, config: OctileConfig):
        self.config = config

    def convert(self, model: nn.Module) -> None:
        to_octile(model, self.config)

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        for part in model if isinstance(model, list) else [model]:
            octile.nn.end_step(part)  # updates delayed scales; other recipes have none


class Layer(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.attention = nn.ModuleDict({name: nn.Linear(dim, dim, bias=False) for name in ("wq", "wk", "wv", "wo")})
        self.feed_forward = nn.ModuleDict(
            {
                "w1": nn.Linear(dim, 3 * dim, bias=False),
                "w2": nn.Linear(3 * dim, dim, bias=False),
                "w3": nn.Linear(dim, 3 * dim, bias=False),
            }
        )
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        h, a = self.attention_norm(x), self.attention
        q, k, v = (a[name](h).unflatten(-1, (-1, 32)).transpose(1, 2) for name in ("wq", "wk", "wv"))
        x = x + a["wo"](F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h, f = self.ffn_norm(x), self.feed_forward
        return x + f["w2"](F.silu(f["w1"](h)) * f["w3"](h))


class Decoder(nn.Module):
    """A byte-level language model, without positions for brevity: tokens [B, S] → logits [B, S, 256]."""

    def __init__(self, dim: int, layers: int):
        super().__init__()
        self.tok_embeddings = nn.Embedding(256, dim)
        self.layers = nn.ModuleDict({str(i): Layer(dim) for i in range(layers)})
        self.norm = nn.RMSNorm(dim)
        self.output = nn.Linear(dim, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))


def main(arguments: list[str] | None = None) -> tuple[nn.Module, list[float]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--recipe", default="deepseek_v3")
    args = parser.parse_args(arguments)
    for name in ("steps", "dim", "layers"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name} must be at least 1, not {getattr(args, name)}")
    if args.dim % 32:
        raise ValueError(f"dim must be a multiple of 32, the size of an attention head, not {args.dim}")
    device = "cuda" if torch.cuda.is_available() else "cpu"

    torch.manual_seed(0)
    model = Decoder(args.dim, args.layers).to(device)
    converter = OctileConverter(OctileConfig(recipe=args.recipe))
    converter.convert(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)
    losses = []
    for _ in range(args.steps):
        starts = torch.randint(len(data) - 129, (8,)).tolist()
        tokens = torch.stack([data[start : start + 129] for start in starts]).long().to(device)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        converter.post_optimizer_hook(model)
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f} nats per byte in {args.steps} steps")
    return model, losses


if __name__ == "__main__":
    run_script(main)  # bad input ends in one line
