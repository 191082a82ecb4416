"""Draft and verify: greedy speculative decoding, token for token the target's own greedy text.

A draft block is drafted from the context strictly before its anchor, the newest known token. One
target call over the block verifies it: drafts are kept up to the first that differs from the
target's own choice, which then is the next anchor (the bonus token). The same call yields the
features of the kept tokens, the next context.

A drafter with a Markov head runs once over the block, too, and then chooses slot by slot, as each
choice adds to the logits of the next slot. With a confidence head the block may be cut before the
first draft that is unlikely to be kept, which saves the target its rows.

Both decoders run one sequence and make the same kind of call, so that their speeds compare.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from runtime.dflash.decoding.block import DraftedBlock, draft_block
from runtime.dflash.decoding.confidence import check_confidence
from runtime.dflash.network.drafter import Drafter, KeyValue
from runtime.errors import CheckpointError, ConfigError
from runtime.target.model import Target


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoded:
    """One answer and what it cost."""

    tokens: tuple[int, ...]
    """New tokens, the end-of-text token included where one came."""
    kept: tuple[int, ...]
    """New tokens of each target call after prefill; prefill itself gives the first token."""
    seconds: float
    """Time after prefill."""

    @property
    def tau(self) -> float:
        """Mean new tokens of a target call after prefill, bonus included; 0 without a call."""
        return sum(self.kept) / len(self.kept) if self.kept else 0.0


class _Sequence:
    """One sequence in the target's key-value cache.

    Args:
        target: The target.
        layer_ids: Layers whose outputs each call returns.
    """

    def __init__(self, target: Target, layer_ids: Sequence[int] = ()) -> None:
        self._target = target
        self._layer_ids = layer_ids
        # Without a config every layer keeps all its keys, so that sliding ones can be rewound too.
        self._cache = DynamicCache()
        self.length = 0
        """Tokens in the cache."""

    def extend(self, tokens: Tensor, *, last_only: bool = False) -> tuple[Tensor, Tensor]:
        """Run the target over the next tokens.

        Args:
            tokens: int64 ``[T]``.
            last_only: Choose after the last token only.

        Returns:
            The target's choices after each token, int64 ``[T]`` (``[1]`` with ``last_only``), and
            the features ``[1, T, K*H]`` (K is 0 without ``layer_ids``).
        """
        logits, features = self._target.extend(
            tokens[None], self._cache, layer_ids=self._layer_ids, last_only=last_only
        )
        self.length += tokens.shape[0]
        if features is None:
            features = logits.new_empty(1, tokens.shape[0], 0)
        return logits[0].argmax(dim=-1), features

    def rewind(self, count: int) -> None:
        """Forget the last ``count`` tokens."""
        if count:
            # A negative count means the same in every transformers 5.
            self._cache.crop(-count)
            self.length -= count


class DraftSession:
    """Greedy draft-and-verify decoding with one target and one drafter.

    Args:
        target: The target.
        drafter: Takes raw features (``export.servable``), on the target's device.
        confidence: In [0, 1]: a block is cut before the first draft whose confidence is below it;
            0 never cuts.

    Raises:
        CheckpointError: The drafter was made for a target of other sizes.
        ConfigError: ``confidence`` is no such number, or the drafter has no confidence head.
    """

    def __init__(self, target: Target, drafter: Drafter, *, confidence: float = 0.0) -> None:
        _check_fits(target, drafter)
        check_confidence(drafter.config, confidence)
        self._target = target
        self._drafter = drafter
        self._reach = drafter.config.reach
        self._confidence = confidence

    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int) -> Decoded:
        """Answer a prompt; see ``stream``."""
        return _collect(self.stream(prompt_ids, max_new_tokens))

    def stream(self, prompt_ids: Sequence[int], max_new_tokens: int) -> Iterator[list[int]]:
        """Yield new tokens: one after prefill, then those of each target call.

        Stops at an end-of-text token or at ``max_new_tokens``.

        Raises:
            ConfigError: The prompt is empty, or too long for the target with its answer.
        """
        _check_room(self._target, prompt_ids, max_new_tokens, self._reach)
        return self._stream(prompt_ids, max_new_tokens)

    @torch.inference_mode()
    def _stream(self, prompt_ids: Sequence[int], max_new_tokens: int) -> Iterator[list[int]]:
        ends = set(self._target.eos_token_ids)
        target, chosen, context = self._prefill(prompt_ids)
        anchor = int(chosen[0])
        room = max_new_tokens - 1
        yield [anchor]
        while room > 0 and anchor not in ends:
            position = target.length
            drafts = self._draft(chosen[-1:], position, context).argmax(dim=-1)
            block = torch.cat((chosen[-1:], drafts))
            chosen, features = target.extend(block)
            accepted = int((drafts == chosen[:-1]).cumprod(dim=0).sum())
            chosen = chosen[: accepted + 1]
            target.rewind(len(drafts) - accepted)
            context = self._extend(context, features, position, accepted + 1)
            new = _until_end(chosen.tolist(), ends)[:room]
            anchor = new[-1]
            room -= len(new)
            yield new

    @torch.inference_mode()
    def first_block(self, prompt_ids: Sequence[int]) -> Tensor:
        """Logits of the first draft block after a prompt: those of a server must be the same.

        Returns:
            ``[drafts, V]``, that of the token after the anchor first; with a Markov head those
            along the drafts, each the largest logit of its slot. Nothing is cut.
        """
        _check_room(self._target, prompt_ids, 1, self._reach)
        target, chosen, context = self._prefill(prompt_ids)
        return self._block_at(chosen, target.length, context).logits

    def _prefill(self, prompt_ids: Sequence[int]) -> tuple[_Sequence, Tensor, list[KeyValue]]:
        """The target's cache of a prompt, its first token, int64 ``[1]``, and the context."""
        prompt = torch.tensor(prompt_ids, dtype=torch.int64, device=self._target.device)
        target = _Sequence(self._target, self._drafter.config.target_layer_ids)
        chosen, features = target.extend(prompt, last_only=True)
        return target, chosen, self._extend(None, features, 0)

    def _draft(self, anchor: Tensor, position: int, context: list[KeyValue]) -> Tensor:
        """Logits at ``position + 1`` and after, ``[n, V]``, up to the first draft in doubt."""
        block = self._block_at(anchor, position, context)
        if not self._confidence:
            return block.logits
        assert block.confidence is not None, "the drafter has a confidence head, checked above"
        sure = block.confidence >= self._confidence
        return block.logits[: int(sure.cumprod(dim=0).sum())]

    def _block_at(self, anchor: Tensor, position: int, context: list[KeyValue]) -> DraftedBlock:
        target = self._target
        return draft_block(
            self._drafter,
            anchor,
            position,
            context,
            embed_weight=target.embed_weight,
            head_weight=target.head_weight,
        )

    def _extend(
        self,
        context: list[KeyValue] | None,
        features: Tensor,
        position: int,
        count: int | None = None,
    ) -> list[KeyValue]:
        """Project the first ``count`` new features and append them to the drafter's cache."""
        with torch.autocast(features.device.type, enabled=False):
            F = self._drafter.fuse(features[:, :count])
            positions = torch.arange(position, position + F.shape[1], device=F.device)
            new = list(self._drafter.context(F, positions))
        if context is None:
            return new
        return [
            (torch.cat((k, new_k), dim=2), torch.cat((v, new_v), dim=2))
            for (k, v), (new_k, new_v) in zip(context, new, strict=True)
        ]


def greedy(target: Target, prompt_ids: Sequence[int], max_new_tokens: int) -> Decoded:
    """The target's own greedy answer, one token a call.

    Raises:
        ConfigError: The prompt is empty, or too long for the target with its answer.
    """
    _check_room(target, prompt_ids, max_new_tokens, 0)
    return _collect(_greedy(target, prompt_ids, max_new_tokens))


@torch.inference_mode()
def _greedy(target: Target, prompt_ids: Sequence[int], max_new_tokens: int) -> Iterator[list[int]]:
    ends = set(target.eos_token_ids)
    tokens = torch.tensor(prompt_ids, dtype=torch.int64, device=target.device)
    cached = _Sequence(target)
    for _ in range(max_new_tokens):
        tokens, _features = cached.extend(tokens, last_only=True)
        token = int(tokens[0])
        yield [token]
        if token in ends:
            return


def choice_gap(target: Target, prompt_ids: Sequence[int], answer: Sequence[int]) -> float:
    """How far an answer is from greedy: its worst token's logit below the largest one.

    One call over prompt and answer together, so rounding differs from decoding: a gap of a few
    roundings of a logit is a tie.
    """
    ids = torch.tensor([*prompt_ids, *answer], dtype=torch.int64, device="cpu")
    with torch.no_grad():
        logits = target.logits(ids[None].to(target.device))[0].float()
    rows = logits[len(prompt_ids) - 1 : -1]
    picked = rows.gather(1, ids[len(prompt_ids) :, None].to(rows.device))[:, 0]
    return float((rows.max(dim=-1).values - picked).max())


def _collect(stream: Iterator[list[int]]) -> Decoded:
    tokens = list(next(stream))
    kept = []
    start = time.perf_counter()
    for new in stream:
        tokens += new
        kept.append(len(new))
    seconds = time.perf_counter() - start
    return Decoded(tokens=tuple(tokens), kept=tuple(kept), seconds=seconds)


def _until_end(tokens: list[int], ends: set[int]) -> list[int]:
    """Cut after the first end-of-text token."""
    for index, token in enumerate(tokens):
        if token in ends:
            return tokens[: index + 1]
    return tokens


def _check_room(
    target: Target, prompt_ids: Sequence[int], max_new_tokens: int, draft_block_size: int
) -> None:
    if not prompt_ids:
        raise ConfigError("prompt", prompt_ids, "must hold at least one token")
    limit = target.max_positions
    if limit is not None and len(prompt_ids) + max_new_tokens + draft_block_size > limit:
        raise ConfigError(
            "max_new_tokens",
            max_new_tokens,
            f"must leave prompt ({len(prompt_ids)} tokens), answer and a draft block "
            f"({draft_block_size}) within the target's {limit} positions",
        )


def _check_fits(target: Target, drafter: Drafter) -> None:
    config = drafter.config
    made_for = (config.hidden_size, config.vocab_size, config.num_target_layers)
    found = (target.hidden_size, target.vocab_size, target.num_layers)
    if made_for != found:
        raise CheckpointError(
            f"the drafter was made for a target of (hidden size, vocabulary, layers) = {made_for}, "
            f"and {target.name!r} has {found}; use the target that it was trained with"
        )
