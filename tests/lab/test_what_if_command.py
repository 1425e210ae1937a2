"""Tests of `octile lab what-if`, `hardware` and `preflight` on the command line."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from octile.checkpoint.hugging_face import save
from octile.lab.capture import Recorder, load
from octile.lab.hardware import hardware
from octile.lab.outliers import find_outliers
from octile.lab.pages import hardware as hardware_page
from octile.lab.pages import what_if_figures
from octile.lab.pages.what_if import best, own_variant, ranked_table, short_table
from octile.lab.variants import PUBLISHED, SearchSpace, Variant
from octile.lab.what_if import Rank, noise_to_db, select_gemms, what_if
from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import DeepseekV3
from octile.recipe import GEMMS, Recipe
from octile.tokenizer import Tokenizer
from tests.lab.captures import write_capture
from tests.lab.test_capture import change_metadata
from tests.report.conftest import leave_empty, read_page
from tests.report.layout import faults_of_pages, signed_zeros
from tests.test_cli import call, refused

SMALL = ("--formats", "e4m3,int8,mx", "--blocks", "1x128,128x128", "--scales", "float32,up", "--sample", "8")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return write_capture(tmp_path_factory.mktemp("captures") / "step_3.safetensors")


@pytest.fixture
def folder(tmp_path, monkeypatch, made):
    shutil.copy(made, tmp_path / "c.safetensors")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def without_figures(monkeypatch):
    """Leave the figures of pages empty."""
    leave_empty(monkeypatch, what_if_figures, hardware_page)


@pytest.mark.slow
@pytest.mark.usefixtures("without_figures")
def test_what_if_prints_a_ranking_and_leaves_a_page(capsys, folder):
    code, out, _ = call(capsys, "lab", "what-if", "c.safetensors", *SMALL)
    assert code == 0
    assert "E4M3 1×128" in out
    assert "E4M3 128×128 *" in out
    assert "* the run's recipe, deepseek_v3" in out
    assert "MXFP8" in out
    assert "The 4 best of each format (--top), " in " ".join(out.split())
    assert "SNR is about all errors, with noise over signal averaged over the GEMMs." in " ".join(out.split())
    assert "Measured on 12 GEMMs with complete sums, and 8 rows of each operand, drawn with seed 0" in out
    assert "left out, 12 combinations: tensor cores sum INT8 as exact integers: use exact" in out
    assert "pictures: lab/what_if.html" in out


@pytest.mark.slow
@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize(("arch", "found_json"), [("sm_90", False), ("sm_89,sm_100", True)])
def test_unverified_tensor_cores_are_named(capsys, folder, arch, found_json):
    _, out, _ = call(
        capsys, "lab", "what-if", "c.safetensors", "--layers", "first", "--formats", "e4m3", "--arch", arch
    )
    assert ("sm_89, sm_100: as published, not checked on hardware" in out) == found_json


@pytest.mark.slow
def test_the_page_is_self_contained_and_complete(capsys, folder):
    write_capture(folder / "later.safetensors", step=9, change=torch.ones(160))
    call(capsys, "lab", "what-if", "c.safetensors", "later.safetensors", *SMALL)
    page = read_page(folder / "lab" / "what_if.html")
    assert all(address.startswith("#") for address in page.loads)
    text = (folder / "lab" / "what_if.html").read_text()
    for title in ("Quantization", "Accumulation", "Layers", "During training", "Outliers", "4 best of each"):
        assert title in text
    assert "step 3 to step 9" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "page"),
    [(("what-if", "c.safetensors", *SMALL), "what_if"), (("hardware", "c.safetensors"), "hardware")],
    ids=["what-if", "hardware"],
)
def test_pages_load_nothing_and_explain_terms_and_their_figures_have_no_faults(
    capsys, monkeypatch, folder, command, page
):
    found = faults_of_pages(monkeypatch)
    call(capsys, "lab", *command)
    written = read_page(folder / "lab" / f"{page}.html")
    assert all(address.startswith("#") for address in written.loads)
    words = written.words
    for term in (
        "SNR is the signal-to-noise ratio in dB",
        "fprop computes",
        "dgrad the gradient",
        "wgrad the gradient",
    ):
        assert term in words
    assert signed_zeros(words) == []
    assert found == []


@pytest.mark.slow
@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize(("top", "heading"), [("1", "The best of each format"), ("2", "The 2 best of each format")])
def test_the_heading_of_the_ranking_is_in_the_right_number(capsys, folder, top, heading):
    call(capsys, "lab", "what-if", "c.safetensors", *SMALL, "--products", "fprop", "--top", top)
    assert heading in read_page(folder / "lab" / "what_if.html").words


def ranks(*variants):
    """A ranking in which the first combination is the best."""
    return [Rank(v, 1, 0.1 * i, 0.0, 0.1 * i, 1.0, 0.0, ("first", "fprop"), 8.0) for i, v in enumerate(variants, 1)]


def test_the_runs_recipe_is_listed_and_marked_where_it_is_not_among_the_best():
    variants = [replace(PUBLISHED, block="1x128"), replace(PUBLISHED, promote=32), PUBLISHED]
    own, line = own_variant(ranks(*variants), "deepseek_v3")
    assert (own, line) == (PUBLISHED, "* the run's recipe, deepseek_v3, except that there x has power_of_2 scales")
    listed = best(ranks(*variants), 1, own)
    assert [rank.variant for rank in listed] == [variants[0], PUBLISHED]
    assert [row[0] for row in short_table(listed, own).rows] == ["E4M3 1×128", "E4M3 128×128 *"]
    assert [row[1] for row in ranked_table(listed, own).rows] == ["1×128", "128×128 *"]


def test_the_runs_recipe_is_marked_where_it_is_best_if_hoppers_sums_are_not_computed():
    exact, never = Variant("mx", "1x32", "up", None, "exact"), Variant("mx", "1x32", "up", None, "sm_100")
    other = replace(exact, scale="ocp")
    assert own_variant(ranks(other, exact, never), "mxfp8") == (exact, "* the run's recipe, mxfp8")


@pytest.mark.parametrize("recipe", ["bf16", "hybrid_e5m2", "delayed", "per_tensor", "mine.toml"])
def test_no_combination_is_marked_where_none_is_the_runs_recipe(recipe):
    own, line = own_variant(ranks(PUBLISHED), recipe)
    assert own is None
    assert line == f"No combination is marked as that of the run's recipe, {recipe}"
    assert [row[0] for row in short_table(ranks(PUBLISHED), own).rows] == ["E4M3 128×128"]


def test_blocks_of_wgrads_x_that_are_not_computed_are_named():
    _, line = own_variant(ranks(PUBLISHED), "wgrad_x_blocks")
    assert line.endswith("except that there x has power_of_2 scales and wgrad's x has blocks of its own")


def test_the_json_of_what_if_equals_the_result(capsys, folder):
    code, out, _ = call(capsys, "lab", "what-if", "c.safetensors", *SMALL, "--seed", "5", "--top", "2", "--json")
    assert code == 0
    capture = load(folder / "c.safetensors")
    choice = SearchSpace(("e4m3", "int8", "mx"), ("1x128", "128x128"), ("float32", "up"))
    found = what_if(select_gemms(capture), choice, sample=8, seed=5)
    found_json = json.loads(out)
    assert [(row["fmt"], row["total_snr_db"]) for row in found_json["ranking"]] == [
        (rank.variant.fmt, noise_to_db(rank.total)) for rank in best(found.ranking(), 2, PUBLISHED)
    ]
    assert [row["is_run_recipe"] for row in found_json["ranking"]] == [
        rank.variant == PUBLISHED for rank in best(found.ranking(), 2, PUBLISHED)
    ]
    row = found.rows_of(best(found.ranking(), 2)[0].variant)[0]
    assert found_json["products"][0]["quantization"].keys() == row.quantization.statistics().keys()
    assert row.total.statistics() in [each["total"] for each in found_json["products"]]
    first = next(p for p in capture.gemms if (p.layer, p.gemm) == ("first", "fprop"))
    kinds = ["first token" if token % 12 == 0 else "other tokens" for token in range(24)]
    expected = find_outliers(first, kinds, 12, 8, 5).without
    assert found_json["outliers"]["layer"] == "first"
    assert [row["output"] for row in found_json["outliers"]["without"]] == [row.output for row in expected]
    assert not (folder / "lab").exists()


@pytest.mark.slow
def test_layers_by_step_are_in_the_order_of_the_steps(capsys, folder):
    write_capture(folder / "earlier.safetensors", step=1, seed=4)
    _, out, _ = call(capsys, "lab", "what-if", "c.safetensors", "earlier.safetensors", *SMALL, "--json")
    steps = json.loads(out)["steps"]
    assert (steps["product"], steps["columns"]) == ("fprop", ["step 1", "step 3"])
    assert steps["rows"] == ["experts.down", "experts.gate_up", "first", "second"]
    assert all(snr is not None for row in steps["cells"] for snr in row)


@pytest.mark.slow
def test_kinds_of_tokens_follow_the_tokenizer_of_the_run(capsys, folder):
    run = folder / "run"
    (run / "data").mkdir(parents=True)
    tokenizer = Tokenizer.train(["a b.\nc d.\n" * 9], 300)
    tokenizer.save(run / "data")
    (run / "captures").mkdir()
    shutil.copy("c.safetensors", run / "captures" / "c.safetensors")
    _, with_texts, _ = call(capsys, "lab", "what-if", "run/captures/c.safetensors", *SMALL, "--json")
    _, without, _ = call(capsys, "lab", "what-if", "c.safetensors", *SMALL, "--json")
    kinds = [[row["kind"] for row in json.loads(out)["outliers"]["without"]] for out in (with_texts, without)]
    dots = [token for token in range(24) if token % 12 and tokenizer.decode([token]).strip() == "."]
    assert ("." in kinds[0]) == bool(dots)
    assert kinds[1] == ["first token", "other tokens", "all tokens"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "capture"),
        (("nowhere.safetensors",), "nowhere.safetensors"),
        (("c.safetensors", "--layers", "third"), "no layer matches 'third'; there are"),
        (("c.safetensors", "--products", "bprop"), "products must be some of fprop, dgrad, wgrad, not 'bprop'"),
        (("c.safetensors", "--formats", "fp4"), "--formats must be some of e4m3"),
        (("c.safetensors", "--blocks", "3x3"), "--blocks must be some of tensor"),
        (("c.safetensors", "--scales", "round"), "--scales must be some of float32"),
        (("c.safetensors", "--promote", "often"), "promote must be never or whole numbers of at least 1"),
        (("c.safetensors", "--arch", "sm_70"), "--arch must be some of sm_80"),
        (
            ("c.safetensors", "--formats", "nvfp4", "--arch", "sm_90"),
            "no combination applies: the model has no instruction",
        ),
        (("c.safetensors", "--sample", "0"), "sample must be at least 1"),
        (("c.safetensors", "--top", "0"), "top must be at least 1"),
        (("c.safetensors", "--tokenizer", "nowhere"), "tokenizer 'nowhere': there is no file"),
    ],
)
def test_what_if_refuses_in_one_line(capsys, folder, options, message):
    assert message in refused(capsys, "lab", "what-if", *options)
    assert not (folder / "lab").exists()


@pytest.mark.parametrize("command", ["what-if", "hardware"])
def test_a_capture_of_another_version_is_refused(capsys, folder, command):
    change_metadata(folder / "c.safetensors", lambda about: about | {"version": 99, "octile": "9.0"})
    assert "a capture of version 99, written by octile 9.0" in refused(capsys, "lab", command, "c.safetensors")


@pytest.mark.parametrize("command", ["what-if", "hardware"])
def test_a_file_that_is_no_capture_is_refused(capsys, folder, command):
    change_metadata(folder / "c.safetensors", lambda about: None)
    assert "is not a capture" in refused(capsys, "lab", command, "c.safetensors")


@pytest.mark.usefixtures("without_figures")
def test_hardware_prints_a_table_and_leaves_a_page(capsys, folder):
    code, out, _ = call(capsys, "lab", "hardware", "c.safetensors")
    assert code == 0
    for name in ("cast fused with the load", "transposed reads", "scaling in the tensor core", "longer accumulation"):
        assert name in out
    assert "pictures: lab/hardware.html" in out
    assert "dotted" not in out
    page = read_page(folder / "lab" / "hardware.html")
    assert "MX on sm_100 (as published, not checked on hardware)" in page.words


def test_the_json_of_hardware_equals_the_result(capsys, folder):
    code, out, _ = call(capsys, "lab", "hardware", "c.safetensors", "--layers", "second", "--sample", "6", "--json")
    assert code == 0
    own = [p for p in load(folder / "c.safetensors").gemms if p.layer == "second"]
    found = hardware(own, own, 6)
    found_json = json.loads(out)
    assert [row["bytes"]["today"] for row in found_json["suggestions"]] == [s.bytes.today for s in found.suggestions]
    assert [a["accumulation_snr_db"] for a in found_json["accumulators"]] == [
        noise_to_db(a.accumulation) for a in found.accumulators
    ]
    assert not (folder / "lab").exists()


def test_hardware_counts_the_bytes_of_all_experts(capsys, folder):
    _, out, _ = call(capsys, "lab", "hardware", "c.safetensors", "--layers", "experts.*", "--json")
    own = [p for p in load(folder / "c.safetensors").gemms if p.expert is not None]
    chosen = select_gemms(load(folder / "c.safetensors"), "experts.*")
    assert len(own) > len(chosen)
    assert json.loads(out)["suggestions"][0]["bytes"]["today"] == hardware(own, chosen).suggestions[0].bytes.today


@pytest.mark.usefixtures("without_figures")
def test_hardware_of_fprop_alone_has_nothing_to_transpose(capsys, folder):
    code, out, _ = call(capsys, "lab", "hardware", "c.safetensors", "--products", "fprop", "--json")
    assert code == 0
    assert json.loads(out)["suggestions"][2]["bytes"] == {"today": 0, "then": 0}
    assert json.loads(out)["suggestions"][2]["snr_db"] is None
    assert call(capsys, "lab", "hardware", "c.safetensors", "--products", "fprop")[0] == 0


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A tiny model with its tokenizer, as in a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "text.txt").write_text("def f(x):\n    return x + 1\n" * 200)
    torch.manual_seed(0)
    model = DeepseekV3(ModelConfig.tiny())
    save(model, folder / "m")
    Tokenizer.train([(folder / "text.txt").read_text()], 300).save(folder / "m")
    return folder


SHORT = ("--batches", "2", "--batch-size", "16", "--sequence-length", "32")


@pytest.mark.slow
def test_preflight_writes_a_recipe_and_a_page(capsys, folder, model_folder, monkeypatch):
    found = faults_of_pages(monkeypatch)
    text = str(model_folder / "text.txt")
    given = (str(model_folder / "m"), "--text", text, *SHORT, "--least-snr", "27")
    code, out, _ = call(capsys, "lab", "preflight", *given)
    assert code == 0
    assert "recipe:   lab/recipe.toml" in out
    recipe = Recipe.read(folder / "lab" / "recipe.toml")
    assert recipe.exceptions
    assert recipe.for_layer(recipe.exceptions[0][0]).high_precision == recipe.exceptions[0][1]
    page = (folder / "lab" / "preflight.html").read_text()
    assert "Prediction vs. measurement" in page
    assert all(address.startswith("#") for address in read_page(folder / "lab" / "preflight.html").loads)
    assert "SNR is the signal-to-noise ratio in dB" in page
    assert signed_zeros(read_page(folder / "lab" / "preflight.html").words) == []
    assert found == []


@pytest.mark.slow
def test_preflight_as_json(capsys, folder, model_folder):
    text = str(model_folder / "text.txt")
    code, out, _ = call(capsys, "lab", "preflight", str(model_folder / "m"), "--text", text, *SHORT, "--json")
    assert code == 0
    rows = json.loads(out)
    assert [row["snr_db"] for row in rows] == sorted(row["snr_db"] for row in rows)
    assert all(row["measured_db"] is not None for row in rows)  # also the forward passes of experts
    assert {row["batches"] for row in rows} == {2}
    known = [row for row in rows if row["product"] == "wgrad"]
    assert sum(abs(row["measured_db"] - row["snr_db"]) for row in known) / len(known) < 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--recipe", "bf16"), "recipe 'bf16' has no GEMM in 8 bits"),
        (("--recipe", "fp4"), "unknown recipe 'fp4'"),
        (("--recipe", "nowhere.toml"), "nowhere.toml"),
        (("--batches", "0"), "batches must be at least 2, not 0"),
        (("--batches", "1"), "batches must be at least 2, not 1"),
        (("--sample", "1"), "--sample must be at least 16, not 1: the advice would depend on the rows drawn"),
        (("--sample", "15"), "--sample must be at least 16, not 15"),
        (("--sequence-length", "100000"), "--sequence-length must be at most the model's max_position_embeddings, "),
        (("--batch-size", "1"), "a batch has 32 tokens, and 512 are needed, so that each of the 16 experts has 128 on"),
        (("--batches", "999"), "tokens, and 511,488 are needed"),
        (("--text", "nowhere.txt"), "nowhere.txt"),
    ],
)
def test_preflight_refuses_in_one_line(capsys, folder, model_folder, options, message):
    given = ("--text", str(model_folder / "text.txt"), *SHORT, *options)
    assert message in refused(capsys, "lab", "preflight", str(model_folder / "m"), *given)
    assert not (folder / "lab").exists()


def test_preflight_of_a_missing_model_is_refused(capsys, folder):
    assert "nowhere" in refused(capsys, "lab", "preflight", "nowhere")


@pytest.mark.slow
def test_gemms_without_loss_have_pages_too(capsys, folder):
    one = torch.ones(8, 8)
    tensors = {"up.x": one, "up.w": one, "up.dy": one}
    recorder = Recorder(frozenset(("up", product) for product in GEMMS), tensors)
    recorder.save(folder / "ones.safetensors", 1, "float32", "toy", torch.zeros(1, 8, dtype=torch.int64))
    for command in ("what-if", "hardware"):
        code, out, _ = call(capsys, "lab", command, "ones.safetensors")
        assert code == 0
        assert "exact" in out
