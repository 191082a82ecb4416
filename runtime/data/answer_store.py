"""Greedy answers on the disk, kept batch by batch as they come, for one target in one dtype.

``FOLDER/{target digest}-{dtype}.jsonl``, one line a batch: ``{"format": 1, "sha256": ...,
"answers": [{"prompt": ..., "tokens": [...], "ended": ...}]}``. A prompt is the SHA-256 of its token
ids; the line's digest is of target, dtype and answers as canonical JSON, so that neither damage nor
another target's line is ever taken. Lines are only added, each in one write, and one process at a
time where the file system has locks. A line that cannot be used is passed over: its prompts are
answered again. A batch is kept whole or not at all, so what is left of a run that was stopped is
batched as it would have been.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cache.atomic import sync_folder
from maskgen.progress import say
from runtime.data.answer import (
    Answer,
    UnusableAnswersError,
    check_kept,
    choose,
    prompt_key,
)
from runtime.errors import DatasetError
from runtime.files.sealed import json_digest

FORMAT = 1


class AnswerStore:
    """The kept answers of one target.

    Args:
        folder: Where the files of all targets lie; made by the first ``add``.
        target_digest: See ``TargetFiles.digest``.
        dtype: The target's, such as ``float32``.
        vocab_size: The target's.
    """

    def __init__(
        self, folder: str | Path, target_digest: str, dtype: str, *, vocab_size: int
    ) -> None:
        self._vocab_size = vocab_size
        self._whose = [target_digest, dtype]
        self.path = Path(folder) / f"{target_digest}-{dtype}.jsonl"

    def find(self, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> dict[int, Answer]:
        """The answers that are there already, see ``choose``.

        Args:
            prompts: Token ids of each.
            limits: Longest answer of each, in tokens.

        Returns:
            Answers by the number of the prompt.

        Raises:
            DatasetError: The file is there and cannot be read.
        """
        return choose(self._answers(), prompts, limits)

    def add(self, prompts: Sequence[Sequence[int]], answers: Sequence[Answer]) -> None:
        """Keep the answers of a batch; they are on the disk when this returns.

        Raises:
            DatasetError: The file cannot be written.
        """
        kept = [
            {"prompt": prompt_key(prompt), "tokens": answer.token_ids, "ended": answer.ended}
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        line = {"format": FORMAT, "sha256": self._digest(kept), "answers": kept}
        self._append(json.dumps(line).encode() + b"\n")

    def check_writable(self) -> None:
        """Refuse now what ``add`` would refuse once a batch is answered.

        Raises:
            DatasetError: The file cannot be written.
        """
        self._append(b"")

    def _append(self, line: bytes) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab+", buffering=0) as stream:
                # The lock ends with the file. Without one a line may be torn, which is seen.
                with contextlib.suppress(OSError):
                    fcntl.flock(stream, fcntl.LOCK_EX)
                size = stream.seek(0, os.SEEK_END)
                # A line that was torn is ended first, so that it costs no other.
                if line and size and os.pread(stream.fileno(), 1, size - 1) != b"\n":
                    line = b"\n" + line
                while os.write(stream.fileno(), line) < len(line):
                    line = b"\n" + line
                os.fsync(stream.fileno())
            if not size:
                sync_folder(self.path.parent)
        except OSError as error:
            raise DatasetError(
                f"{self.path} must take the answers ({error.strerror}); make room, or set [data] "
                "answers to a folder that can be written"
            ) from error

    def _answers(self) -> Iterator[Mapping[str, Any]]:
        unusable: list[str] = []
        try:
            with self.path.open("rb") as stream:
                for number, line in enumerate(stream, start=1):
                    try:
                        yield from self._parse(line)
                    except UnusableAnswersError as error:
                        unusable.append(f"{number} ({error})")
        except FileNotFoundError:
            return
        except OSError as error:
            raise DatasetError(
                f"{self.path} cannot be read ({error.strerror}); set [data] answers to another "
                "folder"
            ) from error
        if unusable:
            say(
                f"{self.path}: {len(unusable)} lines cannot be used, the first is line "
                f"{unusable[0]}; what they kept is answered again"
            )

    def _parse(self, line: bytes) -> list[dict[str, Any]]:
        if not line.strip():
            return []
        try:
            found = json.loads(line)
            if found["format"] != FORMAT:
                raise UnusableAnswersError(f"of format {found['format']!r}, not {FORMAT}")
            kept = found["answers"]
            if found["sha256"] != self._digest(kept):
                raise UnusableAnswersError("damaged, or of another target")
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise UnusableAnswersError("damaged") from error
        return check_kept(kept, self._vocab_size)

    def _digest(self, kept: Any) -> str:
        return json_digest([*self._whose, kept])
