"""Processes that were started together meet in a part of the store that is theirs alone.

torchrun keeps its store when it starts the processes of a job again, and what those before said is
still there; how often each host was started may differ. So process 0 draws a name for this start,
and hands it to each of the others by a number that no earlier process has asked with.
"""

import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from torch import distributed

from runtime.errors import WorkerError, first_line
from runtime.ranks.awake import wait_until

T = TypeVar("T")

JOIN_S = 300.0
"""How long processes may take to start one after another."""


def ask(call: Callable[..., T], *args: Any) -> T:
    """Call the store.

    Raises:
        WorkerError: It is out of reach.
    """
    try:
        return call(*args)
    except RuntimeError as error:
        raise WorkerError(f"lost touch with the other processes: {first_line(error)}") from error


def look(store: Any, key: str) -> str | None:
    """What a key holds, if anything; does not wait for it."""
    found: bytes | None = ask(store.get, key) if ask(store.check, [key]) else None
    return None if found is None else found.decode()


def meet(store: Any, rank: int, size: int) -> Any:
    """Find the others of this start.

    Args:
        store: Shared with them, and with processes of earlier starts.
        rank: This process.
        size: How many there are.

    Returns:
        The part of the store that only the processes of this start use.

    Raises:
        WorkerError: The others do not come, or the store is out of reach.
    """
    start = _call_together(store, size) if rank == 0 else _ask_to_join(store, rank)
    return distributed.PrefixStore(start, store)  # type: ignore[attr-defined]


def _call_together(store: Any, size: int) -> str:
    start = uuid.uuid4().hex
    missing = set(range(1, size))

    def all_joined() -> bool:
        for rank in sorted(missing):
            number = look(store, f"asking/{rank}")
            if number is not None:
                # Perhaps one of an earlier start; whoever asks again is answered again.
                ask(store.set, f"start/{number}", start)
            if look(store, f"{start}/joined/{rank}") is not None:
                missing.remove(rank)
        return not missing

    if not wait_until(all_joined, JOIN_S):
        raise WorkerError(
            f"process {', '.join(map(str, sorted(missing)))} of {size} did not come within "
            f"{JOIN_S:.0f} s of process 0; its own output says why"
        )
    return start


def _ask_to_join(store: Any, rank: int) -> str:
    number = uuid.uuid4().hex
    ask(store.set, f"asking/{rank}", number)
    if not wait_until(lambda: look(store, f"start/{number}") is not None, JOIN_S):
        raise WorkerError(
            f"process 0 did not come within {JOIN_S:.0f} s of process {rank}; its own output says "
            "why"
        )
    start = look(store, f"start/{number}") or ""
    ask(store.set, f"{start}/joined/{rank}", "")
    return start
