"""tools/compare_cubins.py finds the machine code of a kernel and judges a change of it."""

import pytest

from octile.kernels.cuda.jit import specialize

pytest.importorskip("cuda.bindings.nvrtc")

KERNEL = 'extern "C" __global__ void small(int* x) {{ x[threadIdx.x] = {value}; }}'


def row(registers=40, spill_bytes=0, instructions=1000, sha256="a"):
    return {"registers": registers, "spill_bytes": spill_bytes, "instructions": instructions, "sha256": sha256}


@pytest.mark.parametrize(
    ("new", "good"),
    [
        (row(), True),
        (row(sha256="b"), True),
        (row(sha256="b", instructions=1009), True),
        (row(sha256="b", instructions=1011), False),
        (row(sha256="b", instructions=988), False),
        (row(sha256="b", registers=41), False),
        (row(sha256="b", registers=39), True),
        (row(sha256="b", spill_bytes=8), False),
    ],
)
def test_a_kernel_is_as_good_as_before(script, new, good):
    assert script("compare_cubins").compare({"gemm": row()}, {"gemm": new}) == good


def test_a_renamed_kernel_is_found_by_its_machine_code(script, capsys):
    tool = script("compare_cubins")
    assert tool.compare({"old": row()}, {"new": row()})
    assert capsys.readouterr().out == "1 kernels: 1 identical, 0 different and as good, 0 worse\n"
    assert not tool.compare({"old": row()}, {"new": row(sha256="b", spill_bytes=8)})


def test_machine_code_does_not_depend_on_comments(script, monkeypatch, tmp_path):
    monkeypatch.setenv("OCTILE_CACHE_DIR", str(tmp_path))
    tool = script("compare_cubins")

    def code(text):
        return tool.machine_code(specialize.compile("small", {}, "sm_90a", {"small.cu": text}).image)

    one = code(KERNEL.format(value=1))
    assert len(one) % tool.INSTRUCTION_BYTES == 0
    assert code(f"// a comment\n{KERNEL.format(value=1)}") == one
    assert code(KERNEL.format(value=2)) != one
