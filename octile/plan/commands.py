"""The commands of `octile plan …`."""

from octile.options import Command
from octile.report.outputs import check_outputs

COMMANDS = {
    "cluster": Command(
        "octile.plan.cluster",
        "Plan training on a cluster: memory, time, cost, and the best layouts.",
        check_outputs,
    ),
    "experts": Command(
        "octile.plan.experts_command",
        "Draw what redundant experts do for the busiest GPU of each layer.",
        check_outputs,
    ),
    "published": Command(
        "octile.plan.published_command",
        "Compare the plan's figures with published and measured ones.",
        check_outputs,
    ),
    "schedule": Command(
        "octile.plan.schedule", "Draw a pipeline schedule, and compare all schedules at its size.", check_outputs
    ),
}
