"""How `octile train` is started, for messages that say how to continue a run."""


def train_command(n_ranks: int) -> str:
    """What starts a run on so many processes, before its options."""
    return "octile train" if n_ranks == 1 else f"torchrun --nproc-per-node {n_ranks} -m octile train"
