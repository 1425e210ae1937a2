"""The kernels of a first step on a GPU are those that are planned for it on the meta device."""

import json
import os

import pytest

from tests.fresh_python import run_python

# In another process, where no kernel is loaded yet
PROGRAM = """
import json, sys
from dataclasses import replace
import torch
from octile.kernels.cuda.gemm.num_sms import chip
from octile.kernels.cuda.jit import specialize
from octile.kernels.cuda.jit.specialize import PlannedKernel
from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.conversion import apply_recipe
from octile.train.config import preset
from octile.train.memory.saved_activations import saving_activations
from octile.train.run.kernels_ahead import plan_step
from octile.train.step.passes import Passes
from octile.train.step.progress import Progress

config, device = replace(preset("small"), recipe=sys.argv[1]), torch.device("cuda", 0)
recipe = saving_activations(config.load_recipe())
kernels = plan_step(config, recipe, chip(device))
model = DeepseekV3(config.model).to(device)
apply_recipe(model, recipe)
tokens_BS = torch.randint(config.model.vocab_size, (config.micro_batch_size, config.sequence_length))
Passes(model, device, recipe.compute, Progress(config), None).backward(tokens_BS, 1.0)
torch.cuda.synchronize()
loaded = {(name, *rest) for name, _, *rest in specialize._loaded}
planned = {kernel.key for kernel in kernels if isinstance(kernel, PlannedKernel)}
described = lambda keys: sorted(str([part for part in key if not str(part[0]).endswith(".cuh")]) for key in keys)
missing, unused = described(loaded - planned), described(planned - loaded)
print(json.dumps({"loaded": len(loaded), "missing": missing, "unused": unused}))
"""


@pytest.mark.parametrize("recipe", ["deepseek_v3", "bf16", "hybrid_e5m2", "per_tensor"])
def test_a_first_step_loads_what_was_planned(recipe):
    ran = run_python(PROGRAM, recipe, environment={**os.environ, "TRITON_INTERPRET": "0"})
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["loaded"] > 0
    assert (found["missing"], found["unused"]) == ([], [])
