"""Which anchors a sample trains on: a prebuilt layout, or a draw from its own supervised tokens."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.data.draws import raw_words

LAYOUT_STREAM = 1
ANCHOR_STREAM = 2


def anchor_candidates(loss_mask: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Positions that an anchor may take: supervised, and followed by a supervised token.

    Args:
        loss_mask: uint8 ``[S]``, 1 where a token is trained on.

    Returns:
        int64 ``[M]``, ascending.
    """
    return np.flatnonzero(loss_mask[:-1] & loss_mask[1:])


class LayoutChooser:
    """Chooses one prebuilt anchor layout for a sample of one bucket.

    A layout's anchors are drawn once, offline, from a window. A sample takes the window in which
    most of its candidates lie, and of several the shortest: each of its supervised tokens is then
    an anchor as often as any other. A window inside of the answer would waste no anchor, but where
    answers begin and end would never be trained. Each epoch takes the window's next draw.

    Args:
        windows: First position and one past the last of each group of layouts, see
            ``maskgen.families.answer_windows``.
        draws: Layouts of one group; layout ``l`` belongs to group ``l // draws``.
    """

    def __init__(self, windows: Sequence[tuple[int, int]], draws: int) -> None:
        self.windows = np.array(windows, dtype=np.int64)
        self.draws = draws

    def choose(self, loss_mask: NDArray[np.uint8], *, seed: int, epoch: int, sample: int) -> int:
        """Return the layout for this sample in this epoch.

        Args:
            loss_mask: uint8 ``[S]`` with S at most the bucket's context.
            seed: The run's seed.
            epoch: Pass over the data.
            sample: Index of the sample.
        """
        starts, ends = self.windows.T
        candidates = anchor_candidates(loss_mask)
        useful = np.searchsorted(candidates, ends) - np.searchsorted(candidates, starts)
        group = int(np.lexsort((ends - starts, -useful))[0])
        first = raw_words(1, key=(seed, LAYOUT_STREAM), counter=(0, sample, 0))[0]
        return group * self.draws + (int(first) + epoch) % self.draws


def draw_anchors(
    loss_mask: NDArray[np.uint8], count: int, *, seed: int, epoch: int, sample: int
) -> tuple[NDArray[np.int32], int]:
    """Draw a sample's anchors from its own supervised tokens, without replacement.

    Returns:
        int32 ``[count]``, ascending in the first ``n`` and 0 after, and ``n``.
    """
    candidates = anchor_candidates(loss_mask)
    keys = raw_words(len(candidates), key=(seed, ANCHOR_STREAM), counter=(epoch, sample, 0))
    chosen = np.sort(candidates[np.argsort(keys, kind="stable")[:count]])
    anchors = np.zeros(count, dtype=np.int32)
    anchors[: len(chosen)] = chosen
    return anchors, len(chosen)
