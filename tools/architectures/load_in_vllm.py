"""Have vLLM's model classes load folders, without a GPU: `python -m tools.architectures.load_in_vllm FOLDERS OUT`.

vLLM runs as on an H100, but its compiled operators are absent. Building a model and loading its weights calls none of
them; what is imported, asked for or held is replaced below. It is run in vLLM's environment.
"""

import importlib.machinery
import os
import sys
import tempfile
import types
from pathlib import Path

os.environ |= {"VLLM_LOGGING_LEVEL": "CRITICAL", "HF_HUB_OFFLINE": "1"}
ABSENT = (  # extensions that need CUDA's libraries; torchvision's registers operators of one
    "vllm._C",
    "vllm._C_stable_libtorch",
    "vllm._moe_C",
    "vllm._moe_C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
    "torchvision._meta_registrations",
)
for name in ABSENT:
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)

import torch  # noqa: E402
import vllm.platforms  # noqa: E402
from vllm.platforms.cuda import NonNvmlCudaPlatform  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402


class HopperWithoutAGpu(NonNvmlCudaPlatform):
    """What vLLM asks of an H100, with tensors in the host's memory."""

    device_type = "cpu"

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(9, 0)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "NVIDIA H100"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return 80 << 30

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return 132


class AbsentOperator:
    """A compiled operator that a layer holds and nothing here calls."""

    def __init__(self, name: str):
        self.name = name

    def __getattr__(self, overload: str) -> "AbsentOperator":
        return AbsentOperator(f"{self.name}.{overload}")

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"the operator {self.name} is absent here")


vllm.platforms.current_platform = HopperWithoutAGpu()
supported = torch.library.Library("_C", "FRAGMENT")
for name in ("cutlass_scaled_mm_supports_fp8", "cutlass_scaled_mm_supports_block_fp8", "cutlass_group_gemm_supported"):
    supported.define(f"{name}(int capability) -> bool")
    supported.impl(name, lambda capability: True, "CompositeExplicitAutograd")

import vllm._custom_ops  # noqa: E402  # it registers what is there; from here on the others are held

_registered_operator = torch._ops._OpNamespace.__getattr__


def _operator(namespace: torch._ops._OpNamespace, name: str) -> object:
    try:
        return _registered_operator(namespace, name)
    except AttributeError:
        if namespace.name not in ("_C", "_moe_C", "_C_cache_ops") or name.startswith("__"):
            raise
        return AbsentOperator(name)


torch._ops._OpNamespace.__getattr__ = _operator
torch.cuda.Stream.__new__ = lambda cls, *args, **kwargs: None

import vllm.utils.import_utils  # noqa: E402

vllm.utils.import_utils.has_deep_gemm = lambda: True  # as vLLM's wheel has it

from vllm.config import DeviceConfig, LoadConfig, ModelConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.model_executor.model_loader.utils import initialize_model  # noqa: E402
from vllm.model_executor.models import registry  # noqa: E402

from tools.architectures.loading import load_folders  # noqa: E402

# in this process, which has the replacements, and not in one of its own
registry._LazyRegisteredModel.inspect_model_cls = lambda model: registry._ModelInfo.from_model_cls(
    model.load_model_cls()
)


def load(folder: Path) -> torch.nn.Module:
    """Build vLLM's model for a folder."""
    torch.set_default_dtype(torch.float32)
    model = ModelConfig(
        model=str(folder), skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=32
    )
    config = VllmConfig(model_config=model, device_config=DeviceConfig("cpu"), load_config=LoadConfig())
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            parallel_state.init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, "gloo")
        parallel_state.destroy_model_parallel()  # whose groups depend on whether a model has experts
        parallel_state.initialize_model_parallel(1)
        torch.set_default_dtype(torch.bfloat16)
        built = initialize_model(vllm_config=config, model_config=model)
    load_weights = built.load_weights

    def load_weights_with_config(weights):  # type: ignore[no-untyped-def]
        with set_current_vllm_config(config):
            return load_weights(weights)

    built.load_weights = load_weights_with_config
    return built


if __name__ == "__main__":
    load_folders(load, Path(sys.argv[1]), Path(sys.argv[2]))
