"""The commands of `octile plan …`."""

from octile.lab.commands import Command, CommandGroup

PLAN = CommandGroup(
    "plan",
    "octile.plan",
    {
        "cluster": Command("cluster", "Plan training on a cluster: memory, time, cost, and the best layouts."),
        "experts": Command("experts", "Draw what redundant experts do for the busiest GPU of each layer."),
        "published": Command("published_command", "Compare the plan's figures with published and measured ones."),
        "schedule": Command("schedule", "Draw a pipeline schedule, and compare all schedules at its size."),
    },
)
