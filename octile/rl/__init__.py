"""Reinforcement learning in one process: sample with the engine, score, train, and update the engine's weights.

grpo.py       advantages, the clipped loss and the penalty: pure functions
rewards.py    accuracy and format, or a user's function
prompts.py    the prompts of a step
sample.py     the completions of a step
batch.py      completions as tensors, and how far engine and trainer agree
config.py     the configuration of a run
trainer.py    the policy, its engine, its reference and its steps
run.py        the folder of a run, and how it is resumed
console.py    what is printed
loop.py       the loop
command.py    `octile rl`
"""
