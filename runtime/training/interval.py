"""How far a mean over samples may be from that of other samples: a bootstrap interval."""

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1000
ENDS = (0.025, 0.975)
"""Quantiles of the resamples: a 95 % interval."""


def ratio_interval(sums: NDArray[np.float64], seed: int) -> tuple[float, float]:
    """The percentile bootstrap of ``sums[:, 0].sum() / sums[:, 1].sum()`` over the rows.

    The rows, not what they are sums of, are drawn again: what is within a sample goes together.

    Args:
        sums: ``[n, 2]``, one row a sample, none of weight 0, n at least 1.
        seed: Of the draws.

    Returns:
        Lower and upper end.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    totals = np.stack(
        [sums[generator.integers(len(sums), size=len(sums))].sum(axis=0) for _ in range(RESAMPLES)]
    )
    low, high = np.quantile(totals[:, 0] / totals[:, 1], ENDS)
    return float(low), float(high)
