"""The phases of tools/measure_ranks.py, which runs on two GPUs."""

from octile.train.config import preset
from tools.measure_ranks import PHASES


def test_phases_on_symmetric_memory_ask_for_it():
    named = {name for name in PHASES if "symm" in name}
    assert {name for name, (_, parallel) in PHASES.items() if parallel.exchange == "symmetric_memory"} == named


def test_a_preset_has_as_many_sequences_as_the_ranks_of_a_phase_need():
    for times, parallel in PHASES.values():
        medium = preset("medium")
        assert times * medium.batch_size % (parallel.dp * medium.micro_batches) == 0
