"""The frame of a mask, B x H x Q_LEN rows by KV_LEN keys, and the rules of what stands in it."""

import torch
from torch import Tensor

from maskgen.canonical import INT32_MAX
from maskgen.errors import MaskSpecError


def check_frame_length(field: str, value: int) -> int:
    """Return a number of rows or keys that int32 spans can address.

    Raises:
        MaskSpecError: It is none.
    """
    if value < 1:
        raise MaskSpecError(field, value, "a length must be at least 1")
    if value > INT32_MAX:
        raise MaskSpecError(field, value, "a length must be below 2**31: spans are int32")
    return value


def check_spans(starts: Tensor, ends: Tensor, KV_LEN: int) -> None:
    """Refuse what are no spans of a mask with KV_LEN keys; reads the values on the host.

    Args:
        starts: Should be int32 ``[B, H, K, Q_LEN]``.
        ends: Should be of the same shape, dtype and device.
        KV_LEN: Keys.

    Raises:
        MaskSpecError: Shape, dtype, device or length break their rule, or a non-empty span
            leaves ``[0, KV_LEN)``.
    """
    for name, spans in (("starts", starts), ("ends", ends)):
        if spans.dtype != torch.int32:
            raise MaskSpecError(f"{name}.dtype", spans.dtype, "spans must be torch.int32")
        if spans.dim() != 4 or 0 in spans.shape:
            raise MaskSpecError(
                f"{name}.shape", tuple(spans.shape), "must be [B, H, K, Q_LEN], each at least 1"
            )
    if ends.shape != starts.shape:
        rule = f"must equal the shape of starts, {tuple(starts.shape)}"
        raise MaskSpecError("ends.shape", tuple(ends.shape), rule)
    if ends.device != starts.device:
        rule = f"must be the device of starts, {starts.device}"
        raise MaskSpecError("ends.device", str(ends.device), rule)
    check_frame_length("KV_LEN", KV_LEN)
    if starts.numel() > INT32_MAX:
        rule = "B * H * K * Q_LEN must be below 2**31, which kernels index in 32 bits"
        raise MaskSpecError("starts.numel()", starts.numel(), rule)
    outside = ((starts < 0) | (ends > KV_LEN)) & (starts < ends)
    if bool(outside.any()):
        b, h, k, q = (int(i) for i in outside.nonzero()[0])
        span = (int(starts[b, h, k, q]), int(ends[b, h, k, q]))
        rule = f"span {k} of row (b={b}, h={h}, q={q}) must lie inside [0, KV_LEN={KV_LEN})"
        raise MaskSpecError("(starts, ends)", span, rule)


def check_range(field: str, limits: tuple[int, int] | None, length: int) -> tuple[int, int]:
    """Return a half-open range of a frame's side; None is all of it.

    Raises:
        MaskSpecError: It is empty or leaves ``[0, length)``.
    """
    if limits is None:
        return 0, length
    first, last = limits
    if not 0 <= first < last <= length:
        raise MaskSpecError(field, limits, f"must be a range (a, b), 0 <= a < b <= {length}")
    return first, last


def check_same_frame(
    a: tuple[int, int, int, int],
    b: tuple[int, int, int, int],
    what: str,
    q: bool = True,
    kv: bool = True,
) -> None:
    """Refuse two masks that cannot be combined.

    Args:
        a: Shape of one mask, (B, H, Q_LEN, KV_LEN).
        b: Shape of the other.
        what: The operation, as the error names it.
        q: Whether Q_LEN must be equal.
        kv: Whether KV_LEN must be equal.

    Raises:
        MaskSpecError: A length differs, or B or H does and neither is 1.
    """
    for field, x, y, wanted in (("Q_LEN", a[2], b[2], q), ("KV_LEN", a[3], b[3], kv)):
        if wanted and x != y:
            raise MaskSpecError(field, y, f"both masks of {what} must have one {field}, {x} here")
    for field, x, y in (("B", a[0], b[0]), ("H", a[1], b[1])):
        if x != y and 1 not in (x, y):
            raise MaskSpecError(field, y, f"must be {x} as in the other mask of {what}, or 1")
