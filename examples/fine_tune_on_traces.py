"""Fine-tune a model on text that a larger model wrote (distillation traces).

    octile train --preset tiny --steps 200 --out runs/student
    python examples/fine_tune_on_traces.py runs/student traces.jsonl --out runs/distilled

The student is any folder that `octile.load` reads, in FP8 or BF16. FP32 masters made of FP8 weights are the dequantized
weights, so the first forward pass computes with the folder's FP8 values. The loss is that of the response only: the
prompt's labels are −100. The result is saved in FP8 with the student's tokenizer, for `octile generate`,
`octile train --init-from`, vLLM or SGLang.

Traces are text, so teacher and student may have different tokenizers.
"""

import argparse
import json
import math
from pathlib import Path

import torch

import octile
from octile.checkpoint.hugging_face import read_model_config
from octile.cli import run_script
from octile.models.deepseek_v3 import IGNORED, DeepseekV3
from octile.tokenizer import Tokenizer
from octile.validation import read_text


def read_traces(path: Path, tokenizer: Tokenizer, max_length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Read tokens and labels, int64 [1, S] each, of every trace that has tokens to be predicted."""
    traces = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        try:
            trace = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
        if not isinstance(trace, dict) or not all(isinstance(trace.get(name), str) for name in ("prompt", "response")):
            raise ValueError(f'{path}, line {number} must be {{"prompt": TEXT, "response": TEXT}}')
        prompt = tokenizer.encode_prompt(trace["prompt"])
        tokens = [*prompt, *tokenizer.encode(trace["response"]), tokenizer.end][:max_length]
        labels = [IGNORED] * len(prompt) + tokens[len(prompt) :]
        if len(tokens) > len(prompt) + 1:  # multi-token prediction looks two tokens ahead
            traces.append((torch.tensor([tokens]), torch.tensor([labels])))
    if len(traces) < 2:
        raise ValueError(f"{path} has {len(traces)} usable traces: at least 2 are needed, one of them to be held out")
    return traces


@torch.no_grad()
def held_out_loss(model: DeepseekV3, traces: list[tuple[torch.Tensor, torch.Tensor]], device: str) -> float:
    """Return the mean loss of the responses, in nats per token."""
    model.eval()
    with octile.nn.frozen_weights(model):
        return sum(model(tokens.to(device), labels.to(device)).item() for tokens, labels in traces) / len(traces)


def main(arguments: list[str] | None = None) -> tuple[float, float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("student", type=Path, help="a finished run, or a Hugging Face folder of a DeepSeek model")
    parser.add_argument("traces", type=Path, help='lines of {"prompt": …, "response": …}')
    parser.add_argument("--out", type=Path, default=Path("runs/distilled"))
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4, help="traces per step")
    parser.add_argument("--lr", type=float, default=1e-4)
    args = parser.parse_args(arguments)
    for name in ("epochs", "batch"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name} must be at least 1, not {getattr(args, name)}")
    if not 0 < args.lr < math.inf:
        raise ValueError(f"lr must be above 0 and finite, not {args.lr}")
    device = "cuda" if torch.cuda.is_available() else "cpu"

    torch.manual_seed(0)
    folder = args.student / "model" if (args.student / "model").is_dir() else args.student
    context = read_model_config(args.student).max_position_embeddings
    traces = read_traces(args.traces, Tokenizer.load(folder), context)
    args.out.mkdir(parents=True, exist_ok=True)  # before the work: a result that cannot be stored would be lost
    if any(args.out.iterdir()):
        raise FileExistsError(f"out {str(args.out)!r} holds other files: name a folder that is empty or does not exist")
    model = octile.convert(octile.load(args.student)).to(device)
    held_out, trained = traces[::8], [trace for number, trace in enumerate(traces) if number % 8]

    optimizer = octile.optim.AdamW(octile.optim.param_groups(model, weight_decay=0.0), lr=args.lr)
    before = held_out_loss(model, held_out, device)
    for _ in range(args.epochs):
        order = torch.randperm(len(trained)).tolist()
        for start in range(0, len(order), args.batch):
            model.train()
            optimizer.zero_grad()
            batch = order[start : start + args.batch]
            for index in batch:  # one at a time, without padding; the weights are quantized once for all
                tokens, labels = trained[index]
                (model(tokens.to(device), labels.to(device)) / len(batch)).backward()
            octile.optim.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
    after = held_out_loss(model, held_out, device)

    octile.save(model, args.out, "fp8", [folder / "tokenizer.json", folder / "tokenizer_config.json"])
    print(
        f"{len(trained)} traces, {len(held_out)} held out: loss {before:.3f} → {after:.3f} nats per token; {args.out}"
    )
    return before, after


if __name__ == "__main__":
    run_script(main)  # bad input ends in one line
