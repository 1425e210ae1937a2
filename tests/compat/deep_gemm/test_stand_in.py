"""`import deep_gemm` gives octile's functions, alone or under the Python of a checkout."""

import importlib
import inspect
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import octile.compat.deep_gemm as ours
from tests.fresh_python import run_python

SCRIPT = """\
import sys
import deep_gemm
from deep_gemm.utils import get_tma_aligned_size, hello
from neighbor import constant
print(deep_gemm.fp8_gemm_nt.__module__, get_tma_aligned_size(5, 4), hello(), constant, sys.argv[1])
"""


@pytest.fixture
def modules(monkeypatch):
    """The modules as they were, afterwards."""
    for name in [n for n in sys.modules if n.partition(".")[0] == "deep_gemm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield
    for name in [n for n in sys.modules if n.partition(".")[0] == "deep_gemm"]:
        del sys.modules[name]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder built like a checkout: a package whose Python asks its compiled module for functions, and a test."""
    files = {
        "deep_gemm/utils/__init__.py": "from .layout import *\ndef hello(): return 'theirs'\n",
        "deep_gemm/utils/layout.py": "from .._C import get_tma_aligned_size\n",
        "deep_gemm/__init__.py": "raise ImportError('needs its compiled module')\n",
        "tests/neighbor.py": "constant = 'found'\n",
        "tests/test_something.py": SCRIPT,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.usefixtures("modules")
def test_alone_it_has_every_function_and_its_utils():
    ours.install()
    import deep_gemm
    from deep_gemm.utils import per_token_cast_to_fp8

    assert all(getattr(deep_gemm, name) is getattr(ours, name) for name in ours.__all__ if name != "install")
    assert per_token_cast_to_fp8 is ours.utils.per_token_cast_to_fp8


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize(
    "name", ["deep_gemm", "deep_gemm.testing", "deep_gemm.utils", "deep_gemm.utils.layout", "deep_gemm.utils.math"]
)
def test_it_is_found_as_an_installed_module_is(name: str):
    """vLLM asks `importlib.util.find_spec` whether there is DeepGEMM."""
    ours.install()
    assert find_spec(name) is not None


@pytest.mark.usefixtures("modules")
def test_its_spec_is_that_of_a_package():
    spec = ours.install().__spec__
    assert (spec.name, spec.origin, spec.submodule_search_locations) == ("deep_gemm", ours.__file__, [])


@pytest.mark.usefixtures("modules")
def test_its_file_is_octiles():
    deep_gemm = ours.install()
    assert (deep_gemm.__file__, inspect.getsourcefile(deep_gemm)) == (ours.__file__, ours.__file__)


def functions_of(module) -> set[str]:
    return {name for name in dir(module) if not (name.startswith("__") and name.endswith("__"))}


def test_octiles_module_lists_no_internals():
    assert functions_of(ours) == set(ours.__all__) - {"__version__"}


@pytest.mark.usefixtures("modules")
def test_it_lists_what_deepgemm_has():
    assert functions_of(ours.install()) == set(ours.__all__) - {"__version__", "install"}


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize("with_checkout", [False, True])
def test_it_is_reloaded(checkout, with_checkout):
    deep_gemm = ours.install(checkout if with_checkout else None)
    utils = deep_gemm.utils
    deep_gemm.fp8_gemm_nt = None
    assert importlib.reload(deep_gemm) is deep_gemm
    assert deep_gemm.fp8_gemm_nt is ours.fp8_gemm_nt
    assert deep_gemm.utils is utils


@pytest.mark.usefixtures("modules")
def test_it_can_be_installed_again_for_a_checkout(checkout):
    ours.install()
    ours.install(checkout)
    from deep_gemm.utils import hello

    assert hello() == "theirs"
    assert [type(finder).__name__ for finder in sys.meta_path].count("StandIn") == 1


@pytest.mark.usefixtures("modules")
def test_the_modules_of_utils_are_imported_by_their_own_names():
    ours.install()
    import deep_gemm
    import deep_gemm.utils.layout
    import deep_gemm.utils.math

    assert deep_gemm.utils.layout.get_mn_major_tma_aligned_tensor is ours.get_mn_major_tma_aligned_tensor
    assert deep_gemm.utils.math.per_block_cast_to_fp8 is ours.utils.per_block_cast_to_fp8


@pytest.mark.usefixtures("modules")
def test_it_has_testing():
    ours.install()
    from deep_gemm.testing import calc_diff

    assert calc_diff is ours.testing.calc_diff


def test_the_functions_of_utils_are_those_of_the_module():
    functions = set(ours.utils.__all__) - {"layout", "math"}
    assert all(getattr(ours, name) is getattr(ours.utils, name) for name in functions)
    assert functions <= set(ours.__all__)


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("gemm_fp8_fp8_bf16_nt", "fp8_gemm_nt"),
        ("m_grouped_gemm_fp8_fp8_bf16_nt_masked", "m_grouped_fp8_gemm_nt_masked"),
        ("get_col_major_tma_aligned_tensor", "get_mn_major_tma_aligned_tensor"),
        ("wgrad_gemm_fp8_fp8_fp32_nt", r"fp8_gemm_nt, with c=d and recipe=\(1, 1, 128\)"),
    ],
)
def test_names_of_deep_gemm_1_are_answered_with_those_of_2(old: str, new: str):
    for module in (ours, ours.install()):
        with pytest.raises(
            AttributeError, match=f"deep_gemm has no {old}, a name of DeepGEMM 1: DeepGEMM 2 has {new}$"
        ):
            getattr(module, old)


def test_other_names_are_missing_as_usual():
    assert not hasattr(ours, "tf32_hc_prenorm_gemm")


@pytest.mark.usefixtures("modules")
def test_it_has_the_version_whose_functions_it_has():
    assert ours.install().__version__ == ours.__version__ == "2.6.1"


@pytest.mark.usefixtures("modules")
def test_the_python_of_a_checkout_is_used_where_it_is_given(checkout):
    ours.install(checkout)
    from deep_gemm.utils import get_tma_aligned_size, hello

    assert get_tma_aligned_size is ours.get_tma_aligned_size
    assert hello() == "theirs"


@pytest.mark.slow
def test_a_script_of_a_checkout_runs_on_octile(checkout):
    """In a process of its own, with the modules next to it and its arguments."""
    program = "import runpy; runpy.run_module('octile.compat.deep_gemm', run_name='__main__', alter_sys=True)"
    ran = run_python(program, str(checkout / "tests/test_something.py"), "argument", folder=checkout)
    assert ran.stdout.split() == ["octile.compat.deep_gemm.dense", "8", "theirs", "found", "argument"], ran.stderr


@pytest.mark.usefixtures("modules")
def test_where_the_library_itself_is_there_already_it_is_not_replaced(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_gemm", sys)
    with pytest.raises(RuntimeError, match="deep_gemm has been imported already"):
        ours.install()


@pytest.mark.usefixtures("modules")
def test_a_folder_that_is_no_checkout_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="must be a checkout of DeepGEMM"):
        ours.install(tmp_path)
    assert "deep_gemm" not in sys.modules
