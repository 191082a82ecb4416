"""Which anchors a sample trains on: a prebuilt layout, or a draw from its own supervised tokens."""

from dataclasses import dataclass

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


@dataclass(frozen=True)
class LayoutChooser:
    """Chooses one prebuilt anchor layout for a sample of one bucket.

    A layout's anchors are drawn once, offline; a sample takes the group of layouts whose anchors
    fall on its supervised tokens most often, and one draw of that group by the counter.

    Args:
        anchors: int32 ``[L, N]``, ascending in the first ``n_valid``.
        n_valid: int32 ``[L]``.
        draws: Layouts of one group; layout ``l`` belongs to group ``l // draws``.
    """

    anchors: NDArray[np.int32]
    n_valid: NDArray[np.int32]
    draws: int

    def choose(self, loss_mask: NDArray[np.uint8], *, seed: int, epoch: int, sample: int) -> int:
        """Return the layout for this sample in this epoch.

        Args:
            loss_mask: uint8 ``[S]`` with S at most the bucket's context.
            seed: The run's seed.
            epoch: Pass over the data.
            sample: Index of the sample.
        """
        supervised = np.zeros(int(self.anchors.max(initial=0)) + 1, dtype=np.int64)
        candidates = anchor_candidates(loss_mask)
        supervised[candidates[candidates < len(supervised)]] = 1
        live = np.arange(self.anchors.shape[1]) < self.n_valid[:, None]
        useful = (supervised[self.anchors] * live).sum(axis=1)
        group = int(useful.reshape(-1, self.draws).sum(axis=1).argmax())
        word = raw_words(1, key=(seed, LAYOUT_STREAM), counter=(epoch, sample, 0))[0]
        return group * self.draws + int(word % np.uint64(self.draws))


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
