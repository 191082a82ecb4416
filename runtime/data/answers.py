"""Greedy answers in batches.

Prompts of similar length share a batch, padded on the left; rows that have ended are taken out of
it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from runtime.data.answer import Answer
from runtime.target.model import Target

ROOM = 64
"""Positions by which a full KV buffer grows."""
COMPACT_BELOW = 0.85
"""Share of rows still running below which the others are taken out of the batch."""


class KVBuffer(DynamicLayer):  # type: ignore[misc]
    """A DynamicLayer that writes into a buffer with room, where the original copies every step."""

    def __init__(self) -> None:
        super().__init__()
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values ``[B, heads, Q, head_dim]``; returns all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        past = int(self.get_seq_length())
        length = past + key_states.shape[-2]
        if self._buffers is None or length > self._buffers[0].shape[-2]:
            self._grow(key_states, value_states, past, length + ROOM)
        assert self._buffers is not None, "grown above"
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, past:length] = states
        self._show(length)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices`` of the batch."""
        if self._buffers is not None:
            length = self.keys.shape[-2]
            keys, values = self._buffers
            self._buffers = (keys[indices], values[indices])
            self._show(length)

    def _grow(self, keys: Tensor, values: Tensor, past: int, capacity: int) -> None:
        grown = []
        for states, old in zip((keys, values), self._buffers or (None, None), strict=True):
            buffer = states.new_zeros(*states.shape[:2], capacity, states.shape[3])
            if old is not None:
                buffer[:, :, :past] = old[:, :, :past]
            grown.append(buffer)
        self._buffers = (grown[0], grown[1])

    def _show(self, length: int) -> None:
        assert self._buffers is not None, "callers have buffers"
        self.keys, self.values = (buffer[:, :, :length] for buffer in self._buffers)


def answer_all(
    target: Target,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    *,
    batch: int,
    advance: Callable[[int], None] = lambda steps: None,
) -> Iterator[dict[int, Answer]]:
    """Answer prompts greedily.

    Args:
        target: The model.
        prompts: Token ids of each, not empty.
        limits: Longest answer of each, in tokens, at least 1.
        batch: Prompts answered at once.
        advance: Called with steps done, ``step_count`` of them in all.

    Yields:
        The answers of a batch, by the number of the prompt. Batches are cut from the prompts by
        length: those that are left when a run stops between two are cut as they would have been.
    """
    for rows in _batches(prompts, batch):
        steps = max(limits[row] for row in rows)
        answers = _answer_batch(
            target, [prompts[row] for row in rows], [limits[row] for row in rows],
            lambda: advance(1),
        )  # fmt: skip
        advance(steps - max(len(answer.token_ids) for answer in answers))
        yield dict(zip(rows, answers, strict=True))


def step_count(prompts: Sequence[Sequence[int]], limits: Sequence[int], batch: int) -> int:
    """Steps that ``answer_all`` reports, for a progress bar."""
    return sum(max(limits[row] for row in rows) for rows in _batches(prompts, batch))


def _batches(prompts: Sequence[Sequence[int]], batch: int) -> Iterator[list[int]]:
    # Longest first, so that a batch too large for the memory fails at once.
    order = sorted(range(len(prompts)), key=lambda row: (-len(prompts[row]), row))
    for first in range(0, len(order), batch):
        yield order[first : first + batch]


def _answer_batch(
    target: Target,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    step: Callable[[], None],
) -> list[Answer]:
    longest = max(map(len, prompts))
    padding = torch.tensor(
        [longest - len(prompt) for prompt in prompts], dtype=torch.int64, device=target.device
    )
    ids = torch.tensor(
        [[0] * (longest - len(p)) + list(p) for p in prompts],
        dtype=torch.int64,
        device=target.device,
    )
    columns = torch.arange(longest + max(limits), device=target.device)
    visible = (columns >= padding[:, None]).long()
    positions = (columns - padding[:, None]).clamp(min=0)
    cache = _new_cache(target)
    compactable = all(hasattr(layer, "batch_select_indices") for layer in cache.layers)
    tokens: list[list[int]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    rows = list(range(len(prompts)))
    """Prompt of each row of the batch as it is now."""
    running = set(rows)
    past = 0
    while True:
        length = past + ids.shape[1]
        logits, _ = target.extend(
            ids,
            cache,
            position_ids=positions[:, past:length],
            attention_mask=visible[:, :length],
            last_only=True,
        )
        past = length
        chosen = logits[:, -1].argmax(dim=-1)
        for row, token in zip(rows, chosen.tolist(), strict=True):
            if row in running:
                tokens[row].append(token)
                ended[row] = token in target.eos_token_ids
        running -= {row for row in running if ended[row] or len(tokens[row]) == limits[row]}
        step()
        if not running:
            break
        ids = chosen[:, None]
        if compactable and len(running) < COMPACT_BELOW * len(rows):
            keep = [i for i, row in enumerate(rows) if row in running]
            index = torch.tensor(keep, dtype=torch.int64, device=target.device)
            cache.batch_select_indices(index)
            ids, visible, positions = ids[index], visible[index], positions[index]
            rows = [rows[i] for i in keep]
    return [Answer(token_ids=tokens[row], ended=ended[row]) for row in range(len(prompts))]


def _new_cache(target: Target) -> Any:
    cache = target.new_cache()
    # Sliding and linear layers keep their own state; plain ones are replaced.
    cache.layers = [KVBuffer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
