"""What an evaluation found, as plain values: per drafter, and both beside the target alone."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from runtime.training.metrics import strict

TIE: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 0.5}
"""Largest difference of two logits, by dtype, that the rounding of calls of different lengths can
turn around; a few roundings of a logit of about 20."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """One answer whose speculative text left the target's greedy text."""

    prompt: int
    """Held-out sample."""
    position: int
    """Token of the answer, from 0."""
    speculative: int | None
    """Token id there; None where the text had ended."""
    greedy: int | None
    """Token id there; None where the text had ended."""
    gap: float | None
    """Largest amount by which any token of the speculative text is below the best logit; None
    (endless, which JSON cannot say) where one text is the beginning of the other: both end by the
    same rule, so that a missing token is never a tie."""

    def is_tie(self, dtype: str) -> bool:
        """Whether rounding in this dtype alone can have parted the texts."""
        return self.gap is not None and self.gap <= TIE[dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterScore:
    """What one drafter reached."""

    tau: float
    """Tokens per target call after prefill, bonus included."""
    target_calls: int
    new_tokens: int
    """Of those calls; the first token of each answer comes from prefill."""
    kept: tuple[int, ...]
    """Calls that gave 1, 2, .. tokens, up to the anchor's and all drafts."""
    acceptance: tuple[float, ...]
    """Share of calls that kept the first draft, the second, ..; falls from slot to slot."""
    tokens_per_s: float
    """After prefill."""
    mismatches: tuple[Mismatch, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationResult:
    """Trained and untrained drafter on the same held-out prompts."""

    prompts: int
    """Held-out samples scored."""
    without_prompt: int
    """Held-out samples left out, for want of a prompt."""
    repetitive: int
    """Held-out samples left out, as the target's answer repeats itself and flatters any drafter."""
    max_new_tokens: int
    draft_block_size: int
    device: str
    dtype: str
    greedy_tokens_per_s: float
    """The target alone, one token a call, on the prompts that are compared."""
    trained: DrafterScore
    untrained: DrafterScore
    same_target: bool | None = None
    """Whether the drafter was trained for this very target; None where its folder does not say."""
    compared: int = 0
    """The first of these prompts, which the untrained drafter and the target alone answered, too,
    one at a time: all speeds are of them. 0 for all."""
    confidence: float = 0.0
    """Below which the trained drafter's blocks were cut; 0 where they were not."""

    @property
    def mismatches(self) -> tuple[Mismatch, ...]:
        """Of both drafters."""
        return (*self.untrained.mismatches, *self.trained.mismatches)

    @property
    def exact(self) -> bool:
        """Whether every speculative text is the greedy one, but for ties within rounding."""
        return all(mismatch.is_tie(self.dtype) for mismatch in self.mismatches)

    @property
    def ends(self) -> dict[str, tuple[float, float]]:
        """Tau before the first step and after the last."""
        return {"tau": (self.untrained.tau, self.trained.tau)}

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as ``evaluate.json`` has them."""
        values: dict[str, Any] = strict({**asdict(self), "exact": self.exact})
        return values

    def table(self) -> str:
        """A short table for people."""
        pairs = [
            ("tau", [f"{score.tau:.3f}" for score in self._scores]),
            *(
                (
                    f"slot {slot} kept",
                    [f"{score.acceptance[slot - 1]:.1%}" for score in self._scores],
                )
                for slot in range(1, 1 + len(self.trained.acceptance))
            ),
            ("target calls", [str(score.target_calls) for score in self._scores]),
            ("tokens/s", [f"{score.tokens_per_s:.1f}" for score in self._scores]),
            ("mismatches", [str(len(score.mismatches)) for score in self._scores]),
        ]
        if 0 < self.compared < self.prompts:
            pairs.insert(0, ("prompts", [str(self.compared), str(self.prompts)]))
        lines = [f"{'':16} {'untrained':>10} {'trained':>10}"]
        lines += [f"{name:16} {first:>10} {second:>10}" for name, (first, second) in pairs]
        lines.append(
            f"{self.prompts} held-out prompts, {self.trained.new_tokens} tokens; left out: "
            f"{self.repetitive} repetitive, {self.without_prompt} without a prompt"
        )
        lines.append(
            f"the target alone: {self.greedy_tokens_per_s:.1f} tokens/s "
            f"({self.device}, {self.dtype})"
        )
        lines.append(
            "tau: tokens that a call of the target gives, 1 without drafts; slot k kept: calls "
            "that kept k drafts"
        )
        if self.confidence:
            lines.append(f"trained: blocks were cut before drafts below {self.confidence:g}")
        lines += self._speed_explained()
        lines.append(
            "for a larger tau: first more prompts of more kinds (data.prompts), then more steps "
            "(train.steps)"
        )
        if self.same_target is False:
            lines.append("the drafter was trained for another target than this one")
        lines += [
            f"mismatch: prompt {m.prompt}, token {m.position}: {m.speculative} instead of "
            f"{m.greedy}, {_shown(m.gap)}"
            for m in self.mismatches
        ]
        return "\n".join(lines)

    def _speed_explained(self) -> list[str]:
        """What the trained drafter's speed is beside the target's, and why."""
        alone, drafting = self.greedy_tokens_per_s, self.trained.tokens_per_s
        if not alone or not drafting:
            return []
        cost = self.trained.tau * alone / drafting
        said = f"a draft and its check take {cost:.2f} calls of the target alone"
        if drafting >= alone:
            return [f"{said} and give tau tokens: {drafting / alone:.2f} times as fast"]
        return [
            f"{said}, so drafts cost more time here than they save until tau is above that; beside "
            "a larger target they take little more than 1"
        ]

    @property
    def _scores(self) -> tuple[DrafterScore, DrafterScore]:
        return self.untrained, self.trained


def _shown(gap: float | None) -> str:
    if gap is None:
        return "one text is the beginning of the other"
    return f"worst logit {gap:.3g} below the best"
