"""Integers drawn by a digest, alike on every machine: the batches that certificates try."""

from itertools import pairwise

import numpy as np


class Draw:
    """A stream of integers that depends on a digest alone.

    Raw Philox words only: NumPy keeps their stream for ever, unlike its Generator methods.

    Args:
        digest: SHA-256, as hex digits.
    """

    def __init__(self, digest: str) -> None:
        self._words = np.random.Philox(key=int(digest[:32], 16))

    def below(self, n: int) -> int:
        """Draw one of ``0 .. n - 1``."""
        return int(self._words.random_raw()) % n

    def offsets(self, T: int, documents: int) -> list[int]:
        """Draw ``documents + 1`` starts of packed documents; the last one, up to T, may repeat."""
        marks = sorted({1 + self.below(T) for _ in range(documents)})
        return [0, *marks] + [marks[-1]] * (documents - len(marks))

    def doc_ids(self, T: int, documents: int) -> list[int]:
        """Draw the document of each of T positions, -1 for padding; now and then there is one."""
        bounds = self.offsets(T, 1 + self.below(documents))
        ids = [-1] * T
        for index, (start, end) in enumerate(pairwise(bounds)):
            if self.below(4):
                ids[start:end] = [index] * (end - start)
        return ids
