"""Send the weights of a model in training to a server of another process on this machine.

    send_weights("http://127.0.0.1:8000", "secret", model)

The weights are stored in a buffer as `octile.save` stores them in a file, and the server copies them: from a GPU by
CUDA IPC, if it computes on the same one; from a CPU by a file in memory. HTTP has only the address and the layout.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import torch
from torch import Tensor

from octile.checkpoint.fp8_layout import scale_rule
from octile.checkpoint.hugging_face import Weights, check_weights_format, config_json, storage_specs, stored_tensors
from octile.checkpoint.packed import layout_of, packed_size
from octile.models.deepseek_v3 import DeepseekV3
from octile.models.names import to_hf
from octile.nn.linear import recipe_of
from octile.parallel.shared_buffer import SharedBuffer
from octile.serve.engine.config import InFlight
from octile.serve.http.config import check_key
from octile.serve.process.messages import WeightsUpdated

UNAUTHORIZED, FORBIDDEN, BAD_REQUEST = 401, 403, 400


def send_weights(
    url: str,
    key: str,
    model: DeepseekV3,
    in_flight: InFlight = "finish",
    weights: Weights = "fp8",
    timeout: float = 660.0,
) -> WeightsUpdated:
    """Have a server go on with the weights that a model has now, and wait until it does.

    Until the server has answered, a buffer on the model's device takes as much memory as a file of the weights would.

    Args:
        url: address of the server, such as "http://127.0.0.1:8000".
        key: its `--weights-key`.
        model: a model of the configuration that is served, whole and on one device: a CPU, or the server's GPU.
        in_flight: what becomes of requests in flight; see `Engine.update_weights`.
        weights: the format of the folder that is served, as `octile.save` has it.
        timeout: seconds to wait for the answer; more than the server's `--limits.seconds`, since the server may read
            the buffer until it has answered.

    Raises:
        TypeError: model is of another class.
        ValueError: the server refuses the weights, or one holds NaN or Inf and cannot be quantized. Or weights is
            another format, the model is spread over ranks, or key cannot be sent in a header.
        PermissionError: the key is wrong, or the server takes no weights.
        RuntimeError: another update runs, or the server ends; or the driver cannot share the memory.
        OSError: the server cannot be reached, or does not answer in time; or there is no room for the buffer.
    """
    if not isinstance(model, DeepseekV3):
        raise TypeError(f"model must be a DeepseekV3, not {type(model).__name__}")
    check_key("key", key)
    check_weights_format(weights)
    tensors = to_hf(model.state_dict(), model.config)
    for name, tensor in tensors.items():
        if type(tensor) is not Tensor:
            raise ValueError(f"model must be whole in this process, but {name} is spread over ranks")
    specs = {name: storage_specs(name, tuple(tensor.shape), weights) for name, tensor in tensors.items()}
    layout = layout_of({name: spec for stored in specs.values() for name, spec in stored.items()})
    buffer = SharedBuffer(packed_size(layout), model.lm_head.weight.device)
    try:
        scale = scale_rule(model.config.extra)
        for name, tensor in tensors.items():
            stored = stored_tensors(name, tensor, specs[name], scale, model.stored_scales.get(name))
            for each, values in stored.items():
                _write(buffer.bytes, layout[each]["data_offsets"], values)
        buffer.wait()
        config = config_json(model.config, weights, specs, recipe_of(model))
        body = {"config": config, "tensors": layout, **buffer.address, "in_flight": in_flight}
        answer = _post(f"{url.rstrip('/')}/update_weights_from_tensor", key, body, timeout)
    finally:
        buffer.close()
    return WeightsUpdated(answer["weights_version"], answer["seconds"], answer["write_seconds"], answer["bytes"])


@torch.no_grad()
def _write(data: Tensor, offsets: list[int], values: Tensor) -> None:
    begin, end = offsets
    data[begin:end].copy_(values.contiguous().flatten().view(torch.uint8))


def _post(url: str, key: str, body: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Post JSON, and return the answer; an error has the server's words. No proxy reaches this machine."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as error:
        with error:
            content = error.read().decode(errors="replace")
        try:
            why = json.loads(content)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            why = content or error.reason
        raise _error(error.code, f"{url} answers {error.code}: {why}") from None


def _error(status: int, message: str) -> Exception:
    if status in (UNAUTHORIZED, FORBIDDEN):
        return PermissionError(message)
    return ValueError(message) if status == BAD_REQUEST else RuntimeError(message)
