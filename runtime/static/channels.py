"""Items from one thread to another through bounded channels in which neither can hang.

feeder -> lane -> worker, or with targets of their own  feeder -> lane -> target -> lane -> worker
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from runtime.errors import TrainingError

T = TypeVar("T")


class Channel(Generic[T]):
    """A bounded queue between two threads.

    Args:
        depth: Items that may wait in it.
    """

    def __init__(self, depth: int = 2) -> None:
        self.depth = depth
        self.put_waited_s = 0.0
        """Seconds that the sender waited for room."""
        self.get_waited_s = 0.0
        """Seconds that the receiver waited for an item."""
        self._items: deque[T] = deque()
        self._error: BaseException | None = None
        self._stopped = False
        self._changed = threading.Condition()

    def put(self, item: T) -> bool:
        """Send an item once there is room; False when the channel was stopped."""
        began = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or len(self._items) < self.depth)
            self.put_waited_s += time.monotonic() - began
            if self._stopped:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def get(self) -> T:
        """Take the next item once there is one.

        Raises:
            BaseException: What ended the sender, after all that it had sent.
            TrainingError: The channel was stopped.
        """
        began = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._items or self._error)
            self.get_waited_s += time.monotonic() - began
            if self._stopped:
                raise TrainingError("stopped while waiting for another thread")
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
            assert self._error is not None
            raise self._error

    def fail(self, error: BaseException) -> None:
        """Let the receiver raise what ended the sender."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def stop(self) -> None:
        """Wake both threads and take no more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


class Lane(Generic[T]):
    """What one rank's threads send each other, over one channel or several in turn.

    With several, item n of rank r takes channel ``(n * ranks + r) % len(channels)``, so that
    targets share all ranks' steps evenly and each item's way follows from its number alone. One
    thread puts and one thread gets.

    Args:
        channels: In turn.
        rank: r.
        ranks: How many ranks share the channels' other ends.
    """

    def __init__(self, channels: Sequence[Channel[T]], rank: int = 0, ranks: int = 1) -> None:
        self.channels = tuple(channels)
        self._rank = rank
        self._ranks = ranks
        self._put = 0
        self._got = 0

    def put(self, item: T) -> bool:
        """As ``Channel.put``."""
        channel = self._channel(self._put)
        self._put += 1
        return channel.put(item)

    def get(self) -> T:
        """As ``Channel.get``."""
        channel = self._channel(self._got)
        self._got += 1
        return channel.get()

    def _channel(self, number: int) -> Channel[T]:
        return self.channels[(number * self._ranks + self._rank) % len(self.channels)]

    def fail(self, error: BaseException) -> None:
        """As ``Channel.fail``, on all."""
        for channel in self.channels:
            channel.fail(error)

    def stop(self) -> None:
        """As ``Channel.stop``, on all."""
        for channel in self.channels:
            channel.stop()
