"""`octile serve`: load a model and serve it until a signal comes."""

from __future__ import annotations

import signal
import sys
from ipaddress import ip_address
from pathlib import Path

import torch

from octile.report.page import format_count
from octile.serve.config import CacheConfig, EngineConfig
from octile.serve.http.chat import ChatTemplate
from octile.serve.http.config import Limits
from octile.serve.http.server import Server, bind, url_of
from octile.serve.http.service import Service
from octile.serve.load import Folder


def serve(
    run: Path,
    name: str,
    host: str,
    port: int,
    api_keys: tuple[str, ...],
    device: torch.device,
    limits: Limits,
    engine: EngineConfig,
    cache: CacheConfig,
) -> None:
    """Serve a folder; see `octile.cli.Serve` for the arguments. The address is bound before the weights are read.

    Raises:
        FileNotFoundError: there is no model or no tokenizer.
        ValueError: a file is damaged, the address cannot be used, or the model does not fit the options.
        MemoryError: the weights leave no place for a cache.
    """
    folder = Folder.open(run)
    chat = ChatTemplate.load(folder.path, folder.tokenizer)
    with bind(host, port) as bound:
        url = url_of(bound)
        stepped, runner = folder.load(device, engine, cache)
        service = Service(stepped, folder.tokenizer, runner.max_position, chat, limits, name)
        pages = f"{format_count(runner.n_pages, 'page')} of {runner.page_size} tokens, {_binary(runner.cache.nbytes)}"
        limit = folder.model.max_position_embeddings
        fewer = f" (the cache has no place for the model's {limit})" if runner.max_position < limit else ""
        print(f"serving {name} on {device}: context {runner.max_position} tokens{fewer}, cache {pages}")
        if chat.is_plain:
            print("its tokenizer has no chat template, like a base model's: chats use a plain one (User: … Assistant:)")
        is_local = _is_local(bound.getsockname()[0])
        if not api_keys and not is_local:
            print(f"octile: anyone who reaches {url} can use the model: --api-key restricts it", file=sys.stderr)
        announcement = f"try it at {url}, or with OpenAI's client: base_url {url}/v1, model {name}"
        server = Server(service, api_keys, announcement, (host,) if is_local and not api_keys else None)
        server.run([bound])
        if signal.SIGINT in server.signals:  # ignored after the run where a shell began the process in the background
            raise KeyboardInterrupt


def _binary(size: int) -> str:
    """Bytes in the largest binary unit of which there is one: "1.5 GiB", "320 KiB"."""
    unit, name = next((u for u in ((2**30, "GiB"), (2**20, "MiB")) if size >= u[0]), (2**10, "KiB"))
    return f"{size / unit:.3g} {name}"


def _is_local(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_loopback
