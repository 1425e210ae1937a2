import pytest
import torch

from octile.lab.tensor_core.architectures import ARCHITECTURES, EVIDENCE, FP8, find_instruction

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize(
    ("arch", "dtype", "expected"),
    [
        ("sm_80", torch.float16, (8, 24, 23)),
        ("sm_80", torch.float32, (4, 24, 23)),
        ("sm_89", E4M3, (16, 13, 13)),
        ("sm_90", E5M2, (32, 13, 13)),
        ("sm_90", torch.bfloat16, (16, 25, 23)),
        ("sm_90", torch.float32, (8, 25, 23)),
        ("sm_100", E4M3, (32, 25, 23)),
    ],
)
def test_rows_match_the_publications(arch, dtype, expected):
    row = find_instruction(arch, dtype, dtype)
    assert (row.terms, row.fraction_bits, row.output_bits) == expected


def test_fp8_formats_mix():
    assert find_instruction("sm_90", E4M3, E5M2) is find_instruction("sm_90", E5M2, E4M3)


def test_mma_sync_on_hopper_computes_fp8_as_fp16():
    fp8, fp16 = (find_instruction("sm_90_mma", t, t) for t in (E4M3, torch.float16))
    assert (fp8.terms, fp8.fraction_bits, fp8.output_bits) == (fp16.terms, fp16.fraction_bits, fp16.output_bits)
    assert fp8.promotes_every == 32


def test_an_unknown_architecture_is_refused():
    with pytest.raises(ValueError, match="sm_70"):
        find_instruction("sm_70", E4M3, E4M3)


def test_sm_80_has_no_fp8():
    with pytest.raises(TypeError, match="sm_80 has no instruction"):
        find_instruction("sm_80", E4M3, E4M3)


def test_formats_of_different_sizes_do_not_mix():
    with pytest.raises(TypeError, match="bfloat16"):
        find_instruction("sm_90", torch.float16, torch.bfloat16)


def test_every_row_cites_its_evidence():
    hopper = {row for arch in ("sm_90", "sm_90_mma") for row in ARCHITECTURES[arch]}
    assert all(row.evidence == "H200" for row in hopper)
    assert all(row.evidence == "published" for rows in ARCHITECTURES.values() for row in rows if row not in hopper)
    assert EVIDENCE["published"] == "as published, not checked on hardware"


def test_no_two_rows_of_an_architecture_fit_the_same_operands():
    for rows in ARCHITECTURES.values():
        keys = [(fmt.name, row.scaled) for row in rows for fmt in row.formats]
        assert len(keys) == len(set(keys))
        assert any(row.formats == FP8 for row in rows) == (rows is not ARCHITECTURES["sm_80"])
