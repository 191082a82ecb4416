"""A bucket's mask entry on one device: every step's exact mask in tensors that never move.

Layouts stay resident, all of them; a step copies the rows that its samples chose. Parametric masks
are computed from the step's anchors. Both run inside the captured step.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

import maskgen
from cache import Store
from cache.advice import how_to_build
from maskgen.entry import MaskEntry, load_entry
from maskgen.errors import MaskSpecError
from maskgen.holdings import entries_by_spec, find_version
from maskgen.mask_mod import spans_mask_mod
from maskgen.mask_spec import MaskSpec
from maskgen.tables import TABLE_FIELDS, BlockTables
from runtime.errors import BucketMissingError
from runtime.static.attention import dense_mask


def entries_name(masks: str, anchors: str) -> str:
    """Name that a run's entries share: ``dflash``, or ``dflash-data`` for data anchors."""
    return f"{masks}-data" if anchors == "data" else masks


def load_buckets(store: Store, specs: Mapping[int, MaskSpec], config: str) -> dict[int, MaskEntry]:
    """Load the entries of a run's buckets, all from one version of the cache.

    The current version is looked at first, then the others, the newest first: another run file that
    shares the cache may have built since.

    Args:
        store: The cache.
        specs: Context -> what the run file asks for.
        config: Path of the run file, named in errors.

    Raises:
        BucketMissingError: No version has these entries; says what builds them.
    """
    found = find_version(store, [spec.digest for spec in specs.values()])
    if found is None:
        raise BucketMissingError(_what_is_missing(store, specs, config))
    version, infos = found
    try:
        return {
            context: load_entry(store, infos[spec.digest].name, version.id)
            for context, spec in specs.items()
        }
    except MaskSpecError as error:
        raise BucketMissingError(
            f"version {version.id[:12]} of {store.location} cannot be read ({error}); "
            f"{how_to_build(store.location)}"
        ) from error


def _what_is_missing(store: Store, specs: Mapping[int, MaskSpec], config: str) -> str:
    """The first mask that the current version lacks, and how it differs from one of its name."""
    current = store.version()
    held = entries_by_spec(current)
    spec = next(spec for spec in specs.values() if spec.digest not in held)
    info = current.entries.get(spec.name)
    build = how_to_build(store.location)
    if info is None:
        return (
            f"the run needs mask {spec.name!r}, and no version in {store.location} holds it with "
            f"the run's others; {build}"
        )
    what = f"mask {spec.name!r} in version {current.id[:12]} of {store.location}"
    try:
        differs = _what_differs(spec, MaskSpec.from_json(spec.name, info.spec))
    except MaskSpecError as error:
        return f"{what} cannot be read ({error}); {build}"
    return f"{what} is another one than {config} asks for: {differs}; {build}"


def _what_differs(asked: MaskSpec, found: MaskSpec) -> str:
    """Lines such as ``draws: asked 8, found 4``."""
    ours, theirs = ({**spec.to_json(), **spec.params} for spec in (asked, found))
    return "; ".join(
        f"{key}: asked {ours.get(key)}, found {theirs.get(key)}"
        for key in {**ours, **theirs}
        if key != "params" and ours.get(key) != theirs.get(key)
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
