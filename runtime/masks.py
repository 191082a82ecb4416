"""A bucket's mask entry on one device: every step's exact mask in tensors that never move.

Layouts stay resident, all of them; a step copies the rows that its samples chose. Parametric masks
are computed from the step's anchors. Both run inside the captured step.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

import maskgen
from cache import Store
from cache.archive import ZipSource
from cache.errors import EntryNotFoundError
from cache.source import FolderSource
from maskgen.entry import MaskEntry, load_entry
from maskgen.errors import MaskSpecError
from maskgen.mask_mod import spans_mask_mod
from maskgen.spec import MaskSpec
from maskgen.tables import TABLE_FIELDS, BlockTables
from runtime.attention import dense_mask
from runtime.errors import BucketMissingError


def entries_name(masks: str, anchors: str) -> str:
    """Name that a run's entries share: ``dflash``, or ``dflash-data`` for data anchors."""
    return f"{masks}-data" if anchors == "data" else masks


def load_bucket(store: Store, spec: MaskSpec, config: str) -> MaskEntry:
    """Load the entry of one bucket, as the run file asks for it.

    Args:
        store: The cache.
        spec: What the run file asks for.
        config: Path of the run file, named in errors.

    Raises:
        BucketMissingError: The cache has no such entry, or one of other parameters; says what
            builds it.
    """
    try:
        entry = load_entry(store, spec.name)
    except MaskSpecError as error:
        raise BucketMissingError(
            f"mask {spec.name!r} in {store.location} cannot be read ({error}); "
            f"{_how_to_build(store, config)}"
        ) from error
    except EntryNotFoundError as error:
        raise BucketMissingError(
            f"the run needs mask {spec.name!r}, and {store.location} does not hold it; "
            f"{_how_to_build(store, config)}"
        ) from error
    if entry.spec.digest != spec.digest:
        raise BucketMissingError(
            f"mask {spec.name!r} in {store.location} is another one than {config} asks for: "
            f"{_what_differs(spec, entry.spec)}; {_how_to_build(store, config)}"
        )
    return entry


def _what_differs(asked: MaskSpec, found: MaskSpec) -> str:
    """Lines such as ``draws: asked 8, found 4``."""
    ours, theirs = ({**spec.to_json(), **spec.params} for spec in (asked, found))
    return "; ".join(
        f"{key}: asked {ours.get(key)}, found {theirs.get(key)}"
        for key in {**ours, **theirs}
        if key != "params" and ours.get(key) != theirs.get(key)
    )


def _how_to_build(store: Store, config: str) -> str:
    if isinstance(store.source, FolderSource):
        return f"run: make masks CONFIG={config}"
    location, folder, ship = shlex.quote(store.location), "masks.zarr", "push"
    if isinstance(store.source, ZipSource):
        folder, ship = shlex.quote(str(Path(store.location).with_suffix(".zarr"))), "pack"
    return (
        f"nothing is built into a zip or a URL: set masks.cache to a folder that ends in .zarr and "
        f"run: make masks CONFIG={config}; or run: python -m maskgen build {config} --cache "
        f"{folder} && python -m maskgen {ship} {location} --cache {folder}"
    )


class BucketMasks:
    """The masks of one bucket on one device.

    Args:
        entry: Layouts or parametric, family dflash.
        batch: Samples of a step on this device.
        device: Where the tensors live.
    """

    def __init__(self, entry: MaskEntry, batch: int, device: torch.device) -> None:
        self.entry = entry
        self.batch = batch
        bucket = entry.bucket
        self.draft_block_size = int(entry.spec.params["draft_block_size"])
        self.num_anchors = bucket.Q_LEN // self.draft_block_size
        shape = (batch, 1, bucket.K, bucket.Q_LEN)
        self.starts = torch.zeros(shape, dtype=torch.int32, device=device)
        self.ends = torch.zeros(shape, dtype=torch.int32, device=device)
        self.anchors = torch.zeros((batch, self.num_anchors), dtype=torch.int32, device=device)
        self.n_valid = torch.zeros(batch, dtype=torch.int32, device=device)
        self.tables = BlockTables.empty(
            B=batch,
            H=1,
            Q_LEN=bucket.Q_LEN,
            KV_LEN=bucket.KV_LEN,
            BLOCK_SIZE=bucket.BLOCK_SIZE,
            device=device,
        )
        self._uses_tables = device.type == "cuda"
        self._resident = self._load_layouts(device) if entry.kind == "layouts" else {}

    def _load_layouts(self, device: torch.device) -> Mapping[str, Tensor]:
        spans = self.entry.spans
        resident = {
            "starts": spans.starts,
            "ends": spans.ends,
            "anchors": self.entry.params["anchors"],
            "n_valid": self.entry.params["n_valid"],
        }
        if self._uses_tables:
            tables = self.entry.tables
            resident |= {name: getattr(tables, name) for name in TABLE_FIELDS}
        return {name: tensor.to(device) for name, tensor in resident.items()}

    def use_layouts(self, layout: Tensor) -> None:
        """Copy the chosen layouts into the static tensors.

        Args:
            layout: int64 ``[batch]``, indices into the entry's layouts.
        """
        for name, source in self._resident.items():
            target = getattr(self.tables if name in TABLE_FIELDS else self, name)
            torch.index_select(source, 0, layout, out=target)

    def use_anchors(self, anchors: Tensor, n_valid: Tensor) -> None:
        """Compute spans and exact tables of given anchors in the static tensors.

        Args:
            anchors: int32 ``[batch, N]``, ascending in the first ``n_valid``.
            n_valid: int32 ``[batch]``.
        """
        self.anchors.copy_(anchors)
        self.n_valid.copy_(n_valid)
        spec = self.entry.spec
        maskgen.spans_into(
            self.starts,
            self.ends,
            spec.family,
            KV_LEN=spec.KV_LEN,
            anchors=self.anchors,
            n_valid=self.n_valid,
            **spec.family_params,
        )
        if self._uses_tables:
            maskgen.tables_into(self.tables, self.starts, self.ends)

    def block_mask(self) -> BlockMask:
        """Torch's BlockMask over the static tensors."""
        return maskgen.block_mask_over(self.tables, spans_mask_mod(self.starts, self.ends))

    def dense(self) -> Tensor:
        """The current mask, bool ``[batch, 1, Q_LEN, KV_LEN]``."""
        return dense_mask(self.starts, self.ends, self.entry.bucket.KV_LEN)
