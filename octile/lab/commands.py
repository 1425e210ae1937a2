"""The commands of `octile lab …`.

To add a command of the lab, write its module in `octile.lab.pages` and add one entry to `COMMANDS`.
"""

from octile.options import Command
from octile.report.outputs import check_outputs

COMMANDS = {
    "formats": Command(
        "octile.lab.pages.formats",
        "Show values, gaps and ranges of every number format, and their effect on training.",
        check_outputs,
    ),
    "accumulate": Command(
        "octile.lab.pages.accumulate",
        "Measure the error of long FP8 sums, by length, data and promotion interval.",
        check_outputs,
    ),
    "capture": Command(
        "octile.lab.pages.capture",
        "Write the operands of a step's GEMMs to a file, for what-if and hardware.",
        check_outputs,
    ),
    "what-if": Command(
        "octile.lab.pages.what_if",
        "Compute a captured step's GEMMs in every format, block, scale and accumulator.",
        check_outputs,
    ),
    "hardware": Command(
        "octile.lab.pages.hardware", "Estimate what other hardware would bring to a captured step.", check_outputs
    ),
    "preflight": Command(
        "octile.lab.pages.preflight",
        "Predict which layers lose too much in 8 bits, and write a recipe for them.",
        check_outputs,
    ),
    "rollout": Command(
        "octile.lab.pages.rollout", "Compare the probabilities of served tokens with those of training, bit for bit."
    ),
    "recompute": Command(
        "octile.lab.pages.recompute",
        "Recompute a rollout that another machine has recorded, and find the operators that differ.",
    ),
}
