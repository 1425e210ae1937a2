"""One model over several ranks: experts and their copies, heads of attention, and steps of all ranks together.

experts.py             experts spread over ranks, with redundant copies that move between steps
placement.py           `rebalance_experts`: copies of experts, the GPUs that hold them, and the move to them
dynamic_redundancy.py  which of an expert's copies serve its tokens in a step
tensor_parallel.py     ranks that share the rows of a step and the heads of attention
engine.py              the engines of all ranks in lockstep, and as one for a server
"""
