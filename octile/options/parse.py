"""From the words of a command to its options."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, replace
from difflib import get_close_matches
from typing import Any

from octile.options.fields import Option, dataclass_of, default_of, options_of, refused_options
from octile.options.names import WORD_MARKS, with_options
from octile.options.values import OptionError, value_of
from octile.validation import annotations_of

OTHER_WORDS = {  # names of other trainers' and servers' options, and what is given instead
    "epoch": ("--steps", "--tokens"),
    "epochs": ("--steps", "--tokens"),
    "num-epochs": ("--steps", "--tokens"),
    "num-train-epochs": ("--steps", "--tokens"),
    # vLLM's, and SGLang's
    "model": ("RUN",),
    "model-path": ("RUN",),
    "served-model-name": ("--model-name",),
    "max-num-seqs": ("--engine.max-batch",),
    "max-running-requests": ("--engine.max-batch",),
    "max-num-batched-tokens": ("--engine.max-step-tokens",),
    "chunked-prefill-size": ("--engine.max-step-tokens",),
    "num-speculative-tokens": ("--engine.n-drafts",),
    "speculative-config": ("--engine.n-drafts",),
    "gpu-memory-utilization": ("--cache.gib",),
    "kv-cache-memory-bytes": ("--cache.gib",),
    "mem-fraction-static": ("--cache.gib",),
    "kv-cache-dtype": ("--cache.format",),
    "tensor-parallel-size": ("--parallel.tp",),
    "tp-size": ("--parallel.tp",),
    "enable-expert-parallel": ("--parallel.ep",),
    "ep-size": ("--parallel.ep",),
    "enable-eplb": ("--parallel.redundant-experts",),
    "enable-auto-tool-choice": ("--tool-call-parser",),
    "generation-config": ("--sampling-defaults",),
    "enable-log-requests": ("--access-log",),
    "shutdown-timeout": ("--limits.drain",),
}
HELP, HELP_ALL = frozenset({"-h", "--help"}), "--help-all"


@dataclass(frozen=True)
class Given:
    """What is given for a command.

    Attributes:
        cls: the dataclass of its options.
        command: its name, such as "lab formats".
        words: the words that are given for each field; the last ones, if an option is given several times.
        resumable: the settings that may change when it resumes what is stored.
    """

    cls: type
    command: str
    words: Mapping[str, Sequence[str]]
    resumable: Collection[str] = ()

    def __contains__(self, path: str) -> bool:
        """Whether a field is given."""
        return path in self.words

    def get(self, path: str) -> str | None:
        """Return the word that is given for a field, or None."""
        return self.words[path][-1] if path in self.words else None

    def is_set(self, path: str) -> bool:
        """Whether a flag is set."""
        return self.get(path) == "True"

    def check_one_of(self, first: str, second: str) -> None:
        """Refuse two fields of which only one may be given.

        Raises:
            ValueError: both are.
        """
        if first in self and second in self:
            raise ValueError(f"{first} and {second} exclude each other: give one of them")

    def build(self, default: Any = None) -> Any:
        """Make the dataclass.

        Args:
            default: an instance, whose values are those of the fields that are not given; those of the class if None.

        Raises:
            ValueError: a value is not what its annotation says, or the dataclass refuses it; the message names options.
        """
        with _pointing_to_help(self.command):
            return self._build(self.cls, default, {option.path: option for option in options_of(self.cls)})

    def _build(self, cls: type, default: Any, options: Mapping[str, Option], where: str = "") -> Any:
        prefix, values = f"{where}." if where else "", {}
        for name, annotation in annotations_of(cls).items():
            path, inner = prefix + name, dataclass_of(annotation)
            if inner is not None and any(given.startswith(f"{path}.") for given in self.words):
                values[name] = self._build(inner, default_of(cls, name, default), options, path)
            elif path in options and path in self.words:
                values[name] = value_of(options[path], self.words[path])
        try:
            return cls(**values) if default is None else replace(default, **values)
        except (TypeError, ValueError) as error:
            raise ValueError(self.explained(str(error), where)) from None

    def explained(self, message: str, where: str = "") -> str:
        """Name options instead of fields, and say which of them are those of what is resumed, and which may change.

        Args:
            message: text of an exception.
            where: field that it is about, such as "model".
        """
        text, named = with_options(message, self.cls, where)
        stored = {path: option for path, option in named.items() if set(path) & WORD_MARKS and path not in self}
        if not self.is_set("resume") or not stored:
            return text
        may_change = [option for path, option in stored.items() if path.partition(".")[0] in self.resumable]
        which = "which" if len(may_change) == len(stored) else f"of which only {' and '.join(may_change)}"
        are = "is that" if len(stored) == 1 else "are those"
        return f"{text}; {' and '.join(stored.values())} {are} of the run{f', {which} may change' * bool(may_change)}"

    @contextmanager
    def naming_options(self) -> Iterator[None]:
        """Let an exception inside the context name options instead of fields."""
        try:
            yield
        except Exception as error:
            message = error.args[0] if len(error.args) == 1 else None
            if isinstance(message, str):
                is_check = isinstance(error, ValueError)
                text = self.explained(message) if is_check else with_options(message, self.cls)[0]
                error.args = (text,)
                if isinstance(error, ImportError):
                    error.msg = text  # which is shown instead of args
            raise


def parse(
    cls: type,
    words: Sequence[str],
    command: str,
    resumable: Collection[str] = (),
    no_options: Mapping[str, str] | None = None,
) -> Given:
    """Find out for each word which field it is given for; `Given.build` makes the values.

    An option is --name VALUE or --name=VALUE, with _ or - in its name; the last one counts. A value that begins with a
    dash and is no number needs the form with =.

    Args:
        cls: the dataclass of the command's options.
        words: what follows the command's name.
        command: its name, such as "lab formats".
        resumable: as in `Given`.
        no_options: options of other programs, without their dashes, that this command does not need, and why not.

    Raises:
        OptionError: an option is unknown or refused, has no value or a wrong one; or an argument is missing or one too
            many.
    """
    with _pointing_to_help(command):
        no_option = {f"--{name}": f"is no option: {why}" for name, why in (no_options or {}).items()}
        assigned = _assign(options_of(cls), refused_options(cls) | no_option, list(words))
        return Given(cls, command, assigned, resumable)


def _assign(options: Sequence[Option], refused: Mapping[str, str], words: list[str]) -> dict[str, list[str]]:
    named = {option.name: option for option in options if not option.is_positional}
    negations = {option.negation: option for option in options if option.is_flag}
    found, arguments = dict[str, list[str]](), list[str]()
    while words:
        word = words.pop(0)
        if not _is_option(word):
            arguments.append(word)
            continue
        typed, equals, assigned = word.partition("=")
        name = f"--{typed.removeprefix('--').replace('_', '-')}"
        option = named.get(name) or negations.get(name)
        if name in refused:
            raise OptionError(name, refused[name])
        if option is None or not typed.startswith("--"):
            known = [*(option.name for option in options), *negations, "--help", HELP_ALL]
            raise OptionError(typed, f"is unknown{_suggestion(name, known)}")
        if option.is_flag:
            if equals:
                raise OptionError(name, f"takes no value, but {assigned!r} is given")
            found[option.path] = [str(name == option.name)]
            continue
        values, count = [assigned] if equals else [], 1 if option.is_repeated else option.count
        while words and len(values) != count and not _is_option(words[0]):
            values.append(words.pop(0))
        if not values or count not in (None, len(values)):
            following = words[0] if words else ""
            raise OptionError(option.name, _needs_values(option.name, count or 1, following, {*named, *negations}))
        value_of(option, values)  # refuses a wrong one, also where a later one counts
        found[option.path] = [*found.get(option.path, []), *values] if option.is_repeated else values
    return found | _assign_arguments([option for option in options if option.is_positional], arguments)


def _assign_arguments(options: Sequence[Option], words: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for option in options:
        count = len(words) if option.count is None else 1
        if words or option.count is None:
            found[option.path], words = words[:count], words[count:]
        elif option.default is MISSING:
            raise OptionError(option.name, f"is missing: {option.help.rstrip('.')}")
    if words:
        raise OptionError(repr(words[0]), f"is one argument too many{'' if options else ': there are only options'}")
    return found


def _is_option(word: str) -> bool:
    """Whether a word is an option: it begins with a dash, and is no number and no dash alone."""
    if len(word) < 2 or not word.startswith("-"):
        return False
    try:
        float(word)
    except ValueError:
        return True
    return False


def _needs_values(name: str, count: int, following: str, known: Collection[str]) -> str:
    """Say that an option lacks values, and how to write one that begins with a dash and is taken for an option."""
    needs = f"needs {'a value' if count == 1 else f'{count} values'}"
    if count != 1 or not following or following.partition("=")[0].replace("_", "-") in known:
        return needs
    return f"{needs}: write {name}={shlex.quote(following)} for one that begins with a dash"


def _suggestion(name: str, known: Sequence[str]) -> str:
    """Name the options that could be meant: of the same last word or purpose, or those that are written alike."""
    last = name.lstrip("-").rpartition(".")[2]
    alike = (
        [each for each in known if each.rpartition(".")[2] == last]
        or [each for each in OTHER_WORDS.get(last, ()) if each in known]
        or get_close_matches(name, known, n=3, cutoff=0.8)
    )
    return f"; perhaps you meant {' or '.join(alike)}" if alike else ""


@contextmanager
def _pointing_to_help(command: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        error.args = (f"{error} (see octile {command} --help)",)
        raise
