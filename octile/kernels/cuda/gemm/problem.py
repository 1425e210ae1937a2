"""What decides on a kernel: the product, and the chip."""

from dataclasses import dataclass, replace

from octile.kernels.cuda.gemm.config import Scales, Schedule, Store

MASKED_ROWS = 256  # in use of a masked group, where nobody says what to expect; often few


@dataclass(frozen=True)
class Chip:
    """A GPU: the multiprocessors that a product may use."""

    multiprocessors: int

    def clusters(self, size: int) -> int:
        """Clusters of so many blocks that run at the same time."""
        return self.multiprocessors // size


@dataclass(frozen=True)
class Problem:
    """What decides on a kernel: a[m, k] · b[n, k]ᵀ with scales, or one for each group.

    Attributes:
        m: rows; of all groups together where rows are grouped, those expected in one group where they are masked.
        k: what is summed; of all groups together where they are cut along it.
        transposable: the result may be computed as b · aᵀ.
    Others: as in `GemmConfig`.
    """

    m: int
    n: int
    k: int
    groups: int = 1
    schedule: Schedule = Schedule.DENSE
    a_scales: Scales = Scales.PER_ROW
    b_scales: Scales = Scales.PER_BLOCK
    out_float: bool = False
    accumulate: bool = False
    promote: bool = True
    store: Store = Store.TMA
    transposable: bool = False
    zero_rest: bool = True
    a_e5m2: bool = False
    b_e5m2: bool = False


def rounded(p: Problem) -> Problem:
    """Neighbouring sizes share a kernel: m, which changes from call to call, counts by eighths of a power of two."""
    if p.m <= 16:
        return replace(p, m=16 if p.m > 8 else 8)
    step = max(1 << (p.m - 1).bit_length() - 4, 16)
    return replace(p, m=-(-p.m // step) * step)
