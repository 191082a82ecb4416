"""Which samples are kept out of training."""

import hashlib
from collections.abc import Sequence

from runtime.data.dataset import Sample


def split(
    samples: Sequence[Sample], heldout: int, seed: int, *, file: int | None = None
) -> tuple[list[Sample], list[Sample]]:
    """Keep ``heldout`` samples out of training, chosen by the hash of seed and prompt.

    Args:
        samples: All of them, in any order; identities differ.
        heldout: How many to keep out.
        seed: Keys the choice.
        file: Choose among the samples of this prompt file only; of all files when None.

    Returns:
        Train and held-out samples, each in the order given.
    """
    eligible = [sample for sample in samples if file is None or sample.file == file]
    ranked = sorted(eligible, key=lambda sample: _rank(seed, sample))
    chosen = {sample.identity for sample in ranked[:heldout]}
    return (
        [sample for sample in samples if sample.identity not in chosen],
        [sample for sample in samples if sample.identity in chosen],
    )


def _rank(seed: int, sample: Sample) -> str:
    return hashlib.sha256(f"{seed}:{sample.identity}".encode()).hexdigest()
