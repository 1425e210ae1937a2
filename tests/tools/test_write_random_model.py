"""The tool writes a folder of the shape that the benchmark recognizes."""

from octile.bench.serve.peer.random_folder import V2_LITE
from tools import write_random_model


def test_the_folder_has_the_shape_of_v2_lite_in_the_format_that_is_given(monkeypatch, tmp_path):
    written = []
    monkeypatch.setattr(write_random_model, "write_random_folder", lambda *arguments: written.append(arguments[:3]))
    write_random_model.main([str(tmp_path), "fp8"])
    assert written == [(tmp_path, V2_LITE, "fp8")]
