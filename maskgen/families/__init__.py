"""Mask families: each turns named parameters into row intervals."""

from maskgen.families.after_context import AfterContext
from maskgen.families.block_diffusion import block_diffusion
from maskgen.families.causal import causal
from maskgen.families.chunked import chunked
from maskgen.families.dflash import dflash
from maskgen.families.document import document
from maskgen.families.eagle3_ttt import eagle3_ttt
from maskgen.families.family import Family
from maskgen.families.full import full
from maskgen.families.global_prefix_window import global_prefix_window
from maskgen.families.layouts import Layouts
from maskgen.families.natten import natten
from maskgen.families.p_eagle import p_eagle
from maskgen.families.params import Param, RuntimeParam
from maskgen.families.prefix_lm import prefix_lm
from maskgen.families.registry import families, spans_into
from maskgen.families.shared_prefix import shared_prefix
from maskgen.families.sink_window import sink_window
from maskgen.families.sliding_window import sliding_window
from maskgen.families.tree import tree

__all__ = [
    "AfterContext",
    "Family",
    "Layouts",
    "Param",
    "RuntimeParam",
    "block_diffusion",
    "causal",
    "chunked",
    "dflash",
    "document",
    "eagle3_ttt",
    "families",
    "full",
    "global_prefix_window",
    "natten",
    "p_eagle",
    "prefix_lm",
    "shared_prefix",
    "sink_window",
    "sliding_window",
    "spans_into",
    "tree",
]
