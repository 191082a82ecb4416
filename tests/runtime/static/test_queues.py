import threading
import time

import pytest

from runtime.errors import TrainingError
from runtime.static.queues import Handoff, Lane

pytestmark = pytest.mark.timeout(60)


def in_thread(function):
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def test_items_come_in_order_and_no_more_wait_than_the_depth():
    handoff = Handoff(depth=2)
    sent = []

    def send():
        for item in range(5):
            handoff.put(item)
            sent.append(item)

    sender = in_thread(send)
    deadline = time.monotonic() + 5
    while len(sent) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    sender.join(0.05)
    assert sent == [0, 1]
    assert [handoff.get() for _ in range(5)] == [0, 1, 2, 3, 4]
    sender.join(5)
    assert handoff.put_waited_s > 0.04


def test_an_error_comes_after_what_was_handed_over():
    handoff = Handoff()
    handoff.put(1)
    handoff.fail(OSError("disk is gone"))
    assert handoff.get() == 1
    with pytest.raises(OSError, match="disk is gone"):
        handoff.get()


def test_a_stop_wakes_both_ends():
    empty, full = Handoff(), Handoff(depth=1)
    full.put(0)
    found = []

    def get():
        with pytest.raises(TrainingError, match="stopped while waiting"):
            empty.get()
        found.append("get")

    threads = [in_thread(get), in_thread(lambda: found.append(full.put(1)))]
    time.sleep(0.02)
    empty.stop()
    full.stop()
    for thread in threads:
        thread.join(5)
    assert sorted(map(str, found)) == ["False", "get"]


@pytest.mark.parametrize(("ranks", "targets"), [(1, 1), (1, 3), (2, 1), (2, 2), (3, 2), (2, 3)])
def test_lanes_share_all_steps_evenly_and_keep_each_ranks_order(ranks, targets):
    lanes = [Lane([Handoff(100) for _ in range(targets)], rank, ranks) for rank in range(ranks)]
    steps = 6 * targets
    for step in range(steps):
        for lane in lanes:
            lane.put(step)
    held = [[len(handoff._items) for handoff in lane.handoffs] for lane in lanes]
    assert [sum(column) for column in zip(*held, strict=True)] == [6 * ranks] * targets
    for lane in lanes:
        assert [lane.get() for _ in range(steps)] == list(range(steps))
