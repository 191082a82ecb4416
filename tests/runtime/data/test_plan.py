from collections import Counter

import numpy as np
import pytest

from runtime.data.plan import NO_SAMPLE, StepPlan


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
            assert len(step.samples) == 4
            for sample in step.samples:
                if sample != NO_SAMPLE:
                    assert contexts[sample] == step.context
                    seen[sample] += 1
        assert seen == Counter(range(17))


def test_epochs_differ_in_the_order_of_buckets_and_in_what_is_together():
    steps = plan([128] * 40 + [256] * 40)
    epochs = [[steps[20 * epoch + i] for i in range(20)] for epoch in range(4)]
    orders = {tuple(step.context for step in epoch) for epoch in epochs}
    together = {frozenset(frozenset(step.samples) for step in epoch) for epoch in epochs}
    assert len(orders) == len(together) == 4
    assert [step.epoch for epoch in epochs for step in epoch] == [
        e for e in range(4) for _ in range(20)
    ]


def test_buckets_of_equal_size_are_shuffled_each_for_itself():
    steps = plan([128] * 40 + [256] * 40)
    together = {128: set(), 256: set()}
    for number in range(20):
        step = steps[number]
        together[step.context].add(frozenset(sample % 40 for sample in step.samples))
    assert len(together[128]) == len(together[256]) == 10
    assert together[128] != together[256]


def test_epochs_differ_and_a_resumed_plan_does_not():
    first, second = plan([128] * 40), plan([128] * 40)
    assert [first[i].samples for i in range(10)] != [first[i].samples for i in range(10, 20)]
    assert first[37].samples == second[37].samples
    assert plan([128] * 40, seed=2)[0].samples != first[0].samples


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_share_a_step_without_overlap(size):
    step = plan([128] * 10)[2]
    shares = [step.of_rank(rank, size) for rank in range(size)]
    assert tuple(sample for share in shares for sample in share) == step.samples
    assert len({len(share) for share in shares}) == 1
