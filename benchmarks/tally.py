"""What one rank of a benchmark did: steps, crashes, and what it waited for."""

import collections
import time
from dataclasses import dataclass, field


@dataclass
class Tally:
    """Counts of one rank."""

    began: float = 0.0
    """When the ranks began together."""
    ended: float = 0.0
    """Seconds after ``began`` when the last step was finished on the device."""
    tokens: list[tuple[float, int]] = field(default_factory=list)
    """(seconds after ``began``, tokens) of every step."""
    crashes: collections.Counter[str] = field(default_factory=collections.Counter)
    waited_s: float = 0.0
    """Before the lock."""
    host_ms: float = 0.0
    """Median host time of a step; 0 where it was not measured."""

    def start(self) -> None:
        """Begin to count."""
        self.began = time.monotonic()

    def passed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def count(self, tokens: int) -> None:
        """Count one step."""
        self.tokens.append((self.passed(), tokens))

    def crash(self, error: Exception) -> None:
        """Count one failed step by the first line of its error."""
        lines = str(error).strip().splitlines()
        self.crashes[f"{type(error).__name__}: {lines[0][:100] if lines else ''}"] += 1

    def finish(self) -> None:
        """Note the end, of what was begun."""
        self.ended = self.passed() if self.began else 0.0

    def rate(self, since: float = 0.0) -> float:
        """Tokens a second from ``since`` to the end."""
        counted = sum(tokens for at, tokens in self.tokens if at >= since)
        return counted / max(self.ended - since, 1e-9)
