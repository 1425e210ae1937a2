"""Tests of the command line: exit codes, errors in one line, and the files that commands write."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import is_dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import octile.cli
from octile.checkpoint.hugging_face import save
from octile.checkpoint.training import save_checkpoint
from octile.cli import COMMANDS, main
from octile.models.config import ModelConfig, RopeScaling
from octile.models.deepseek_v3 import DeepseekV3
from octile.options import Command
from octile.options.fields import options_of
from octile.options.names import SETTINGS_FILES, with_options
from octile.options.parse import OTHER_WORDS, parse
from octile.serve.engine.engine import Engine
from octile.serve.http import command as serve_command
from octile.serve.newest_run import newest_run
from octile.tokenizer import Tokenizer
from octile.train import command as train_command
from octile.train.compare.compare import Comparison
from octile.train.config import OptimConfig, ParallelConfig, TrainConfig, preset
from octile.train.run.folder import RunFolder
from octile.validation import annotations_of
from tests.train.conftest import MICRO, estimate_memory_once, write_no_report

MICRO_RUN = [
    *("--steps", "2", "--batch-size", "2", "--sequence-length", "32", "--val-sequences", "2", "--device", "cpu"),
    *("--model.vocab-size", "320", "--model.hidden-size", "64", "--model.num-hidden-layers", "2"),
    *("--model.n-routed-experts", "4", "--model.num-experts-per-tok", "2", "--model.n-group", "2"),
    *("--model.topk-group", "1"),
]


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run a command and return its exit code, stdout and stderr."""
    try:
        main(arguments)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a command refuses its arguments."""
    code, _, err = call(capsys, *arguments)
    assert code == 2
    assert err.startswith("octile: ")
    assert err.count("\n") == 1
    if isinstance(command := COMMANDS.get(arguments[0]), Command) and not any(file in err for file in SETTINGS_FILES):
        line = err.removeprefix("octile: ")
        assert with_options(line, command.load().Options)[0] == line
    return err


@pytest.fixture(scope="module")
def hf_folder(text, tmp_path_factory):
    """A BF16 checkpoint with its tokenizer."""
    folder = tmp_path_factory.mktemp("hf") / "bf16"
    torch.manual_seed(0)
    save(DeepseekV3(MICRO), folder, weights="bf16")
    Tokenizer.train((text / "argparse.txt").read_text().splitlines(), MICRO.vocab_size).save(folder)
    return folder


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    import argparse
    import inspect

    folder = tmp_path_factory.mktemp("cli-text")
    (folder / "argparse.txt").write_text(inspect.getsource(argparse))
    return folder


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory) -> Path:
    """A run of two steps, with a checkpoint of each; it is not to be changed."""
    run = tmp_path_factory.mktemp("cli-trained") / "run"
    main(["train", "--data", str(text), "--out", str(run), "--checkpoint-every", "1", *MICRO_RUN])
    return run


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have runs write no report and no sample, which `trained` has, and estimate their memory once."""
    write_no_report(monkeypatch)
    estimate_memory_once(monkeypatch)


def test_help_names_every_command(capsys):
    code, out, _ = call(capsys, "--help")
    assert code == 0
    assert all(name in out for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(capsys, command):
    code, out, _ = call(capsys, command, "--help")
    assert code == 0
    assert "usage: octile " + command in out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_no_class_of_a_configuration(capsys, command):
    assert "Config`" not in call(capsys, command, "--help")[1]


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("command", ["--help", *COMMANDS])
def test_help_fits_the_terminal(capsys, monkeypatch, command, width):
    monkeypatch.setenv("COLUMNS", str(width))
    out = call(capsys, command, "--help")[1]
    assert [line for line in out.splitlines() if len(line) > width] == []


@pytest.mark.parametrize(
    "command",
    [[name] for name in COMMANDS if name not in ("lab", "plan")] + [["lab", "capture"], ["plan", "schedule"]],
    ids=" ".join,
)
def test_help_names_what_an_option_takes_not_that_it_may_be_left_out(capsys, command):
    assert "{None}" not in call(capsys, *command, "--help")[1]


@pytest.mark.parametrize(
    "arguments",
    [["--preset", "huge"], ["--resume", "--out", "none"], ["--init-from", "none"], ["--steps", "1", "--tokens", "1"]],
    ids=" ".join,
)
def test_help_is_shown_whatever_else_is_given(capsys, monkeypatch, arguments):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, out, err = call(capsys, "train", *arguments, "--help")
    assert (code, err) == (0, "")
    assert "usage: octile train" in out


@pytest.mark.parametrize("command", ["train", "compare"])
def test_help_shows_the_defaults_of_a_preset(capsys, command):
    shown = [call(capsys, command, "--preset", name, "-h")[1] for name in ("tiny", "small")]
    assert "(default: tiny)" in shown[0]
    assert "(default: small)" in shown[1]


HELPED = [
    [],
    *([name] for name in COMMANDS),
    *([group, name] for group in ("lab", "plan") for name in COMMANDS[group].commands),
]
HELP = """
import os, sys, octile.cli
for command in sys.argv[1:]:
    if (child := os.fork()) == 0:
        status = 1
        try:
            octile.cli.main([*command.split(), "--help"])
            status = 2 if "torch" in sys.modules else 0
        finally:
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=sys.stderr, flush=True)
"""


@pytest.fixture(scope="module")
def status_of_help() -> dict[str, int]:
    """The exit status of each command's help, 2 if it has loaded torch: forks of one interpreter without torch."""
    commands = [" ".join(command) for command in HELPED]
    run = subprocess.run(
        [sys.executable, "-c", HELP, *commands],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    return dict(zip(commands, map(int, run.stderr.split()), strict=True))


@pytest.mark.parametrize("command", HELPED, ids=" ".join)
def test_help_loads_no_torch(status_of_help, command):
    assert status_of_help[" ".join(command)] == 0


def test_version(capsys):
    assert call(capsys, "--version")[1].startswith("octile 0.")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], pytest.param(["doctor"], marks=pytest.mark.exhaustive)], ids=" ".join
)
def test_a_closed_output_pipe_is_no_failure(arguments):
    command = subprocess.Popen(
        [sys.executable, "-m", "octile", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    command.stdout.close()
    assert (command.stderr.read(), command.wait()) == (b"", 0)


@pytest.mark.parametrize("command", ["--help", "train"])
def test_help_is_shown_by_a_console_without_utf_8(command):
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    shown = subprocess.run(
        [sys.executable, "-m", "octile", command, "--help"], env=ascii_only, capture_output=True, check=False
    )
    assert (shown.stderr, shown.returncode) == (b"", 0)


def test_unknown_command(capsys):
    message = refused(capsys, "trian")
    assert "unknown command 'trian'; there are train, compare" in message
    assert message.rstrip().endswith("; perhaps you meant train")


def test_an_unknown_command_like_no_other(capsys):
    assert refused(capsys, "xyz").rstrip().endswith("doctor")


def test_the_help_of_convert_names_what_its_messages_name(capsys):
    assert "octile convert [-h] SRC [DST]" in call(capsys, "convert", "--help")[1]


def test_unknown_preset(capsys):
    assert "unknown preset 'huge'; there are tiny" in refused(capsys, "train", "--preset", "huge")


@pytest.mark.parametrize(
    "command",
    [
        ("train", "--out="),
        ("train", "--resume", "--out", ""),
        ("train", "--init-from="),
        ("train", "--model="),
        ("train", "--init_from", ""),
        ("compare", "--out="),
        ("lab", "formats", "--out="),
        ("lab", "formats", ""),
        ("lab", "what-if", "capture", ""),
        ("plan", "schedule", "--out="),
        ("generate", ""),
        ("convert", "model", ""),
    ],
    ids=" ".join,
)
def test_an_empty_path_is_refused(capsys, monkeypatch, tmp_path, command):
    monkeypatch.chdir(tmp_path)
    assert "is empty: name a path" in refused(capsys, *command)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "name"),
    [(("convert", "m", ""), "DST"), (("generate", ""), "RUN"), (("lab", "what-if", "a", ""), "CAPTURES")],
)
def test_an_empty_path_is_refused_by_its_name(capsys, command, name):
    assert refused(capsys, *command).startswith(f"octile: {name} is empty: ")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--prompt", "-x"), "--prompt needs a value: write --prompt=-x for one that begins with a dash"),
        (("--prompt", "-x y"), "--prompt needs a value: write --prompt='-x y' for one that begins with a dash"),
        (("--prompt", "--seed", "1"), "--prompt needs a value (see"),
        (("--prompt",), "--prompt needs a value (see"),
    ],
)
def test_a_value_that_begins_with_a_dash(capsys, options, says):
    assert says in refused(capsys, "generate", "run", *options)


def test_a_vocabulary_too_small_for_the_bytes_is_refused_before_any_work(capsys, text, tmp_path):
    options = ("--data", str(text), *MICRO_RUN, "--model.vocab-size", "3")
    code, out, err = call(capsys, "train", "--out", str(tmp_path / "run"), *options)
    assert (code, out) == (2, "")
    assert "--model.vocab-size must be at least 258 (256 bytes + 2), not 3" in err


@pytest.mark.parametrize("command", ["train", "compare"])
def test_special_tokens_are_those_of_the_tokenizer(capsys, tmp_path, command):
    line = refused(capsys, command, "--model.eos-token-id", "5", "--out", str(tmp_path / "run"))
    assert "--model.eos-token-id is no option: it is a token of the tokenizer" in line


def test_a_smaller_vocabulary_needs_no_other_special_tokens():
    given = parse(train_command.Options, ["--preset", "v2_lite_16b", "--model.vocab-size", "4096"], "train")
    assert train_command.read(given).model.special_tokens == ()  # training sets them


def test_unknown_recipe(capsys, text, tmp_path):
    line = refused(capsys, "train", "--recipe", "fp9", "--data", str(text), "--out", str(tmp_path / "run"), *MICRO_RUN)
    assert "unknown recipe 'fp9'; there are deepseek_v3" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stepz", "4"], "--stepz is unknown; perhaps you meant --steps"),
        (["--epochs", "3"], "--epochs is unknown; perhaps you meant --steps or --tokens"),
        (["--num_train_epochs=3"], "--num_train_epochs is unknown; perhaps you meant --steps or --tokens"),
        (["--device", "gpu"], "--device must be one of auto, cpu, cuda, not 'gpu'"),
        (["--steps", "abc"], "--steps must be a whole number, not 'abc'"),
        (["--optim.lr", "x"], "--optim.lr must be a number, not 'x'"),
        (["--optim.lr", "-1"], "octile: --optim.lr must be at least 0, not -1.0"),
        (["--steps", "0"], "steps must be at least 1, not 0"),
    ],
)
def test_options_that_are_wrong(capsys, options, message):
    assert message in refused(capsys, "train", *options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--served-model-name", "a"], "--served-model-name is unknown; perhaps you meant --model-name"),
        (["--max_num_seqs=8"], "--max_num_seqs is unknown; perhaps you meant --engine.max-batch"),
        (["-tp", "2"], "-tp is unknown; perhaps you meant --parallel.tp"),
        (["--model", "a"], "--model is unknown; perhaps you meant RUN"),
    ],
)
def test_options_of_other_servers_are_refused_with_octiles(capsys, options, message):
    assert message in refused(capsys, "serve", *options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-model-len", "4096"], "--max-model-len is no option: the context is the model's"),
        (["--dtype=bfloat16"], "--dtype is no option: weights are served as they are stored"),
        (["--trust_remote_code"], "--trust-remote-code is no option: no code of a model's folder is run"),
    ],
)
def test_options_of_other_servers_that_need_none_here_say_why(capsys, options, message):
    assert message in refused(capsys, "serve", *options)


def test_no_option_that_there_is_needs_none():
    names = {option.name.removeprefix("--") for option in options_of(serve_command.Options)}
    assert not names & serve_command.NO_OPTIONS.keys()


def test_words_of_other_programs_lead_to_options_that_there_are():
    classes = train_command.Options, serve_command.Options
    names = {option.name for cls in classes for option in options_of(cls)}
    assert {name for meant in OTHER_WORDS.values() for name in meant} <= names


@pytest.fixture
def begun(monkeypatch):
    """begun(options): the configuration with which these options begin a run."""
    configs = []
    monkeypatch.setattr("octile.train.loop.train", lambda config, *rest: configs.append(config))

    def begin(*options: str):
        main(["train", *options])
        return configs.pop()

    return begin


def test_an_option_that_may_be_left_out_takes_none_as_well(begun):
    assert begun("--model.q-lora-rank", "None").model.q_lora_rank is None


def test_without_options_the_tiny_preset_is_trained(begun):
    assert begun() == preset("tiny")


@pytest.mark.parametrize(
    "options",
    [
        ("--preset", "small"),
        ("--preset=small",),
        ("--preset", "tiny", "--preset", "small"),
        ("--preset", "tiny", "--preset=small"),
        ("--preset=tiny", "--preset", "small"),
    ],
    ids=" ".join,
)
def test_the_last_preset_is_the_one_that_is_trained_and_written_down(begun, options):
    assert begun(*options) == preset("small")


@pytest.mark.parametrize("option", ["--init-from", "--init_from"])
def test_the_last_checkpoint_brings_the_shape_and_is_written_down(begun, hf_folder, tmp_path, option):
    other = tmp_path / "other"
    save(DeepseekV3(replace(MICRO, hidden_size=128)), other, weights="bf16")
    config = begun("--init-from", str(other), option, str(hf_folder), "--sequence-length", "32")
    assert (config.init_from, config.model.hidden_size) == (hf_folder, MICRO.hidden_size)
    config = begun("--init-from", str(hf_folder), f"{option}={other}", "--sequence-length", "32")
    assert (config.init_from, config.model.hidden_size) == (other, 128)


def test_the_last_out_is_the_run_that_is_resumed(begun, tmp_path):
    for steps in (11, 12):
        folder = tmp_path / str(steps)
        RunFolder(folder).write_config(replace(preset("tiny"), steps=steps, out=folder))
    first, last = str(tmp_path / "11"), str(tmp_path / "12")
    for options in (("--out", first, "--out", last), ("--out", first, f"--out={last}")):
        config = begun("--resume", *options)
        assert (config.out, config.steps) == (tmp_path / "12", 12)


RUN_OF_FOUR = {"batch_size": 4, "micro_batches": 4, "parallel": ParallelConfig(pp=2)}
STORED = {  # torchrun's environment, and options: the message about a run to resume
    "one value may change": (
        {"WORLD_SIZE": "2"},
        ["--parallel.pp=1", "--parallel.dp=2"],
        "--batch-size 4 must be divisible by --micro-batches 4 × --parallel.dp 2: use --batch-size 8 or "
        "--micro-batches 2; --batch-size and --micro-batches are those of the run, of which only --micro-batches may "
        "change (see octile train --help)",
    ),
    "fewer ranks": (
        {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
        ["--parallel.dp=4", "--parallel.pp=1", "--micro-batches=1"],
        "--parallel.dp is 4, but torchrun has started 2 (WORLD_SIZE): it must be the number of all processes; torchrun "
        "--nnodes 2 --nproc-per-node 2 … -m octile train --parallel.dp 4 …, or --parallel.dp 2 for these 2",
    ),
    "all may change": (
        {},
        ["--parallel.dp=1"],
        "--parallel.pp × --parallel.dp is 2 × 1, but this is one process: it must be the number of all processes; "
        "torchrun --nproc-per-node 2 -m octile train --parallel.pp 2 --parallel.dp 1 …, or --parallel.pp 1 in this "
        "process; --parallel.pp is that of the run, which may change",
    ),
}


@pytest.mark.parametrize(("environment", "options", "message"), STORED.values(), ids=STORED)
def test_values_of_a_run_to_resume_are_said_to_be_its_own(capsys, monkeypatch, tmp_path, environment, options, message):
    RunFolder(tmp_path).write_config(replace(preset("tiny"), **RUN_OF_FOUR, out=tmp_path))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert message in refused(capsys, "train", "--resume", "--out", str(tmp_path), *options)


@pytest.mark.parametrize(("ranks", "options"), [("2", ["--parallel.ep=4"]), ("3", [])], ids=["experts", "batch"])
def test_fewer_ranks_are_not_offered_a_layout_that_would_be_refused(capsys, monkeypatch, ranks, options):
    monkeypatch.setenv("WORLD_SIZE", ranks)
    message = refused(capsys, "train", "--parallel.dp=4", "--batch-size=4", *options)
    assert message.endswith("-m octile train --parallel.dp 4 …\n")


def test_a_damaged_configuration_of_a_checkpoint_is_not_said_to_be_that_of_options(capsys, tmp_path):
    config = {**json.loads(preset("tiny").to_json()), "micro_batches": 3}
    folder = save_checkpoint(tmp_path / "checkpoints", 2, {}, {"config": config})
    arguments = ("--resume", "--out", str(tmp_path / "lost"), "--checkpoints", str(tmp_path / "checkpoints"))
    message = f"octile: {folder}/state.json is damaged: config: batch_size 4 must be divisible by micro_batches 3: "
    assert refused(capsys, "train", *arguments).startswith(message)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (["--tokens", "512"], 1),
        (["--tokens", "513"], 2),
        (["--tokens", "10000", "--batch-size", "2", "--sequence-length", "100"], 50),
        (["--tokens", "8192", "--batch-size", "8", "--initial-batch-size", "2", "--batch-ramp", "0.5"], 10),
    ],
)
def test_tokens_give_the_number_of_steps(begun, options, steps):
    assert begun(*options).steps == steps


@pytest.mark.usefixtures("begun")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "1024", "--steps", "3"], "--steps and --tokens exclude each other: give one of them"),
        (["--tokens", "0"], "tokens must be at least 1, not 0"),
        (["--tokens", "10M"], "--tokens must be a whole number, not '10M'"),
        (["--tokens", "9", "--batch-size", "0"], "--batch-size must be at least 1, not 0"),
        (["--tokens", "512", "--telemetry-every", "2"], "--telemetry-every must be from 1 to 1, the run's steps"),
    ],
)
def test_tokens_that_cannot_be_read_are_refused(capsys, options, message):
    assert message in refused(capsys, "train", *options)


@pytest.mark.parametrize(("name", "data"), [("tiny", "stdlib"), ("small", "packages"), ("medium", "packages")])
def test_a_preset_for_a_gpu_reads_the_text_of_all_packages(begun, name, data):
    assert begun("--preset", name).data == data


@pytest.mark.parametrize("name", ["tiny", "small", "medium", "v3_671b"])
def test_no_preset_trains_with_yarn(begun, name):
    assert begun("--preset", name).model.rope_scaling is None


def test_options_turn_yarn_on(begun):
    config = begun("--model.max-position-embeddings", "8192", "--model.rope-scaling.factor", "4")
    assert config.model.rope_scaling == RopeScaling(factor=4.0, original_max_position_embeddings=2048)
    config = begun("--model.rope-scaling.factor", "2", "--model.rope-scaling.original-max-position-embeddings", "1024")
    assert config.model.rope_scaling == RopeScaling(factor=2.0, original_max_position_embeddings=1024)


def test_yarn_for_another_context_than_the_model_has_causes_a_warning(begun, capsys):
    begun("--model.max-position-embeddings", "4096", "--model.rope-scaling.factor", "4")
    assert "octile: rope_scaling: a factor of 4 extends 2,048 tokens to 8,192, but" in capsys.readouterr().err


def test_a_run_with_yarn_is_resumed_with_it(begun, tmp_path):
    model = replace(ModelConfig.tiny(), rope_scaling=RopeScaling(factor=1.0))
    RunFolder(tmp_path).write_config(replace(preset("tiny"), model=model, out=tmp_path))
    assert begun("--resume", "--out", str(tmp_path)).model == model


@pytest.mark.usefixtures("begun")
def test_an_option_of_yarn_without_its_factor_is_refused(capsys):
    line = refused(capsys, "train", "--model.rope-scaling.mscale", "0.7")
    assert "--model.rope-scaling.factor must be above 1 for YaRN: its other options have no effect with 1" in line


@pytest.fixture
def shape(tmp_path) -> Path:
    """A Hugging Face configuration."""
    file = tmp_path / "shape.json"
    MICRO.write(file)
    return file


def test_a_folder_gives_the_shape_of_its_model(begun, tmp_path):
    MICRO.write(tmp_path / "config.json")
    assert begun("--model", str(tmp_path)).model == MICRO


def test_a_folder_whose_weights_have_no_mtp_layer_gives_a_model_without_one(begun, tmp_path, capsys):
    save_file({"model.norm.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    MICRO.write(tmp_path / "config.json")
    assert begun("--model", str(tmp_path)).model == replace(MICRO, num_nextn_predict_layers=0)
    assert "have no multi-token prediction layer: the model is trained without it" in capsys.readouterr().err
    assert begun("--model", str(tmp_path), "--model.num-nextn-predict-layers", "1").model == MICRO


def test_a_folder_whose_weights_have_the_mtp_layer_gives_a_model_with_it(begun, tmp_path):
    save_file({f"model.layers.{MICRO.num_hidden_layers}.norm": torch.ones(1)}, tmp_path / "model.safetensors")
    MICRO.write(tmp_path / "config.json")
    assert begun("--model", str(tmp_path)).model == MICRO


def test_a_file_gives_the_shape_of_the_model(begun, shape):
    assert begun("--model", str(shape)) == replace(preset("tiny"), model=MICRO)
    config = begun("--model", str(shape), "--model.hidden-size", "128", "--steps", "7")
    assert config == replace(preset("tiny"), model=replace(MICRO, hidden_size=128), steps=7)


def test_a_file_with_an_indexer_trains_sparse_attention(begun, shape):
    indexer = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 8}
    replace(MICRO, **indexer).write(shape)
    config = begun("--model", str(shape))
    assert (config.model, config.indexer_stage) == (replace(MICRO, **indexer), "sparse")


def test_sequences_are_no_longer_than_the_context_of_a_file(begun, shape):
    replace(MICRO, max_position_embeddings=64).write(shape)
    assert begun("--model", str(shape)).sequence_length == 64


def test_the_quantization_of_a_file_is_not_that_of_the_model(begun, shape):
    shape.write_text(json.dumps(json.loads(shape.read_text()) | {"quantization_config": {"scale_fmt": "ue8m0"}}))
    assert begun("--model", str(shape)).model == MICRO


def test_yarn_is_turned_on_for_the_shape_of_a_file(begun, shape):
    rope = begun("--model", str(shape), "--model.rope-scaling.factor", "4").model.rope_scaling
    assert rope == RopeScaling(factor=4.0, original_max_position_embeddings=MICRO.max_position_embeddings)


@pytest.mark.usefixtures("begun")
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--preset=tiny", "octile: --preset and --model exclude each other: give one of them\n"),
        ("--init-from=x", "octile: --model and --init-from exclude each other: give one of them\n"),
    ],
)
def test_the_shape_comes_from_one_option(capsys, shape, option, message):
    assert refused(capsys, "train", "--model", str(shape), option) == message


@pytest.mark.usefixtures("begun")
@pytest.mark.parametrize("command", ["train", "compare"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', but this model computes only 'silu'"),
        ({"model_type": "llama"}, "model_type is 'llama', but must be one of 'deepseek_v3', "),
        ({"hidden_size": None}, "the configuration lacks hidden_size"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number, not '64'"),
    ],
)
def test_a_file_of_a_model_that_octile_does_not_train_is_refused(capsys, shape, command, change, says):
    shape.write_text(json.dumps(json.loads(shape.read_text()) | change))
    line = refused(capsys, command, "--model", str(shape))
    assert line.startswith(f"octile: --model {str(shape)!r} is no shape that octile trains: {says}")


@pytest.mark.usefixtures("begun")
def test_a_shape_that_is_no_json_is_refused_by_its_option(capsys, shape):
    shape.write_text("no JSON")
    line = refused(capsys, "train", "--model", str(shape))
    assert line.startswith(
        f"octile: --model {str(shape)!r} is no shape that octile trains: {shape} is damaged: not JSON"
    )


@pytest.mark.usefixtures("begun")
@pytest.mark.parametrize(("name", "file"), [("none.json", "none.json"), (".", "config.json")])
def test_a_file_of_a_shape_that_does_not_exist(capsys, tmp_path, name, file):
    line = refused(capsys, "train", "--model", str(tmp_path / name))
    assert line == f"octile: {str(tmp_path / file)!r}: No such file or directory\n"


HUB_MODEL = "deepseek-ai/DeepSeek-V3"


@pytest.mark.parametrize(
    ("words", "files"),
    [
        (["serve", HUB_MODEL], ""),
        (["generate", HUB_MODEL], ""),
        (["rl", HUB_MODEL], ""),
        (["train", "--init-from", HUB_MODEL], ""),
        (["train", "--model", HUB_MODEL], "config.json "),
        (["plan", "cluster", "--model", HUB_MODEL], "config.json "),
        (["convert", HUB_MODEL], ""),
        (["convert", HUB_MODEL, "dst", "--to", "fp8"], ""),
    ],
    ids=str,
)
def test_a_model_of_the_hugging_face_hub_is_not_downloaded(capsys, tmp_path, monkeypatch, words, files):
    monkeypatch.chdir(tmp_path)
    command = f"hf download {HUB_MODEL} {files}--local-dir {HUB_MODEL}"
    how = f"; octile downloads no models: if this is one of the Hugging Face Hub, get it with {command}\n"
    assert refused(capsys, *words).endswith(how)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("begun")
@pytest.mark.parametrize("options", [["--preset="], ["--preset", "tiny", "--preset", ""]], ids=" ".join)
def test_an_empty_preset_name_is_refused(capsys, options):
    assert "unknown preset ''" in refused(capsys, "train", *options)


@pytest.mark.usefixtures("begun")
def test_an_option_whose_value_is_missing_is_refused(capsys):
    assert "--preset needs a value (" in refused(capsys, "train", "--preset", "small", "--preset")


@pytest.mark.slow
@pytest.mark.usefixtures("no_report")
def test_data_that_was_missing_does_not_block_the_run_folder(capsys, text, tmp_path):
    run = str(tmp_path / "run")
    refused(capsys, "train", "--data", str(tmp_path / "none"), "--out", run, *MICRO_RUN)
    assert call(capsys, "train", "--data", str(text), "--out", run, *MICRO_RUN)[0] == 0


def test_missing_data(capsys, tmp_path):
    line = refused(capsys, "train", "--data", str(tmp_path / "none"), "--out", str(tmp_path / "run"), *MICRO_RUN)
    assert "is no file or folder" in line


def test_missing_data_leave_no_folder_behind(capsys, tmp_path):
    refused(capsys, "train", "--data", str(tmp_path / "none"), "--out", str(tmp_path / "runs/run"), *MICRO_RUN)
    assert list(tmp_path.iterdir()) == []


def test_data_that_is_a_link_to_nothing(capsys, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    line = refused(capsys, "train", "--data", str(link), "--out", str(tmp_path / "run"), *MICRO_RUN)
    assert f"--data '{link}' is a link to '{tmp_path / 'gone'}', which does not exist" in line


def test_empty_data(capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    line = refused(capsys, "train", "--data", str(tmp_path / "empty"), "--out", str(tmp_path / "run"), *MICRO_RUN)
    assert "holds no files to read" in line


def test_resume_without_a_run(capsys):
    assert "--resume needs --out RUN" in refused(capsys, "train", "--resume")


@pytest.mark.usefixtures("no_report")
def test_a_run_with_a_recipe_file_is_resumed_without_the_file(capsys, text, tmp_path):
    run, file = tmp_path / "run", tmp_path / "mine.toml"
    file.write_text('recipe = "per_tensor"\n')
    options = ("--data", str(text), "--recipe", str(file), "--out", str(run))
    assert call(capsys, "train", *options, *MICRO_RUN)[0] == 0
    file.unlink()
    code, out, _ = call(capsys, "train", "--resume", "--out", str(run), "--steps", "3")
    assert code == 0
    assert "linear layers to per_tensor" in out
    assert json.loads((run / "config.json").read_text())["recipe_text"] == 'recipe = "per_tensor"\n'


def test_the_text_of_a_recipe_is_no_option(capsys):
    assert "recipe-text" not in call(capsys, "train", "--help")[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--telemetry-every", "3"], "--telemetry-every must be from 1 to 2, the run's steps, or 0 for none; not 3"),
        (["--telemetry-layers", "*.down"], "add --telemetry-every N"),
        (["--telemetry-every", "1", "--recipe", "bf16"], "recipe 'bf16' has none"),
        (["--telemetry-every", "1", "--telemetry-layers", "nothing"], "no layer matches 'nothing'"),
    ],
)
def test_telemetry_that_would_measure_nothing_is_refused_before_the_run_begins(capsys, tmp_path, options, message):
    assert message in refused(capsys, "train", "--out", str(tmp_path / "run"), *MICRO_RUN, *options)
    assert not (tmp_path / "run").exists()


def test_train_then_generate(capsys, trained):
    code, out, _ = call(capsys, "generate", str(trained), "--prompt", "def ", "--max-new-tokens", "4")
    assert code == 0
    assert out.startswith("def ")


def test_generate_names_the_run_that_it_chose(capsys, hf_folder, tmp_path, monkeypatch):
    shutil.copytree(hf_folder, tmp_path / "runs" / "mine" / "model")
    monkeypatch.chdir(tmp_path)
    code, _, err = call(capsys, "generate", "--max-new-tokens", "1")
    assert (code, err) == (0, "octile: runs/mine, the newest run\n")


def test_only_the_first_rank_names_the_run(capsys, hf_folder, tmp_path, monkeypatch):
    shutil.copytree(hf_folder, tmp_path / "runs" / "mine" / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "1")
    assert newest_run() == Path("runs/mine")
    assert capsys.readouterr().err == ""


def test_generate_without_a_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "no finished run under runs/" in refused(capsys, "generate")


def test_generate_from_a_folder_that_is_not_there(capsys, tmp_path):
    assert f"no checkpoint at {tmp_path / 'run'}" in refused(capsys, "generate", str(tmp_path / "run"))


def test_generate_with_a_prompt_longer_than_the_context(capsys, hf_folder):
    code, out, err = call(capsys, "generate", str(hf_folder), "--prompt", "def " * 200)
    assert (code, out) == (2, "")  # nothing of the prompt before it
    assert "exceed the context of 128" in err


def test_generate_no_token(capsys, hf_folder):
    assert "--max-new-tokens must be at least 1, not 0" in refused(
        capsys, "generate", str(hf_folder), "--max-new-tokens", "0"
    )


def test_generate_with_an_empty_prompt_begins_a_text(capsys, hf_folder, monkeypatch):
    prompts = []
    monkeypatch.setattr(Engine, "submit", lambda engine, request: prompts.append(request.prompt))
    options = ("--prompt", "", "--max-new-tokens", "4")
    assert call(capsys, "generate", str(hf_folder), *options)[:2] == (0, "\n")
    assert prompts == [(Tokenizer.load(hf_folder).begin,)]


def test_eval_prints_the_loss_of_a_folder(capsys, hf_folder, text):
    options = ("--data", str(text), "--sequences", "2", "--sequence-length", "32", "--device", "cpu")
    code, out, err = call(capsys, "eval", str(hf_folder), *options)
    assert (code, err) == (0, "")
    assert "bf16 (own)" in out


def test_eval_names_the_option_of_a_bad_value(capsys, hf_folder, text):
    said = refused(capsys, "eval", str(hf_folder), "--data", str(text), "--sequence-length", "4096")
    assert said.startswith("octile: --sequence-length 4096 exceeds the context of ")


def test_generate_with_a_prompt_that_is_not_utf_8(capsys, hf_folder, monkeypatch):
    monkeypatch.setattr("octile.serve.generate.ServedWeights.read", lambda *_: pytest.fail("the model was loaded"))
    said = refused(capsys, "generate", str(hf_folder), "--prompt", os.fsdecode(b"caf\xe9"))
    assert "prompt must be UTF-8, but character 4 begins with the byte 0xe9" in said


@pytest.mark.parametrize(("is_terminal", "shown"), [(True, r"old\x1b[2J"), (False, "old\x1b[2J")])
def test_control_characters_of_an_error_reach_no_terminal(capsys, monkeypatch, is_terminal, shown):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    assert f"no checkpoint at {shown}: " in refused(capsys, "generate", "old\x1b[2J")


@pytest.mark.parametrize(
    ("option", "variable"), [("--api-key", "OCTILE_API_KEY"), ("--weights-key", "OCTILE_WEIGHTS_KEY")]
)
@pytest.mark.parametrize("key", ["a\udcff", "naïve", "secret\n", " secret", "two\tparts"])
def test_keys_that_no_client_can_send_are_refused(capsys, hf_folder, monkeypatch, key, option, variable):
    monkeypatch.setattr("octile.serve.http.serve_folder.serve", lambda *_: pytest.fail("the model was loaded"))
    line = "must be printable ASCII without blanks at its ends, to be sent in a header"
    assert f"{option} {line}" in refused(capsys, "serve", str(hf_folder), f"{option}={key}")
    monkeypatch.setenv(variable, key)
    assert f"{variable} {line}" in refused(capsys, "serve", str(hf_folder))


def test_a_key_of_the_environment_that_is_empty_is_refused(capsys, hf_folder, monkeypatch):
    monkeypatch.setattr("octile.serve.http.serve_folder.serve", lambda *_: pytest.fail("the model was loaded"))
    monkeypatch.setenv("OCTILE_API_KEY", "")
    line = "OCTILE_API_KEY must not be empty: leave it unset to serve without a key"
    assert line in refused(capsys, "serve", str(hf_folder))


def test_a_key_of_clients_does_not_update_the_weights(capsys, hf_folder, monkeypatch):
    monkeypatch.setattr("octile.serve.http.serve_folder.serve", lambda *_: pytest.fail("the model was loaded"))
    monkeypatch.setenv("OCTILE_WEIGHTS_KEY", "secret")
    line = "OCTILE_WEIGHTS_KEY must not be a key that clients have (--api-key, OCTILE_API_KEY)"
    assert line in refused(capsys, "serve", str(hf_folder), "--api-key=secret")


def test_an_old_llguidance_is_refused_before_anything_is_loaded(capsys, hf_folder, monkeypatch):
    monkeypatch.setattr("octile.serve.http.serve_folder.serve", lambda *_: pytest.fail("the model was loaded"))
    monkeypatch.setattr("octile.serve.engine.grammar._version", lambda _: "1.6.1")
    line = 'llguidance must be at least 1.7, not 1.6.1: pip install -U "octile[serve]"'
    assert line in refused(capsys, "serve", str(hf_folder))


def test_a_sample_prompt_that_is_not_utf_8_is_refused_before_any_work(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "prompt must be UTF-8" in refused(capsys, "train", "--prompt", os.fsdecode(b"caf\xe9"))
    assert not list(tmp_path.iterdir())


def test_generate_with_the_tokenizer_of_another_model(capsys, hf_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("octile.serve.generate.ServedWeights.read", lambda *_: pytest.fail("the model was loaded"))
    other = tmp_path / "other"
    shutil.copytree(hf_folder, other)
    Tokenizer.train(["abab " * 50 + "cdcd " * 50] * 9 + [str(n) * 3 for n in range(999)], 600).save(other)
    said = refused(capsys, "generate", str(other), "--prompt", "998998998")
    assert "the model's vocabulary has 320: the tokenizer is that of another model" in said


@pytest.mark.parametrize(("is_terminal", "shown"), [(True, r"a\x1b[31m\x07b"), (False, "a\x1b[31m\x07b")])
def test_control_characters_are_escaped_on_a_terminal_only(capsys, hf_folder, monkeypatch, is_terminal, shown):
    monkeypatch.setattr("octile.serve.generate._generate", lambda *_: iter(["\x1b[31m", "\x07b"]))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    code, out, _ = call(capsys, "generate", str(hf_folder), "--prompt", "a", "--max-new-tokens", "2")
    assert (code, out) == (0, shown + "\n")


def test_generate_from_a_truncated_file(capsys, hf_folder, tmp_path):
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(hf_folder, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors" in refused(capsys, "generate", str(broken))


def test_generate_from_a_checkpoint_of_another_shape(capsys, hf_folder, tmp_path):
    import shutil

    other = tmp_path / "other"
    shutil.copytree(hf_folder, other)
    (other / "octile.json").unlink()  # it has the checksum of the other config.json
    replace(MICRO, hidden_size=128).write(other / "config.json")
    assert "by its config.json" in refused(capsys, "generate", str(other), "--max-new-tokens", "8")


@pytest.mark.parametrize("command", ["train", "compare"])
def test_help_is_shown_under_torchrun(capsys, monkeypatch, command):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, out, _ = call(capsys, command, "--help")
    assert code == 0
    assert "usage: octile " + command in out


def test_compare_refuses_several_processes(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = refused(capsys, "compare", "--out", str(tmp_path / "run"))
    assert "octile compare runs in one process, but torchrun has started 2 (WORLD_SIZE)" in message
    assert not (tmp_path / "run").exists()


NOT_RUN = {  # torchrun's environment, and arguments: the message
    "more ranks": ({"WORLD_SIZE": "2"}, [], "parallel.dp is 1, but torchrun has started 2 (WORLD_SIZE)"),
    "fewer ranks": ({}, ["--parallel.dp=2"], "--parallel.dp 2 …, or --parallel.dp 1 in this process"),
    "no pipeline": ({}, ["--parallel.pp=2"], "--parallel.pp × --parallel.dp is 2 × 1, but this is one process"),
    "neither": (
        {},
        ["--parallel.pp=2", "--parallel.dp=2", "--parallel.ep=2", "--batch-size=8"],
        ", or --parallel.pp 1 --parallel.dp 1 --parallel.ep 1 in this process",
    ),
    "no stages": ({}, ["--parallel.schedule=dualpipe"], "parallel.schedule has no effect without a pipeline: add --pa"),
    "no expert parallelism": (
        {},
        ["--parallel.exchange=auto"],
        "exchange has no effect without expert parallelism: add",
    ),
    "no sums": ({}, ["--parallel.reduce=bfloat16"], "has no effect without data-parallel ranks: add --parallel.dp N"),
    "too few layers": (
        {"WORLD_SIZE": "64"},
        ["--parallel.pp=64"],
        "--parallel.pp 64 with --parallel.schedule 1f1b needs at least 64 layers, one a stage",
    ),
    "too few micro-batches": (
        {"WORLD_SIZE": "2"},
        ["--parallel.pp=2", "--parallel.schedule=dualpipe", "--micro-batches=2"],
        "--parallel.schedule dualpipe does not fit --parallel.pp 2 and --micro-batches 2: ",
    ),
    "telemetry of stages": (
        {"WORLD_SIZE": "2"},
        ["--parallel.pp=2", "--telemetry-every=2"],
        "must be 0 on several ranks (--parallel.pp 2 × --parallel.dp 1)",
    ),
    "no run to restart": (
        {"WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3"},
        ["--parallel.dp=2"],
        "--max-restarts needs --out RUN",
    ),
    "one scale": (
        {"WORLD_SIZE": "2"},
        ["--parallel.dp=2", "--recipe=fp8_lm"],
        "recipe fp8_lm needs one rank, not --parallel.dp 2",
    ),
    "no rank": (
        {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
        ["--parallel.dp=2"],
        "octile: WORLD_SIZE is 2, but RANK is not set: start the ranks with torchrun, or set for each",
    ),
    "no address": (
        {"WORLD_SIZE": "2", "RANK": "0"},
        ["--parallel.dp=2"],
        "octile: WORLD_SIZE is 2, but MASTER_ADDR and MASTER_PORT are not set: start the ranks with torchrun",
    ),
}


@pytest.mark.parametrize(("environment", "arguments", "message"), NOT_RUN.values(), ids=NOT_RUN)
def test_ranks_that_cannot_train_are_refused(capsys, monkeypatch, tmp_path, environment, arguments, message):
    monkeypatch.chdir(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert message in refused(capsys, "train", *arguments)
    assert not list(tmp_path.iterdir())


def test_doctor_names_the_option_of_an_unknown_architecture(capsys):
    pytest.importorskip("triton")
    assert refused(capsys, "doctor", "--compile", "sm_77").startswith("octile: --compile must be one of sm_80, ")


def test_convert_there_and_back(capsys, hf_folder, tmp_path):
    fp8, bf16 = str(tmp_path / "fp8"), str(tmp_path / "bf16")
    code, out, _ = call(capsys, "convert", str(hf_folder), fp8, "--to", "fp8")
    assert code == 0
    assert "of the parameters" in out
    assert call(capsys, "convert", fp8, bf16, "--to", "bf16")[0] == 0
    assert (tmp_path / "bf16" / "tokenizer.json").exists()


def test_convert_names_the_weights_that_it_does_not_copy(capsys, hf_folder, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(hf_folder, model)
    for i in range(1, 5):
        (model / f"pytorch_model-{i}.bin").write_bytes(bytes(500))
        out = call(capsys, "convert", str(model), str(tmp_path / f"fp8-{i}"))[1]
        if i == 2:
            assert "not copied: pytorch_model-1.bin and pytorch_model-2.bin (1 kB)\n" in out
    assert "not copied: pytorch_model-1.bin, pytorch_model-2.bin and 2 other weight files (2 kB)\n" in out


@pytest.mark.slow
def test_convert_predicts_the_size_of_a_bare_configuration(capsys, tmp_path):
    ModelConfig.v3_671b().write(tmp_path / "config.json")
    code, out, _ = call(capsys, "convert", str(tmp_path), "--to", "fp8")
    assert code == 0
    assert "684.5B parameters stored, 689 GB as fp8 (a multi-token prediction layer" in out  # published are 688.6 GB


def test_convert_speaks_of_multi_token_prediction_only_where_there_is_some(capsys, tmp_path):
    MICRO.write(tmp_path / "with.json")
    replace(MICRO, num_nextn_predict_layers=0).write(tmp_path / "without.json")
    said = [call(capsys, "convert", str(tmp_path / name))[1] for name in ("with.json", "without.json")]
    assert ["multi-token" in each for each in said] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nowhere",), "SRC must be a folder with config.json, or that file: nowhere does not exist"),
        (("folder",), "SRC must be a folder with config.json, or that file: folder has no config.json"),
        (("adapter",), "adapter is a LoRA adapter (adapter_config.json): merge it into its model first"),
        (("adapter", "x"), "adapter is a LoRA adapter (adapter_config.json): merge it into its model first"),
        (("m/model.safetensors",), "SRC must be a folder with config.json, or that file, not the file m/model.safe"),
        (("run/config.json",), "SRC must be the configuration of a model, not of a run: octile convert run predicts"),
        (("begun/config.json",), "SRC must be the configuration of a model, not of a run: the run has no model yet"),
        (("begun",), "SRC must be the configuration of a model, not of a run: the run has no model yet"),
        (("nowhere", "x"), "SRC must be a folder with config.json and safetensors files: nowhere does not exist"),
        (("m", "m", "--to", "bf16"), "DST must lie outside of m, which is converted, not at m"),
        (
            ("m/config.json", "--to", "float32", "--keep", "*"),
            "--keep must be left out of a conversion to float32: it names",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_convert_refuses_by_the_names_of_its_help(capsys, hf_folder, monkeypatch, tmp_path, arguments, says):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(hf_folder, "m")
    Path("folder").mkdir()
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").touch()
    for run in (Path("run"), Path("begun")):
        run.mkdir()
        (run / "config.json").write_text('{"preset": "tiny"}')
        (run / "metrics.jsonl").touch()
    (tmp_path / "run" / "model").mkdir()
    shutil.copy("m/config.json", "run/model")
    code, out, err = call(capsys, "convert", *arguments)
    assert (code, out) == (2, "")  # no empty line, either
    assert err.startswith(f"octile: {says}")


def test_convert_says_that_a_checkpoint_in_float32_becomes_bf16(capsys, tmp_path):
    from tests.models_of_transformers import small_model

    small_model("llama").save_pretrained(tmp_path / "model")
    capsys.readouterr()  # transformers' progress
    out = call(capsys, "convert", str(tmp_path / "model"), str(tmp_path / "fp8"))[1]
    assert "the checkpoint was FP32: what is not FP8, and the dtype in config.json, became BF16" in out


def test_convert_keeps_what_patterns_match(capsys, hf_folder, tmp_path):
    keep = ("--keep", "*.down_proj", "--keep", "*.o_proj")
    code, out, _ = call(capsys, "convert", str(hf_folder), str(tmp_path / "fp8"), *keep)
    rows = [line for line in out.splitlines() if "down_proj" in line or "o_proj" in line]
    assert code == 0
    assert rows
    assert all("unchanged" in row for row in rows)


def test_convert_refuses_a_pattern_that_matches_nothing(capsys, hf_folder, tmp_path):
    message = refused(capsys, "convert", str(hf_folder), str(tmp_path / "fp8"), "--keep", "*.dwon_proj")
    assert "keep has '*.dwon_proj', which matches no layer that would be converted" in message


def test_convert_warns_of_what_engines_refuse(capsys, hf_folder, tmp_path):
    predicted, converted = (call(capsys, "convert", str(hf_folder), *dst)[1] for dst in ((), (str(tmp_path / "fp8"),)))
    assert "warning: vLLM 0.26 and SGLang 0.5.23 refuse" in predicted
    assert "warning: vLLM 0.26 and SGLang 0.5.23 refuse" in converted


def test_convert_what_is_fp8_already(capsys, hf_folder, tmp_path):
    fp8 = str(tmp_path / "fp8")
    call(capsys, "convert", str(hf_folder), fp8)
    assert "already" in refused(capsys, "convert", fp8, str(tmp_path / "again"))


def test_doctor_names_the_kernel_of_every_operator(capsys):
    code, out, _ = call(capsys, "doctor", "--json")
    assert code == 0
    found = json.loads(out)
    assert {row["operator"] for row in found["operators"]} >= {"octile::quantize", "octile::matmul_nt"}


MEASURE = re.compile(
    r"[-+−]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?\s?(%|×|x|[kMGT]?i?B|[mµ]?s|h|tokens/s|[kMGT]?FLOP/s)?"
)  # 10.5%, 1×


def strings(value):
    """All strings in a value of JSON; keys are no values."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value] if isinstance(value, str) else [text for item in items for text in strings(item)]


@pytest.mark.parametrize(
    "command",
    [
        ("plan", "cluster", "--preset", "tiny", "--cluster", "h200_8", "--pp", "2"),
        pytest.param(("plan", "published"), marks=pytest.mark.slow),
        ("lab", "formats"),
        ("lab", "accumulate", "--k", "256", "--data", "normal", "--promote", "128"),
        ("doctor",),
    ],
    ids=" ".join,
)
def test_json_holds_measures_as_numbers(capsys, command):
    code, out, _ = call(capsys, *command, "--json")
    assert code == 0
    assert [text for text in strings(json.loads(out)) if MEASURE.fullmatch(text)] == []


@pytest.mark.usefixtures("no_report")
def test_a_warning_of_ours_is_a_line(capsys, trained, tmp_path):
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    with (run / "checkpoints/step_00000002/tensors.safetensors").open("r+b") as file:
        file.truncate(1000)
    code, _, err = call(capsys, "train", "--resume", "--out", str(run), "--steps", "3")
    assert (code, err.count("\n")) == (0, 1)
    assert err.startswith("octile: checkpoint step_00000002 cannot be used, trying the one before: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seeds", "two"], "seeds must be how many (3) or which (0,1,2), not 'two'"),
        (
            ["--seed", str(2**63 - 1), "--seeds", "2"],
            "seed must be at most 9,223,372,036,854,775,807, not 9223372036854775808",
        ),
        (["--gradient-steps", "1600"], "--gradient-steps must be from 1 to 1000, or start, middle, end, or none"),
    ],
)
def test_a_comparison_that_cannot_be_made_is_refused(capsys, tmp_path, options, message):
    assert message in refused(capsys, "compare", "--out", str(tmp_path / "out"), *options)
    assert not (tmp_path / "out").exists()


def started_as_a_program(tmp_path, module: str, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m octile` with another module in the place of one that it imports."""
    (tmp_path / module).mkdir()
    (tmp_path / module / "__init__.py").write_text(f"import os, signal\n{text}")
    code = (
        "import runpy, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background process ignores it
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        f"sys.argv[1:] = {arguments!r}\n"
        "runpy.run_module('octile', run_name='__main__')"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["train", "--steps", "5"], "trains: preset tiny, recipe deepseek_v3, seed 0, steps 5"),
        (["train", "--resume", "--out", "runs/one"], "resumes runs/one"),
        (["train", "--prompt", "a\nb"], "trains: preset tiny, recipe deepseek_v3, seed 0, prompt a\\nb"),
        (["compare", "--steps", "5"], "compares bf16 and deepseek_v3: preset tiny, seed 0, steps 5"),
        (["compare", "--seeds", "0,3"], "compares bf16 and deepseek_v3: preset tiny, seed 0, seeds 0,3"),
        (["compare", "--resume", "--out", "runs/two"], "resumes runs/two"),
    ],
)
def test_a_command_says_what_it_does_before_torch_is_imported(tmp_path, arguments, line):
    ended = started_as_a_program(tmp_path, "torch", "os._exit(5)\n", *arguments)
    assert (ended.stdout, ended.returncode) == (f"octile {octile.__version__} {line}\n", 5)


@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_command_names_the_file_of_its_model_in_place_of_a_preset(tmp_path, command, shape):
    line = started_as_a_program(tmp_path, "torch", "os._exit(5)\n", command, "--model", str(shape)).stdout
    assert f": model {shape}, " in line
    assert "preset" not in line
    assert "model." not in line  # nobody has typed these options


@pytest.mark.parametrize("changes", [(), ("--optim.warmup", "0.1")])
def test_the_line_of_a_fine_tuning_run_names_model_and_batch_and_what_is_typed(capsys, tmp_path, changes):
    save(DeepseekV3(MICRO), tmp_path, "bf16")
    with pytest.raises(SystemExit):
        main(["train", "--init-from", str(tmp_path), "--data", str(tmp_path / "none.txt"), *changes])
    typed = ", optim.warmup 0.1" if changes else ""
    line = capsys.readouterr().out.splitlines()[0]
    batch = f"batch_size {TrainConfig().batch_size}, sequence_length {MICRO.max_position_embeddings}"
    says = f"init_from {tmp_path}, {batch}, recipe deepseek_v3, seed 0, data {tmp_path}/none.txt{typed}"
    assert line == f"octile {octile.__version__} trains: {says}"


FULL_COMMANDS = {
    "the default": TrainConfig(),
    "a run with changes of every type": TrainConfig(
        steps=300, data="my text's folder", prompt="-x", deterministic=True, checkpoints="s3://bucket/run",
        out=Path("runs/one two"), initial_batch_size=2, batch_ramp=0.5, telemetry_every=5, guards=Path("rules.toml"),
        optim=OptimConfig(lr=3e-4, betas=(0.8, 0.95), clip=0.5),
        model=replace(ModelConfig.tiny(), norm_topk_prob=False, q_lora_rank=None,
                      rope_scaling=RopeScaling(factor=2.0, original_max_position_embeddings=1024)),
    ),
    "another preset": replace(preset("small"), recipe="bf16", checkpoint_every=0, allow_slow=True),
    "several ranks": TrainConfig(batch_size=8, parallel=ParallelConfig(dp=2, ep=2, reduce="bfloat16")),
}  # fmt: skip


@pytest.mark.parametrize("config", FULL_COMMANDS.values(), ids=FULL_COMMANDS)
def test_the_full_command_of_a_run_has_its_configuration(monkeypatch, config):
    begun = []
    monkeypatch.setattr("octile.train.loop.train", lambda config, *_: begun.append(config))
    monkeypatch.setattr("octile.lab.run.observer", lambda config: None)
    program, arguments = config.full_command.split(" train", 1)
    assert program == ("octile" if config.parallel.ranks == 1 else "torchrun --nproc-per-node 2 -m octile")
    main(["train", *shlex.split(arguments)])
    assert begun == [config]


COMPARED = (
    "--model.hidden-size",
    "64",
    "--sequence-length",
    "32",
    "--steps",
    "2",
    "--recipes",
    "deepseek_v3,per_tensor",
)


@pytest.fixture
def compared(monkeypatch):
    """compared(options): the arguments with which these options begin a comparison."""
    calls = []
    monkeypatch.setattr("octile.train.compare.compare.compare", lambda *arguments: calls.append(arguments))

    def begin(*options: str):
        main(["compare", *options])
        return calls.pop()

    return begin


def test_a_comparison_takes_the_shape_of_the_model_and_the_length_of_sequences(compared):
    config, recipes, *_ = compared(*COMPARED)
    assert (config.model.hidden_size, config.sequence_length, config.steps) == (64, 32, 2)
    assert recipes == ("deepseek_v3", "per_tensor")
    assert config == replace(
        preset("tiny"), steps=2, sequence_length=32, model=replace(preset("tiny").model, hidden_size=64)
    )


def test_a_comparison_takes_the_shape_of_a_file(compared, shape):
    assert compared("--model", str(shape))[0] == replace(preset("tiny"), model=MICRO)


def test_a_comparison_of_another_preset_has_its_settings(compared):
    assert compared("--preset", "small")[0] == preset("small")


@pytest.mark.parametrize("seeds", ["3", "0,7", "9,"])
def test_a_resumed_comparison_takes_everything_from_its_folder(compared, tmp_path, seeds):
    begun = compared(*COMPARED, "--seeds", seeds, "--gradient-steps", "none", "--out", str(tmp_path))
    config, recipes, out, _, of_recipes, gradient_steps, _ = begun
    Comparison(config, recipes, of_recipes, gradient_steps, {}).write(out)
    resumed = compared("--resume", "--out", str(tmp_path))
    assert resumed[:3] + resumed[4:6] == begun[:3] + begun[4:6]
    assert resumed[6] is True


@pytest.mark.parametrize("recipes", ["", " , "])
def test_a_comparison_without_recipes_is_refused(capsys, tmp_path, recipes):
    assert "recipes is empty" in refused(capsys, "compare", "--recipes", recipes, "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("url", ["ftp://127.0.0.1:1/x", "http://127.0.0.1:1/x"])
def test_a_comparison_names_the_option_of_data_that_cannot_be_reached(capsys, tmp_path, url):
    line = refused(capsys, "compare", "--data", url, "--out", str(tmp_path / "out"))
    assert line.startswith(f"octile: --data {url!r} cannot be read: ")


def test_resuming_a_comparison_needs_its_folder(capsys):
    assert "--resume needs --out FOLDER" in refused(capsys, "compare", "--resume")


EXTREMES = ("nan", "inf", "-inf", "-1", "0", "1e30", str(10**18))
ACCEPTED = {  # those of the extremes that an option accepts; all other numeric options accept none
    **dict.fromkeys(("checkpoint-every", "skip-limit", "telemetry-every", "patience"), ("0",)),
    "seed": ("0", str(10**18)),
    **dict.fromkeys(("optim.lr", "optim.weight-decay", "optim.balance-speed", "optim.late-mtp-loss-weight"), ("0",)),
    **dict.fromkeys(("optim.warmup", "optim.decay", "optim.final-lr", "optim.tail", "optim.last-tail"), ("0",)),
    **dict.fromkeys(("optim.last-lr", "optim.balance-end", "optim.mtp-change", "optim.ema-decay"), ("0",)),
    "batch-ramp": ("0",),
    "optim.clip": ("1e30", str(10**18)),
    **dict.fromkeys(("model.first-k-dense-replace", "model.num-nextn-predict-layers"), ("0",)),
    **dict.fromkeys(("model.aux-loss-alpha", "model.mtp-loss-weight", "model.routed-scaling-factor"), ("0",)),
    "model.initializer-range": ("0",),
    **dict.fromkeys(("model.rope-scaling.mscale", "model.rope-scaling.mscale-all-dim"), ("0",)),
    "model.rope-theta": (str(10**18),),
}


def numeric_options(config, prefix=""):
    """The options whose value is a number, by the fields of a configuration."""
    for name, annotation in annotations_of(type(config)).items():
        value = getattr(config, name)
        if is_dataclass(value):
            yield from numeric_options(value, f"{prefix}{name}.")
        elif (isinstance(value, int | float) and not isinstance(value, bool)) or "[int" in str(annotation):
            yield f"{prefix}{name}".replace("_", "-")


NUMERIC = list(numeric_options(replace(preset("tiny"), model=replace(ModelConfig.tiny(), rope_scaling=RopeScaling()))))


def test_every_numeric_option_is_tried():
    assert {"initial-batch-size", "optim.lr", "parallel.dp", "model.q-lora-rank", "model.rope-scaling.factor"} <= set(
        NUMERIC
    )
    assert ACCEPTED.keys() <= set(NUMERIC)
    assert len(NUMERIC) == 67


@pytest.mark.parametrize("option", NUMERIC)
def test_numbers_out_of_range_are_refused_before_anything_is_made(capsys, tmp_path, option):
    run = tmp_path / "run"
    for value in EXTREMES:
        if value not in ACCEPTED.get(option, ()):
            line = refused(capsys, "train", f"--{option}={value}", "--out", str(run))
            assert f"--{option}" in line, value
            assert "at least 0, not inf" not in line
    assert not run.exists()


@pytest.mark.parametrize("option", ["steps", "sequence-length", "seed"])
def test_numbers_out_of_range_are_refused_before_a_comparison_is_made(capsys, tmp_path, option):
    for value in ("nan", "-1", "1e30", str(10**19)):
        refused(capsys, "compare", f"--{option}={value}", "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
