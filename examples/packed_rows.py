"""Text into packed rows: documents end to end, with where each of them starts."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from runtime.errors import ConfigError, NoSamplesError
from runtime.prompts.conversation import Skipped, check_messages
from runtime.prompts.counts import Counts
from runtime.prompts.records import open_prompts, read_records

Row = dict[str, Tensor]
"""One row of L tokens by the names of a step's inputs: ``input_ids`` int64 ``[L]``; ``doc_offsets``
int32 ``[max_documents + 2]``, where each document and the unused tail start, then L to the end;
``used``, an int32 scalar, the tokens before the tail."""


def make_row(documents: Sequence[Sequence[int]], length: int, max_documents: int) -> Row:
    """Put documents into one row; the unused tail becomes one last document.

    Args:
        documents: Token ids, ``length`` at most in all.
        length: Tokens of the row.
        max_documents: Fixes the size of ``doc_offsets``.

    Raises:
        ConfigError: There are more than ``max_documents``.
    """
    if len(documents) > max_documents:
        found = f"a row of {length} tokens was packed with {len(documents)} documents"
        raise ConfigError("--max-documents", max_documents, f"{found}; allow that many")
    offsets = [0, *accumulate(map(len, documents))]
    input_ids = torch.zeros(length, dtype=torch.int64)
    input_ids[: offsets[-1]] = torch.tensor([token for ids in documents for token in ids])
    padded = offsets + [length] * (max_documents + 2 - len(offsets))
    return {
        "input_ids": input_ids,
        "doc_offsets": torch.tensor(padded, dtype=torch.int32),
        "used": torch.tensor(offsets[-1], dtype=torch.int32),
    }


def read_documents(path: str, tokenizer: Any, longest: int) -> Iterator[list[int]]:
    """Give the token ids of each prompt of a JSONL file, or of each paragraph of a text file.

    Args:
        path: File, UTF-8.
        tokenizer: Of transformers; its end-of-text token ends each document.
        longest: Tokens; a longer document is cut into several.
    """
    for record in read_records(open_prompts([path]), Counts()):
        if record.text is not None:
            texts = record.text.split("\n\n")
        else:
            try:
                messages = check_messages(record.messages)
            except Skipped:
                continue
            texts = ["\n".join(message["content"] for message in messages)]
        for text in texts:
            ids = tokenizer(text.strip() + (tokenizer.eos_token or ""))["input_ids"]
            pieces = (ids[start : start + longest] for start in range(0, len(ids), longest))
            # One token predicts nothing.
            yield from (piece for piece in pieces if len(piece) > 1)


def pack(documents: Iterable[list[int]], lengths: Sequence[int], max_documents: int) -> list[Row]:
    """Fill rows in the order given.

    Args:
        documents: Token ids, none longer than the longest row.
        lengths: Tokens of a row, ascending. A document goes where rows are at least four times
            as long as it is, so that little of a row stays empty.
        max_documents: See ``make_row``.

    Raises:
        ConfigError: A row has more than ``max_documents``.
        NoSamplesError: There are fewer than two rows.
    """
    packed: dict[int, list[list[list[int]]]] = {length: [[]] for length in lengths}
    for ids in documents:
        length = next((size for size in lengths if 4 * len(ids) <= size), lengths[-1])
        if sum(map(len, packed[length][-1])) + len(ids) > length:
            packed[length].append([])
        packed[length][-1].append(ids)
    rows = [make_row(row, size, max_documents) for size in lengths for row in packed[size] if row]
    if len(rows) < 2:
        raise NoSamplesError("the text must fill two rows or more", {"rows": len(rows)})
    return rows
