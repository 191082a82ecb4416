"""What each code base means by the order of slots and by a sliding window in a DFlash layer."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class SlidingRule:
    """How one code base reads "sliding window" in a DFlash layer."""

    moves: bool
    """The context's lower bound moves with the slot: ``anchor + slot - (W - 1)``, else
    ``anchor - W``."""
    causal: bool
    """A slot sees only itself and the slots before it in its block."""
    within_block: bool
    """The window also bounds the slots of the own block."""


SLIDING_RULES: Final = {
    "specforge": SlidingRule(moves=True, causal=True, within_block=False),
    "speculators": SlidingRule(moves=False, causal=True, within_block=False),
    "speculators_non_causal": SlidingRule(moves=False, causal=False, within_block=False),
    "modelopt": SlidingRule(moves=True, causal=False, within_block=False),
    "nemo": SlidingRule(moves=True, causal=False, within_block=False),
    "sglang": SlidingRule(moves=True, causal=True, within_block=True),
    "vllm": SlidingRule(moves=True, causal=True, within_block=True),
}
"""The sliding conventions by the name of the code that has them."""


def layer_rule(layer: str, in_block: str, convention: str) -> SlidingRule:
    """Return the rule of a layer; a full layer is a sliding one without bounds."""
    rule = SLIDING_RULES[convention]
    if layer == "full":
        rule = SlidingRule(moves=False, causal=False, within_block=False)
    if in_block == "default":
        return rule
    return SlidingRule(rule.moves, in_block == "causal", rule.within_block)
