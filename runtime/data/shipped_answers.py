"""Greedy answers of a target in one file, to be handed on: token ids, and text to look at.

JSON Lines, compressed with xz. The first line is a header: ``format``; ``target``, the digest of
the model that answered; ``dtype``, what it computed in; ``max_new_tokens``, the limit;
``answers``, how many follow; ``made_by``, the command; ``sha256``, of the lines that follow; and
``document_sha256``, of the header's own keys, as ``runtime.files.sealed`` has it. Each other line
is an answer: ``prompt``, the SHA-256 of the prompt's token ids as a JSON list; ``question``, the
prompt's text; ``text``; ``tokens``; and ``ended``, whether the model ended it or the limit did.
"""

import hashlib
import json
import lzma
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cache.atomic import staging_folder
from maskgen.progress import say
from runtime.data.answer import (
    Answer,
    UnusableAnswersError,
    check_kept,
    choose,
    prompt_key,
)
from runtime.errors import ConfigError, DatasetError
from runtime.files.sealed import json_digest
from runtime.files.writing import write_file

FORMAT = 1
PRESET = 9 | lzma.PRESET_EXTREME
SEAL = "document_sha256"
HEAD = 1 << 16
"""Bytes of a file, packed or not, that its header is within."""


def pack_answers(
    path: Path,
    header: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Answer],
    decode: Callable[[Sequence[int]], str],
) -> int:
    """Write the answers to prompts into a file, and return its size in bytes.

    Args:
        path: The file; answers that stood there are replaced.
        header: ``target``, ``dtype``, ``max_new_tokens`` and ``made_by``.
        prompts: Token ids of each.
        answers: The answer to each.
        decode: Token ids to text.

    Raises:
        ConfigError: As ``check_packable``.
        DatasetError: The file cannot be written.
    """
    check_packable(path)
    lines = [
        {
            "prompt": prompt_key(prompt),
            "question": decode(prompt),
            "text": decode(answer.token_ids),
            "tokens": answer.token_ids,
            "ended": answer.ended,
        }
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    body = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
    found = {
        "format": FORMAT,
        **header,
        "answers": len(lines),
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    head = json.dumps({**found, SEAL: json_digest(found)}).encode()
    packed = lzma.compress(head + b"\n" + body, preset=PRESET)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, packed)
    except OSError as error:
        raise _untaken(path, error) from error
    return len(packed)


def check_packable(path: Path) -> None:
    """Refuse now what ``pack_answers`` would refuse once all is answered; nothing is left there.

    Raises:
        ConfigError: Something else than a file of answers stands there.
        DatasetError: The file cannot be written.
    """
    try:
        if path.exists() and not _is_packed(path):
            what = "a folder" if path.is_dir() else "a file that holds no packed answers"
            rule = f"must be a new file or one of packed answers, which is replaced; found {what}"
            raise ConfigError("--pack-answers", str(path), rule)
        there = next(folder for folder in path.absolute().parents if folder.exists())
        with staging_folder(there / path.name):
            pass
    except OSError as error:
        raise _untaken(path, error) from error


def _untaken(path: Path, error: OSError) -> DatasetError:
    return DatasetError(f"{path} must take the answers ({error.strerror}); choose another file")


def _is_packed(path: Path) -> bool:
    """Whether a file begins with a header of packed answers, be it damaged behind that."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        begin = stream.read(HEAD)
    try:
        head = lzma.LZMADecompressor().decompress(begin, max_length=HEAD).partition(b"\n")[0]
        return bool({"format", SEAL} <= json.loads(head).keys())
    except (lzma.LZMAError, ValueError, AttributeError, RecursionError):
        return False


def check_shipped(paths: Sequence[str]) -> None:
    """Refuse names of files that are not there.

    Raises:
        ConfigError: One is not.
    """
    for path in paths:
        if not Path(path).is_file():
            raise ConfigError("data.shipped", path, "must name files that are there")


class ShippedAnswers:
    """The answers in a file, of one target in one dtype; none where the file has another's.

    What keeps them from being used is told in one line, and the prompts are answered anew.

    Args:
        path: The file.
        target_digest: See ``TargetFiles.digest``.
        dtype: The target's, such as ``float32``.
        vocab_size: The target's.
    """

    def __init__(
        self, path: str | Path, target_digest: str, dtype: str, *, vocab_size: int
    ) -> None:
        self.path = Path(path)
        self._vocab_size = vocab_size
        self._whose = {"target": target_digest, "dtype": dtype}

    def find(self, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> dict[int, Answer]:
        """The answers to prompts by their number, see ``choose``."""
        try:
            return choose(self._answers(), prompts, limits)
        except UnusableAnswersError as error:
            say(f"{self.path} is not used: {error}")
            return {}

    def _answers(self) -> list[dict[str, Any]]:
        damaged = "it is damaged; fetch it again, or make it anew with --pack-answers"
        try:
            head, _, body = lzma.decompress(self.path.read_bytes()).partition(b"\n")
            header = json.loads(head)
            seal = header.pop(SEAL)
            if seal != json_digest(header):
                raise UnusableAnswersError(damaged)
            if header["format"] != FORMAT:
                raise UnusableAnswersError(f"its format is {header['format']!r:.40}, not {FORMAT}")
            if header["sha256"] != hashlib.sha256(body).hexdigest():
                raise UnusableAnswersError(damaged)
            for name, ours in self._whose.items():
                if header[name] != ours:
                    raise UnusableAnswersError(
                        f"its answers are of {name} {header[name]:.12}, the run's is {ours:.12}"
                    )
            return check_kept([_parsed(line) for line in body.splitlines()], self._vocab_size)
        except OSError as error:
            raise UnusableAnswersError(f"it cannot be read ({error.strerror})") from error
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise UnusableAnswersError(damaged) from error
        except (EOFError, lzma.LZMAError, MemoryError) as error:
            raise UnusableAnswersError(damaged) from error


def _parsed(line: bytes) -> object:
    """A line's JSON value; what is none is left as text, for ``check_kept`` to name."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return line.decode(errors="replace")
