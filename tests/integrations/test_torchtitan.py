"""Tests of octile's converter of torchtitan: its refusals, and jobs of torchtitan's own trainer and command line."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.worlds import Outcomes, Work, each_work

pytest.importorskip("torchtitan")

from torchtitan.config import ConfigManager
from torchtitan.distributed import ParallelDims
from torchtitan.models.moe import moe

from octile.integrations.torchtitan import OctileConverter
from octile.integrations.torchtitan_moe import FusedMoE, fuse_moe
from octile.nn import Linear
from octile.nn.conversion import apply_recipe
from octile.recipe import Recipe
from tests.integrations import torchtitan_cases as cases
from tests.torchtitan_on_cpu import MODULES, octile

WORKS = (
    cases.losses_are_near_those_in_bf16,
    cases.activation_checkpointing_changes_no_bit,
    cases.a_run_resumes_from_a_checkpoint_with_the_same_bits,
)
EXHAUSTIVE = (
    cases.a_checkpoint_in_bf16_is_trained_on_in_fp8,
    cases.a_pipeline_has_losses_near_those_in_bf16,
    cases.ddp_has_losses_near_those_in_bf16,
    cases.compiled_blocks_have_nearly_the_same_losses,
    cases.experts_are_divided_by_tensor_parallelism,
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes(tmp_path_factory, "torchtitan", (*WORKS, *EXHAUSTIVE), imports=MODULES, further=EXHAUSTIVE)


@pytest.mark.slow
@each_work((*WORKS, *EXHAUSTIVE), EXHAUSTIVE)
def test_jobs_on_two_ranks(work: Work, outcomes: Outcomes):
    outcomes.assert_passed(work)


ONE_RANK = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1, "etp": 1, "world_size": 1}


def converter(*arguments: str, **degrees: int) -> OctileConverter:
    """The converter of a job whose command line has these arguments, on ranks of these degrees of parallelism."""
    dims = ParallelDims(**ONE_RANK | degrees | {"world_size": math.prod(degrees.values()) // degrees.get("ep", 1)})
    return OctileConverter(ConfigManager().parse_args([*octile(), *arguments]), dims)


def model() -> nn.Module:
    with torch.device("meta"):
        return nn.ModuleDict({name: nn.Linear(128, 128) for name in ("first", "second", "output")})


def test_without_a_section_of_its_own_a_configuration_means_the_defaults():
    made = OctileConverter(ConfigManager().parse_args(["--model.converters", "octile"]), ParallelDims(**ONE_RANK))
    assert (made.recipe.name, made.settings.keep) == ("deepseek_v3", [])


def test_layers_are_left_out_by_patterns():
    layers = model()
    converter("--octile.keep", "fir*").convert(layers)
    assert [type(layer) is Linear for layer in layers.values()] == [False, True, False]


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--octile.recipe", "fp8"], "octile.recipe: unknown recipe 'fp8'; there are "),
        (["--octile.recipe", "delayed"], "octile.recipe 'delayed' has delayed scaling, whose scales of past steps "),
        (["--octile.recipe", "global_scale"], "octile.recipe 'global_scale' needs a loss scale, which torchtitan "),
        (["--octile.recipe", "fp8_lm"], "octile.recipe 'fp8_lm' sets formats of the optimizer's state, but "),
        (["--octile.recipe", "exact"], "octile.recipe 'exact' needs an octile.models.DeepseekV3, not ModuleDict"),
        (["--octile.keep", "first,third"], "octile.keep has 'third', which matches no layer"),
        (
            ["--model.converters", "octile,quantize.linear.float8"],
            "model.converters must have octile as the only converter that quantizes, not quantize.linear.float8",
        ),
    ],
)
def test_what_is_not_supported_is_refused_with_the_name_of_the_option(arguments: list[str], message: str):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        converter(*arguments).convert(model())


def test_a_recipe_is_read_from_a_file(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"missing\.toml"):
        converter("--octile.recipe", str(tmp_path / "missing.toml"))


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("degrees", "transposed"),
    [({"dp_replicate": 2}, "cached"), ({"pp": 2}, "cached"), ({"dp_shard": 2}, None), ({"tp": 2}, None)],
)
def test_transposed_weights_are_cached_where_ranks_have_whole_weights(degrees: dict[str, int], transposed: str | None):
    assert converter(**degrees).recipe.transposed_weights == transposed


def test_a_recipe_file_decides_what_becomes_of_transposed_weights(tmp_path: Path):
    file = tmp_path / "recipe.toml"
    file.write_text('recipe = "deepseek_v3"\ntransposed_weights = "recomputed"\n')
    assert converter("--octile.recipe", str(file)).recipe.transposed_weights == "recomputed"


@pytest.mark.slow
@pytest.mark.parametrize(("degrees", "kind"), [({"dp_shard": 2, "ep": 2}, FusedMoE), ({"tp": 2}, moe.MoE)])
def test_octile_moves_the_rows_of_mixtures_unless_tensor_parallelism_divides_them(degrees: dict[str, int], kind: type):
    with torch.device("meta"):
        layers = nn.ModuleDict({"moe": moe.MoE(moe.MoEArgs(score_before_experts=False), 128, 128)})
    converter(**degrees).convert(layers)
    assert type(layers["moe"]) is kind


def test_a_program_converts_a_model_as_the_converter_does():
    """As docs/torchtitan.md has it."""
    with torch.device("meta"):
        theirs, ours = (
            nn.ModuleDict({"moe": moe.MoE(moe.MoEArgs(score_before_experts=False), 128, 128)}) for _ in "ab"
        )
    converter().convert(theirs)
    apply_recipe(ours, replace(Recipe.deepseek_v3(), transposed_weights="cached"))
    fuse_moe(ours)
    assert str(ours) == str(theirs)
    assert ours.conversion_summary == theirs.conversion_summary
