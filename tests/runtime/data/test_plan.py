from collections import Counter

import numpy as np
import pytest

from runtime.data.plan import NO_ROW, StepPlan


def plan(contexts, global_batch=4, seed=1):
    contexts = np.array(contexts, dtype=np.int64)
    return StepPlan(contexts - 1, contexts, global_batch, seed)


def test_every_epoch_takes_every_sample_once_in_its_own_bucket():
    contexts = [128] * 10 + [256] * 7
    steps = plan(contexts)
    assert steps.steps_per_epoch == 3 + 2
    for epoch in range(3):
        seen = Counter()
        for number in range(epoch * 5, epoch * 5 + 5):
            step = steps[number]
            assert (step.number, step.epoch) == (number, epoch)
            assert len(step.rows) == 4
            for sample in step.rows:
                if sample != NO_ROW:
                    assert contexts[sample] == step.bucket
                    seen[sample] += 1
        assert seen == Counter(range(17))


def test_epochs_differ_in_the_order_of_buckets_and_in_what_is_together():
    steps = plan([128] * 40 + [256] * 40)
    epochs = [[steps[20 * epoch + i] for i in range(20)] for epoch in range(4)]
    orders = {tuple(step.bucket for step in epoch) for epoch in epochs}
    together = {frozenset(frozenset(step.rows) for step in epoch) for epoch in epochs}
    assert len(orders) == len(together) == 4
    assert [step.epoch for epoch in epochs for step in epoch] == [
        e for e in range(4) for _ in range(20)
    ]


def test_buckets_of_equal_size_are_shuffled_each_for_itself():
    steps = plan([128] * 40 + [256] * 40)
    together = {128: set(), 256: set()}
    for number in range(20):
        step = steps[number]
        together[step.bucket].add(frozenset(sample % 40 for sample in step.rows))
    assert len(together[128]) == len(together[256]) == 10
    assert together[128] != together[256]


def test_epochs_differ_and_a_resumed_plan_does_not():
    first, second = plan([128] * 40), plan([128] * 40)
    assert [first[i].rows for i in range(10)] != [first[i].rows for i in range(10, 20)]
    assert first[37].rows == second[37].rows
    assert plan([128] * 40, seed=2)[0].rows != first[0].rows


def order(count, key, counter):
    """A permutation, from NumPy's own Philox."""
    words = np.random.Philox(
        key=np.array(key, np.uint64), counter=np.array([0, *counter], np.uint64)
    )
    drawn = words.random_raw(count).tolist() if count else []
    return sorted(range(count), key=drawn.__getitem__)


def by_hand(contexts, global_batch, seed, epoch):
    """The steps of an epoch: (bucket, samples), the padding last in its bucket."""
    steps = []
    for context in sorted(set(contexts)):
        ids = [i for i, c in enumerate(contexts) if c == context]
        drawn = [ids[i] for i in order(len(ids), (seed, 3), (epoch, context, 0))]
        while len(drawn) % global_batch:
            drawn.append(-1)
        for start in range(0, len(drawn), global_batch):
            steps.append((context, tuple(drawn[start : start + global_batch])))
    return [steps[i] for i in order(len(steps), (seed, 4), (epoch, 0, 0))]


@pytest.mark.parametrize("global_batch", [1, 3, 4, 8])
def test_an_old_runs_order_is_drawn_again_by_every_release(global_batch):
    contexts = [256, 128, 128, 512, 128, 256, 256, 128, 128, 256, 128, 128]
    steps = plan(contexts, global_batch, seed=11)
    assert steps.buckets == (128, 256, 512)
    expected = [by_hand(contexts, global_batch, 11, epoch) for epoch in range(3)]
    assert {len(epoch) for epoch in expected} == {steps.steps_per_epoch}
    count = steps.steps_per_epoch
    # As a resumed run asks, and a look back at an epoch that is no longer kept.
    for number in [*range(3 * count), 2 * count, 0]:
        step = steps[number]
        assert (step.bucket, step.rows) == expected[number // count][number % count]
        assert (step.number, step.epoch) == (number, number // count)


@pytest.mark.parametrize(("samples", "count"), [(4, 1), (5, 2), (8, 2), (1, 1)])
def test_a_bucket_is_filled_up_to_a_whole_step_and_no_further(samples, count):
    steps = plan([128] * samples)
    assert steps.steps_per_epoch == count
    drawn = [sample for number in range(count) for sample in steps[number].rows]
    assert sorted(drawn) == [NO_ROW] * (4 * count - samples) + list(range(samples))


def test_lengths_are_kept_as_they_came():
    contexts = np.array([128, 256, 128])
    lengths = np.array([100, 200, 90])
    assert StepPlan(lengths, contexts, 2, 1).lengths.tolist() == [100, 200, 90]


def test_no_sample_is_a_number_that_no_sample_has():
    assert NO_ROW == -1


@pytest.mark.parametrize(("size", "share"), [(1, 6), (2, 3), (3, 2), (6, 1)])
def test_each_rank_takes_its_place_in_the_batch(size, share):
    step = plan([128] * 60, global_batch=6)[3]
    for rank in range(size):
        begin = rank * share
        assert step.of_rank(rank, size) == step.rows[begin : begin + share]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_share_a_step_without_overlap(size):
    step = plan([128] * 10)[2]
    shares = [step.of_rank(rank, size) for rank in range(size)]
    assert tuple(sample for share in shares for sample in share) == step.rows
    assert len({len(share) for share in shares}) == 1


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_micro_batches_are_the_steps_rows_in_order(count):
    step = plan([128] * 10, global_batch=6)[1]
    parts = [*step.parts(count)]
    assert tuple(row for part in parts for row in part.rows) == step.rows
    assert [part.last for part in parts] == [False] * (count - 1) + [True]
    assert {len(part.rows) for part in parts} == {6 // count}
    assert {(part.number, part.epoch, part.bucket) for part in parts} == {
        (step.number, step.epoch, step.bucket)
    }
    assert [*step.parts(1)] == [step]
