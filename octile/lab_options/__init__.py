"""The commands of `octile lab …`: a module here has the options of each, and one of `octile.lab.pages` runs it.

`octile.lab` imports torch, which takes seconds: options are checked before that.

To add a command of the lab, write both modules, and add one entry to `COMMANDS`.
"""

from octile.options import Command
from octile.report.outputs import check_outputs

COMMANDS = {
    "formats": Command(
        "octile.lab_options.formats",
        "Show values, gaps and ranges of every number format, and their effect on training.",
        check_outputs,
        runs_in="octile.lab.pages.formats",
    ),
    "accumulate": Command(
        "octile.lab_options.accumulate",
        "Measure the error of long FP8 sums, by length, data and promotion interval.",
        check_outputs,
        runs_in="octile.lab.pages.accumulate",
    ),
    "capture": Command(
        "octile.lab_options.capture",
        "Write the operands of a step's GEMMs to a file, for what-if and hardware.",
        check_outputs,
        runs_in="octile.lab.pages.capture",
    ),
    "what-if": Command(
        "octile.lab_options.what_if",
        "Compute a captured step's GEMMs in every format, block, scale and accumulator.",
        check_outputs,
        runs_in="octile.lab.pages.what_if",
    ),
    "hardware": Command(
        "octile.lab_options.hardware",
        "Estimate what other hardware would bring to a captured step.",
        check_outputs,
        runs_in="octile.lab.pages.hardware",
    ),
    "preflight": Command(
        "octile.lab_options.preflight",
        "Predict which layers lose too much in 8 bits, and write a recipe for them.",
        check_outputs,
        runs_in="octile.lab.pages.preflight",
    ),
    "rollout": Command(
        "octile.lab_options.rollout",
        "Compare the probabilities of served tokens with those of training, bit for bit.",
        runs_in="octile.lab.pages.rollout",
    ),
    "recompute": Command(
        "octile.lab_options.recompute",
        "Recompute a rollout that another machine has recorded, and find the operators that differ.",
        runs_in="octile.lab.pages.recompute",
    ),
}
