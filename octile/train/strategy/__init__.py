"""How a run uses its ranks.

rank_mesh.py        the groups of ranks: pipelines, data parallelism, experts
expert_parallel.py  the experts of a run on several ranks, and the capacity for their rows
pipelined_model.py  the stages of a rank of a pipeline
state_layout.py     which rows of a trainer's tensors each rank has
"""
