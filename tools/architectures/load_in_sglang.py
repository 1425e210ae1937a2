"""Have SGLang's model classes load folders, without a GPU: `python -m tools.architectures.load_in_sglang FOLDERS OUT`.

SGLang's code takes the ways that it has where it finds no accelerator; which layers are FP8 and how weights are read
does not depend on it. Compiled operators are absent, and loading calls none. It is run in SGLang's environment.
"""

import concurrent.futures
import importlib.machinery
import os
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path


class Absent(types.ModuleType):
    """A module with compiled operators, which are imported and not called."""

    __path__: list[str] = []  # noqa: RUF012  # of a module

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


os.environ |= {"HF_HUB_OFFLINE": "1"}
for name in ("sgl_kernel", "vllm", "vllm._custom_ops", "torchvision._meta_registrations"):
    sys.modules[name] = Absent(name) if name[0] != "t" else types.ModuleType(name)
    sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)

import torch  # noqa: E402
from sglang.srt.arg_groups import mamba_hook  # noqa: E402
from sglang.srt.configs.load_config import LoadConfig  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.distributed import parallel_state  # noqa: E402
from sglang.srt.layers.dp_attention import init_dp_gathered_buffer, initialize_dp_attention  # noqa: E402
from sglang.srt.layers.moe import initialize_moe_config  # noqa: E402
from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model  # noqa: E402
from sglang.srt.platforms import current_platform  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402
from sglang.srt.weight_cache.daemon import SpawnRanks, publish, spawn_world_rank  # noqa: E402

from tools.architectures.loading import load_folders  # noqa: E402

mamba_hook._platform_supports_mamba_cache_extra_buffer = lambda: True
torch.cuda.get_device_capability = lambda device=None: (9, 0)
type(current_platform).get_device = lambda self, index=None: "cpu"


def _submit(
    executor: concurrent.futures.Executor, call: Callable[..., object], *args: object, **kwargs: object
) -> concurrent.futures.Future[object]:
    """Call a function in this thread, whose operators are looked at, and not in another one."""
    future = concurrent.futures.Future[object]()
    future.set_result(call(*args, **kwargs))
    return future


concurrent.futures.ThreadPoolExecutor.submit = _submit


def load(folder: Path) -> torch.nn.Module:
    """Build SGLang's model for a folder."""
    torch.set_default_dtype(torch.float32)
    arguments = ServerArgs(
        model_path=str(folder),
        device="cpu",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        context_length=32,
        attention_backend="triton",
    )
    ranks = SpawnRanks(world_rank=spawn_world_rank(arguments, tp_rank=0, pp_rank=0), gpu_id=0)
    publish(arguments, role="loader", ranks=ranks)
    initialize_moe_config()
    model = ModelConfig.from_server_args(arguments)
    if not torch.distributed.is_initialized():
        parallel_state.init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            backend="gloo",
            distributed_init_method=f"file://{tempfile.mktemp()}",
        )
        parallel_state.initialize_model_parallel()
    initialize_dp_attention(arguments)
    init_dp_gathered_buffer(model)
    torch.set_default_dtype(torch.bfloat16)
    return _initialize_model(model, LoadConfig(), _get_quantization_config(model, LoadConfig()))


if __name__ == "__main__":
    load_folders(load, Path(sys.argv[1]), Path(sys.argv[2]))
