"""Put the scripts of experiments/, which are not part of the package, on Python's search path; a trainer for them."""

import sys
from pathlib import Path

from tests.train.conftest import new_trainer, store, text  # noqa: F401  (fixtures)

sys.path.insert(0, str(Path(__file__).parents[2]))
