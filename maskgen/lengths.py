"""A data set -> the lengths of its samples, for the bucket planner."""

from pathlib import Path

from maskgen.errors import MaskSpecError

MAX_SAMPLES = 10_000_000
"""Most samples that a text file may name."""


def read_lengths(path: str | Path) -> list[int]:
    """Read sample lengths, in tokens.

    Args:
        path: A folder of ``runtime.prepare``, or a text file with one sample a line: its length,
            or a length and how many samples have it.

    Raises:
        MaskSpecError: There is no such file, a line is something else, or nothing is in it.
    """
    source = Path(path)
    lengths = _prepared_lengths(source) if source.is_dir() else _text_lengths(source)
    if not lengths:
        raise MaskSpecError("DATA", str(path), "must hold at least one length")
    return lengths


def _prepared_lengths(folder: Path) -> list[int]:
    from safetensors import SafetensorError, safe_open

    file = folder / "train.safetensors"
    try:
        with safe_open(file, "numpy") as tensors:
            offsets = tensors.get_tensor("offsets")
    except (OSError, SafetensorError) as error:
        raise MaskSpecError(
            "DATA", str(file), f"must be a file of runtime.prepare with offsets ({error})"
        ) from error
    return [int(length) for length in offsets[1:] - offsets[:-1]]


def _text_lengths(file: Path) -> list[int]:
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise MaskSpecError("DATA", str(file), f"cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise MaskSpecError("DATA", str(file), f"must be UTF-8 text ({error})") from error
    lengths: list[int] = []
    for number, line in enumerate(lines, start=1):
        fields = line.replace(",", " ").split()
        if not fields:
            continue
        if len(fields) > 2 or not all(field.isdecimal() for field in fields):
            raise MaskSpecError(
                f"DATA line {number}", line, "must be a length, or a length and a count"
            )
        count = int(fields[1]) if len(fields) == 2 else 1
        if len(lengths) + count > MAX_SAMPLES:
            raise MaskSpecError(f"DATA line {number}", line, f"more than {MAX_SAMPLES} samples")
        lengths += [int(fields[0])] * count
    return lengths
