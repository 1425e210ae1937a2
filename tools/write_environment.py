"""Write docs/environment.md, the environment variables that octile reads: `python -m tools.write_environment`."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[1] / "docs" / "environment.md"
HEAD = """\
# Environment variables

Every environment variable that octile reads, written by `python -m tools.write_environment`. A test compares the list
with the code.
"""
FOOT = """\
The libraries below octile read more, for example `OMP_NUM_THREADS`, `CUDA_VISIBLE_DEVICES` and `NCCL_SOCKET_IFNAME`.
"""


class Variable(NamedTuple):
    """One environment variable, or several that belong together.

    Attributes:
        names: their names, separated by spaces.
        meaning: what it is for, as Markdown.
        default: what holds if it is not set, as Markdown; "": the meaning says it.
    """

    names: str
    meaning: str
    default: str = ""


class Section(NamedTuple):
    """A section of the page."""

    title: str
    variables: tuple[Variable, ...]
    text: str = ""


SECTIONS = (
    Section(
        "octile's own",
        (
            Variable(
                "OCTILE_API_KEY",
                "a key that requests to `octile serve` must have, besides those of `--api-key`",
                "no key",
            ),
            Variable(
                "OCTILE_CACHE_DIR",
                "the folder of compiled kernels, tuned GEMMs and tokens",
                "`$XDG_CACHE_HOME/octile`, else `~/.cache/octile`",
            ),
            Variable(
                "OCTILE_COMMIT",
                "the commit that records name if the source tree has no history, such as a copy for a job",
                "no commit",
            ),
            Variable("OCTILE_CUDA_COMPILER", "the compiler of the CUDA C++ kernels, `nvrtc` or `nvcc`", "`nvrtc`"),
            Variable("OCTILE_TRACEBACK", "any value shows the traceback of a failed command", "one line"),
            Variable(
                "OCTILE_WEIGHTS_KEY",
                "the key with which `octile serve` takes other weights, if `--weights-key` does not give one",
                "no client can send any",
            ),
        ),
    ),
    Section(
        "Loggers of octile train --log",
        (
            Variable("WANDB_PROJECT", "the project in Weights & Biases", "`octile`"),
            Variable("WANDB_NAME", "the name of the run there", "the name of the run's folder"),
            Variable("MLFLOW_EXPERIMENT_NAME", "the experiment in MLflow", "`octile`"),
        ),
        text="wandb and mlflow read their other variables themselves, such as `WANDB_MODE` and `MLFLOW_TRACKING_URI`.",
    ),
    Section(
        "Set by torchrun",
        (
            Variable("RANK WORLD_SIZE", "this process, and how many there are; without them there is one"),
            Variable(
                "LOCAL_RANK LOCAL_WORLD_SIZE",
                "this process on its host, which takes the GPU of that number, and how many there are on the host",
            ),
            Variable("GROUP_WORLD_SIZE", "how many hosts have ranks"),
            Variable(
                "TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS",
                "how often the ranks were started again, and how often they may be",
            ),
            Variable(
                "TORCHELASTIC_ERROR_FILE", "where the line of a failure is written, which torchrun's report quotes"
            ),
        ),
    ),
    Section(
        "Of other libraries",
        (
            Variable("XDG_CACHE_HOME", "where `OCTILE_CACHE_DIR` is by default"),
            Variable("NO_COLOR", "any value: headings of `--help` are not bold"),
            Variable(
                "MPLBACKEND", "left out while matplotlib is imported, if it names a backend that is not installed"
            ),
            Variable("OMP_WAIT_POLICY", "if it is set, `GOMP_SPINCOUNT` is left alone"),
            Variable(
                "GOMP_SPINCOUNT",
                "1000 in a command: threads that spin for longer delay one another where a core is busy",
            ),
            Variable("CUBLAS_WORKSPACE_CONFIG", "`:4096:8` with `octile train --deterministic`"),
            Variable(
                "TORCH_SYMMMEM_NBLOCKS",
                "the blocks of an [exchange by NVSHMEM](expert_parallel.md#across-nodes-by-nvshmem)",
            ),
            Variable(
                "DG_USE_NVIDIA_TOOLS",
                "1 in `python -m octile.compat.deep_gemm`: DeepGEMM's tests then measure with events",
            ),
            Variable(
                "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING",
                "`false` on several GPUs: torch's warning about the sends of pipelines is not shown",
            ),
        ),
        text="octile sets the last five, unless they are set already.",
    ),
)


def names() -> set[str]:
    """Return the names of all variables."""
    return {name for section in SECTIONS for variable in section.variables for name in variable.names.split()}


def page() -> str:
    """Return the page."""
    return "\n".join([HEAD, *(line for section in SECTIONS for line in lines(section)), FOOT])


def lines(section: Section) -> Iterator[str]:
    """Yield the lines about a section: a table, which has a column of defaults where a variable has one."""
    has_defaults = any(variable.default for variable in section.variables)
    yield f"## {section.title}\n"
    if section.text:
        yield f"{section.text}\n"
    yield "| variable | if not set | |\n|---|---|---|" if has_defaults else "| variable | |\n|---|---|"
    for variable in section.variables:
        cells = [", ".join(f"`{name}`" for name in variable.names.split()), variable.default, variable.meaning]
        yield f"| {' | '.join(cells if has_defaults else cells[::2])} |"
    yield ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
