"""The figure of the load of GPUs."""

from xml.etree import ElementTree

import numpy as np
import pytest

from octile.report.experts import GpuLoads, save_gpu_loads


def loads(*layers) -> GpuLoads:
    load = np.array(layers, dtype=np.float64)
    return GpuLoads(load, np.zeros(load.shape, dtype=bool))


def test_the_imbalance_is_that_of_whole_gpus():
    assert loads([[1, 3], [2, 2]], [[5, 1], [2, 0]]).imbalance().tolist() == [1, 1.5]


def test_gpus_wait_for_the_busiest_one_of_each_layer():
    assert loads([[2], [0]], [[0], [2]]).waiting() == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_the_worst_layer_is_drawn_before_and_after(tmp_path, layers):
    before = loads(*([[[2, 1], [1, 1]]] * (layers - 1)), [[3, 3], [1, 1]])
    path = save_gpu_loads(tmp_path / "new" / "a.svg", before, loads(*([[[2, 2], [2, 2]]] * layers)))
    texts = [text.text for text in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]
    assert f"one copy of each expert: layer {layers - 1}, busiest GPU 1.50 × the mean" in texts
    assert f"redundant experts: layer {layers - 1}, busiest GPU 1.00 × the mean" in texts
    assert "load of a GPU / the mean" in texts


def test_another_suffix_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"path must end in .png or .svg, not 'a.pdf'"):
        save_gpu_loads(tmp_path / "a.pdf", loads([[1]]), loads([[1]]))
