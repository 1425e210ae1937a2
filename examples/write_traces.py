"""Write distillation traces: a larger model's answers to prompts, one JSON object per line.

    octile train --preset tiny --out runs/teacher          # or any DeepSeek-V2/V3 folder, FP8 or BF16
    python examples/write_traces.py runs/teacher --out traces.jsonl

Each line is {"prompt": TEXT, "response": TEXT}, a format that most fine-tuning tools read, such as
`fine_tune_on_traces.py`. Each line of --prompts is a prompt with --samples answers, drawn with different seeds.
"""

import argparse
import json
from pathlib import Path

import torch

from octile.checkpoint.files import check_output_file
from octile.cli import run_script
from octile.serve.engine.config import EngineConfig
from octile.serve.engine.engine import Engine
from octile.serve.engine.request import Sampling
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.weights.weights import ServedWeights
from octile.tokenizer import Tokenizer
from octile.validation import read_text


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("teacher", type=Path, help="a finished run, or a Hugging Face folder of a DeepSeek model")
    parser.add_argument("--prompts", type=Path, default=Path(__file__).with_name("prompts.txt"))
    parser.add_argument("--out", type=Path, default=Path("traces.jsonl"))
    parser.add_argument("--samples", type=int, default=4, help="answers per prompt")
    parser.add_argument("--tokens", type=int, default=128, help="maximum tokens of an answer")
    parser.add_argument("--temperature", type=float, default=0.8)
    args = parser.parse_args(arguments)
    for name in ("samples", "tokens"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name} must be at least 1, not {getattr(args, name)}")
    check_output_file("out", args.out)
    samplings = [Sampling(args.tokens, args.temperature, top_p=0.95, seed=seed) for seed in range(args.samples)]
    prompts = [line for line in read_text(args.prompts).splitlines() if line.strip()]

    device = "cuda" if torch.cuda.is_available() else "cpu"
    teacher = ServedWeights.read(args.teacher, torch.bfloat16 if device == "cuda" else torch.float32, device)
    model_folder = args.teacher / "model"
    tokenizer = Tokenizer.load(model_folder if model_folder.is_dir() else args.teacher)

    asked = [(prompt, sampling) for prompt in prompts for sampling in samplings]
    longest = max((len(tokenizer.encode_prompt(prompt)) for prompt in prompts), default=0) + args.tokens
    n_pages = EngineConfig().max_batch * -(-longest // ModelRunner.page_size)
    engine = Engine(ModelRunner(teacher, n_pages), tokenizer)
    requests = [engine.add(tokenizer.encode_prompt(prompt), sampling) for prompt, sampling in asked]
    responses = {request.id: "" for request in requests}
    while engine.has_work:  # many answers at once
        for output in engine.step():
            responses[output.request_id] += output.text

    written = 0
    with args.out.open("w", encoding="utf-8") as file:
        for (prompt, _), response in zip(asked, responses.values(), strict=True):
            if response:  # the answer may be empty
                file.write(json.dumps({"prompt": prompt, "response": response}, ensure_ascii=False) + "\n")
                written += 1
    print(f"{written} traces of {args.teacher} in {args.out}")
    return written


if __name__ == "__main__":
    run_script(main)  # bad input ends in one line
