"""Tables and spans to torch's BlockMask: the only file that touches fields of that class.

The constructor is given finished tables, so nothing is traced, sorted or mapped here.
"""

import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.torch_version import TorchVersion

from maskgen import host_builds
from maskgen.errors import MaskSpecError, UnsupportedMaskError
from maskgen.families.family import MaskMod
from maskgen.intervals import RowIntervals
from maskgen.mask_mod import spans_mask_mod
from maskgen.tables import BlockTables


def to_block_mask(
    tables: BlockTables,
    spans: RowIntervals,
    device: torch.device | str | None = None,
    mask_mod: MaskMod | None = None,
) -> BlockMask:
    """Build torch's BlockMask of a compiled mask.

    Args:
        tables: Exact tables of the mask.
        spans: The mask itself.
        device: Where the BlockMask is to be; None for the device of the tables.
        mask_mod: Evaluated in partial blocks; None for the one that reads ``spans``. A mask_mod
            of its own must equal the spans, and its captured tensors must be on ``device``.

    Returns:
        A BlockMask with all eight tables, for forward and backward.

    Raises:
        MaskSpecError: Spans and tables are not of one mask's shape.
        UnsupportedMaskError: The torch in use cannot run this BLOCK_SIZE or length on a GPU, or
            has none.
    """
    host_builds.announce("to_block_mask")
    for field in ("B", "H", "Q_LEN", "KV_LEN"):
        found, wanted = getattr(spans, field), getattr(tables, field)
        if found != wanted and not (field in "BH" and 1 in (found, wanted)):
            raise MaskSpecError(f"spans.{field}", found, f"the tables have {field}={wanted}")
    device = tables.device if device is None else torch.device(device)
    if device.type == "cuda":
        check_gpu_limits(tables.BLOCK_SIZE, tables.Q_LEN, tables.KV_LEN, torch.__version__)
        if not torch.cuda.is_available():
            raise UnsupportedMaskError(
                f"device must be one that torch can use here, but it is {device} and torch "
                f"{torch.__version__} has no GPU: leave device out, or install a CUDA build"
            )
    if tables.device != device:
        tables = tables.to(device)
    if mask_mod is None:
        spans = spans if spans.device == device else spans.to(device)
        mask_mod = spans_mask_mod(spans.starts, spans.ends)
    return block_mask_over(tables, mask_mod)


def block_mask_over(tables: BlockTables, mask_mod: MaskMod) -> BlockMask:
    """Wrap tables and a mask_mod as they are: for static buffers, also inside a captured step.

    Nothing is copied, moved or read. The BlockMask reads the very tensors of ``tables``, so tables
    written in place later are those that the next attention uses; a captured graph does not keep
    them alive, its owner must.

    Raises:
        UnsupportedMaskError: The torch in use cannot run this BLOCK_SIZE or length on a GPU.
    """
    if tables.device.type == "cuda":
        check_gpu_limits(tables.BLOCK_SIZE, tables.Q_LEN, tables.KV_LEN, torch.__version__)
    return BlockMask(
        seq_lengths=(tables.Q_LEN, tables.KV_LEN),
        kv_num_blocks=tables.kv_num_blocks,
        kv_indices=tables.kv_indices,
        full_kv_num_blocks=tables.full_kv_num_blocks,
        full_kv_indices=tables.full_kv_indices,
        q_num_blocks=tables.q_num_blocks,
        q_indices=tables.q_indices,
        full_q_num_blocks=tables.full_q_num_blocks,
        full_q_indices=tables.full_q_indices,
        BLOCK_SIZE=tables.BLOCK_SIZE,
        mask_mod=mask_mod,
    )


def check_gpu_limits(
    BLOCK_SIZE: tuple[int, int], Q_LEN: int, KV_LEN: int, torch_version: str
) -> None:
    """Refuse what the compiled attention of a torch version cannot run on a GPU.

    Args:
        BLOCK_SIZE: Block size (query rows, keys).
        Q_LEN: Query rows.
        KV_LEN: Keys.
        torch_version: As in ``torch.__version__``.

    Raises:
        UnsupportedMaskError: Naming the rule and the version.

    Source: the lowering of flex_attention in torch 2.11 to 2.14,
    ``torch/_inductor/kernel/flex/flex_attention.py``.
    """
    if TorchVersion(torch_version) >= TorchVersion("2.14"):
        return
    if any(size % 128 for size in BLOCK_SIZE):
        raise UnsupportedMaskError(
            f"both sizes of BLOCK_SIZE must be multiples of 128 on a GPU with torch below 2.14 "
            f"(its default backward tiles are 64 x 128 and 128 x 64), but BLOCK_SIZE is "
            f"{BLOCK_SIZE} and torch {torch_version}: compile the mask with BLOCK_SIZE=128"
        )
    # Bounds checks are left out there when both lengths are multiples of 128, although a larger
    # block then reaches beyond the end.
    ragged = Q_LEN % BLOCK_SIZE[0] or KV_LEN % BLOCK_SIZE[1]
    if ragged and Q_LEN % 128 == 0 and KV_LEN % 128 == 0:
        raise UnsupportedMaskError(
            f"lengths that are multiples of 128 must be multiples of BLOCK_SIZE too on a GPU with "
            f"torch below 2.14 (it leaves out bounds checks), but Q_LEN={Q_LEN}, KV_LEN={KV_LEN}, "
            f"BLOCK_SIZE={BLOCK_SIZE} and torch {torch_version}: compile with BLOCK_SIZE=128"
        )
