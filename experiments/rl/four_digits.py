"""Write examples and prompts of additions of four digits, no problem in both: `python four_digits.py FOLDER`.

The method and the share of wrong examples are those of `octile.train.data.arithmetic`. FOLDER/examples has a text of
each example, for `octile train --data`, and FOLDER/prompts.jsonl the problems for `octile rl --prompts`.
"""

import json
import random
import sys
from pathlib import Path

from octile.train.data.arithmetic import SEED, WRONG_SHARE, Problem, spaced

NUMBERS = range(1_000, 10_000)
EXAMPLES, PROMPTS = 60_000, 4_000


def solve(problem: Problem, is_wrong: bool) -> str:
    """Write a completion column by column from the right, the first one too far if it is wrong."""
    left, right, carry, columns, answer = problem.a, problem.b, 0, [], 0
    for place in range(4):
        total = left % 10 + right % 10 + carry + (is_wrong and place == 0)
        columns.append(f"{left % 10} + {right % 10}{f' + {carry}' if carry else ''} = {spaced(total)}")
        answer += 10**place * (total if place == 3 else total % 10)
        left, right, carry = left // 10, right // 10, total // 10
    return f" <think> {' , '.join(columns)} </think> {spaced(answer)}"


def main(folder: Path) -> None:
    rng = random.Random(SEED)
    problems = list({Problem(rng.choice(NUMBERS), rng.choice(NUMBERS)): None for _ in range(EXAMPLES + PROMPTS)})
    (folder / "examples").mkdir(parents=True)
    for i, problem in enumerate(problems[PROMPTS:]):
        text = problem.prompt + solve(problem, is_wrong=rng.random() < WRONG_SHARE)
        (folder / "examples" / f"{i:05}.txt").write_text(text)
    prompts = ({"prompt": problem.prompt, "answer": problem.answer} for problem in problems[:PROMPTS])
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in prompts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
