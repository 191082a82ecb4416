"""Counter-based draws: the same numbers for any device count, any resume, any NumPy.

Only Philox's raw 64-bit words are used: their stream is fixed by the algorithm, while those of
``numpy.random.Generator``'s methods may change between releases.
"""

import numpy as np
from numpy.typing import NDArray


def raw_words(
    count: int, *, key: tuple[int, int], counter: tuple[int, int, int]
) -> NDArray[np.uint64]:
    """Draw ``count`` 64-bit words.

    Args:
        count: Words to draw.
        key: What the stream belongs to, such as (seed, purpose).
        counter: Where in it, such as (epoch, sample, 0).

    Returns:
        uint64 ``[count]``.
    """
    words = np.array([0, *counter], dtype=np.uint64)
    bits = np.random.Philox(key=np.array(key, dtype=np.uint64), counter=words)
    return np.asarray(bits.random_raw(count), dtype=np.uint64)


def permutation(
    count: int, *, key: tuple[int, int], counter: tuple[int, int, int]
) -> NDArray[np.int64]:
    """Draw a permutation of ``range(count)``, int64 ``[count]``."""
    return np.argsort(raw_words(count, key=key, counter=counter), kind="stable")
