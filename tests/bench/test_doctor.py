"""What `octile doctor` says of a machine."""

import torch

import octile.ops.grouped
import octile.ops.matmul
import octile.ops.quantize  # noqa: F401  (they register the operators)
from octile.bench.doctor import OPERATORS, examine, show


def test_every_operator_is_listed():
    names = [n.removeprefix("octile::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("octile::")]
    registered = {name.partition(".")[0] for name in names}
    assert registered == set(OPERATORS)


def test_a_kernel_is_named_with_its_reason():
    assert all(row["kernel"] and row["why"] for row in examine()["operators"])


def test_a_person_can_read_it(capsys):
    show(examine(), as_json=False)
    assert "octile::matmul_nt" in capsys.readouterr().out
