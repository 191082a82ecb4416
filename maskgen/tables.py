"""BlockTables: the eight block tables of a FlexAttention mask.

Shape legend: B batch, H heads (1 where the mask does not depend on them), R query block rows,
C KV block columns.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from maskgen import classify
from maskgen.canonical import INT32_MAX
from maskgen.checks import checked_block_size
from maskgen.errors import MaskSpecError
from maskgen.packing import check_agreement, check_pair, live, unpack_pair

TABLE_FIELDS = (
    "kv_num_blocks",
    "kv_indices",
    "full_kv_num_blocks",
    "full_kv_indices",
    "q_num_blocks",
    "q_indices",
    "full_q_num_blocks",
    "full_q_indices",
)
"""Names of the tables, in the order of torch's BlockMask."""

_SIZES = ("B", "H", "Q_LEN", "KV_LEN", "BLOCK_SIZE")


@dataclass(frozen=True, kw_only=True)
class BlockCounts:
    """How many blocks of each kind a mask has, over all B and H."""

    full: int
    """Blocks with every cell visible."""
    partial: int
    """Blocks with some cells visible."""
    empty: int
    """Blocks with none, which attention skips."""

    @property
    def total(self) -> int:
        """All blocks."""
        return self.full + self.partial + self.empty


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BlockTables:
    """The eight block tables of a mask; int32, contiguous, the tail of each index row zero.

    Counts and the first ``num_blocks`` indices of a row equal those of torch's
    ``create_block_mask``. The plain tables list the partial blocks, the ``full_`` ones those
    that need no mask_mod; ``kv_`` tables run over query block rows and ``q_`` ones, their
    transposes, over KV block columns.
    """

    Q_LEN: int
    """Query rows."""
    KV_LEN: int
    """Keys."""
    BLOCK_SIZE: tuple[int, int]
    """Size of a block: (query rows, keys)."""
    kv_num_blocks: Tensor
    """``[B, H, R]``."""
    kv_indices: Tensor
    """``[B, H, R, C]``, ascending."""
    full_kv_num_blocks: Tensor
    """``[B, H, R]``."""
    full_kv_indices: Tensor
    """``[B, H, R, C]``, ascending."""
    q_num_blocks: Tensor
    """``[B, H, C]``."""
    q_indices: Tensor
    """``[B, H, C, R]``, ascending."""
    full_q_num_blocks: Tensor
    """``[B, H, C]``."""
    full_q_indices: Tensor
    """``[B, H, C, R]``, ascending."""
    scratch: Tensor | None = None
    """uint8 ``[B, H, R, C]``, what ``tables_into`` on a GPU works in; it allocates where None."""

    def __post_init__(self) -> None:
        shapes = table_shapes(self.B, self.H, self.Q_LEN, self.KV_LEN, self.BLOCK_SIZE)
        for name, shape in shapes.items():
            table: Tensor = getattr(self, name)
            if table.shape != shape or table.dtype != torch.int32 or not table.is_contiguous():
                found = (tuple(table.shape), table.dtype)
                raise MaskSpecError(name, found, f"must be a contiguous int32 tensor {shape}")
            if table.device != self.device:
                raise MaskSpecError(name, table.device, f"must be on {self.device} as the others")

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={getattr(self, name)}" for name in _SIZES)
        blocks = ""
        # Elsewhere counting would wait for the device, or there is nothing to count.
        if type(self.kv_num_blocks) is Tensor and self.device.type == "cpu":
            blocks = str(self.counts()).removeprefix("BlockCounts").strip("()") + ", "
        return f"BlockTables({sizes}, {blocks}device={str(self.device)!r})"

    @property
    def B(self) -> int:  # noqa: N802
        """Batch size, 1 where the mask does not depend on the batch."""
        return self.kv_num_blocks.shape[0]

    @property
    def H(self) -> int:  # noqa: N802
        """Number of heads, 1 where the mask does not depend on the head."""
        return self.kv_num_blocks.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return self.kv_num_blocks.device

    @property
    def nbytes(self) -> int:
        """Bytes of the eight tables."""
        return sum(table.nbytes for table in self.as_dict().values())

    def as_dict(self) -> dict[str, Tensor]:
        """The eight tables by name, in the order of ``TABLE_FIELDS``."""
        return {name: getattr(self, name) for name in TABLE_FIELDS}

    @classmethod
    def empty(
        cls,
        *,
        B: int = 1,
        H: int = 1,
        Q_LEN: int,
        KV_LEN: int,
        BLOCK_SIZE: int | tuple[int, int] = 128,
        device: torch.device | str = "cpu",
    ) -> "BlockTables":
        """Tables of a mask without a visible cell: static buffers for ``tables_into``.

        Raises:
            MaskSpecError: A size breaks its rule.
        """
        size = checked_block_size("BLOCK_SIZE", BLOCK_SIZE)
        shapes = table_shapes(B, H, Q_LEN, KV_LEN, size)
        tables = {
            name: torch.zeros(shape, dtype=torch.int32, device=device)
            for name, shape in shapes.items()
        }
        scratch = None
        if torch.device(device).type == "cuda":
            scratch = torch.empty(shapes["kv_indices"], dtype=torch.uint8, device=device)
        return cls(Q_LEN=Q_LEN, KV_LEN=KV_LEN, BLOCK_SIZE=size, scratch=scratch, **tables)

    def select(self, batch_index: Tensor) -> "BlockTables":
        """Pick masks of the batch.

        Args:
            batch_index: Which ones, integers ``[n]``.

        Returns:
            Tables of batch n, or ``self`` where B is 1: those hold for every index.
        """
        if self.B == 1:
            return self
        index = batch_index.to(self.device)
        return self._with({n: t.index_select(0, index) for n, t in self.as_dict().items()})

    def to(self, device: torch.device | str) -> "BlockTables":
        """The same tables on another device."""
        return self._with({name: table.to(device) for name, table in self.as_dict().items()})

    def _with(self, tables: dict[str, Tensor]) -> "BlockTables":
        return BlockTables(
            Q_LEN=self.Q_LEN, KV_LEN=self.KV_LEN, BLOCK_SIZE=self.BLOCK_SIZE, **tables
        )

    def counts(self) -> BlockCounts:
        """Number of blocks of each kind, over all B and H."""
        full = int(self.full_kv_num_blocks.sum())
        partial = int(self.kv_num_blocks.sum())
        return BlockCounts(
            full=full, partial=partial, empty=self.kv_indices.numel() - full - partial
        )

    def block_kinds(self) -> Tensor:
        """Kind of each block, uint8 ``[B, H, R, C]``: 0 empty, 1 partial, 2 full."""
        kinds = torch.zeros(self.kv_indices.shape, dtype=torch.uint8, device=self.device)
        for prefix, kind in (("", classify.PARTIAL), ("full_", classify.FULL)):
            listed = live(getattr(self, f"{prefix}kv_num_blocks"), self.kv_indices.shape[-1])
            rows = listed.nonzero()[:, :3].unbind(1)
            columns = getattr(self, f"{prefix}kv_indices")[listed].long()
            kinds[(*rows, columns)] = kind
        return kinds

    def pack(self) -> dict[str, Tensor]:
        """The tables as counts and live indices only, int32 ``[n]`` each, on the CPU.

        Returns:
            By the names of ``TABLE_FIELDS``; ``unpack`` is the inverse.
        """
        packed = {}
        for counts_name, indices_name in zip(TABLE_FIELDS[::2], TABLE_FIELDS[1::2], strict=True):
            counts, indices = getattr(self, counts_name), getattr(self, indices_name)
            packed[counts_name] = counts.reshape(-1).cpu()
            packed[indices_name] = indices[live(counts, indices.shape[-1])].cpu()
        return packed

    @classmethod
    def unpack(
        cls,
        packed: Mapping[str, Tensor],
        *,
        B: int = 1,
        H: int = 1,
        Q_LEN: int,
        KV_LEN: int,
        BLOCK_SIZE: int | tuple[int, int],
    ) -> "BlockTables":
        """Tables from what ``pack`` returned, on the CPU.

        Raises:
            MaskSpecError: A size breaks its rule.
            LayoutInvariantError: A table is missing, its length, a count or an index is out of
                range, the indices of a row do not ascend, a block is both full and partial, or
                the q tables are not the transposes of the kv tables.
        """
        size = checked_block_size("BLOCK_SIZE", BLOCK_SIZE)
        shapes = table_shapes(B, H, Q_LEN, KV_LEN, size)
        pairs = list(zip(TABLE_FIELDS[::2], TABLE_FIELDS[1::2], strict=True))
        for pair in pairs:
            check_pair(packed, *pair, shapes[pair[1]])
        *_, R, C = shapes["kv_indices"]
        check_agreement(packed, (B, H, R, C))
        tables: dict[str, Tensor] = {}
        for pair in pairs:
            tables |= zip(pair, unpack_pair(packed, *pair, shapes[pair[1]]), strict=True)
        return cls(Q_LEN=Q_LEN, KV_LEN=KV_LEN, BLOCK_SIZE=size, **tables)


def table_shapes(
    B: int, H: int, Q_LEN: int, KV_LEN: int, BLOCK_SIZE: tuple[int, int]
) -> dict[str, tuple[int, ...]]:
    """Shape of each table, by name.

    Raises:
        MaskSpecError: A size is below 1, or the tables are too large to address.
    """
    for field, value in (("B", B), ("H", H), ("Q_LEN", Q_LEN), ("KV_LEN", KV_LEN)):
        if not 1 <= value <= INT32_MAX:
            raise MaskSpecError(field, value, "must be at least 1 and below 2**31")
    R, C = -(-Q_LEN // BLOCK_SIZE[0]), -(-KV_LEN // BLOCK_SIZE[1])
    if B * H * R * C > INT32_MAX:
        rule = "B * H * R * C must be below 2**31 (kernels index in 32 bits): use larger blocks"
        raise MaskSpecError("blocks", B * H * R * C, rule)
    by_side = {"kv": ((B, H, R), (B, H, R, C)), "q": ((B, H, C), (B, H, C, R))}
    return {
        name: by_side["q" if name.removeprefix("full_").startswith("q_") else "kv"][i % 2]
        for i, name in enumerate(TABLE_FIELDS)
    }
