"""Training runs that are measured: random tokens in memory, and initial weights that are drawn on the GPU."""

from contextlib import AbstractContextManager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import DeepseekV3
from octile.tokenizer import Tokenizer
from octile.train.data.token_store import Manifest, TokenStore
from octile.train.strategy import single


def random_store(vocabulary: int, tokens: int) -> TokenStore:
    """A store of random tokens, each four times in a row, so that a model can learn a little."""
    rng = np.random.default_rng(0)
    sizes = tokens, tokens // 8
    train, val = (np.repeat(rng.integers(0, vocabulary // 2, n // 4 + 1, dtype=np.uint16), 4)[:n] for n in sizes)
    manifest = Manifest("random", {}, "", vocabulary, {}, {}, {}, {}, {})
    return TokenStore(Path(), manifest, Tokenizer.train(["probe"], 258), train, val)


def weights_drawn_on(device: torch.device) -> AbstractContextManager[object]:
    """A context in which trainers draw the initial weights on a device, which takes a GPU less time than the host."""

    def made_there(config: ModelConfig) -> DeepseekV3:
        if torch.get_default_device().type == "meta":  # the whole model, of which a rank needs the names
            return DeepseekV3(config)
        with device:
            return DeepseekV3(config)

    return patch.object(single, "DeepseekV3", made_there)
