"""A bucket's mask on one device: every step's exact mask in tensors that never move.

Static entries and layouts stay resident; a step copies the rows that its samples chose. Parametric
masks are computed from what the batch says. Both run inside the captured step.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

import maskgen
from maskgen.entry import MaskEntry
from maskgen.mask_mod import spans_mask_mod
from maskgen.tables import TABLE_FIELDS, BlockTables
from runtime.static.attention import Attention, Backend, backend_of, dense_mask
from runtime.static.buffers import Field


class BucketMasks:
    """The masks of one bucket on one device, of any family and kind.

    Args:
        entry: From the cache.
        batch: Rows of a step on this device.
        device: Where the tensors live.
        shapes: Of a parametric entry: runtime parameter -> its shape without the batch.
        backend: How steps attend; that of the device if left out.
    """

    def __init__(
        self,
        entry: MaskEntry,
        batch: int,
        device: torch.device,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        *,
        backend: Backend | None = None,
    ) -> None:
        self.entry = entry
        self.batch = batch
        self.backend = backend or backend_of(device)
        bucket = entry.bucket
        H = 1 if entry.kind == "parametric" else entry.spans.starts.shape[1]
        shape = (batch, H, bucket.K, bucket.Q_LEN)
        self.starts = torch.zeros(shape, dtype=torch.int32, device=device)
        self.ends = torch.zeros(shape, dtype=torch.int32, device=device)
        if shapes is None:
            shapes = {name: tuple(tensor.shape[1:]) for name, tensor in entry.params.items()}
        self.params = {
            name: torch.zeros((batch, *rest), dtype=torch.int32, device=device)
            for name, rest in shapes.items()
        }
        """Runtime parameters of the current mask by name, int32 ``[batch, ...]``."""
        self.tables = BlockTables.empty(
            B=batch,
            H=H,
            Q_LEN=bucket.Q_LEN,
            KV_LEN=bucket.KV_LEN,
            BLOCK_SIZE=bucket.BLOCK_SIZE,
            device=device,
        )
        self._block_mask: BlockMask | None = None
        self._attention: Attention | None = None
        self._resident = {} if entry.kind == "parametric" else self._load(device)
        if entry.kind == "static":
            self._copy(torch.zeros(batch, dtype=torch.int64, device=device))

    @property
    def fields(self) -> dict[str, Field]:
        """What an input slot must carry so that ``update`` can make a batch's masks."""
        if self.entry.kind == "layouts":
            return {"layout": Field((self.batch,), torch.int64)}
        if self.entry.kind == "static":
            return {}
        return {name: Field(tuple(t.shape), torch.int32) for name, t in self.params.items()}

    @property
    def nbytes(self) -> int:
        """Bytes on the device: what is resident, and the mask of the current batch."""
        current = [getattr(self.tables, name) for name in TABLE_FIELDS]
        tensors = [self.starts, self.ends, *self.params.values(), *current]
        return sum(tensor.nbytes for tensor in (*tensors, *self._resident.values()))

    def _load(self, device: torch.device) -> Mapping[str, Tensor]:
        spans, tables = self.entry.spans, self.entry.tables
        resident = {"starts": spans.starts, "ends": spans.ends, **self.entry.params}
        if self.backend.needs_tables:
            resident |= {name: getattr(tables, name) for name in TABLE_FIELDS}
        return {name: tensor.to(device) for name, tensor in resident.items()}

    def _copy(self, rows: Tensor) -> None:
        spans = {"starts": self.starts, "ends": self.ends}
        for name, source in self._resident.items():
            known = self.params.get(name, spans.get(name))
            target = getattr(self.tables, name) if known is None else known
            torch.index_select(source, 0, rows, out=target)

    def update(self, inputs: Mapping[str, Tensor]) -> None:
        """Write a batch's masks into the static tensors.

        Args:
            inputs: Has ``fields``: ``layout`` int64 ``[batch]``, indices into the entry's layouts,
                or each runtime parameter int32 ``[batch, ...]``.
        """
        if self.entry.kind == "static":
            return
        if self.entry.kind == "layouts":
            self._copy(inputs["layout"])
            return
        for name, tensor in self.params.items():
            tensor.copy_(inputs[name])
        spec = self.entry.spec
        maskgen.spans_into(
            self.starts,
            self.ends,
            spec.family,
            KV_LEN=spec.KV_LEN,
            **self.params,
            **spec.family_params,
        )
        if self.backend.needs_tables:
            maskgen.tables_into(self.tables, self.starts, self.ends)

    def block_mask(self) -> BlockMask:
        """Torch's BlockMask over the static tensors."""
        return maskgen.block_mask_over(self.tables, spans_mask_mod(self.starts, self.ends))

    def dense(self) -> Tensor:
        """The current mask, bool ``[batch, H, Q_LEN, KV_LEN]``."""
        return dense_mask(self.starts, self.ends, self.entry.bucket.KV_LEN)

    def mask(self) -> BlockMask | Tensor:
        """The current mask in the form that the device attends with.

        A BlockMask is one object for all steps: compiled code is guarded by what it was given.
        """
        if not self.backend.needs_tables:
            return self.dense()
        if self._block_mask is None:
            self._block_mask = self.block_mask()
        return self._block_mask

    def attention(self) -> Attention:
        """Attention with the current mask; like ``mask``, one object where it reads tables."""
        if not self.backend.needs_tables:
            return self.backend.attend(self.dense())
        if self._attention is None:
            self._attention = self.backend.attend(self.mask())
        return self._attention
