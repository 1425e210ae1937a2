"""The notebook runs in Jupyter's kernel, and is stored without outputs."""

import json

import pytest

from tests.examples.conftest import FOLDER

FILE = FOLDER / "fp8_in_a_notebook.ipynb"


def test_no_output_is_stored():
    cells = json.loads(FILE.read_text(encoding="utf-8"))["cells"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells if cell["cell_type"] == "code")


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_it_runs(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="octile[clients] is not installed")
    nbformat = pytest.importorskip("nbformat", reason="octile[clients] is not installed")
    monkeypatch.setenv("PYTHONPATH", f"{FOLDER.parent}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads of several tests would wait for one another
    notebook = nbformat.read(FILE, as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": f"{tmp_path}"}}).execute()
    assert (tmp_path / "runs" / "notebook" / "model.safetensors").exists()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
