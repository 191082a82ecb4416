"""maskgen: any FlexAttention mask as row intervals, exact block tables and torch's BlockMask.

    spans = maskgen.causal(4096, 4096) & maskgen.sliding_window(4096, 4096, window=1024)
    tables = maskgen.compile_mask(spans, BLOCK_SIZE=128)
    block_mask = maskgen.to_block_mask(tables, spans, device="cuda")

Names are loaded when they are first used, so that the command line answers without torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maskgen.block_mask import block_mask_over, to_block_mask
    from maskgen.compile import compile_mask, tables_into
    from maskgen.errors import (
        BackendUnavailableError,
        HostBuildForbiddenError,
        LayoutInvariantError,
        MaskgenError,
        MaskSpecError,
        StaleMaskError,
        UnsupportedMaskError,
    )
    from maskgen.families import (
        block_diffusion,
        causal,
        chunked,
        dflash,
        document,
        eagle3_ttt,
        families,
        full,
        global_prefix_window,
        natten,
        p_eagle,
        prefix_lm,
        shared_prefix,
        sink_window,
        sliding_window,
        spans_into,
        tree,
    )
    from maskgen.interval_limit import MAX_INTERVALS
    from maskgen.intervals import RowIntervals
    from maskgen.mask_mod import from_mask_mod, spans_mask_mod
    from maskgen.tables import TABLE_FIELDS, BlockCounts, BlockTables

__all__ = [
    "MAX_INTERVALS",
    "TABLE_FIELDS",
    "BackendUnavailableError",
    "BlockCounts",
    "BlockTables",
    "HostBuildForbiddenError",
    "LayoutInvariantError",
    "MaskSpecError",
    "MaskgenError",
    "RowIntervals",
    "StaleMaskError",
    "UnsupportedMaskError",
    "block_diffusion",
    "block_mask_over",
    "causal",
    "chunked",
    "compile_mask",
    "dflash",
    "document",
    "eagle3_ttt",
    "families",
    "from_mask_mod",
    "full",
    "global_prefix_window",
    "natten",
    "p_eagle",
    "prefix_lm",
    "shared_prefix",
    "sink_window",
    "sliding_window",
    "spans_into",
    "spans_mask_mod",
    "tables_into",
    "to_block_mask",
    "tree",
]

_HOME = {
    "block_mask": ("block_mask_over", "to_block_mask"),
    "compile": ("compile_mask", "tables_into"),
    "errors": tuple(name for name in __all__ if name.endswith("Error")),
    "interval_limit": ("MAX_INTERVALS",),
    "intervals": ("RowIntervals",),
    "mask_mod": ("from_mask_mod", "spans_mask_mod"),
    "tables": ("TABLE_FIELDS", "BlockCounts", "BlockTables"),
}
# What has no other home is a family, or about families.
_MODULE_OF = dict.fromkeys(__all__, "maskgen.families") | {
    name: f"maskgen.{module}" for module, names in _HOME.items() for name in names
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'maskgen' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps ``maskgen.families`` the mapping: importing the subpackage would bind its module."""

    @property
    def families(self) -> Any:
        return import_module("maskgen.families").families

    @families.setter
    def families(self, module: ModuleType) -> None:
        pass


sys.modules[__name__].__class__ = _Package
