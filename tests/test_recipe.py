"""Tests of recipes and recipe files; tests/nn/test_linear.py tests what they compute."""

import re
from dataclasses import FrozenInstanceError, fields, replace
from itertools import combinations

import pytest
import torch

from octile.formats import E4M3, E5M2, INT8
from octile.recipe import (
    BLOCK,
    COLUMN_TILE,
    OPERANDS,
    TENSOR,
    TILE,
    GemmFormats,
    OperandFormat,
    OptimizerFormats,
    Recipe,
)

every_name = pytest.mark.parametrize("name", Recipe.names())

PUBLISHED = (
    "bf16",
    "per_tensor",
    "delayed",
    "hybrid_delayed",
    "hybrid_e5m2",
    "global_scale",
    "fp16_loss_scaling",
    "fp8_lm",
    "smooth_swiglu",
    "mxfp8",
    "int8_tiles",
)


@every_name
def test_a_recipe_is_found_by_its_name(name):
    assert Recipe.named(name).name == name


@every_name
def test_a_name_means_the_same_recipe_every_time(name):
    assert Recipe.named(name) == Recipe.named(name)


@every_name
def test_a_recipe_can_be_a_key(name):
    assert {Recipe.named(name): 1}[Recipe.named(name)] == 1


@every_name
def test_a_recipe_says_what_it_is(name):
    assert getattr(Recipe, name).__doc__


def test_the_librarys_own_recipe_comes_first():
    assert Recipe.names()[0] == "deepseek_v3"


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_the_paper_compares_with_is_there(name):
    assert name in Recipe.names()


@pytest.mark.parametrize("pair", list(combinations(Recipe.names(), 2)), ids="-".join)
def test_two_recipes_differ_in_more_than_their_names(pair):
    one, other = (replace(Recipe.named(name), name="") for name in pair)
    assert one != other


@pytest.mark.parametrize("name", ["nothing", "names", "named", "__init__", ""])
def test_an_unknown_name_is_refused_with_those_there_are(name):
    with pytest.raises(ValueError, match=f"unknown recipe {name!r}; there are deepseek_v3, bf16"):
        Recipe.named(name)


def test_recipes_are_frozen():
    with pytest.raises(FrozenInstanceError):
        Recipe.bf16().name = "mine"


# The casts


def test_deepseek_v3_tiles_tokens_forward_and_channels_for_the_weight_gradient():
    formats = Recipe.deepseek_v3().formats
    assert (formats.x.block, formats.w.block, formats.dy.block) == (TILE, BLOCK, TILE)
    assert (formats.wgrad_x.block, formats.wgrad_dy.block) == (COLUMN_TILE, COLUMN_TILE)


def _operand_formats(recipe: Recipe) -> list[OperandFormat]:
    return [
        value
        for field in fields(GemmFormats)
        if isinstance(value := getattr(recipe.formats, field.name), OperandFormat)
    ]


@pytest.mark.parametrize("name", ["deepseek_v3", "mxfp8"])
def test_e4m3_everywhere(name):
    assert {cast.fmt for cast in _operand_formats(Recipe.named(name))} == {E4M3}


def test_mxfp8_requantizes_nothing():
    assert [name for name in Recipe.names() if (f := Recipe.named(name).formats) and not f.requantizes_x] == ["mxfp8"]


def test_what_is_requantized_has_powers_of_2_for_scales():
    formats = Recipe.deepseek_v3().formats
    assert (formats.x.scale, formats.wgrad_x.scale) == ("power_of_2", "power_of_2")


@pytest.mark.parametrize("name", ["hybrid_e5m2", "hybrid_delayed", "fp8_lm", "global_scale"])
def test_gradients_are_e5m2_where_the_forward_pass_is_e4m3(name):
    formats = Recipe.named(name).formats
    assert [cast.fmt for cast in (formats.x, formats.w, formats.wgrad_x)] == [E4M3] * 3
    assert [cast.fmt for cast in (formats.dy, formats.wgrad_dy)] == [E5M2] * 2


@pytest.mark.parametrize("name", ["per_tensor", "delayed", "hybrid_delayed", "global_scale", "fp8_lm", "smooth_swiglu"])
def test_one_scale_a_tensor(name):
    assert {cast.block for cast in _operand_formats(Recipe.named(name))} == {TENSOR}


def test_int8_tiles_are_those_of_deepseek_v3():
    assert {cast.fmt for cast in _operand_formats(Recipe.int8_tiles())} == {INT8}
    for ours, theirs in zip(*map(_operand_formats, (Recipe.int8_tiles(), Recipe.deepseek_v3())), strict=True):
        assert replace(ours, fmt=E4M3) == theirs


def test_wgrad_x_blocks_differ_from_deepseek_v3_in_one_block():
    ours, theirs = Recipe.wgrad_x_blocks(), Recipe.deepseek_v3()
    wgrad_x = replace(theirs.formats.wgrad_x, block=BLOCK)
    assert ours == replace(theirs, name="wgrad_x_blocks", formats=replace(theirs.formats, wgrad_x=wgrad_x))


WINDOWS = {"delayed": 16, "smooth_swiglu": 16, "fp8_lm": 16, "hybrid_delayed": 1024}


@every_name
def test_scales_from_past_steps(name):
    recipe = Recipe.named(name)
    assert recipe.has_delayed_scaling == (name in WINDOWS)
    assert (recipe.formats.window if recipe.formats else 0) == WINDOWS.get(name, 0)


def test_fp8_lm_has_powers_of_2_for_scales():
    assert {operand.scale for operand in _operand_formats(Recipe.fp8_lm())} == {"power_of_2"}


def test_fp8_lm_takes_the_scale_of_the_tensor_until_its_window_is_full():
    formats = Recipe.fp8_lm().formats
    assert {operand.warm_up for operand in (formats.x, formats.dy, formats.wgrad_x, formats.wgrad_dy)} == {"until_full"}


def test_fp8_lm_delays_the_scales_of_inputs_and_gradients_and_not_of_weights():
    formats = Recipe.fp8_lm().formats
    assert (formats.x.amax, formats.w.amax, formats.dy.amax) == ("delayed", "current", "delayed")


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16_loss_scaling", torch.float16)])
def test_recipes_without_quantization_compute_in_16_bits(name, dtype):
    assert (Recipe.named(name).formats, Recipe.named(name).compute) == (None, dtype)


# The rest


@every_name
def test_the_loss_is_scaled_where_small_gradients_would_vanish(name):
    assert (Recipe.named(name).loss_scale == "dynamic") == (name in ("global_scale", "fp16_loss_scaling"))


def test_fp8_lm_stores_6_bytes_per_parameter():
    assert Recipe.fp8_lm().optimizer == OptimizerFormats("float16", "float8_e4m3fn", "float8_e4m3fn", "float16")


def test_masters_are_float32_and_moments_bfloat16_by_default():
    assert Recipe.deepseek_v3().optimizer == OptimizerFormats("float32", "float32", "bfloat16", "bfloat16")


# Refusals


@pytest.mark.parametrize("amax", ["delayed", "unscaled"])
def test_only_whole_tensors_have_a_scale_from_elsewhere(amax):
    with pytest.raises(ValueError, match=rf"amax='{amax}' needs one scale for the whole tensor, .* \(1, 128\)"):
        OperandFormat(amax=amax)


def test_a_scale_of_1_is_not_rounded():
    with pytest.raises(ValueError, match="scale='power_of_2' has no meaning with amax='unscaled'"):
        OperandFormat(block=TENSOR, scale="power_of_2", amax="unscaled")


def test_a_history_has_at_least_one_step():
    with pytest.raises(ValueError, match="window must be at least 1, not 0"):
        OperandFormat(block=TENSOR, amax="delayed", window=0)


def test_a_history_serves_both_layouts():
    delayed, current = OperandFormat(block=TENSOR, amax="delayed"), OperandFormat(block=TENSOR)
    with pytest.raises(ValueError, match="wgrad_x and wgrad_dy must be x and dy where a scale is delayed"):
        GemmFormats(delayed, delayed, delayed, wgrad_x=current, wgrad_dy=delayed)


# Exceptions


def with_weights(block: tuple[int, int]) -> Recipe:
    recipe = Recipe.deepseek_v3()
    return replace(recipe, formats=replace(recipe.formats, w=OperandFormat(block=block)))


def with_exceptions():
    return replace(
        Recipe.deepseek_v3(),
        exceptions=(("layers.1.*", frozenset({"wgrad"})), ("*.down", frozenset({"fprop", "dgrad"}))),
    )


def test_a_layer_gets_the_exceptions_that_match_it():
    recipe = with_exceptions()
    assert recipe.for_layer("layers.0.up") == Recipe.deepseek_v3()
    assert recipe.for_layer("layers.1.up").high_precision == {"wgrad"}
    assert recipe.for_layer("layers.1.down").high_precision == {"fprop", "dgrad", "wgrad"}
    assert recipe.for_layer("layers.1.down").exceptions == ()


def test_a_recipe_with_exceptions_is_read_as_it_was_written(tmp_path):
    path = with_exceptions().write(tmp_path / "deep" / "r.toml")
    assert Recipe.read(path) == with_exceptions()
    assert Recipe.named(str(path)) == with_exceptions()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recipe = 3", "must say recipe"),
        ("", "must say recipe"),
        ('recipe = "fp4"', "unknown recipe 'fp4'"),
        ('recipe = "other.toml"', "unknown recipe 'other.toml'"),
        (
            'recipe = "per_tensor"\nstrict = true',
            "strict is unknown: there are recipe, swiglu_inputs, transposed_weights, wgrad_x_block, latents, formats, "
            "keep$",
        ),
        (
            'recipe = "per_tensor"\n[[keep]]\nlayer = "*"\nproducts = ["fprop"]',
            "keep 1: layer is unknown: there are layers, products$",
        ),
        ("recipe = ", "r.toml: "),
        ('recipe = "deepseek_v3"\nswiglu_inputs = "no"', 'swiglu_inputs must be "kept" or "recomputed", not \'no\''),
        ('recipe = "bf16"\nswiglu_inputs = "recomputed"', "recipe 'bf16' saves SwiGLU's inputs in high precision"),
        (
            'recipe = "deepseek_v3"\ntransposed_weights = 1',
            'transposed_weights must be "cached" or "recomputed", not 1',
        ),
        ('recipe = "mxfp8"\ntransposed_weights = "recomputed"', "recipe 'mxfp8' has no weights in 128×128 blocks"),
        ('recipe = "deepseek_v3"\nwgrad_x_block = [1, 128]', r"must be \[128, 1\] or \[128, 128\], not \[1, 128\]"),
        ('recipe = "deepseek_v3"\nwgrad_x_block = 128', r"must be \[128, 1\] or \[128, 128\], not 128"),
        ('recipe = "per_tensor"\nwgrad_x_block = [128, 128]', "recipe 'per_tensor' has no tiles of 128 tokens"),
        (
            'recipe = "deepseek_v3"\nwgrad_x_block = [128, 128]\n[formats.wgrad_x]\nblock = [128, 1]',
            r"r\.toml: wgrad_x_block must be left out with \[formats\.wgrad_x\]",
        ),
        ('recipe = "deepseek_v3"\nformats = "e4m3"', r"formats must be tables such as \[formats\.x\], not 'e4m3'"),
        (
            'recipe = "deepseek_v3"\n[formats.y]\nfmt = "e4m3"',
            r"r\.toml: formats\.y is unknown: there are x, w, dy, wgrad_x, wgrad_dy, requantizes_x$",
        ),
        ('recipe = "deepseek_v3"\n[formats]\nx = "e4m3"', r"formats\.x must be a table with some of fmt, block, scale"),
        (
            'recipe = "deepseek_v3"\n[formats.x]\nformat = "e4m3"',
            r"formats\.x\.format is unknown: there are fmt, block, scale, amax, window, warm_up$",
        ),
        (
            'recipe = "deepseek_v3"\n[formats.x]\nfmt = "e5m6"',
            r"formats\.x\.fmt must be one of e4m3, e5m2, int8, not",
        ),
        (
            'recipe = "deepseek_v3"\n[formats.x]\nblock = [1, "row"]',
            r"formats\.x\.block must be a list of 2, each a whole number or \"all\", not \[1, 'row'\]",
        ),
        (
            'recipe = "deepseek_v3"\n[formats.x]\nblock = [0, 128]',
            r"toml: formats\.x\.block must be at least 1, not 0",
        ),
        (
            'recipe = "deepseek_v3"\n[formats.w]\nscale = "up"',
            r"formats\.w\.scale must be float32 or power_of_2, not",
        ),
        ('recipe = "delayed"\n[formats.x]\nwindow = true', r"formats\.x\.window must be a whole number, not True"),
        ('recipe = "delayed"\n[formats.x]\nwindow = 32', r"formats\.wgrad_x and wgrad_dy must be x and dy"),
        ('recipe = "mxfp8"\n[formats]\nrequantizes_x = 1', r"formats\.requantizes_x must be true or false, not 1"),
        ('recipe = "bf16"\n[formats.x]\nfmt = "e4m3"', "recipe 'bf16' quantizes nothing, so it takes no formats"),
        (
            'recipe = "exact"\n[formats.x]\nfmt = "e5m2"',
            r"r\.toml: recipe 'exact' has its own formats: serving computes",
        ),
        ('recipe = "exact"\nlatents = "bf16"', 'latents must be "activations" or "fp8", not \'bf16\''),
        ('recipe = "exact"\n[[keep]]\nlayers = "*"\nproducts = ["fprop"]', "recipe 'exact' keeps nothing"),
        ('recipe = "deepseek_v3"\nlatents = "fp8"', "recipe 'deepseek_v3' does not round latents as serving does"),
        ('recipe = "bf16"\n[[keep]]\nlayers = "*"\nproducts = ["fprop"]', "recipe 'bf16' quantizes nothing"),
        ('recipe = "per_tensor"\n[[keep]]\nlayers = "*"', "keep 1 must say layers, a pattern, and products, a list"),
        ('recipe = "per_tensor"\nkeep = "all"', "keep must be a list"),
        ('recipe = "per_tensor"\n[[keep]]\nlayers = "*"\nproducts = "fprop"', "products must be some of"),
        ('recipe = "per_tensor"\n[[keep]]\nlayers = "*"\nproducts = ["bprop"]', r"not \['bprop'\]"),
        ('recipe = "per_tensor"\n[[keep]]\nlayers = "*"\nproducts = []', "products must be some of"),
    ],
)
def test_files_that_are_no_recipe_are_refused(tmp_path, text, message):
    path = tmp_path / "r.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Recipe.read(path)


def test_a_file_says_that_swiglus_inputs_are_recomputed(tmp_path):
    recipe = replace(Recipe.deepseek_v3(), swiglu_inputs="recomputed")
    path = recipe.write(tmp_path / "r.toml")
    assert Recipe.read(path) == recipe
    path.write_text('recipe = "deepseek_v3"\nswiglu_inputs = "kept"')
    assert Recipe.read(path) == Recipe.deepseek_v3()


@pytest.mark.parametrize("transposed_weights", ["cached", "recomputed", None])
def test_a_file_says_whether_transposed_weights_are_recomputed(transposed_weights, tmp_path):
    recipe = replace(Recipe.deepseek_v3(), transposed_weights=transposed_weights)
    assert Recipe.read(recipe.write(tmp_path / "r.toml")) == recipe
    assert recipe.recomputes_transposed_weights == (transposed_weights != "cached")


def test_transposed_weights_without_blocks_are_not_recomputed():
    assert not Recipe.mxfp8().recomputes_transposed_weights
    assert not Recipe.bf16().recomputes_transposed_weights


@pytest.mark.parametrize("name", ["deepseek_v3", "hybrid_e5m2", "wgrad_x_blocks"])
@pytest.mark.parametrize("block", [COLUMN_TILE, BLOCK])
def test_a_file_says_which_blocks_wgrads_x_has(name, block, tmp_path):
    recipe = Recipe.named(name)
    recipe = replace(recipe, formats=replace(recipe.formats, wgrad_x=replace(recipe.formats.wgrad_x, block=block)))
    path = recipe.write(tmp_path / "r.toml")
    assert Recipe.read(path) == recipe
    path.write_text(f'recipe = "{name}"\nwgrad_x_block = {list(block)}')
    assert Recipe.read(path) == recipe


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("deepseek_v3", {"w": {"block": (1, 128), "scale": "power_of_2"}}),
        ("deepseek_v3", {"dy": {"fmt": E5M2}, "wgrad_dy": {"fmt": E5M2}}),
        ("per_tensor", {"x": {"block": (1, None)}}),
        ("mxfp8", {"requantizes_x": True}),
        ("delayed", {name: {"window": 32, "warm_up": "until_full"} for name in ("x", "wgrad_x")}),
        ("deepseek_v3", {name: {"fmt": INT8, "block": TENSOR} for name in OPERANDS}),
    ],
)
def test_a_file_says_which_formats_operands_have(name, changes, tmp_path):
    usual = Recipe.named(name)
    changed = {
        key: replace(getattr(usual.formats, key), **change) if isinstance(change, dict) else change
        for key, change in changes.items()
    }
    recipe = replace(usual, formats=replace(usual.formats, **changed))
    assert recipe != usual
    assert Recipe.read(recipe.write(tmp_path / "r.toml")) == recipe


def test_a_file_has_formats_and_exceptions(tmp_path):
    recipe = replace(with_weights((1, 128)), exceptions=with_exceptions().exceptions, transposed_weights="cached")
    path = recipe.write(tmp_path / "r.toml")
    assert "\n[formats.w]\nblock = [1, 128]\n\n[[keep]]\n" in path.read_text()
    assert Recipe.read(path) == recipe


def test_a_file_gives_weights_the_blocks_that_recomputing_their_transposes_needs(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text('recipe = "mxfp8"\ntransposed_weights = "recomputed"\n[formats.w]\nblock = [128, 128]')
    assert Recipe.read(path).recomputes_transposed_weights
    path.write_text('recipe = "deepseek_v3"\ntransposed_weights = "recomputed"\n[formats.w]\nblock = [1, 128]')
    with pytest.raises(ValueError, match="recipe 'deepseek_v3' has no weights in 128×128 blocks"):
        Recipe.read(path)


@pytest.mark.parametrize("name", Recipe.names())
def test_only_recipes_in_tiles_take_the_data_flow_of_deepseek_v3(name):
    recipe = Recipe.named(name)
    fused = name in ("deepseek_v3", "hybrid_e5m2", "int8_tiles", "wgrad_x_blocks", "exact")
    assert (recipe.can_fuse_attention, recipe.can_fuse_swiglu) == (fused, fused)


def test_a_gemm_in_high_precision_disables_fused_blocks():
    recipe = Recipe.deepseek_v3().without("wgrad")
    assert not recipe.can_fuse_attention
    assert not recipe.can_fuse_swiglu


def test_blocks_along_other_sides_are_no_tiles():
    formats = Recipe.deepseek_v3().formats
    assert formats.is_tiled
    assert not replace(formats, dy=OperandFormat(block=BLOCK)).is_tiled
    assert not replace(formats, wgrad_dy=OperandFormat(block=COLUMN_TILE, scale="power_of_2")).is_tiled


def test_a_file_that_does_not_exist_is_refused():
    with pytest.raises(FileNotFoundError, match=r"there is no recipe file .nowhere\.toml"):
        Recipe.named("nowhere.toml")


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "recipe.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"recipe\.toml is damaged: byte 0 is not UTF-8"):
        Recipe.read(tmp_path / "recipe.toml")


def test_the_rounding_of_latents_is_written_and_read(tmp_path):
    recipe = replace(Recipe.exact(), latents="fp8")
    path = recipe.write(tmp_path / "r.toml")
    assert path.read_text() == 'recipe = "exact"\nlatents = "fp8"\n'
    assert Recipe.read(path) == recipe


@pytest.mark.parametrize(
    ("recipe", "changes", "message"),
    [
        (Recipe.int8_tiles(), {"batch_invariant": True}, "other formats than E4M3 in 1×128 tiles"),
        (Recipe.per_tensor(), {"batch_invariant": True}, "layers that are not fused, or in high precision"),
        (Recipe.bf16(), {"batch_invariant": True}, "layers that are not fused, or in high precision"),
        (Recipe.exact(), {"exceptions": (("*.o_proj", frozenset({"wgrad"})),)}, r"exceptions such as '\*\.o_proj'"),
        (Recipe.exact(), {"latents": "int8"}, "latents must be activations or fp8, not 'int8'"),
        (Recipe.deepseek_v3(), {"latents": "fp8"}, "latents must be 'activations', not 'fp8', without batch_invariant"),
    ],
)
def test_what_serving_does_not_compute_is_not_batch_invariant(recipe, changes, message):
    with pytest.raises(ValueError, match=message):
        replace(recipe, **changes)


def test_exact_differs_from_deepseek_v3_in_its_forward_pass_alone():
    assert replace(Recipe.exact(), name="deepseek_v3", batch_invariant=False) == Recipe.deepseek_v3()


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (replace(Recipe.deepseek_v3(), name="mine"), "recipe 'mine' must have one of the names deepseek_v3, bf16, "),
        (
            replace(Recipe.bf16(), formats=Recipe.per_tensor().formats),
            "recipe 'bf16' has other formats than a file can give it",
        ),
        (
            replace(Recipe.deepseek_v3(), attention_output=None),
            "recipe 'deepseek_v3' has other attention_output than a file can give it",
        ),
        (
            replace(Recipe.deepseek_v3(), high_precision=frozenset({"dgrad"})),
            "recipe 'deepseek_v3' has other high_precision than a file can give it",
        ),
    ],
)
def test_a_recipe_that_a_file_cannot_say_is_not_written(recipe, message, tmp_path):
    path = tmp_path / "r.toml"
    with pytest.raises(ValueError, match=f"^{message}"):
        recipe.write(path)
    assert not path.exists()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: OperandFormat("e4m3"), TypeError, "fmt must be a format such as octile.E4M3, not 'e4m3'"),
        (lambda: OperandFormat(scale="up"), ValueError, "scale must be float32 or power_of_2, not 'up'"),
        (lambda: OperandFormat(block=(0, 128)), ValueError, "block must be at least 1, not 0"),
        (
            lambda: OperandFormat(block=128),
            TypeError,
            "block must be a list of 2, each a whole number or null, not 128",
        ),
        (lambda: OperandFormat(window=1.5), TypeError, "window must be a whole number, not 1.5"),
        (
            lambda: OptimizerFormats(exp_avg="int8"),
            ValueError,
            "exp_avg must be float32 or bfloat16 or float8_e4m3fn, ",
        ),
        (lambda: GemmFormats(*5 * (E4M3,)), TypeError, "x must be an OperandFormat, not "),
        (lambda: Recipe("a", E4M3), TypeError, "formats must be None or GemmFormats, not "),
        (
            lambda: Recipe("a", compute="bf16"),
            TypeError,
            "compute must be a floating-point dtype such as torch.bfloat16, ",
        ),
        (lambda: Recipe("a", loss_scale="static"), ValueError, "loss_scale must be dynamic, not 'static'"),
        (lambda: Recipe("a", norms="saved"), ValueError, "norms must be kept or recomputed, not 'saved'"),
        (lambda: Recipe("a", swiglu_inputs="kept"), TypeError, "swiglu_inputs must be None, 'recomputed' or an Oper"),
        (
            lambda: Recipe("a", exceptions=(("*", {"bprop"}),)),
            ValueError,
            "high_precision and exceptions must have GEMMs",
        ),
    ],
)
def test_a_recipe_that_means_nothing_is_refused_where_it_is_written(make, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        make()
