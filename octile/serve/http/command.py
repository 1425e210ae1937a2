"""`octile serve`: serve a model over HTTP."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from octile.extras import require
from octile.options import Positional, Section
from octile.serve.engine.config import CacheConfig, EngineConfig, ParallelConfig, ProcessesConfig, window_of
from octile.serve.http.config import (
    HttpConfig,
    Limits,
    Parsers,
    ReasoningFormat,
    ToolCallFormat,
    check_key,
    check_origin,
)
from octile.serve.http.tls import TlsFiles
from octile.serve.newest_run import newest_run
from octile.signals import importing
from octile.torchrun import count_ranks
from octile.validation import Range, check_fields


@dataclass(frozen=True)
class Options:
    """Serve a model over HTTP with OpenAI's protocol, and a page to try it.

    Attributes:
        run: a run folder, or a Hugging Face folder of a DeepSeek-V3 model; the newest under runs/ if not given.
        host: the address to listen at. 127.0.0.1 is reached from this machine only, 0.0.0.0 from its network, too.
        port: the port to listen at; 0 chooses a free one.
        model_name: the name by which clients ask for the model; the folder's name if not given.
        sampling_defaults: model: requests that give no temperature, top_p, top_k, min_p or repetition_penalty get those
            of the folder's generation_config.json; openai: they get OpenAI's, temperature 1 and all tokens.
        reasoning_parser: deepseek_r1: what a model writes between <think> and </think> in a chat is answered as
            reasoning_content; it stays in the text if not given.
        tool_call_parser: how the model writes calls of functions in chats, which are answered as tool_calls; requests
            with tools are refused if not given. deepseek_v3 is also R1's.
        api_key: a key that clients must send; can be given several times. Other users of this machine can see it, but
            not one in the environment variable OCTILE_API_KEY.
        allowed_origins: an origin, such as https://chat.example.org, whose scripts browsers let read answers; can be
            given several times. * allows any origin; if not given, none is allowed.
        ssl_certfile: a file in PEM with the certificate for HTTPS, and after it the intermediate ones of its chain.
        ssl_keyfile: the certificate's private key, a file in PEM without a password.
        weights_key: a key with which a client can update the weights while the server runs; without it no client can.
            It can be given by the environment variable OCTILE_WEIGHTS_KEY instead.
        access_log: write a line on stderr for each response: time, client, path, status, seconds, tokens, request id.
        device: auto uses a GPU if there is one.
        limits: what the server takes at most.
        engine: how much is computed at once.
        cache: the paged latent cache, of each rank or process.
        parallel: the ranks that torchrun starts.
        processes: prefill and decoding in processes of their own.
    """

    run: Positional[Path | None] = None
    host: str = "127.0.0.1"
    port: Annotated[int, Range(at_least=0, at_most=65535)] = 8000
    model_name: str | None = None
    sampling_defaults: Literal["model", "openai"] = "model"
    reasoning_parser: ReasoningFormat | None = None
    tool_call_parser: ToolCallFormat | None = None
    api_key: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    weights_key: str | None = None
    access_log: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    limits: Limits = field(default_factory=Limits)
    engine: EngineConfig = field(default_factory=EngineConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    processes: ProcessesConfig = field(default_factory=ProcessesConfig)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.processes.prefill and self.parallel.ep > 1:
            raise ValueError(
                f"processes.prefill must be 0, not {self.processes.prefill}, if parallel.ep is {self.parallel.ep}: the "
                "ranks prefill and decode"
            )
        window_of(self.engine, self.parallel)  # refuses what would have no effect
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            given, missing = (
                ("ssl_keyfile", "ssl_certfile") if self.ssl_certfile is None else ("ssl_certfile", "ssl_keyfile")
            )
            raise ValueError(f"{missing} is needed, too, with {given}")
        if not all(self.api_key) or self.model_name == "":
            raise ValueError(f"{'model_name' if self.model_name == '' else 'api_key'} must not be empty")
        for key in self.api_key:
            check_key("api_key", key)
        for origin in self.allowed_origins:
            check_origin("allowed_origins", origin)
        if self.weights_key is not None:
            if not self.weights_key:
                raise ValueError("weights_key must not be empty")
            check_key("weights_key", self.weights_key)
            _check_updates("weights_key", self.weights_key, self)


PACKAGES = "fastapi", "uvicorn", "prometheus_client"  # of the extra `serve`, which nothing else of octile imports

SECTIONS = (
    Section("model", ("run", "device", "model_name", "sampling_defaults")),
    Section("chats", (), ("reasoning_parser", "tool_call_parser")),
    Section(
        "address and clients",
        ("host", "port", "api_key"),
        ("weights_key", "ssl_certfile", "ssl_keyfile", "allowed_origins", "access_log"),
    ),
    Section("limits of the server", ("limits.in_flight", "limits.new_tokens"), ("limits",)),
    Section("steps", ("engine.max_batch", "engine.max_step_tokens", "engine.n_drafts"), ("engine",)),
    Section("cache of keys and values", ("cache.format", "cache.gib")),
    Section("GPUs", ("parallel.ep", "parallel.tp", "processes.prefill", "processes.decode"), ("parallel",)),
)

CONTEXT = "the context is the model's, or what the cache holds if that is less; --limits.new-tokens limits answers"
WEIGHTS = "weights are served as they are stored; octile convert writes other ones"
TOKENIZER = "the tokenizer is that of the model's folder"
NO_DOWNLOAD = "nothing is downloaded; RUN is a folder"
CACHED = "the cache of prefixes is always on"
CHUNKED = "chunked prefill is always on; --engine.max-step-tokens limits the tokens of a step"

NO_OPTIONS = {  # vLLM's, and SGLang's; those that have another name here are in `octile.options.parse`
    "max-model-len": CONTEXT,
    "context-length": CONTEXT,
    "dtype": WEIGHTS,
    "quantization": WEIGHTS,
    "tokenizer": TOKENIZER,
    "tokenizer-path": TOKENIZER,
    "revision": NO_DOWNLOAD,
    "download-dir": NO_DOWNLOAD,
    "trust-remote-code": "no code of a model's folder is run",
    "chat-template": "the template is chat_template.jinja of the model's folder: put yours there",
    "enable-prefix-caching": CACHED,
    "no-enable-prefix-caching": CACHED,
    "disable-radix-cache": CACHED,
    "enable-chunked-prefill": CHUNKED,
    "no-enable-chunked-prefill": CHUNKED,
}


def run(options: Options) -> None:
    """Serve until a signal comes.

    Raises:
        ImportError: a package of the extra `serve` is missing, or llguidance is too old.
        ValueError: torchrun has started another number of ranks; a key in the environment, the certificate or its key
            cannot be used; or as for `octile.serve.http.serve_folder.serve`, which raises the other exceptions, too.
    """
    _check_ranks(options.parallel.ep)
    environment_key = os.environ.get("OCTILE_API_KEY")
    if environment_key == "":  # such as that of a secret which is missing: the server would be open
        raise ValueError("OCTILE_API_KEY must not be empty: leave it unset to serve without a key")
    check_key("OCTILE_API_KEY", environment_key or "")
    weights_key = options.weights_key or os.environ.get("OCTILE_WEIGHTS_KEY") or None
    if weights_key is not None:
        check_key("OCTILE_WEIGHTS_KEY", weights_key)
        _check_updates("OCTILE_WEIGHTS_KEY", weights_key, options)
    tls = None
    if options.ssl_certfile is not None and options.ssl_keyfile is not None:
        tls = TlsFiles(options.ssl_certfile, options.ssl_keyfile)
        tls.context()  # raises before anything is loaded
    require(*PACKAGES, extra="serve")
    if find_spec("llguidance") is not None:  # without it requests with a grammar are refused
        from octile.serve.engine.grammar import require_llguidance  # which --help does not need

        require_llguidance()
    path = options.run or newest_run()
    name = options.model_name or path.resolve().name
    keys = options.api_key + tuple(filter(None, [environment_key]))
    with importing():
        from octile.parallel.device import pick_own_device
        from octile.serve.http.serve_folder import serve

    device = pick_own_device(options.device)
    parsers = Parsers(options.reasoning_parser, options.tool_call_parser)
    config = HttpConfig(
        name, options.limits, keys, weights_key, parsers, tls, options.allowed_origins, options.access_log
    )
    serve(
        path, options.host, options.port, device, config, options.engine, options.cache, options.parallel,
        options.processes, options.sampling_defaults == "model",
    )  # fmt: skip


def _check_updates(name: str, key: str, options: Options) -> None:
    """Refuse a key to update the weights of a server whose weights cannot be updated, or that every client has.

    Raises:
        ValueError: it is one.
    """
    if options.parallel.ep > 1 or options.processes.prefill:
        option = "parallel.ep" if options.parallel.ep > 1 else "processes.prefill"
        raise ValueError(f"{name} must not be given with {option}: only the weights of one process can be updated")
    if key in options.api_key or key == os.environ.get("OCTILE_API_KEY"):
        raise ValueError(f"{name} must not be a key that clients have (api_key, OCTILE_API_KEY)")


def _check_ranks(ep: int) -> None:
    """Refuse another number of ranks than torchrun has started.

    Raises:
        ValueError: it is another one.
    """
    if (started := count_ranks()) == ep:
        return
    if started == 1:
        raise ValueError(
            f"parallel.ep {ep} needs as many processes: torchrun --nproc-per-node {ep} -m octile serve … starts them"
        )
    raise ValueError(
        f"torchrun has started {started} processes (WORLD_SIZE), so parallel.ep must be {started}, not {ep}"
    )
