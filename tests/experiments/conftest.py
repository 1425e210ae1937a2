"""Put the scripts of experiments/, which are not part of the package, on Python's search path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
