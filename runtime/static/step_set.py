"""The steps over a run's buckets on one device: warmed up and captured together, run one by one."""

from collections.abc import Callable, Iterator, Mapping

from runtime.static.graph import GraphPool, StaticStep


class StepSet(Mapping[int, StaticStep]):
    """One static step a bucket, all in one pool: a mapping from bucket length, largest first.

    Args:
        steps: Bucket length -> (name, function of static tensors).
        pool: Stream and memory of the device.
        memory_hint: What to lower where memory runs out.
    """

    def __init__(
        self,
        steps: Mapping[int, tuple[str, Callable[[], None]]],
        pool: GraphPool,
        *,
        memory_hint: str,
    ) -> None:
        self.pool = pool
        # The largest first, as its memory serves the smaller ones.
        self._steps = {
            length: StaticStep(function, pool, name, memory_hint=memory_hint)
            for length, (name, function) in sorted(steps.items(), reverse=True)
        }

    def __getitem__(self, length: int) -> StaticStep:
        return self._steps[length]

    def __iter__(self) -> Iterator[int]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def warm_up(self, report: Callable[[str], None]) -> None:
        """Run every step until compiling and workspaces are settled, on the calling thread."""
        for step in self._steps.values():
            report(f"warming up {step.name}")
            step.warm_up()

    def capture(self) -> None:
        """Record every step as a graph, on the calling thread."""
        for step in self._steps.values():
            step.capture()

    def run(self, length: int) -> None:
        """Enqueue the step of a bucket on the current stream."""
        self._steps[length].run()

    @property
    def replays(self) -> int:
        """Graph replays so far."""
        return sum(step.replays for step in self._steps.values())

    def teardown(self) -> None:
        """Free the graphs."""
        self.pool.synchronize()
        for step in self._steps.values():
            step.teardown()
