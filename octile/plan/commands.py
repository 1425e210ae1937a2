"""The commands of `octile plan …`."""

from octile.lab.commands import Command, CommandGroup

PLAN = CommandGroup(
    "plan",
    "octile.plan",
    {"schedule": Command("schedule", "Draw a pipeline schedule, and compare all schedules at its size.")},
)
