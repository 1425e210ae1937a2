"""How a rank takes part in a run: alone, in data parallelism, or in a pipeline.

single.py           one process, and what a trainer asks of every strategy
sharded.py          data-parallel ranks, and experts distributed over them
pipelined.py        ranks of a pipeline
make.py             the strategy that a configuration asks for
rank_mesh.py        the groups of ranks: pipelines, data parallelism, experts
expert_parallel.py  the experts of a run on several ranks
pipelined_model.py  the stages of a rank of a pipeline, and the passes through those of all ranks
state_layout.py     which rows of a trainer's tensors each rank has
"""
