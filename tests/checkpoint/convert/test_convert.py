import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from octile.checkpoint.convert import convert_checkpoint
from octile.checkpoint.convert import folder as convert_module
from octile.checkpoint.convert.size import predict_size
from octile.checkpoint.convert.tensor import Action, convert_tensor
from octile.checkpoint.fp8_layout import QUANTIZATION_CONFIG, dequantize_weight, quantize_weight
from octile.checkpoint.shards import Shards
from octile.checkpoint.tensor_file import DTYPE_NAMES
from octile.scaled import ScaledTensor, quantize

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def src(tmp_path, hf_folder, moe_tensors, moe_config):
    folder = hf_folder(tmp_path / "src", moe_config, moe_tensors)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "inference").mkdir()
    (folder / "inference" / "model.py").write_text("pass")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "lock").write_text("")
    return folder


@pytest.fixture
def dst(tmp_path):
    return tmp_path / "dst"


def weights(folder):
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def test_projections_are_quantized_as_the_library_does_it(src, dst, same):
    convert_checkpoint(src, dst, "fp8")
    found, q = weights(dst), quantize(weights(src)[Q_PROJ], (128, 128))
    assert same(found[Q_PROJ], q.data)
    assert same(found[Q_PROJ + "_scale_inv"], q.scale)


def test_every_other_tensor_is_copied_bit_for_bit(src, dst, same):
    report = convert_checkpoint(src, dst, "fp8")
    before, after = weights(src), weights(dst)
    unchanged = [name for name in before if name + "_scale_inv" not in after]
    assert all(same(before[name], after[name]) for name in unchanged)
    assert "who.knows" in unchanged
    assert len(unchanged) == sum(report.unchanged.values())


def test_the_result_is_read_by_index_and_announced(src, dst):
    convert_checkpoint(src, dst, "fp8")
    index = json.loads((dst / "model.safetensors.index.json").read_text())
    after = weights(dst)
    assert index["weight_map"].keys() == after.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in after.values())
    announced = {**QUANTIZATION_CONFIG, "modules_to_not_convert": ["lm_head"]}
    assert json.loads((dst / "config.json").read_text())["quantization_config"] == announced


def test_other_files_are_copied_and_hidden_ones_are_not(src, dst):
    report = convert_checkpoint(src, dst, "fp8")
    assert report.copied_files == ("inference/model.py", "tokenizer.json")
    assert (dst / "inference" / "model.py").read_text() == "pass"
    assert not (dst / ".cache").exists()


def test_weights_that_are_not_read_are_not_copied(src, dst):
    unread = ("model.bak.safetensors", "original/consolidated.00.pth", "pytorch_model.bin", "q4.gguf", "scheduler.pt")
    (src / "original").mkdir()
    for name in (*unread, "original/tokenizer.model", "pytorch_model.bin.index.json", "tiktoken.model"):
        (src / name).write_bytes(bytes(100))
    report = convert_checkpoint(src, dst, "fp8")
    assert report.not_copied == dict.fromkeys(sorted((*unread, "pytorch_model.bin.index.json")), 100)
    assert {"original/tokenizer.model", "tiktoken.model"} <= set(report.copied_files)
    assert sorted(path.name for path in (dst / "original").iterdir()) == ["tokenizer.model"]
    assert sorted(path.name for path in dst.glob("*.safetensors")) == [FIRST, SECOND]


def test_the_report_counts_parameters_flops_and_bytes(src, dst):
    report = convert_checkpoint(src, dst, "fp8")
    before = weights(src)
    fp8 = [name for name in before if name + "_scale_inv" in weights(dst)]
    assert report.share.part == sum(before[name].numel() for name in fp8)
    assert report.share.parameters == sum(tensor.numel() for tensor in before.values())
    experts, attention = 3 * 130 * 192, (256 + 200) * 192  # one expert of four is active
    others = 4 * 192 + 192 * 384 + 50 * 192  # gate, eh_proj, head
    assert report.share.flops == pytest.approx((experts + attention) / (experts + attention + others))
    assert report.bytes_before == sum(t.nbytes for t in before.values())
    assert report.bytes_after == sum(t.nbytes for t in weights(dst).values())
    assert report.converted["model.layers.*.mlp.experts.*.gate_proj.weight"] == 4
    assert report.max_error == pytest.approx(16 / 448, rel=1e-5)  # half a spacing of the largest encoded values


def test_a_quantized_parameter_takes_at_most_1_05_bytes(src, dst):
    report = convert_checkpoint(src, dst, "fp8")
    assert report.converted_bytes <= 1.05 * report.share.part


def test_fp8_to_bf16_and_back_returns_the_same_encoded_values(src, dst, tmp_path, same):
    convert_checkpoint(src, dst, "fp8")
    report = convert_checkpoint(dst, tmp_path / "bf16", "bf16")
    convert_checkpoint(tmp_path / "bf16", tmp_path / "again", "fp8")
    once, twice = weights(dst), weights(tmp_path / "again")
    assert once.keys() == twice.keys()
    assert all(same(once[n], twice[n]) for n in once if not n.endswith("_scale_inv"))
    assert report.max_error <= 2.0**-8


@given(st.integers(0, 2**32 - 1), st.floats(-100, 100))
def test_encoded_values_survive_bf16_and_scales_stay_within_its_rounding(seed, log2_size):
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randn(130, 140, generator=generator) * 4
    x = torch.randn(130, 140, generator=generator) * 2.0 ** (log2_size + exponents)
    q = quantize_weight("x", x)
    again = quantize_weight("x", dequantize_weight(q.data, q.scale, torch.bfloat16))
    assert again.data.view(torch.uint8).equal(q.data.view(torch.uint8))
    assert ((again.scale / q.scale - 1).abs() <= 2.0**-8).all()


def test_fp8_to_float32_and_back_returns_the_same_numbers_and_the_same_scales(src, dst, tmp_path, same):
    convert_checkpoint(src, dst, "fp8")
    report = convert_checkpoint(dst, tmp_path / "float32", "float32")
    wide = weights(tmp_path / "float32")[Q_PROJ]
    assert same(wide, dequantize_weight(weights(dst)[Q_PROJ], weights(dst)[Q_PROJ + "_scale_inv"], torch.float32))
    assert report.max_error == 0
    config = json.loads((tmp_path / "float32" / "config.json").read_text())
    assert (config["torch_dtype"], "quantization_config" in config) == ("float32", False)

    convert_checkpoint(tmp_path / "float32", tmp_path / "again", "fp8")
    before, after = weights(dst), weights(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(same(before[name], after[name]) for name in before)


@given(st.integers(0, 2**32 - 1), st.integers(-60, 60))
def test_float32_masters_are_quantized_to_what_they_were_made_of(seed, log2_size):
    random = torch.Generator().manual_seed(seed)
    q = quantize(torch.randn(200, 150, generator=random) * 2.0**log2_size, (128, 128))
    again = quantize(dequantize_weight(q.data, q.scale, torch.float32), (128, 128))
    assert again.data.view(torch.uint8).equal(q.data.view(torch.uint8))
    assert again.scale.equal(q.scale)


# Checkpoints of llm-compressor

WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128], "symmetric": True}


def compressed(src, folder, hf_folder, moe_config, **changes):
    """The FP8 folder src in the format of compressed-tensors, with scales in BF16 as llm-compressor writes them."""
    tensors = {
        name.replace("weight_scale_inv", "weight_scale"): t.bfloat16() if name.endswith("_scale_inv") else t
        for name, t in weights(src).items()
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": WEIGHTS | changes, "input_activations": {"dynamic": True}}}
    announced = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    tensors["logit_scale"] = torch.ones(())
    return hf_folder(folder, moe_config | {"quantization_config": announced | {"ignore": ["lm_head"]}}, [tensors])


@pytest.mark.parametrize(("to", "dtype"), [("bf16", torch.bfloat16), ("float32", torch.float32)])
def test_blocks_of_compressed_tensors_are_dequantized(src, dst, tmp_path, hf_folder, moe_config, same, to, dtype):
    convert_checkpoint(src, tmp_path / "fp8", "fp8")
    folder = compressed(tmp_path / "fp8", tmp_path / "compressed", hf_folder, moe_config)
    convert_checkpoint(folder, dst, to)
    before, after = weights(folder), weights(dst)
    assert after.keys() == weights(src).keys() | {"logit_scale"}
    assert same(after[Q_PROJ], dequantize_weight(before[Q_PROJ], before[Q_PROJ + "_scale"], dtype))
    assert "quantization_config" not in json.loads((dst / "config.json").read_text())


def test_other_formats_of_compressed_tensors_are_refused(src, dst, tmp_path, hf_folder, moe_config):
    convert_checkpoint(src, tmp_path / "fp8", "fp8")
    folder = compressed(tmp_path / "fp8", tmp_path / "compressed", hf_folder, moe_config, strategy="channel")
    with pytest.raises(ValueError, match=r"quantization_config must be 'fp8' .*, not 'compressed-tensors'"):
        convert_checkpoint(folder, dst, "bf16")


def test_a_weight_of_compressed_tensors_without_a_scale_is_named(src, dst, tmp_path, hf_folder, moe_config):
    convert_checkpoint(src, tmp_path / "fp8", "fp8")
    folder = compressed(tmp_path / "fp8", tmp_path / "compressed", hf_folder, moe_config)
    (path,) = folder.glob("*.safetensors")
    rewrite(path, lambda tensors: tensors.pop(Q_PROJ + "_scale"))
    with pytest.raises(ValueError, match=r"q_proj\.weight is FP8, but the checkpoint has no .*q_proj\.weight_scale$"):
        convert_checkpoint(folder, dst, "bf16")


# Checkpoints in FP32


@pytest.fixture
def float32_src(tmp_path, hf_folder, moe_tensors, moe_config):
    """What `save_pretrained` writes of FP32 weights, with a part that has a configuration of its own."""
    tensors = [
        {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in file.items()}
        for file in moe_tensors
    ]
    config = {**moe_config, "dtype": "float32", "vision_config": {"dtype": "float32", "depth": 2}}
    return hf_folder(tmp_path / "float32", config, tensors)


def test_what_is_not_fp8_of_a_float32_checkpoint_becomes_bf16(float32_src, dst, same):
    report = convert_checkpoint(float32_src, dst, "fp8")
    before, after = weights(float32_src), weights(dst)
    cast = {name for name, tensor in after.items() if tensor.dtype == torch.bfloat16}
    copied = {"model.layers.0.mlp.gate.e_score_correction_bias", "who.knows"}
    assert cast == {name for name in before if name not in copied and name + "_scale_inv" not in after}
    assert all(same(after[name], before[name]) for name in copied)
    assert all(same(after[name], before[name].bfloat16()) for name in cast)
    assert sum(report.cast.values()) == len(cast)


def test_the_configuration_of_a_float32_checkpoint_announces_bf16(float32_src, dst):
    convert_checkpoint(float32_src, dst, "fp8")
    config = json.loads((dst / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["vision_config"] == {"dtype": "bfloat16", "depth": 2}


def test_a_float32_tensor_of_a_bf16_checkpoint_is_copied(src, dst, hf_folder, moe_tensors, moe_config, tmp_path):
    name = "model.norm.weight"
    src = hf_folder(tmp_path / "mixed", moe_config, [*moe_tensors, {name: torch.ones(192)}])
    assert convert_checkpoint(src, dst, "fp8").cast == {}
    assert weights(dst)[name].dtype == torch.float32


def test_a_wrong_cast_is_not_accepted(float32_src, dst, monkeypatch):
    def careless(name, action, source, out):
        if action is Action.CAST:
            out.write_bytes(name, 0, torch.zeros(source.specs[name].nbytes // 2, dtype=torch.uint8))
        else:
            convert_tensor(name, action, source, out)

    monkeypatch.setattr(convert_module, "convert_tensor", careless)
    with pytest.raises(RuntimeError, match="does not hold the numbers that were cast"):
        convert_checkpoint(float32_src, dst, "fp8")


def test_bf16_folders_announce_no_quantization_and_have_no_scales(src, dst, tmp_path):
    convert_checkpoint(src, dst, "fp8")
    convert_checkpoint(dst, tmp_path / "bf16", "bf16")
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert weights(tmp_path / "bf16").keys() == weights(src).keys()


def test_the_rest_of_a_checkpoint_in_fp16_becomes_bf16_with_its_weights(
    dst, tmp_path, hf_folder, moe_tensors, moe_config, same
):
    tensors = [{n: t.half() if t.dtype == torch.bfloat16 else t for n, t in file.items()} for file in moe_tensors]
    config = {**moe_config, "torch_dtype": "float16", "text_config": {"dtype": "float16"}}
    src = hf_folder(tmp_path / "float16", config, tensors)
    convert_checkpoint(src, tmp_path / "fp8", "fp8")
    report = convert_checkpoint(tmp_path / "fp8", dst, "bf16")
    before, after = weights(src), weights(dst)
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16, torch.float32, torch.int64}
    halves, fp8 = [name for name, tensor in before.items() if tensor.dtype == torch.float16], weights(tmp_path / "fp8")
    cast = [name for name in halves if name + "_scale_inv" not in fp8]
    assert all(same(after[name], before[name].bfloat16()) for name in cast)
    assert sum(report.cast.values()) == len(cast)
    config = json.loads((dst / "config.json").read_text())
    assert (config["torch_dtype"], config["text_config"]["dtype"]) == ("bfloat16", "bfloat16")


def test_a_scale_may_lie_in_another_file_than_its_weight(tmp_path, hf_folder):
    torch.manual_seed(0)
    q = quantize(torch.randn(200, 130), (128, 128))
    folder = hf_folder(tmp_path / "src", {}, [{"a_proj.weight_scale_inv": q.scale}, {"a_proj.weight": q.data}])
    convert_checkpoint(folder, tmp_path / "dst", "bf16")
    assert weights(tmp_path / "dst")["a_proj.weight"].equal(q.dequantize(torch.bfloat16))


def test_chunks_give_what_the_whole_gives(src, dst, tmp_path, monkeypatch):
    convert_checkpoint(src, dst, "fp8")
    monkeypatch.setattr("octile.checkpoint.convert.tensor.CHUNK", 1000)
    convert_checkpoint(src, tmp_path / "chunks", "fp8")
    assert {path.name: path.read_bytes() for path in dst.glob("*.safetensors")} == {
        path.name: path.read_bytes() for path in (tmp_path / "chunks").glob("*.safetensors")
    }


def interrupted(src, dst, monkeypatch):
    """Converts the first file and stops in the second."""

    def stop_in_second(name, *arguments):
        if "experts.1" in name:
            raise KeyboardInterrupt
        convert_tensor(name, *arguments)

    convert_tensor = convert_module.convert_tensor
    monkeypatch.setattr(convert_module, "convert_tensor", stop_in_second)
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(src, dst, "fp8")
    monkeypatch.undo()


def test_an_interrupted_conversion_is_no_checkpoint_yet(src, dst, monkeypatch):
    interrupted(src, dst, monkeypatch)
    assert sorted(path.name for path in dst.iterdir()) == [FIRST, "octile.json"]


def test_it_continues_with_the_first_unfinished_file(src, dst, tmp_path, monkeypatch):
    interrupted(src, dst, monkeypatch)
    written = os.stat(dst / FIRST).st_mtime_ns
    report = convert_checkpoint(src, dst, "fp8")
    whole = convert_checkpoint(src, tmp_path / "whole", "fp8")
    assert (report.resumed_files, report.files) == (1, 2)
    assert os.stat(dst / FIRST).st_mtime_ns == written
    assert report.max_error == whole.max_error
    assert (dst / "octile.json").read_bytes() == (tmp_path / "whole" / "octile.json").read_bytes()


def test_it_removes_the_file_in_whose_midst_a_conversion_was_killed(src, dst, tmp_path, monkeypatch):
    interrupted(src, dst, monkeypatch)
    (dst / f"{SECOND}.0123456789abcdef.partial").touch()
    convert_checkpoint(src, dst, "fp8")
    convert_checkpoint(src, tmp_path / "whole", "fp8")
    assert {path.name for path in dst.iterdir()} == {path.name for path in (tmp_path / "whole").iterdir()}


def test_a_finished_file_that_was_damaged_since_is_converted_again(src, dst, monkeypatch, flip_byte):
    interrupted(src, dst, monkeypatch)
    flip_byte(dst / FIRST, -1)
    assert convert_checkpoint(src, dst, "fp8").resumed_files == 0
    assert Shards(dst).read("model.embed_tokens.weight").shape == (50, 192)


def test_another_conversion_that_finished_no_file_does_not_stand_in_the_way(tmp_path, hf_folder, dst):
    src, weight = tmp_path / "src", torch.ones(4, 4)
    hf_folder(src, {}, [{"a_proj.weight": torch.full_like(weight, torch.nan)}])
    with pytest.raises(ValueError, match="holds NaN or Inf"):
        convert_checkpoint(src, dst, "fp8")
    shutil.rmtree(src)
    hf_folder(src, {}, [{"a_proj.weight": weight}])
    assert convert_checkpoint(src, dst, "fp8").resumed_files == 0


def test_it_does_not_continue_from_another_source(src, dst, monkeypatch):
    interrupted(src, dst, monkeypatch)
    os.utime(src / FIRST)
    with pytest.raises(ValueError, match="holds the start of another conversion"):
        convert_checkpoint(src, dst, "fp8")


def test_a_full_disk_keeps_what_is_finished(src, dst, full_disk, monkeypatch):
    size = sum(spec.nbytes for spec in Shards(src).files[FIRST].specs.values())
    full_disk(size)
    with pytest.raises(OSError, match=f"No space left on device: .*{SECOND}"):
        convert_checkpoint(src, dst, "fp8")
    monkeypatch.undo()
    assert sorted(path.name for path in dst.iterdir()) == [FIRST, "octile.json"]
    assert convert_checkpoint(src, dst, "fp8").resumed_files == 1


def test_too_little_space_is_reported_before_the_work(src, dst, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 0))
    with pytest.raises(OSError, match=r"has too little room: \d+ MB are needed, \d+ MB are free; make room, or"):
        convert_checkpoint(src, dst, "fp8")
    assert [path.name for path in dst.iterdir()] == ["octile.json"]


def test_space_is_needed_for_the_other_files_too(src, dst, monkeypatch):
    (src / "tokenizer.model").write_bytes(bytes(10**6))
    weights = sum(spec.nbytes for spec in Shards(src).specs.values())  # more than FP8 needs
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 0, weights))
    with pytest.raises(OSError, match="has too little room"):
        convert_checkpoint(src, dst, "fp8")


def test_a_result_that_is_wrong_is_not_accepted(src, dst, monkeypatch):
    def careless(name, tensor):
        q = quantize_weight(name, tensor)
        return ScaledTensor(q.data, q.scale * 1.1, q.block)

    monkeypatch.setattr("octile.checkpoint.convert.tensor.quantize_weight", careless)
    with pytest.raises(RuntimeError, match="differs from its source by more than rounding"):
        convert_checkpoint(src, dst, "fp8")


GROWTH = """
import resource, sys, torch
from octile.checkpoint import convert_checkpoint
torch.set_num_threads(1)
convert_checkpoint(sys.argv[1], sys.argv[1] + "-fp8", "fp8")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert_checkpoint(sys.argv[2], sys.argv[2] + "-fp8", "fp8")
unit = 1 if sys.platform == "darwin" else 1024
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_tensors(tmp_path, hf_folder):
    for name, rows in (("small", 2048), ("large", 2048 * 20)):
        tensors = {"a_proj.weight": torch.randn(rows, 512).bfloat16(), "other": torch.ones(rows, 512)}
        hf_folder(tmp_path / name, {}, [tensors])
    command = [sys.executable, "-c", GROWTH, str(tmp_path / "small"), str(tmp_path / "large")]
    growth = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert growth < 8 * 2**20  # the large tensors have 40 and 80 MiB


def test_progress_counts_every_byte_twice(src, dst):
    calls = []
    convert_checkpoint(src, dst, "fp8", progress=lambda *call: calls.append(call))
    assert [done for done, _, _ in calls] == sorted(done for done, _, _ in calls)
    assert calls[-1] == (2 * Shards(src).nbytes, 2 * Shards(src).nbytes, SECOND)


def test_what_is_fp8_already_is_refused(src, dst, tmp_path):
    convert_checkpoint(src, dst, "fp8")
    with pytest.raises(ValueError, match="holds FP8 weights already: there is nothing to convert to fp8"):
        convert_checkpoint(dst, tmp_path / "again", "fp8")


def test_what_is_not_fp8_is_refused(src, dst):
    with pytest.raises(ValueError, match="holds no FP8 weights: there is nothing to convert to bf16"):
        convert_checkpoint(src, dst, "bf16")


def test_an_unknown_format_is_refused(src, dst):
    with pytest.raises(ValueError, match="to must be 'fp8', 'bf16' or 'float32', not 'int4'"):
        convert_checkpoint(src, dst, "int4")


@pytest.mark.parametrize("inside", ["", "fp8"])
def test_a_destination_within_the_source_is_refused(src, inside):
    with pytest.raises(ValueError, match=f"dst must lie outside of {src}, which is converted, not at {src / inside}$"):
        convert_checkpoint(src, src / inside, "fp8")


@pytest.mark.parametrize("folder", ["/proc/fp8", "/sys", "/tmp/../proc/self/fp8"])
def test_a_destination_where_the_system_shows_its_state_is_refused(src, folder):
    with pytest.raises(ValueError, match=f"dst must be on a disk, not {folder}, where the system shows its state"):
        convert_checkpoint(src, folder, "fp8")


def test_a_destination_with_other_files_is_refused(src, dst):
    dst.mkdir()
    (dst / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="dst must be empty or an interrupted conversion"):
        convert_checkpoint(src, dst, "fp8")


def test_one_conversion_at_a_time_writes_to_a_folder(src, dst):
    dst.mkdir()
    with FileLock(dst / convert_module.LOCK), pytest.raises(FileExistsError, match=f"conversion writes to {dst}"):
        convert_checkpoint(src, dst, "fp8")
    convert_checkpoint(src, dst, "fp8")
    assert not (dst / convert_module.LOCK).exists()


def test_a_finished_conversion_is_called_so(src, dst):
    convert_checkpoint(src, dst, "fp8")
    with pytest.raises(FileExistsError, match=r"dst must be empty .*, but .* holds a finished one"):
        convert_checkpoint(src, dst, "fp8")


def test_a_source_without_a_configuration_is_refused(tmp_path):
    (tmp_path / "src").mkdir()
    with pytest.raises(FileNotFoundError, match=r"src has no config\.json"):
        convert_checkpoint(tmp_path / "src", tmp_path / "dst", "fp8")


def test_a_missing_source_is_named(tmp_path, dst):
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError, match=f"{tmp_path / 'file'} is a file"):
        convert_checkpoint(tmp_path / "file", dst, "fp8")
    with pytest.raises(FileNotFoundError, match=f"{tmp_path / 'nowhere'} does not exist"):
        convert_checkpoint(tmp_path / "nowhere", dst, "fp8")


def test_a_truncated_source_is_named_before_anything_is_written(src, dst):
    (src / SECOND).write_bytes((src / SECOND).read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{SECOND} is damaged"):
        convert_checkpoint(src, dst, "fp8")
    assert not dst.exists()


def test_a_weight_that_is_no_number_is_not_quantized(tmp_path, dst, hf_folder):
    hf_folder(tmp_path / "src", {}, [{"a_proj.weight": torch.full((4, 4), torch.nan)}])
    with pytest.raises(ValueError, match=r"a_proj\.weight holds NaN or Inf"):
        convert_checkpoint(tmp_path / "src", dst, "fp8")
    assert not dst.exists()


def test_an_empty_destination_stays_empty_if_a_weight_is_no_number(tmp_path, dst, hf_folder):
    hf_folder(tmp_path / "src", {}, [{"a_proj.weight": torch.full((4, 4), torch.nan)}])
    dst.mkdir()
    with pytest.raises(ValueError, match="holds NaN or Inf"):
        convert_checkpoint(tmp_path / "src", dst, "fp8")
    assert list(dst.iterdir()) == []


def test_an_error_of_the_progress_callback_leaves_a_conversion_that_can_be_resumed(src, dst):
    def fail(done, total, file):
        if done > total * 0.49:
            raise ValueError("of the caller")

    with pytest.raises(ValueError, match="of the caller"):
        convert_checkpoint(src, dst, "fp8", progress=fail)
    assert convert_checkpoint(src, dst, "fp8").files


def test_a_weight_that_is_no_number_is_not_dequantized(tmp_path, dst, hf_folder):
    q = quantize(torch.full((4, 4), torch.nan), (128, 128))
    hf_folder(tmp_path / "src", {}, [{"a_proj.weight": q.data, "a_proj.weight_scale_inv": torch.ones(1, 1)}])
    with pytest.raises(ValueError, match=r"a_proj\.weight in .*src holds NaN or Inf"):
        convert_checkpoint(tmp_path / "src", dst, "bf16")


def rewrite(path, edit):
    """Changes the tensors of a file as another program would, which writes no checksums."""
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)
    (path.parent / "octile.json").unlink(missing_ok=True)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_positive_number_is_refused_before_anything_is_written(src, dst, tmp_path, value):
    convert_checkpoint(src, dst, "fp8")
    rewrite(dst / FIRST, lambda tensors: tensors[f"{Q_PROJ}_scale_inv"].fill_(value))
    with pytest.raises(ValueError, match=f"{FIRST}: {Q_PROJ}_scale_inv must hold positive numbers, but {value} is in"):
        convert_checkpoint(dst, tmp_path / "back", "bf16")
    assert not (tmp_path / "back").exists()


def test_a_scale_without_its_weight_is_refused(src, dst):
    rewrite(src / SECOND, lambda tensors: tensors.update({"no.weight_scale_inv": torch.ones(1, 1)}))
    with pytest.raises(ValueError, match=f"{SECOND}: no.weight_scale_inv is the scale of no.weight, which is missing"):
        convert_checkpoint(src, dst, "fp8")


def test_a_type_that_torch_does_not_have_is_refused(src, dst):
    header = json.dumps({"x": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    shutil.rmtree(dst, ignore_errors=True)
    for path in src.glob("model*"):
        path.unlink()
    (src / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(2))
    with pytest.raises(ValueError, match=r"model\.safetensors: x is of type F4, which torch does not have"):
        convert_checkpoint(src, dst, "fp8")


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.int16, torch.complex64])
def test_weights_of_another_type_are_refused(src, dst, dtype):
    rewrite(src / SECOND, lambda tensors: tensors.update({"odd.weight": torch.ones(4, 4).to(dtype)}))
    expected = f"{SECOND}: odd.weight is of type {DTYPE_NAMES[dtype]}; weights must be of one of F64, F32, F16, BF16"
    with pytest.raises(ValueError, match=expected):
        convert_checkpoint(src, dst, "fp8")


def test_an_empty_index_is_refused(src, dst):
    (src / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(ValueError, match=r"index\.json is damaged: it must map each tensor to its file"):
        convert_checkpoint(src, dst, "fp8")


def test_power_of_two_scales_become_bf16_exactly(src, dst, tmp_path):
    convert_checkpoint(src, dst, "fp8")
    q = quantize(torch.randn(256, 192), (128, 128), scale="power_of_2")
    rewrite(dst / FIRST, lambda tensors: tensors.update({Q_PROJ: q.data, f"{Q_PROJ}_scale_inv": q.scale}))
    convert_checkpoint(dst, tmp_path / "back", "bf16")
    assert weights(tmp_path / "back")[Q_PROJ].float().equal(q.dequantize())


# Layers that are left out


def test_layers_that_a_pattern_matches_are_copied_and_announced(src, dst, same):
    report = convert_checkpoint(src, dst, "fp8", keep=["*.experts", "*.q_proj"])
    assert list(report.converted) == ["model.layers.*.self_attn.kv_a_proj_with_mqa.weight"]
    assert same(weights(dst)[Q_PROJ], weights(src)[Q_PROJ])
    announced = json.loads((dst / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert {"lm_head", "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts.3.up_proj"} <= set(announced)


@pytest.mark.parametrize(
    ("to", "keep", "message"),
    [
        ("fp8", ["*.o_proj"], r"keep has '\*\.o_proj', which matches no layer that would be converted, such as model"),
        ("fp8", ["*"], "no weight would become FP8: 14 × left out by keep, 4 × no weight of a linear layer"),
        ("bf16", ["*"], "keep must be left out of a conversion to bf16: it names layers that do not become FP8"),
    ],
    ids=["no match", "all", "to BF16"],
)
def test_patterns_that_cannot_be_meant_are_refused(src, dst, tmp_path, to, keep, message):
    if to == "bf16":
        convert_checkpoint(src, tmp_path / "fp8", "fp8")
        src = tmp_path / "fp8"
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(src, dst, to, keep=keep)
    assert not dst.exists()


def test_a_conversion_is_not_resumed_with_other_patterns(src, dst, monkeypatch):
    monkeypatch.setattr(convert_module, "_check_result", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(src, dst, "fp8")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="holds the start of another conversion"):
        convert_checkpoint(src, dst, "fp8", keep=["*.q_proj"])


def test_a_checkpoint_without_a_linear_layer_is_refused(hf_folder, moe_config, dst, tmp_path):
    tensors = {"model.embed_tokens.weight": torch.ones(4, 4), "model.norm.weight": torch.ones(4)}
    src = hf_folder(tmp_path / "embedding", moe_config, [tensors])
    with pytest.raises(ValueError, match="would become FP8: 1 × embedding, 1 × no weight of a linear layer"):
        convert_checkpoint(src, dst, "fp8")


def test_what_engines_refuse_is_in_the_report(src, dst):
    report = convert_checkpoint(src, dst, "fp8")
    assert any("experts.*.gate_proj has 130 rows, no multiple of 128" in warning for warning in report.warnings)


def test_what_transformers_does_not_dequantize_is_in_the_report_and_in_the_prediction(src, dst):
    for warnings in (convert_checkpoint(src, dst, "fp8").warnings, predict_size(src, "fp8").warnings):
        assert [warning.split(" (")[0] for warning in warnings if "transformers" in warning] == [
            "transformers 5.24 dequantizes this checkpoint"
        ]
