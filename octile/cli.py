"""The command line of octile. tyro reads each command's options into a frozen dataclass.

A command imports what it needs when it runs, so that `octile --help` answers at once.

Exit codes: 0 success; 2 an error that the user can correct, with one line that says how; 1 any other failure; 130
ended by Ctrl-C; 143 ended by SIGTERM.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from io import StringIO, TextIOWrapper
from itertools import accumulate, dropwhile, takewhile, zip_longest
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TextIO, TypeVar, Union, get_args

from octile import __version__
from octile.extras import require
from octile.models.config import PRESETS, ModelConfig, RopeScaling
from octile.serve.engine.config import CacheConfig, EngineConfig, ParallelConfig, ProcessesConfig, window_of
from octile.serve.http.config import Limits
from octile.signals import Terminated, importing, quiet_exit, terminable, termination_ignored
from octile.text import escape_control_characters
from octile.train.config import RESUMABLE, TrainConfig, describe_settings, preset
from octile.validation import Dataclass, Range, annotations_of, check_fields

if TYPE_CHECKING:
    from octile.lab.commands import CommandGroup

with suppress(ImportError):  # `main` reports it when it is missing
    import tyro

    POSITIONAL = get_args(tyro.conf.Positional[str])[1]

Form = TypeVar("Form", bound=Dataclass)

NUMBER_ERRORS = {  # Python's message for a word that is not a number: what the option needs
    "invalid literal for int() with base 10: ": "a whole number",
    "could not convert string to float: ": "a number",
}

# tyro's message for an option that is a number or several
UNION_ERROR = re.compile(r"no type matching (INT|FLOAT)\|.* could be instantiated from \[(.*)\]")

MISSING_VALUE = re.compile(r"Missing value for argument '(.*)'\. Expected (\d+) values\.")
NO_VALID_PARSE = "Could not find valid parse for arguments: "  # tyro's message for words that are values of no path

WRAPPED_NUMBER = re.compile(r"(?<=\d,)\n(?=\d{3}(?!\d))")  # tyro breaks lines within 128,000
INVALID_CHOICE = re.compile(r"invalid choice '(.*)' for argument '(.*)'\. Expected one of \((.*)\)\.")

EMPTY_PATH = "is empty: name a path"

SETTINGS_FILES = ("config.json", "comparison.json", "state.json")  # of runs, comparisons and their checkpoints
WORD_MARKS = frozenset("._")  # of a field's name that is no word of prose
HELP = frozenset({"-h", "--help"})
HELP_HEAD = re.compile(r"usage: | *\S+ {2,}")  # the start of a line of help, after which its text begins
ANSI_STYLE = re.compile(r"\x1b\[[0-9;]*m")

# torch's warning of an autograd thread whose first kernel is a GEMM, as in a stage's backward pass; it sets the context
NO_CONTEXT = "Attempting to run cuBLAS, but there was no current CUDA context"

OF_RANKS = {  # fields of `parallel` without effect where another one is 1, and what is missing then
    "schedule": ("pp", "a pipeline"),
    "exchange": ("ep", "spread experts"),
    "reduce": ("dp", "data-parallel ranks"),
}

RunForm = TypeVar("RunForm", "Train", "Compare")

USER_ERROR, FAILURE, INTERRUPTED, TERMINATED = 2, 1, 130, 143
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


@dataclass(frozen=True)
class Train(TrainConfig):
    """Train a model: from text to a run folder with checkpoints, the model, a report and a sample.

    Attributes:
        resume: continue the run in --out from its newest checkpoint, with the settings that are stored there.
        tokens: tokens to read, instead of steps; rounded up to whole steps.
        profile: record a few steps after warm-up with torch's profiler, and write trace.json.gz and profile.txt, the
            ten largest costs, into the run folder.
    """

    recipe_text: tyro.conf.Suppress[str | None] = None
    guards_text: tyro.conf.Suppress[str | None] = None
    resume: bool = False
    tokens: Annotated[int, Range(at_least=1, at_most=2**53)] | None = None
    profile: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.tokens is not None:
            object.__setattr__(self, "steps", self.steps_for(self.tokens))
        super().__post_init__()


def train(arguments: list[str]) -> None:
    """Train a model: from text to a run folder with checkpoints, the model, a report and a sample."""
    arguments = _for_help(arguments)
    out = _value_of("--out", arguments)
    if "--resume" in arguments and out:
        _announce(f"resumes {out}")
        with importing():
            from octile.train.run.resume import open_run

        default = open_run(Path(out), _value_of("--checkpoints", arguments)).config
    else:
        name, begin = _value_of("--preset", arguments), _value_of("--init-from", arguments)
        default = preset("tiny" if name is None else name)
        if begin:
            from octile.train.run.fine_tune import fine_tuning

            default = fine_tuning(default, Path(begin))
    if _value_of("--steps", arguments) is not None and _value_of("--tokens", arguments) is not None:
        raise ValueError("--steps and --tokens exclude each other: give one of them")
    names = [f.name for f in fields(TrainConfig)]
    options = _parse_run(Train, arguments, "train", Train(**{name: getattr(default, name) for name in names}))
    config = TrainConfig(**{name: getattr(options, name) for name in names})
    if not options.resume:
        _announce(f"trains: {describe_settings(config)}")
    with importing():
        from octile.lab.run import observer
        from octile.train.loop import train as run
        from octile.train.run.console import RunConsole

    for name, (ranks, without) in OF_RANKS.items():  # a resumed run may have them from more ranks
        if getattr(config.parallel, ranks) == 1 and _value_of(f"--parallel.{name}", arguments) is not None:
            raise ValueError(f"parallel.{name} has no effect without {without}: add --parallel.{ranks} N")
    is_first = _rank() == 0
    console, hook = RunConsole() if is_first else RunConsole.silent(), observer(config)
    if options.profile and is_first:
        from octile.train.step.profile import profiling

        hook = profiling(config, hook, console)
    run(config, options.resume, console, hook)


def _announce(what: str) -> None:
    """Say what a command does before it imports torch, which takes half a minute on a busy machine; rank 0 says it."""
    if not _rank():
        print(escape_control_characters(f"octile {__version__} {what}"), flush=True)


def _for_help(arguments: list[str]) -> list[str]:
    """What is left of arguments that ask for help: the preset whose values are shown. The others may be wrong."""
    if not HELP.intersection(arguments):
        return arguments
    name = _value_of("--preset", arguments)
    return [*(("--preset", name) if name in PRESETS else ()), "--help"]


def _check_one_process(command: str) -> None:
    """Refuse to be one of several processes, which would all write the same run.

    Raises:
        ValueError: torchrun started more than one.
    """
    if _is_one_of_several():
        raise ValueError(
            f"octile {command} runs in one process, but torchrun has started {os.environ['WORLD_SIZE']} (WORLD_SIZE): "
            "start it with --nproc-per-node 1, or without torchrun"
        )


@dataclass(frozen=True)
class Compare:
    """Train BF16 with two or more seeds (the noise band) and each recipe from the same weights on the same batches.

    Attributes:
        preset: tiny, small, medium, v2_lite_16b, v2_236b or v3_671b.
        recipes: names of recipes, separated by commas.
        steps: steps of each run.
        sequence_length: tokens per sequence.
        data: a text file, a folder, hf:NAME (a Hugging Face dataset), stdlib: the source of Python's library, or
            packages: source and documentation of that library and of every package installed here.
        seed: the first seed. BF16 and each recipe are trained with it, and BF16 with the following seed too.
        seeds: the number of seeds of BF16 and each recipe, from --seed on; or the seeds themselves, such as 0,7,9.
        gradient_steps: steps at which gradients are compared with BF16's: numbers, start, middle, end, or none.
        out: folder for the report and the curves; chosen under runs/ if not given.
        device: auto uses a GPU if there is one.
        allow_slow: begin also a comparison that takes more than four hours at least on this CPU.
        resume: continue the comparison in --out, with the settings that are stored there.
        model: the shape of the model.
    """

    preset: str = "tiny"
    recipes: str = "deepseek_v3"
    steps: int = TrainConfig.steps
    sequence_length: int = TrainConfig.sequence_length
    data: str = "stdlib"
    seed: int = 0
    seeds: str = "1"
    gradient_steps: str = "start,middle,end"
    out: Path | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    allow_slow: bool = False
    resume: bool = False
    model: ModelConfig = field(default_factory=ModelConfig.tiny)


# settings of train and compare
SHARED = ("preset", "steps", "sequence_length", "data", "seed", "device", "allow_slow", "model")


def compare(arguments: list[str]) -> None:
    """Train recipes and BF16 with its noise band, and report the loss that each recipe costs."""
    arguments = _for_help(arguments)
    out, name = _value_of("--out", arguments), _value_of("--preset", arguments)
    begun_with: dict[str, Any] = {}
    if "--resume" in arguments and out:
        _announce(f"resumes {out}")
        with importing():
            from octile.train.compare.compare import Comparison, seeds_text

        stored = Comparison.read(Path(out))
        begun_with = {
            "recipes": ",".join(stored.recipes) or "bf16",
            "seeds": seeds_text(stored.seeds, stored.config.seed),
            "gradient_steps": stored.gradient_steps,
        }
        config = stored.config
    else:
        config = preset("tiny" if name is None else name)
    default = Compare(**{name: getattr(config, name) for name in SHARED}, **begun_with)
    options = _parse_run(Compare, arguments, "compare", default)
    _check_one_process("compare")
    if not options.recipes.replace(",", "").strip():
        raise ValueError("recipes is empty: name recipes, separated by commas")
    config = replace(config, **{name: getattr(options, name) for name in SHARED})
    if not options.resume:
        _announce(f"compares bf16 and {options.recipes}: {describe_settings(config, ('preset', 'seed'))}")
    with importing():
        from octile.train.compare.compare import compare as run
        from octile.train.compare.compare import parse_seeds
        from octile.train.run.console import RunConsole

    seeds, recipes = parse_seeds(options.seeds, options.seed), tuple(options.recipes.split(","))
    run(config, recipes, options.out, RunConsole(), seeds, options.gradient_steps, options.resume)


@dataclass(frozen=True)
class Generate:
    """Continue a prompt with a trained model.

    Attributes:
        run: a run folder, or a Hugging Face folder of a DeepSeek-V3 model; the newest under runs/ if not given.
        prompt: the text to continue; an empty one has the model begin a text.
        max_new_tokens: maximum number of tokens to generate.
        temperature: 0 is greedy, 1 samples from the model's distribution. If not given, that of the folder's
            generation_config.json, or 0 without one.
        top_p: sample only from the most likely tokens that together have this probability. If not given, that of
            generation_config.json, or 1.
        seed: seed of the random choices; with temperature 0 there are none.
    """

    run: tyro.conf.Positional[Path | None] = None
    prompt: str = "def "
    max_new_tokens: int = 200
    temperature: float | None = None
    top_p: float | None = None
    seed: int = 0


def generate(arguments: list[str]) -> None:
    """Continue a prompt with a trained model and print the text as it is generated."""
    options = _parse(Generate, arguments, "generate")
    run = options.run or _newest_run()
    with importing():
        from octile.serve.generate import generate_from
        from octile.serve.weights.load import Folder

    folder = Folder.open(run)
    given = {name: value for name in ("temperature", "top_p") if (value := getattr(options, name)) is not None}
    sampling = folder.sampling(max_new_tokens=options.max_new_tokens, seed=options.seed, **given)
    pieces = generate_from(folder, options.prompt, sampling)
    show = escape_control_characters if sys.stdout.isatty() else str  # a pipe gets the text itself
    first = next(pieces, "")  # raises before the prompt is printed if it cannot be continued
    print(show(options.prompt + first), end="", flush=True)
    for piece in pieces:
        print(show(piece), end="", flush=True)
    print()


@dataclass(frozen=True)
class Serve:
    """Serve a model over HTTP with OpenAI's protocol, and a page to try it.

    Attributes:
        run: a run folder, or a Hugging Face folder of a DeepSeek-V3 model; the newest under runs/ if not given.
        host: the address to listen at. 127.0.0.1 is reached from this machine only, 0.0.0.0 from its network, too.
        port: the port to listen at; 0 chooses a free one.
        model_name: the name by which clients ask for the model; the folder's name if not given.
        sampling_defaults: model: requests that give no temperature, top_p or top_k get those of the folder's
            generation_config.json; openai: they get OpenAI's, temperature 1 and all tokens.
        api_key: a key that clients must send; can be given several times. Other users of this machine can see it, but
            not one in the environment variable OCTILE_API_KEY.
        device: auto uses a GPU if there is one.
        limits: what the server takes at most.
        engine: how much is computed at once.
        cache: the paged latent cache, of each rank or process.
        parallel: the ranks that torchrun starts.
        processes: prefill and decoding in processes of their own.
    """

    run: tyro.conf.Positional[Path | None] = None
    host: str = "127.0.0.1"
    port: Annotated[int, Range(at_least=0, at_most=65535)] = 8000
    model_name: str | None = None
    sampling_defaults: Literal["model", "openai"] = "model"
    api_key: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    limits: Limits = field(default_factory=Limits)
    engine: EngineConfig = field(default_factory=EngineConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    processes: ProcessesConfig = field(default_factory=ProcessesConfig)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.processes.prefill and self.parallel.ep > 1:
            raise ValueError(
                f"processes.prefill must be 0, not {self.processes.prefill}, if parallel.ep is {self.parallel.ep}: the "
                "ranks read prompts and generate"
            )
        window_of(self.engine, self.parallel)  # refuses what would have no effect
        if not all(self.api_key) or self.model_name == "":
            raise ValueError(f"{'model_name' if self.model_name == '' else 'api_key'} must not be empty")
        for key in self.api_key:
            _check_key("api_key", key)


def serve(arguments: list[str]) -> None:
    """Serve a model over HTTP with OpenAI's protocol, and a page to try it."""
    options = _parse(Serve, arguments, "serve")
    _check_ranks(options.parallel.ep)
    _check_key("OCTILE_API_KEY", os.environ.get("OCTILE_API_KEY", ""))
    require("fastapi", "uvicorn", "prometheus_client", extra="serve")
    run = options.run or _newest_run()
    name = options.model_name or run.resolve().name
    keys = options.api_key + tuple(filter(None, [os.environ.get("OCTILE_API_KEY")]))
    with importing():
        from octile.parallel.device import pick_own_device
        from octile.serve.http.command import serve as serve_folder

    device = pick_own_device(options.device)
    serve_folder(
        run, name, options.host, options.port, keys, device, options.limits, options.engine, options.cache,
        options.parallel, options.processes, options.sampling_defaults == "model",
    )  # fmt: skip


def _check_key(name: str, key: str) -> None:
    """Refuse a key that no client could send in a header, such as one with a newline from a file. It is not shown.

    Raises:
        ValueError: it is one.
    """
    if not (key.isascii() and key.isprintable() and key == key.strip()):
        raise ValueError(f"{name} must be printable ASCII without blanks at its ends, to be sent in a header")


def _check_ranks(ep: int) -> None:
    """Refuse another number of ranks than torchrun has started.

    Raises:
        ValueError: it is another one.
    """
    with importing():
        from octile.torchrun import count_ranks

    if (started := count_ranks()) == ep:
        return
    if started == 1:
        raise ValueError(
            f"--parallel.ep {ep} needs as many processes: torchrun --nproc-per-node {ep} -m octile serve … starts them"
        )
    raise ValueError(
        f"torchrun has started {started} processes (WORLD_SIZE), so --parallel.ep must be {started}, not {ep}"
    )


@dataclass(frozen=True)
class Convert:
    """Convert a BF16 Hugging Face checkpoint to FP8 (128×128 blocks), or an FP8 one to BF16 or FP32, shard by shard.

    Attributes:
        src: a Hugging Face folder; or one with only a config.json (or that file), to predict the size.
        dst: the folder to write; not needed for a prediction.
        to: fp8, bf16, or float32, which represents FP8 weights exactly, for further training.
        keep: a pattern of layers that stay in high precision besides heads, gates and embeddings, such as
            "*.down_proj"; can be given several times.
    """

    src: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SRC")]  # the names in messages
    dst: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="[DST]")] = None
    to: Literal["fp8", "bf16", "float32"] = "fp8"
    keep: tyro.conf.UseAppendAction[tuple[str, ...]] = ()


def convert(arguments: list[str]) -> None:
    """Convert a checkpoint between BF16 and FP8, or predict the size from a configuration."""
    options = _parse(Convert, arguments, "convert")
    from octile.report.conversion import run_conversion

    run_conversion(options.src, options.dst, options.to, options.keep)


@dataclass(frozen=True)
class Bench:
    """Measure this machine.

    Attributes:
        what: gemm, casts (quantization), step (a model's training step: speed, memory, checkpoint size), train
            (`octile train` on a GPU, vs. torchtitan), transformers (converted models of that library: speed, memory),
            attention (of decoding, over the latent cache), serve (`octile serve`: throughput, time to the first token
            and between tokens, what is refused), indexer (logits of sparse attention's lightning indexer, and its
            choice of keys), sparse (attention over the chosen keys), dispatch (of tokens to experts on other GPUs; by
            torchrun), lab (the tensor core model); tune, which searches the fastest GEMM configurations on a Hopper GPU
            and stores them; or tune-casts, which shows the fastest settings of quantization kernels there.
        json: also write the rows to this file.
        run: a run folder or a Hugging Face folder to serve; the newest under runs/ if not given.
        shape: M,N,K of one GEMM to tune; every shape of gemm if not given.
        minutes: after so many minutes, tune starts no further shape.
    """

    what: Annotated[
        tyro.conf.Positional[
            Literal[
                "gemm",
                "casts",
                "step",
                "train",
                "transformers",
                "attention",
                "serve",
                "indexer",
                "sparse",
                "dispatch",
                "lab",
                "tune",
                "tune-casts",
            ]
        ],
        tyro.conf.arg(metavar="[WHAT]"),  # tyro would list the values in one word, which no line can break
    ] = "step"
    json: Path | None = None
    run: Path | None = None
    shape: str | None = None
    minutes: float | None = None


def bench(arguments: list[str]) -> None:
    """Measure GEMMs, quantization, a training step, training or serving on this machine, compared with a peer."""
    options = _parse(Bench, arguments, "bench")
    from octile.bench import run, search, search_casts

    if options.what != "tune" and (options.shape is not None or options.minutes is not None):
        raise ValueError(f"shape and minutes are options of tune, not of {options.what}")
    if options.what.startswith("tune") and options.json is not None:
        raise ValueError(
            "json is an option of gemm, casts, step, train, transformers, attention, serve, indexer, sparse, dispatch "
            f"and lab, not of {options.what}, which writes no rows"
        )
    if options.what != "serve" and options.run is not None:
        raise ValueError(f"run is an option of serve, not of {options.what}")
    if _is_one_of_several() and options.run is not None:
        raise ValueError("run is an option of one process: serve on several ranks measures a model of its own")
    if options.what == "tune-casts":
        search_casts()
    elif options.what == "tune":
        search(options.shape, options.minutes)
    else:
        is_run = options.what == "serve" and not _is_one_of_several()
        run(options.what, options.json, (options.run or _newest_run()) if is_run else None)


@dataclass(frozen=True)
class Doctor:
    """Report this machine, octile's caches on its disk, and which kernel runs each operator.

    Attributes:
        kernels: compile the kernels and list their registers, stack and shared memory; needs no GPU.
        compile: the architecture to compile for: sm_80, sm_86, sm_89, sm_90 or sm_100; the GPU here, or sm_90, if not
            given.
        json: print JSON.
    """

    kernels: bool = False
    compile: str | None = None
    json: bool = False


def doctor(arguments: list[str]) -> None:
    """Report this machine, which kernel runs each operator, and why."""
    options = _parse(Doctor, arguments, "doctor")
    from octile.bench.doctor import check_architecture, compile_kernels, examine, show

    if options.compile is not None:
        check_architecture("compile", options.compile)
    found = examine()
    if options.kernels or options.compile:
        found["kernels"] = compile_kernels(options.compile)
    show(found, as_json=options.json)


def lab(arguments: list[str]) -> None:
    """Study FP8 numerics: number formats, accumulation, the GEMMs of a run."""
    from octile.lab.commands import LAB

    _run_group(LAB, arguments)


def plan(arguments: list[str]) -> None:
    """Plan training on many GPUs: time, memory and cost on a cluster, and pipeline schedules."""
    from octile.plan.commands import PLAN

    _run_group(PLAN, arguments)


def _run_group(group: CommandGroup, arguments: list[str]) -> None:
    name, *rest = arguments or ["--help"]
    if name in HELP:
        print(wrap_help(group.overview()))
    else:
        group.run(name, rest, _parse, _named_as_options)


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": train,
    "compare": compare,
    "generate": generate,
    "serve": serve,
    "convert": convert,
    "bench": bench,
    "lab": lab,
    "plan": plan,
    "doctor": doctor,
}
FORMS: dict[str, type[Dataclass]] = {  # of commands without commands of their own
    "train": Train,
    "compare": Compare,
    "generate": Generate,
    "serve": Serve,
    "convert": Convert,
    "bench": Bench,
    "doctor": Doctor,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit with its exit code. The entry point of the `octile` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a console without UTF-8 shows "?" for "…"
    if "OMP_WAIT_POLICY" not in os.environ:  # spinning threads delay one another if a core is busy
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    with quiet_exit() if argv is None else nullcontext():
        _dispatch(list(sys.argv[1:] if argv is None else argv))


def _dispatch(arguments: list[str]) -> None:
    name = arguments[0] if arguments else "--help"
    if name in HELP:
        _run(lambda _: print(wrap_help(_overview()), flush=True), [])
    elif name == "--version":
        _run(lambda _: print(f"octile {__version__}", flush=True), [])
    elif name not in COMMANDS:
        meant = "".join(f"; perhaps you meant {close}" for close in get_close_matches(name, COMMANDS, n=1))
        _fail(f"unknown command {name!r}; there are {', '.join(COMMANDS)}{meant}", USER_ERROR)
    else:
        _run(lambda rest: _call(name, rest), arguments[1:])


def _call(name: str, arguments: list[str]) -> None:
    require("tyro", "rich", extra="lab" if name == "lab" else "train")
    with _named_as_options(FORMS[name], arguments) if name in FORMS else nullcontext():
        COMMANDS[name](arguments)


class _CapturedOutput(StringIO):
    """Captured text that looks as it would on the standard output, with the same characters and styles."""

    def __init__(self) -> None:
        super().__init__()
        self._stream = sys.stdout

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()


def _parse(form: type[Form], arguments: list[str], command: str, default: Form | None = None) -> Form:
    """Read arguments into a dataclass. tyro's error box becomes the one line of a ValueError.

    Raises:
        ValueError: the arguments are not valid for the command.
    """
    shown, output = _CapturedOutput(), StringIO()
    marks = (tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff)
    try:
        with redirect_stdout(shown), redirect_stderr(output):
            defaults = tyro.MISSING_NONPROP if default is None else default
            with _registry():
                options = tyro.cli(form, args=arguments, prog=f"octile {command}", default=defaults, config=marks)
    except SystemExit as end:
        if not end.code:  # --help
            print(wrap_help(shown.getvalue()), flush=True)
            raise
        raise ValueError(f"{_error_line(output.getvalue(), form, arguments)} (see octile {command} --help)") from None
    return options


def _path_of(words: list[str]) -> Path:
    if not words[0]:
        raise ValueError(EMPTY_PATH)  # Path("") is the current folder
    return Path(words[0])


def _registry() -> tyro.constructors.ConstructorRegistry:
    """Registry for tyro with octile's rules for values.

    An empty path is refused. The help of an optional value names what the value is, and not None, too.
    """
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

    registry = ConstructorRegistry()

    @registry.primitive_rule
    def path(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Path] | None:
        if info.type is not Path:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="PATH",
            instance_from_str=_path_of,
            is_instance=lambda value: isinstance(value, Path),
            str_from_instance=lambda value: [str(value)],
        )

    @registry.primitive_rule
    def optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        if info.type_origin not in (Union, UnionType) or type(None) not in get_args(info.type):
            return None
        without_none: Any = Union[*(kind for kind in get_args(info.type) if kind is not type(None))]
        spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(without_none, info.markers))
        if not isinstance(spec, PrimitiveConstructorSpec):
            return None
        return replace(
            spec,
            instance_from_str=lambda words: None if words == ["None"] else spec.instance_from_str(words),
            is_instance=lambda value: value is None or spec.is_instance(value),
            str_from_instance=lambda value: ["None"] if value is None else spec.str_from_instance(value),
        )

    return registry


def _parse_run(form: type[RunForm], arguments: list[str], command: str, default: RunForm) -> RunForm:
    """Read arguments into a dataclass that contains a model.

    tyro has no options for the fields of a dataclass that is None. A model without YaRN is therefore shown to it with
    YaRN's factor of 1, which changes nothing.

    Raises:
        ValueError: as for `_parse`, or an option of YaRN has no effect.
    """
    model = default.model
    if model.rope_scaling is not None:
        options = _parse(form, arguments, command, default)
        options.model.warn_of_yarn()
        return options
    without = RopeScaling(factor=1.0, original_max_position_embeddings=model.max_position_embeddings)
    shown = replace(default, model=replace(model, rope_scaling=without))
    options = _parse(form, arguments, command, shown)
    rope = options.model.rope_scaling
    if rope == without:
        return replace(options, model=replace(options.model, rope_scaling=None))
    if rope is not None and rope.factor == 1:
        raise ValueError("model.rope_scaling.factor must be above 1 for YaRN: its other options have no effect with 1")
    options.model.warn_of_yarn()
    return options


def _error_line(box: str, form: type[Dataclass], arguments: list[str]) -> str:
    """The first paragraph of tyro's error box, reworded where it quotes tyro or Python, or begins with a field."""
    lines = [line.strip("│ ") for line in box.splitlines()[1:]]  # without the title
    text = "\n".join(takewhile(_is_text, dropwhile(lambda line: not _is_text(line), lines)))
    first = WRAPPED_NUMBER.sub("", text).replace("\n", " ") or box
    where, _, what = first.removeprefix("Error parsing ").partition(": ")
    if where == first.partition(": ")[0]:
        if choice := INVALID_CHOICE.fullmatch(first):
            given, option, choices = choice.groups()
            name = option if option.startswith("-") else option.upper()
            return f"{name} must be one of {choices.replace(chr(39), '')}, not {given!r}"
        if missing := MISSING_VALUE.fullmatch(first):
            return _missing_value(missing[1], int(missing[2]), form, arguments)
        meant = [line.split()[0] for line in lines if line.startswith("--") and _is_text(line)]
        return f"{first}; perhaps you meant {' or '.join(meant)}" if meant else first
    if what == EMPTY_PATH or (what.startswith(NO_VALID_PARSE) and "''" in what):
        names = [name for _, name in _options(form) if not name.startswith("--")]
        word = where.strip("[]")
        return f"{word if word.startswith('--') or word in names else names[0]} {EMPTY_PATH}"
    for python, kind in NUMBER_ERRORS.items():
        what = what.replace(python, f"{where} must be {kind}, not ")
    if none_of := UNION_ERROR.match(what):
        kind, given = none_of.groups()
        return f"{where} must be {'a whole number' if kind == 'INT' else 'a number'}, not {given}"
    text, named = _with_options(what, form, where.replace("-", "_"))
    return text + _of_run(named, arguments)


def _missing_value(option: str, count: int, form: type[Dataclass], arguments: list[str]) -> str:
    """Say that an option has no value, and how to write a value that begins with a dash and is taken for an option."""
    needs = f"{option} needs {'a value' if count == 1 else f'{count} values'}"
    following = _value_of(option, arguments)
    known = {*HELP, *(name for _, name in _options(form))}
    if count != 1 or not following or following.partition("=")[0].replace("_", "-") in known:
        return needs
    return f"{needs}: write {option}={shlex.quote(following)} for one that begins with a dash"


@contextmanager
def _named_as_options(form: type[Dataclass], arguments: list[str]) -> Iterator[None]:
    """Let an exception inside the context name options instead of fields.

    Where it speaks of a file of settings, whose fields it may name, only the one that it begins with.
    """
    try:
        yield
    except Exception as error:
        message = error.args[0] if len(error.args) == 1 else None
        if isinstance(message, str):
            if any(file in message for file in SETTINGS_FILES):
                text, named = _with_first(message, form), dict[str, str]()
            else:
                text, named = _with_options(message, form)
            error.args = (text + _of_run(named, arguments) if isinstance(error, ValueError) else text,)
            if isinstance(error, ImportError):
                error.msg = text  # which is shown instead of args
        raise


def _with_first(message: str, form: type[Dataclass]) -> str:
    first, blank, rest = message.partition(" ")
    return dict(_options(form)).get(first, first) + blank + rest


def _with_options(message: str, form: type[Dataclass], where: str = "") -> tuple[str, dict[str, str]]:
    """Write the fields that a message names as options; return it, and the options by their fields.

    A word that could be prose, such as "out", is a field where the message begins with it.

    Args:
        message: of an exception.
        form: the options of a command.
        where: the field that the message is about, such as "model", whose fields it may name without those above.
    """
    options = dict(_options(form))
    above = accumulate(f"{part}." for part in where.split("."))
    names = {path.removeprefix(prefix): path for prefix in above for path in options} | {path: path for path in options}
    any_name = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    found: dict[str, str] = {}

    def option(match: re.Match[str]) -> str:
        name = match[0]
        if not set(name) & WORD_MARKS and not begins.match(message[: match.end()]):
            return name
        found[names[name]] = options[names[name]]
        return found[names[name]]

    begins = re.compile(rf"(({any_name}) and )*({any_name})$")
    text = re.sub(rf"(?<![\w./-])({any_name})(?![\w-]|\.\w)(?! of )", option, message)
    return text, found


def _of_run(named: Mapping[str, str], arguments: list[str]) -> str:
    """Say which options of a message are not given, but those of the run that is resumed, and which may change.

    Args:
        named: options by their fields.
        arguments: of the command.
    """
    stored = {path: o for path, o in named.items() if set(path) & WORD_MARKS and _value_of(o, arguments) is None}
    if "--resume" not in arguments or not stored:
        return ""
    resumable = [option for path, option in stored.items() if path.partition(".")[0] in RESUMABLE]
    may = "which may change" if len(resumable) == len(stored) else f"of which only {' and '.join(resumable)} may change"
    are = "is that" if len(stored) == 1 else "are those"
    return f"; {' and '.join(stored.values())} {are} of the run{f', {may}' if resumable else ''}"


def _options(form: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The fields of a dataclass and of its dataclasses, "optim.lr", and what they are on the command line."""
    for name, annotation in annotations_of(form).items():
        kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type) and is_dataclass(kind)]
        for kind in kinds:
            yield from _options(kind, f"{prefix}{name}.")
        if POSITIONAL in get_args(annotation):
            yield name, name.upper()
        elif not kinds:
            yield prefix + name, f"--{(prefix + name).replace('_', '-')}"


def _is_text(line: str) -> bool:
    """Whether a line is text and not a rule, which is drawn with hyphens on a terminal without UTF-8."""
    return bool(line.strip("─-"))


def run_script(main: Callable[[], object]) -> None:
    """Run the main function of a script; an exception becomes one line and an exit code, as in octile's commands."""

    def command(_: list[str]) -> None:
        main()

    _run(command, [])


def _run(command: Callable[[list[str]], None], arguments: list[str]) -> None:
    """Run a command; an exception becomes one line and an exit code. OCTILE_TRACEBACK=1 shows the traceback."""
    raised: list[type[KeyboardInterrupt]] = []
    try:
        with warnings.catch_warnings(), terminable() as raised:
            warnings.showwarning = _warn
            warnings.filterwarnings("ignore", NO_CONTEXT)
            command(arguments)
    except BrokenPipeError:  # the reader of the output, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt as interrupt:
        _fail(*_explain_interrupt(type(interrupt)))
    except Exception as error:
        if os.environ.get("OCTILE_TRACEBACK"):
            raise
        _fail(*_explain(error, raised))


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning: one of octile as a line like an error, any other in Python's form."""
    is_octile = Path(filename).is_relative_to(Path(__file__).parent)
    if is_octile and _rank():  # rank 0 says the same
        return
    text = f"octile: {message}\n" if is_octile else warnings.formatwarning(message, category, filename, lineno, line)
    sys.stderr.write(text)


def _explain(error: Exception, raised: Sequence[type[KeyboardInterrupt]] = ()) -> tuple[str, int]:
    """The line and the exit code for an exception, before which signals were raised."""
    if (code := getattr(error, "exit_code", None)) is not None:  # of Stopped and RanksError
        return str(error), code
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return f"{error.strerror}: {error.filename or 'while writing'}; what was complete is still there", FAILURE
    if isinstance(error, FloatingPointError) or (isinstance(error, MemoryError) and _raised_by_octile(error)):
        return str(error), FAILURE
    if isinstance(error, OSError) and error.filename is not None:  # the system's message without its number
        return f"{str(error.filename)!r}: {error.strerror}", USER_ERROR
    if raised:  # a library has taken it for an import that has failed
        return _explain_interrupt(raised[-1])
    if isinstance(error, OSError) or (isinstance(error, ValueError | ImportError) and _raised_by_octile(error)):
        return str(error), USER_ERROR
    return f"{type(error).__name__}: {error} (OCTILE_TRACEBACK=1 shows where)", FAILURE


def _explain_interrupt(kind: type[KeyboardInterrupt]) -> tuple[str, int]:
    return (_terminated(), TERMINATED) if kind is Terminated else ("interrupted", INTERRUPTED)


def _raised_by_octile(error: BaseException) -> bool:
    """Whether octile or the script itself raised an exception: a check that tells what to correct, not a defect."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not frames:
        return False
    file, script = frames[-1].f_code.co_filename, getattr(sys.modules["__main__"], "__file__", None)
    return file == script or Path(file).is_relative_to(Path(__file__).parent)


def _fail(message: str, code: int) -> NoReturn:
    line = " ".join(message.split())
    if sys.stderr.isatty():  # a message quotes files and their names
        line = escape_control_characters(line)
    if not _is_one_of_several():
        print(f"octile: {line}", file=sys.stderr)
        sys.exit(code)
    from octile.parallel.ranks import fail

    with termination_ignored():  # torchrun sends SIGTERM when another rank has ended, while this one waits to report
        fail(line, code)


def _terminated() -> str:
    """What to say of SIGTERM, which torchrun sends to the other ranks when one has ended."""
    if not _is_one_of_several() or "octile.parallel.ranks" not in sys.modules:
        return "terminated"
    from octile.parallel.ranks import where_ranks_are

    return f"terminated{where_ranks_are()}"


def _rank() -> int:
    return int(os.environ.get("RANK") or 0)


def _is_one_of_several() -> bool:
    """Whether torchrun has started this process and others."""
    return (os.environ.get("WORLD_SIZE") or "1") != "1"


def _overview() -> str:
    lines = [f"  {name:10}{command.__doc__}" for name, command in COMMANDS.items()]
    head = "octile: DeepSeek-V3-style models in fine-grained FP8\n\nusage: octile COMMAND [--help] …\n\n"
    return head + "\n".join(lines)


def wrap_help(text: str) -> str:
    """Break the lines of a command's help that are wider than the terminal.

    The lines that follow are indented to where the text of the first begins: behind "usage:", or behind a name that is
    followed by its description.
    """
    width = shutil.get_terminal_size().columns
    return "\n".join(_wrap(line, width) for line in text.splitlines())


def _wrap(line: str, width: int) -> str:
    shown = ANSI_STYLE.sub("", line)
    if len(shown) <= width:
        return line
    head = HELP_HEAD.match(shown)
    indent = " " * (len(head[0]) if head else 0)
    return textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False)


def _newest_run() -> Path:
    """The finished run under runs/ whose model was written last; rank 0 prints it."""
    runs = sorted(Path("runs").glob("*/model/config.json"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise FileNotFoundError("no finished run under runs/: name one, or make one with octile train")
    run = runs[-1].parent.parent
    if not _rank():
        print(f"octile: {run}, the newest run", file=sys.stderr)
    return run


def _value_of(option: str, arguments: list[str]) -> str | None:
    """The value of an option, from the next argument or after its equals sign; the last one wins, as with tyro."""
    value = None
    for argument, following in zip_longest(arguments, arguments[1:]):
        name, equals, assigned = argument.partition("=")
        if name.replace("_", "-") == option:  # tyro accepts --init_from too
            value = assigned if equals else following
    return value
