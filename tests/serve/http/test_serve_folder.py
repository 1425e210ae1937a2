"""What is done before a server answers its first request."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from octile.serve.engine.config import CacheConfig, EngineConfig, ParallelConfig, ProcessesConfig
from octile.serve.engine.grammar import GrammarCompiler
from octile.serve.http import serve_folder
from octile.tokenizer import Tokenizer
from tests.serve.http.conftest import Served
from tests.serve.models import save_untrained
from tests.train.conftest import MICRO


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[GrammarCompiler]:
    found: list[GrammarCompiler] = []
    monkeypatch.setattr(GrammarCompiler, "prepare", lambda compiler: found.append(compiler))
    return found


def test_the_engine_reads_the_vocabulary_of_grammars(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tokenizer: Tokenizer, prepared: list[GrammarCompiler]
):
    engines = []
    monkeypatch.setattr(serve_folder._Address, "bind", lambda *_: SimpleNamespace(http=None))
    monkeypatch.setattr(serve_folder, "_answer", lambda *of: engines.append(of[3].engine))
    config = SimpleNamespace(tls=None, model_name="micro", weights_key=None)
    limits = EngineConfig(), CacheConfig(), ParallelConfig(), ProcessesConfig()
    folder = save_untrained(MICRO, tokenizer, tmp_path)
    serve_folder.serve(folder, "127.0.0.1", 0, torch.device("cpu"), config, *limits, True)
    assert prepared == [engine._grammars for engine in engines]
    assert len(prepared) == 1


def test_the_http_process_reads_the_vocabulary_of_grammars(serve, prepared: list[GrammarCompiler]):
    served: Served = serve()
    assert prepared == [served.service._grammars._compiler]
