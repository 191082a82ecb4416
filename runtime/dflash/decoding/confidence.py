"""The least confidence that a draft is verified with, and which drafters can say theirs."""

from runtime.dflash.network.config import DrafterConfig
from runtime.errors import ConfigError


def check_confidence(network: DrafterConfig, confidence: float, where: str = "confidence") -> None:
    """Refuse to cut blocks by what a drafter does not say.

    Args:
        network: The drafter's.
        confidence: See ``DraftSession``.
        where: What the user calls it, named in errors.

    Raises:
        ConfigError: It is not in [0, 1], or above 0 without a confidence head.
    """
    if not 0 <= confidence <= 1:
        raise ConfigError(where, confidence, "must be in [0, 1]")
    if confidence and not network.confidence_head:
        rule = "must be 0 for a drafter without a confidence head, which drafter.confidence trains"
        raise ConfigError(where, confidence, rule)
