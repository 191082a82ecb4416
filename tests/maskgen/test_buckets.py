"""Buckets: which one a length takes, and the plan with the least padding."""

import itertools
import random

import pytest

from maskgen.buckets import (
    MAX_CANDIDATES,
    Bucket,
    BucketOverflowError,
    BucketPlan,
    BucketWaste,
    plan_buckets,
)
from maskgen.errors import MaskgenError, MaskSpecError


def test_bucket_counts_ragged_blocks_and_its_context():
    bucket = Bucket(129, 400, (128, 64), 2)
    assert bucket.num_blocks == (2, 7)
    assert bucket.context == 271


def test_a_length_takes_the_smallest_bucket_that_holds_it():
    plan = BucketPlan((512, 128, 128, 256))
    assert plan.contexts == (128, 256, 512)
    lengths = [512, 1, 128, 129, 256, 257, 1]
    assert plan.buckets_of(lengths).tolist() == [512, 128, 128, 256, 256, 512, 128]


def test_a_length_beyond_the_largest_bucket_is_refused_with_both_numbers():
    with pytest.raises(BucketOverflowError, match="600 tokens, the largest bucket holds 512") as e:
        BucketPlan((128, 512)).buckets_of([513, 1, 600])
    assert (e.value.length, e.value.largest) == (600, 512)
    assert isinstance(e.value, MaskgenError)
    assert isinstance(e.value, ValueError)
    assert e.value.exit_code == 1


@pytest.mark.parametrize("contexts", [(), (0, 128), (-5,)])
def test_a_plan_needs_positive_lengths(contexts):
    with pytest.raises(MaskSpecError, match="at least 1"):
        BucketPlan(contexts)


def test_waste_is_counted_per_bucket():
    small, large = BucketPlan((100, 200)).waste([50, 100, 150])
    assert (small.samples, small.tokens, small.padded_tokens, small.share) == (2, 150, 200, 0.25)
    assert (large.samples, large.tokens, large.padded_tokens, large.share) == (1, 150, 200, 0.25)
    unused = BucketPlan((100, 200)).waste([150])[0]
    assert (unused.samples, unused.share) == (0, 0.0)


def test_waste_of_a_length_beyond_the_plan_is_refused():
    with pytest.raises(BucketOverflowError, match="201 tokens"):
        BucketPlan((100, 200)).waste([201, 3])


def test_two_clusters_get_a_bucket_each():
    lengths = [100] * 50 + [120] * 50 + [1000] * 3
    assert plan_buckets(lengths, 2, 128).contexts == (128, 1024)
    assert plan_buckets(lengths, 1, 128).contexts == (1024,)


def test_no_more_buckets_than_distinct_lengths():
    assert plan_buckets([5, 5, 9], 10, 1).contexts == (5, 9)
    assert plan_buckets([5, 9], 10, 16).contexts == (16,)


def padded(lengths, contexts):
    return sum(min(c for c in contexts if c >= n) for n in lengths)


@pytest.mark.parametrize("seed", range(20))
def test_the_plan_is_as_good_as_trying_every_choice(seed):
    draw = random.Random(seed)
    lengths = [draw.randint(1, 90) for _ in range(draw.randint(1, 30))]
    multiple, max_buckets = draw.choice([1, 8, 10]), draw.randint(1, 4)
    candidates = sorted({-(-n // multiple) * multiple for n in lengths})
    best = min(
        padded(lengths, (*chosen, candidates[-1]))
        for count in range(max_buckets)
        for chosen in itertools.combinations(candidates[:-1], count)
    )
    plan = plan_buckets(lengths, max_buckets, multiple)
    assert padded(lengths, plan.contexts) == best
    assert len(plan.contexts) <= max_buckets
    assert sum(bucket.padded_tokens for bucket in plan.waste(lengths)) == best


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (([], 2, 1), "at least one length"),
        (([3, 0], 2, 1), "lengths = 0: must be integers, 1 to"),
        # Their padding would be counted in int64, which wraps, and a fraction would be cut off.
        (([3, 2**62], 2, 1), "lengths = 4611686018427387904: must be integers, 1 to"),
        (([2**64, 3], 2, 1), "must be integers, 1 to"),
        (([3, 4.5], 2, 1), "must be integers, 1 to"),
        (([None, 3], 2, 1), "must be integers, 1 to"),
        (([3], 1, 2**63), "multiple = 9223372036854775808: must be 1 to"),
        (([3], 0, 1), "max_buckets = 0"),
        (([3], 1, 0), "multiple = 0"),
        ((range(1, MAX_CANDIDATES + 2), 2, 1), "distinct rounded lengths"),
    ],
)
def test_bad_input_of_the_planner_is_named(arguments, rule):
    with pytest.raises(MaskSpecError, match=rule):
        plan_buckets(*arguments)


def test_lengths_and_multiples_at_their_limits():
    assert plan_buckets([2**30, 1], 2, 1).contexts == (1, 2**30)
    assert plan_buckets([3], 1, 2**30).contexts == (2**30,)
    for arguments, message in (
        (([3, 2**30 + 1], 2, 1), "lengths = 1073741825: must be integers, 1 to 2**30 tokens each"),
        (([3], 1, 2**30 + 1), "multiple = 1073741825: must be 1 to 2**30"),
        (([3], 0, 1), "max_buckets = 0: must be at least 1"),
        (([], 1, 1), "lengths = []: must hold at least one length"),
    ):
        with pytest.raises(MaskSpecError) as caught:
            plan_buckets(*arguments)
        assert str(caught.value) == message
    assert len(plan_buckets(range(1, MAX_CANDIDATES + 1), 1, 1).contexts) == 1
    with pytest.raises(MaskSpecError) as caught:
        plan_buckets(range(1, 2 * MAX_CANDIDATES + 2), 1, 2)
    assert str(caught.value) == (
        "multiple = 2: must leave at most 16384 distinct rounded lengths, this one leaves 16385; "
        "raise it"
    )


def test_what_a_bucket_plan_refuses():
    for length in (0, -1):
        with pytest.raises(MaskSpecError) as caught:
            BucketPlan((4,)).buckets_of([3, length])
        assert str(caught.value) == f"lengths = {length}: must be integers, 1 to 2**30 tokens each"
    for lengths in ([], [0], [1.5]):
        with pytest.raises(MaskSpecError):
            BucketPlan((4,)).waste(lengths)
    with pytest.raises(MaskSpecError) as caught:
        BucketPlan((4, 0))
    assert str(caught.value) == "contexts = [4, 0]: must be lengths of at least 1"
    assert BucketPlan((1,)).buckets_of([1]).tolist() == [1]
    with pytest.raises(BucketOverflowError) as caught:
        BucketPlan((4, 8)).waste([3, 10, 12])
    assert (caught.value.length, caught.value.largest) == (12, 8)
    assert str(caught.value) == (
        "a length must fit a bucket: found 12 tokens, the largest bucket holds 8; cut or skip the "
        "sample, or add a larger bucket to [masks] and build again"
    )


def test_waste_keeps_the_order_of_the_plan_and_every_bucket():
    found = BucketPlan((300, 100, 200)).waste([300, 100, 100, 250, 1])
    assert found == [
        BucketWaste(context=100, samples=3, tokens=201),
        BucketWaste(context=200, samples=0, tokens=0),
        BucketWaste(context=300, samples=2, tokens=550),
    ]
    assert [bucket.padded_tokens for bucket in found] == [300, 0, 600]
    assert found[0].share == pytest.approx(99 / 300)


def test_blocks_that_just_fit_a_bucket():
    assert Bucket(128, 256, (128, 64), 1).num_blocks == (1, 4)
    assert Bucket(1, 257, (128, 64), 1).num_blocks == (1, 5)
