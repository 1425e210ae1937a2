"""Pipeline schedules as data: a table of actions for each rank, made by a pure function, and their simulation.

actions.py          actions, equal to torch's: forward, input gradient, weight gradient, full backward, overlapped pair
schedule.py         Schedule: the table, and which rank has which stage
one_direction.py    GPipe, 1F1B, ZB1P
dualpipe.py         DualPipe, DualPipeV
chimera.py          Chimera
simulation.py       times, bubble and activations of a schedule
communication.py    the sends and receives that follow from a table
catalog.py          all schedules with their constraints and formulas
"""

from octile.parallel.schedules.actions import Action, ActionType, parts
from octile.parallel.schedules.catalog import SCHEDULES, ScheduleKind, make_schedule
from octile.parallel.schedules.communication import SENDS_IN_FLIGHT, add_communication
from octile.parallel.schedules.schedule import WITH_WEIGHT_GRADIENTS, Schedule, held_activations
from octile.parallel.schedules.simulation import (
    Costs,
    Simulation,
    Span,
    StageCosts,
    run_actions,
    simulate,
)

__all__ = [
    "SCHEDULES",
    "SENDS_IN_FLIGHT",
    "WITH_WEIGHT_GRADIENTS",
    "Action",
    "ActionType",
    "Costs",
    "Schedule",
    "ScheduleKind",
    "Simulation",
    "Span",
    "StageCosts",
    "add_communication",
    "held_activations",
    "make_schedule",
    "parts",
    "run_actions",
    "simulate",
]
