"""`python -m octile.compat.deep_gemm FILE`: run a script that uses DeepGEMM, such as one of its tests, with octile.

    python -m octile.compat.deep_gemm ~/DeepGEMM/tests/test_fp8_fp4.py

DeepGEMM's tests time kernels by their names in its sources. That is switched off, so the times that they print have no
meaning. Their assertions are unchanged.
"""

import os
import runpy
import sys
from pathlib import Path

from octile.compat.deep_gemm.stand_in import install


def main() -> None:
    """Run the script that the command line names, with `deep_gemm` replaced by octile.

    Raises:
        SystemExit: the command line names no file.
    """
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        raise SystemExit("usage: python -m octile.compat.deep_gemm FILE [its arguments]")
    script = Path(sys.argv[1]).resolve()
    checkout = next((folder for folder in script.parents if (folder / "deep_gemm" / "utils").is_dir()), None)
    os.environ.setdefault("DG_USE_NVIDIA_TOOLS", "1")
    install(checkout)
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
