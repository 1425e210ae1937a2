"""`octile serve`: load a model and serve it until a signal comes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from octile.chat.template import ChatTemplate
from octile.checkpoint.files import GENERATION_CONFIG
from octile.ops.latent_cache import PAGE
from octile.parallel.ranks import explain, join, leave, world
from octile.serve.disaggregated.router import Router
from octile.serve.engine.config import CacheConfig, EngineConfig, ParallelConfig, ProcessesConfig, check_micro_batches
from octile.serve.http.address import bind, url_of
from octile.serve.http.config import HttpConfig
from octile.serve.http.process import HttpProcess
from octile.serve.http.tls import TlsFiles
from octile.serve.http.worker import Start
from octile.serve.process.server import StepEngine
from octile.serve.process.signals import freeze_loaded, signals_ignored
from octile.serve.process.updates import WeightsUpdates
from octile.serve.ranks.engine import LockstepEngine, follow
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.weights.load import Folder
from octile.serve.weights.replaceable import ReplaceableWeights
from octile.text import format_count


def serve(
    run: Path,
    host: str,
    port: int,
    device: torch.device,
    config: HttpConfig,
    engine: EngineConfig,
    cache: CacheConfig,
    parallel: ParallelConfig,
    processes: ProcessesConfig,
    has_model_defaults: bool,
) -> None:
    """Serve a folder. The address is bound before the weights are read.

    Of several ranks that torchrun has started all call this, and rank 0 answers the requests.

    Args:
        run: a run folder, or a Hugging Face folder.
        host, port, engine, cache, parallel, processes: as in `octile.serve.http.command.Options`.
        device: device of this rank.
        config: how requests are answered.
        has_model_defaults: whether requests that do not say how to sample get what generation_config.json says.

    Raises:
        FileNotFoundError: there is no model or no tokenizer.
        ValueError: a file is damaged, the address cannot be used, or the model does not fit the options.
        MemoryError: the weights leave no memory for a cache.
        ProcessEndedError: a prefill or decode process has ended or hangs.
        RanksError: another rank hangs or has ended.
    """
    check_micro_batches(engine, parallel, device.type)
    ranks = join(device, parallel.timeout)
    try:
        folder = Folder.open(run)
        ranks.agree("parallel", str(parallel))
        engine, cache = folder.exact_options(engine, cache, parallel, device)
        folder.check_parallel(parallel, engine.batch_invariant)
        chat = ChatTemplate.load(folder.path, folder.tokenizer)
        with ExitStack() as stack:
            address = ranks.from_first_only(lambda: _Address.bind(host, port, config.tls, stack))
            if processes.prefill:
                where = f"{device} by processes, {processes.prefill} for prefill and {processes.decode} for decoding"
            else:
                where = f"{device}" if ranks.size == 1 else f"{ranks.size} ranks ({device.type})"
                if parallel.tp > 1:
                    where += f" in groups of {parallel.tp}"
            if address is not None:  # on rank 0
                print(f"loading {config.model_name} on {where}", file=sys.stderr, flush=True)
                folder.warn_of_unused()
            if processes.prefill:
                router = Router(folder.path, processes, device, engine, cache, parallel.timeout)
                loaded = _Loaded(router, router.max_position, router.n_pages, router.cache_bytes)
                where += ", each with this cache or a larger one"
            elif ranks.size == 1:
                own, runner = folder.load(device, engine, cache)
                own.prepare_grammars()
                loaded = _Loaded.of(own, runner)
                if config.weights_key is not None:
                    assert isinstance(runner.updatable_weights, ReplaceableWeights)  # as those of all folders
                    loaded = loaded._replace(updates=WeightsUpdates(own, runner.updatable_weights))
            else:
                control = world() if device.type == "cpu" else dist.new_group(backend="gloo", timeout=ranks.timeout)
                parallel_engine, runner = folder.load_expert_parallel(device, engine, cache, parallel, control)
                parallel_engine.engine.prepare_grammars()
                if device.type == "cuda":
                    ranks.at("the compilation of kernels")
                    parallel_engine.warm_up()
                if address is None:
                    freeze_loaded()
                    with signals_ignored():  # rank 0 has them, too, and ends this rank when it has drained
                        follow(parallel_engine, ranks, control)
                    return leave()
                loaded = _Loaded.of(LockstepEngine(parallel_engine, ranks, control, address.http.fail), runner)
                where += f", each {'group ' if parallel.tp > 1 else ''}with this cache"
            assert address is not None  # on rank 0
            defaults = folder.generation.sampling if has_model_defaults else {}
            _answer(address, folder, host, loaded, where, chat, defaults, config)
    except Exception as error:
        if (explained := explain(error)) is not error:
            raise explained from error
        raise


class _Address(NamedTuple):
    """A bound address, and the process that answers requests there."""

    url: str
    is_local: bool
    http: HttpProcess

    @classmethod
    def bind(cls, host: str, port: int, tls: TlsFiles | None, stack: ExitStack) -> _Address:
        """Bind an address and start the process, which the stack ends."""
        with bind(host, port) as bound:
            url = url_of(bound, tls is not None)
            is_local = ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback
            http = HttpProcess(bound)
        stack.callback(http.close)
        return cls(url, is_local, http)


class _Loaded(NamedTuple):
    """An engine, the positions of a request at most, the engine's cache, and updates of its weights if any can come."""

    engine: StepEngine
    context: int
    n_pages: int
    cache_bytes: int
    updates: WeightsUpdates | None = None

    @classmethod
    def of(cls, engine: StepEngine, runner: ModelRunner) -> _Loaded:
        """The engine of a runner."""
        return cls(engine, runner.max_position, runner.n_pages, runner.n_pages * runner.pages.bytes_per_page)


def _answer(
    address: _Address,
    folder: Folder,
    host: str,
    loaded: _Loaded,
    where: str,
    chat: ChatTemplate,
    defaults: Mapping[str, Any],
    config: HttpConfig,
) -> None:
    """Answer requests until a signal comes, and end the other ranks and processes."""
    url, name = address.url, config.model_name
    pages = f"{format_count(loaded.n_pages, 'page')} of {PAGE} tokens, {_binary(loaded.cache_bytes)}"
    limit = folder.model.max_position_embeddings
    fewer = f" (the cache does not hold the model's {limit})" if loaded.context < limit else ""
    print(f"serving {name} on {where}: context {loaded.context} tokens{fewer}, cache {pages}", flush=True)
    if chat.is_plain:
        print("its tokenizer has no chat template, like a base model's: chats use a plain one (User: … Assistant:)")
    if defaults:
        values = ", ".join(f"{field} {value:g}" for field, value in defaults.items())
        print(f"requests that give none get its {GENERATION_CONFIG}'s {values} (not with --sampling-defaults openai)")
    if not config.api_keys and not address.is_local:
        print(f"octile: anyone who reaches {url} can use the model: --api-key restricts it", file=sys.stderr)
    engine, hosts = loaded.engine, (host,) if address.is_local and not config.api_keys else None
    vocab_size, stats = folder.model.vocab_size, engine.stats()
    freeze_loaded()
    try:
        served = Start(folder.path, vocab_size, loaded.context, stats, defaults, hosts, config)
        address.http.listen(served)
        announcement = f"try it at {url}, or with OpenAI's client: base_url {url}/v1, model {name}"
        signals = address.http.serve(engine, announcement, loaded.updates)
    finally:
        has_failed = address.http.engine_failure is not None
        if not has_failed or isinstance(engine, Router):  # whose other processes must end; ranks end themselves
            engine.close()
        if not has_failed:
            leave()
    if signal.SIGINT in signals:  # also where a shell began the process in the background, which then ignores it
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGTERM)


def _binary(size: int) -> str:
    """Bytes in the largest binary unit of which there is one: "1.5 GiB", "320 KiB"."""
    unit, name = next((u for u in ((2**30, "GiB"), (2**20, "MiB")) if size >= u[0]), (2**10, "KiB"))
    return f"{size / unit:.3g} {name}"
