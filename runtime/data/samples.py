"""Records into samples: tokenise, let the target answer, filter, and count what was left out.

Rules, in this order:

* A conversation that ends with the user is answered greedily; one that ends with an answer is
  taken as it is. A prompt seen before is dropped.
* Plain text is cut into pieces of the largest context, the last one being what is left. Every
  token of a piece but its first is supervised; an evaluation that writes on starts in its middle.
* A sample longer than the largest context is cut, skipped or refused (``data.too_long``). A prompt
  that leaves no room for the shortest answer is dropped, or refused, as it cannot be cut.
* A sample with fewer supervised tokens than ``data.min_answer_tokens`` is dropped.
* Answers are kept as they come (``runtime.data.answer_store``), and those that are there are taken,
  as are shipped ones (``runtime.data.shipped_answers``).
* An answer of which fewer than ``data.min_distinct_4grams`` of the 4-grams are distinct is
  repetition and dropped. Only answers of the target are judged.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from maskgen.progress import Progress, say
from runtime.config import DataConfig
from runtime.data.answer import Answer, distinct_share
from runtime.data.answer_store import AnswerStore
from runtime.data.answers import answer_all, step_count
from runtime.data.candidate import Candidate
from runtime.data.features import features_of, is_finite, scale_of
from runtime.data.shipped_answers import ShippedAnswers
from runtime.errors import SampleTooLongError
from runtime.prompts.conversation import Skipped, check_messages
from runtime.prompts.counts import Counts, shown
from runtime.prompts.records import Record
from runtime.prompts.supervision import tokenise
from runtime.prompts.template import ChatTemplate, TemplateChoice
from runtime.prompts.tokenisation import bos_tokens, token_ids
from runtime.target.model import Target

SCALE_SAMPLES = 64
"""Samples that ``feature_scale`` is measured on where features are not stored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleMaker:
    """Turns records into samples for one target and one set of rules."""

    target: Target
    data: DataConfig
    context: int
    """Longest sample, in tokens: the largest context of the mask entries."""
    layer_ids: tuple[int, ...]
    store: bool
    """Whether samples keep their features."""
    answers: AnswerStore
    counts: Counts
    shipped: Sequence[ShippedAnswers] = ()
    """Files of answers, looked into first."""
    last_hidden: bool = False
    """Whether the target's last hidden state is kept behind the features of ``layer_ids``."""
    features_dtype: torch.dtype | None = None
    """What stored features are computed in; None for the target's own."""

    def make(self, records: Sequence[Record]) -> list[Candidate]:
        """All samples of the records, in their order.

        Raises:
            ConfigError: There are conversations, and the target has no chat template as asked.
            SampleTooLongError: A sample is too long and ``data.too_long`` is ``refuse``.
        """
        candidates = self._answer(self._read(records))
        kept = [fitted for candidate in candidates if (fitted := self._fit(candidate)) is not None]
        return self._with_features(kept) if self.store else kept

    def answer(self, records: Sequence[Record]) -> tuple[list[list[int]], list[Answer]]:
        """The prompts of open records, as token ids, and their answers; raises as ``make``."""
        prompts, limits = self._questions([*self._unanswered(self._read(records)).values()])
        return prompts, self._generate(prompts, limits)

    def _read(self, records: Sequence[Record]) -> list[Candidate]:
        """Tokenised records, each prompt once."""
        candidates: list[Candidate] = []
        seen: set[str] = set()
        template = None
        for record in records:
            if record.text is None and template is None:
                choice = TemplateChoice.read(self.data.chat_template, self.data.template)
                template = ChatTemplate.of(self.target.tokenizer, choice)
            for candidate in self._tokenise(record, template):
                if candidate.identity in seen:
                    self.counts.drop("duplicate prompt", candidate.source)
                    continue
                seen.add(candidate.identity)
                candidates.append(replace(candidate, file=record.file))
        return [candidate for candidate in candidates if self._is_readable(candidate)]

    def feature_scale(self, candidates: Sequence[Candidate]) -> list[float]:
        """Root mean square of each layer's features, K numbers.

        Stored features are all used, else those of the first samples; held-out ones too, so that
        the split is free to change.
        """
        if not self.layer_ids:
            return []
        if not self.store:
            first = [candidate.input_ids for candidate in candidates[:SCALE_SAMPLES]]
            found = features_of(self.target, self.layer_ids, first)
            return scale_of(found, len(self.layer_ids))
        stored = [candidate.features for candidate in candidates if candidate.features is not None]
        return scale_of(stored, len(self.stored_layer_ids))[: len(self.layer_ids)]

    @property
    def stored_layer_ids(self) -> tuple[int, ...]:
        """Layers whose outputs samples keep, in the order of the columns."""
        last = (self.target.num_layers,) if self.last_hidden else ()
        return self.layer_ids + last

    def _tokenise(self, record: Record, template: ChatTemplate | None) -> list[Candidate]:
        if record.text is not None:
            return self._cut_text(record.source, record.text)
        assert template is not None, "made with the first conversation"
        try:
            messages = check_messages(record.messages)
            conversation = tokenise(template, messages, self.target.eos_token_ids)
        except Skipped as skipped:
            self.counts.drop(skipped.reason, record.source, shown(skipped.detail, 80))
            return []
        self.counts.noted.update(conversation.notes)
        is_open = messages[-1]["role"] == "user"
        return [
            Candidate(
                identity=_identity(messages if is_open else messages[:-1]),
                source=record.source,
                input_ids=conversation.input_ids,
                loss_mask=conversation.loss_mask,
                prompt_len=_last_answer_start(conversation.loss_mask),
                is_open=is_open,
            )
        ]

    def _cut_text(self, source: str, text: str) -> list[Candidate]:
        """Pieces of a plain text, each begun as the tokenizer begins a text.

        The target reads a piece by itself, and so does a server: models that know a BOS token
        park much of their attention on it and are lost without one, in the middle of a text too.
        """
        bos = bos_tokens(self.target.tokenizer)
        ids = token_ids(self.target.tokenizer, text)
        ids = ids[len(bos) :] if ids[: len(bos)] == bos else ids
        size = self.context - len(bos)
        pieces = [bos + ids[i : i + size] for i in range(0, len(ids), size)]
        return [
            Candidate(
                identity=_identity(piece),
                source=source,
                input_ids=piece,
                loss_mask=[0] + [1] * (len(piece) - 1),
                prompt_len=max(1, len(piece) // 2),
            )
            for piece in pieces
        ]

    def _is_readable(self, candidate: Candidate) -> bool:
        """Whether the target can be given the tokens."""
        if not candidate.input_ids:
            self.counts.drop("no tokens", candidate.source)
            return False
        if not all(0 <= token < self.target.vocab_size for token in candidate.input_ids):
            self.counts.drop("token outside the embedding", candidate.source)
            return False
        return True

    def _answer(self, candidates: list[Candidate]) -> list[Candidate]:
        """Answer what is open; what has its answer passes through in place."""
        finished = {i: one for i, one in enumerate(candidates) if not one.is_open}
        unanswered = self._unanswered(candidates)
        answers = self._generate(*self._questions([*unanswered.values()]))
        for (index, candidate), answer in zip(unanswered.items(), answers, strict=True):
            self.counts.noted["answered"] += 1
            self.counts.noted["answer tokens"] += len(answer.token_ids)
            self.counts.noted["answers ended by the model"] += answer.ended
            if distinct_share(answer.token_ids) < self.data.min_distinct_4grams:
                self.counts.drop("repetition", candidate.source)
                continue
            finished[index] = replace(
                candidate,
                input_ids=candidate.input_ids + answer.token_ids,
                loss_mask=candidate.loss_mask + [1] * len(answer.token_ids),
                is_open=False,
            )
        return [finished[index] for index in sorted(finished)]

    def _unanswered(self, candidates: Sequence[Candidate]) -> dict[int, Candidate]:
        """Those that are open and leave room for an answer, by their number."""
        found = {}
        for index, candidate in enumerate(candidates):
            least = len(candidate.input_ids) + self.data.min_answer_tokens
            if candidate.is_open and least <= self.context:
                found[index] = candidate
            elif candidate.is_open:
                self._refuse_if_asked(candidate, least)
                self.counts.drop("prompt too long", candidate.source)
        return found

    def _questions(self, candidates: Sequence[Candidate]) -> tuple[list[list[int]], list[int]]:
        """Prompts, and the longest answer of each in tokens."""
        prompts = [candidate.input_ids for candidate in candidates]
        # One token more than fits shows that an answer is too long.
        most, room = self.data.max_new_tokens, self.context + 1
        return prompts, [min(most, room - len(prompt)) for prompt in prompts]

    def _generate(self, prompts: list[list[int]], limits: list[int]) -> list[Answer]:
        if not prompts:
            return []
        found = self.answers.find(prompts, limits)
        for file in self.shipped:
            shipped = file.find(prompts, limits)
            found |= shipped
            missing = [row for row in range(len(prompts)) if row not in found]
            say(f"{len(shipped):,} answers from {file.path}, {len(missing):,} to make")
        missing = [row for row in range(len(prompts)) if row not in found]
        label = f"answering {len(missing)} prompts"
        if found:
            label += f" ({len(found)} answers are there)"
        if not missing:
            if not self.shipped:
                say(label)
            return [found[row] for row in range(len(prompts))]
        self.answers.check_writable()
        asked = [prompts[row] for row in missing]
        most = [limits[row] for row in missing]
        batch = self.data.batch
        with Progress(label, step_count(asked, most, batch)) as progress:
            for answers in answer_all(
                self.target, asked, most, batch=batch, advance=progress.advance
            ):
                self.answers.add([asked[row] for row in answers], list(answers.values()))
                found |= {missing[row]: answer for row, answer in answers.items()}
        return [found[row] for row in range(len(prompts))]

    def _fit(self, candidate: Candidate) -> Candidate | None:
        """Apply the rules on length and supervision; None when the sample is dropped."""
        if len(candidate.input_ids) > self.context:
            self._refuse_if_asked(candidate, len(candidate.input_ids))
            if self.data.too_long == "skip":
                self.counts.drop("longer than the largest context", candidate.source)
                return None
            self.counts.noted["cut at the largest context"] += 1
            loss_mask = candidate.loss_mask[: self.context]
            candidate = replace(
                candidate,
                input_ids=candidate.input_ids[: self.context],
                loss_mask=loss_mask,
                prompt_len=_last_answer_start(loss_mask),
            )
        if sum(candidate.loss_mask) < self.data.min_answer_tokens:
            self.counts.drop("too few supervised tokens", candidate.source)
            return None
        return candidate

    def _refuse_if_asked(self, candidate: Candidate, length: int) -> None:
        if self.data.too_long == "refuse":
            raise SampleTooLongError(
                f"{candidate.source} needs at least {length} tokens, the largest context of the "
                f"mask entries is {self.context}; set data.too_long to cut or skip, or add a "
                "larger one"
            )

    def _with_features(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The candidates whose features are finite, with them."""
        target = self.target
        if self.features_dtype is not None:
            say(f"features are computed in {str(self.features_dtype).removeprefix('torch.')}")
            target = target.in_dtype(self.features_dtype)
        found = features_of(
            target, self.stored_layer_ids, [candidate.input_ids for candidate in candidates]
        )
        kept = []
        for candidate, features in zip(candidates, found, strict=True):
            if is_finite(features):
                kept.append(replace(candidate, features=features))
            else:
                self.counts.drop("features not finite", candidate.source)
        return kept


def _last_answer_start(loss_mask: Sequence[int]) -> int:
    """Where the last run of supervised tokens begins; the length when there is none."""
    end = len(loss_mask)
    while end and not loss_mask[end - 1]:
        end -= 1
    start = end
    while start and loss_mask[start - 1]:
        start -= 1
    return start if end else len(loss_mask)


def _identity(content: Any) -> str:
    return _sha256(json.dumps(content, sort_keys=True))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
