"""Plans of training on many GPUs: `octile plan`.

hardware.py       a cluster and what kernels reach of it, from TOML files
work.py           the GEMMs and operators of a step; durations.py: how long they take
exchange.py       what dispatch and combine send, and how long that takes
layout.py         how layers, experts and batch are divided; stages.py: which stage has which layers
memory.py         the memory of a rank by kind; pass_memory.py: what its passes take when they take most
step.py           a step: schedule, bubble, exposed communication, cost
search.py         the best layouts, and why not the others
replicas.py       all GPUs, with jitter and stragglers
serving.py        prefill and decode units
published.py      published and measured figures compared with the plan's
trace.py          a step as a Chrome trace
"""
