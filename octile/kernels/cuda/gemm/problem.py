"""What decides on a kernel configuration: the problem, and the chip."""

from dataclasses import dataclass, replace

from octile.kernels.cuda.gemm.config import Scales, Schedule, Store

MASKED_ROWS = 256  # assumed rows of a masked group where the caller does not say what to expect


@dataclass(frozen=True)
class Chip:
    """A GPU: the number of SMs that a GEMM may use."""

    multiprocessors: int

    def clusters(self, size: int) -> int:
        """Return how many clusters of this many blocks run at the same time."""
        return self.multiprocessors // size


@dataclass(frozen=True)
class Problem:
    """A GEMM a[m, k] · b[n, k]ᵀ with scales, or one for each group.

    Attributes:
        m: rows: of all groups together where rows are grouped, those expected in one group where they are masked.
        k: the contracted dimension; of all groups together where they are along it.
        transposable: the result may be computed as b · aᵀ.

    All other attributes are as in `GemmConfig`.
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
    """Round m, which changes from call to call, up to eighths of a power of two: neighboring sizes share a kernel."""
    if p.m <= 16:
        return replace(p, m=16 if p.m > 8 else 8)
    step = max(1 << (p.m - 1).bit_length() - 4, 16)
    return replace(p, m=-(-p.m // step) * step)


def transposed(p: Problem) -> Problem:
    """Return the problem b · aᵀ, whose result is the transposed one."""
    return replace(p, m=p.n, n=p.m, a_scales=p.b_scales, b_scales=p.a_scales, a_e5m2=p.b_e5m2, b_e5m2=p.a_e5m2)
