"""Single flight: threads that ask for one thing wait for one maker and share what it made."""

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Flight(Generic[Key, Value]):
    """Makes each key's value once for as long as somebody holds it.

    Values are held weakly: what nobody uses is freed, and made again when it is asked for.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._makers: dict[Key, threading.Lock] = {}
        self._values: weakref.WeakValueDictionary[Key, Value] = weakref.WeakValueDictionary()

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """Return the value of ``key``, made by ``make`` in one thread while the others wait.

        An error of ``make`` is raised in the thread that ran it; the next one tries again.
        """
        with self._guard:
            value = self._values.get(key)
            if value is not None:
                return value
            maker = self._makers.setdefault(key, threading.Lock())
        with maker:
            with self._guard:
                value = self._values.get(key)
            if value is None:
                value = make()
                with self._guard:
                    self._values[key] = value
            return value
