"""What stands in a data folder beside its samples: looked at, divided anew, written, shown."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from maskgen.progress import say
from runtime.data.dataset import Sample, open_splits, write_dataset
from runtime.data.folder import PREPARE, check_replaceable, read_meta
from runtime.data.split import split
from runtime.errors import DatasetError, NoSamplesError

WRITTEN = {"counts", "dropped", "noted", "places", "split", "target"}
"""What ``meta.json`` must have to be shown again or divided anew."""
DROPPED = "dropped: "
"""How the lines of the closing table begin that count what was left out."""


def kept(folder: Path, keys: Collection[str]) -> dict[str, Any] | None:
    """The ``meta.json`` of a folder that is of one of these keys and whole; None otherwise.

    Raises:
        DatasetError: The folder cannot be read, and holds something else than prepared data.
        LaterFormatError: It holds data of a later release.
    """
    try:
        found = read_meta(folder)
        if found is None or found.get("key") not in keys or not found.keys() >= WRITTEN:
            return None
        # Another process may replace the data between two looks.
        found = dict(open_splits(folder)[0].meta)
    except DatasetError as error:
        check_replaceable(folder)
        say(f"preparing again: {str(error).removesuffix(f'; {PREPARE}')}")
        return None
    return found if found.get("key") in keys and found.keys() >= WRITTEN else None


def write(
    folder: Path,
    samples: Sequence[Sample],
    about: Mapping[str, Any],
    settings: Mapping[str, Any],
    seen: str,
) -> dict[str, Any]:
    """Divide samples into train and held-out ones and write the folder; returns its meta.

    ``seen`` is what stood there when this began.
    """
    asked = settings["heldout"]
    train, heldout = split(samples, asked, settings["seed"], file=settings["heldout_from"])
    if not train:
        raise NoSamplesError(
            f"no sample is left for training: data.heldout keeps {len(heldout)} of {len(samples)} "
            "out",
            about["dropped"],
            about["places"],
        )
    missing = {"held-out samples asked for": asked} if len(heldout) < asked else {}
    meta = {
        **about,
        "split": dict(settings),
        "counts": {
            "records": about["counts"]["records"],
            "train samples": len(train),
            "held-out samples": len(heldout),
            **missing,
            "train tokens": sum(sample.input_ids.numel() for sample in train),
            "train supervised tokens": sum(int(sample.loss_mask.sum()) for sample in train),
        },
    }
    return write_dataset(folder, {"train": train, "heldout": heldout}, meta, seen)


def table(meta: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """The lines of the closing table; ``folder`` is shown as the place of the data."""
    lines: dict[str, Any] = {"folder": folder, "target": meta["target"]["name"], **meta["counts"]}
    lines |= {f"{DROPPED}{reason}": count for reason, count in meta["dropped"].items()}
    lines |= {f"noted: {what}": count for what, count in meta["noted"].items()}
    return lines | {"places": meta["places"]}
