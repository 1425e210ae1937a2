"""The scripts of experiments/ are no part of the package: their folder is where Python finds them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
