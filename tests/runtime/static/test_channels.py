import threading
import time

import pytest

from runtime.errors import TrainingError
from runtime.static.channels import Channel, Lane

pytestmark = pytest.mark.timeout(60)


def in_thread(function):
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def test_items_come_in_order_and_no_more_wait_than_the_depth():
    channel = Channel(depth=2)
    sent = []

    def send():
        for item in range(5):
            channel.put(item)
            sent.append(item)

    sender = in_thread(send)
    deadline = time.monotonic() + 5
    while len(sent) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    sender.join(0.05)
    assert sent == [0, 1]
    assert [channel.get() for _ in range(5)] == [0, 1, 2, 3, 4]
    sender.join(5)
    assert channel.put_waited_s > 0.04


def test_an_error_comes_after_what_was_handed_over():
    channel = Channel()
    channel.put(1)
    channel.fail(OSError("disk is gone"))
    assert channel.get() == 1
    with pytest.raises(OSError, match="disk is gone"):
        channel.get()


def test_a_stop_wakes_both_ends():
    empty, full = Channel(), Channel(depth=1)
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
    lanes = [Lane([Channel(100) for _ in range(targets)], rank, ranks) for rank in range(ranks)]
    steps = 6 * targets
    for step in range(steps):
        for lane in lanes:
            lane.put(step)
    held = [[len(channel._items) for channel in lane.channels] for lane in lanes]
    assert [sum(column) for column in zip(*held, strict=True)] == [6 * ranks] * targets
    for lane in lanes:
        assert [lane.get() for _ in range(steps)] == list(range(steps))


def test_a_queue_takes_two_items_unless_it_is_told_otherwise():
    assert [Channel().depth, Channel(3).depth] == [2, 3]
    channel, sent = Channel(), []
    sender = in_thread(lambda: [sent.append(channel.put(item)) for item in range(3)])
    sender.join(0.2)
    assert sent == [True, True]
    channel.get()
    sender.join(5)
    assert sent == [True, True, True]


def test_each_side_counts_what_it_alone_stood_waiting():
    channel = Channel(1)
    channel.put(0)
    assert channel.put_waited_s < 0.1
    sender = in_thread(lambda: [channel.put(item) for item in (1, 2)])
    waited = 0.0
    for item in (0, 1):
        time.sleep(0.1)
        assert channel.get() == item
        # The waits add up; one that began a little late is shorter.
        waited += 0.06
    sender.join(5)
    assert waited < channel.put_waited_s < 5
    assert channel.get_waited_s < 0.1
    assert channel.get() == 2
    before, waited = channel.put_waited_s, 0.0
    for _ in range(2):
        receiver = in_thread(channel.get)
        time.sleep(0.1)
        waited += 0.06
        channel.put(3)
        receiver.join(5)
        assert waited < channel.get_waited_s < 5
    assert channel.put_waited_s - before < 0.1


def test_after_a_stop_nothing_goes_in_and_what_waits_does_not_come_out():
    channel = Channel(depth=3)
    assert channel.put(1)
    channel.stop()
    assert not channel.put(2)
    for _ in range(2):
        with pytest.raises(TrainingError, match="stopped while waiting for another thread"):
            channel.get()
    channel.fail(OSError("late"))
    with pytest.raises(TrainingError, match="stopped"):
        channel.get()


def test_an_error_wakes_a_receiver_that_waits_and_is_raised_each_time():
    channel, found = Channel(), []

    def get():
        with pytest.raises(KeyboardInterrupt) as caught:
            channel.get()
        found.append(caught.value)

    error = KeyboardInterrupt()
    receiver = in_thread(get)
    receiver.join(0.05)
    channel.fail(error)
    receiver.join(5)
    assert found == [error]
    get()
    assert found == [error, error]


@pytest.mark.parametrize(("ranks", "targets"), [(1, 3), (2, 3), (3, 2)])
def test_item_n_of_rank_r_goes_through_the_channel_that_the_number_names(ranks, targets):
    for rank in range(ranks):
        channels = [Channel(9) for _ in range(targets)]
        lane = Lane(channels, rank, ranks)
        for number in range(6):
            assert lane.put((rank, number))
            channel = channels[(number * ranks + rank) % targets]
            assert channel.get() == (rank, number)
            assert channel.put((rank, number))
            assert lane.get() == (rank, number)


def test_a_lane_of_one_rank_is_the_usual_one():
    channels = [Channel(), Channel()]
    lane = Lane(channels)
    for item in "abc":
        lane.put(item)
    assert [channels[0].get(), channels[1].get(), channels[0].get()] == ["a", "b", "c"]


def test_what_ends_a_lane_ends_all_its_channels():
    failed = [Channel() for _ in range(3)]
    Lane(failed).fail(OSError("disk is gone"))
    for channel in failed:
        with pytest.raises(OSError, match="disk is gone"):
            channel.get()
    stopped = [Channel() for _ in range(3)]
    lane = Lane(stopped)
    lane.stop()
    assert not lane.put(1)
    for channel in stopped:
        with pytest.raises(TrainingError, match="stopped"):
            channel.get()
