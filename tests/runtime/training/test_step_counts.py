"""What the counters of a training state say, and when a run counts as trained."""

import pytest
import torch

from runtime.errors import NonFiniteError, NothingLearnedError
from runtime.training.outcome import StepCounts, check_learned, check_skips, step_counts


def counts(**changes):
    values = {
        "begun": 10,
        "learned": 5,
        "skipped": 3,
        "skips_in_a_row": 1,
        "worst_skips_in_a_row": 2,
    }
    return StepCounts(**{**values, **changes})


def test_counters_are_read_by_their_places():
    """Steps, skipped, in a row, worst in a row, and a norm that is no count."""
    state = {"counters": torch.tensor([10.0, 3.0, 1.0, 2.0, 0.5]), "step": torch.tensor(5.0)}
    assert step_counts(state) == counts()
    assert counts().empty == 2
    assert counts().as_dict() == {
        "begun": 10,
        "learned": 5,
        "skipped": 3,
        "skips_in_a_row": 1,
        "worst_skips_in_a_row": 2,
    }


def test_a_row_of_skips_is_refused_from_the_limit_on():
    check_skips(3, 4, 20)
    for in_a_row in (4, 5):
        with pytest.raises(NonFiniteError) as caught:
            check_skips(in_a_row, 4, 20)
        assert str(caught.value).startswith(
            f"{in_a_row} steps in a row had a loss or gradient that was not finite (limit "
            "train.max_skipped = 4), the last about step 20; "
        )


def test_a_finished_run_is_judged_by_its_worst_row():
    check_learned(counts(), 3)
    check_learned(counts(skips_in_a_row=9), 3)
    with pytest.raises(NonFiniteError, match=r"^2 steps in a row .* the last about step 10;"):
        check_learned(counts(), 2)


def test_a_run_that_changed_no_weight_says_why():
    check_learned(counts(learned=1), 9)
    with pytest.raises(NothingLearnedError) as caught:
        check_learned(counts(learned=0, skipped=3), 9)
    assert str(caught.value).startswith(
        "nothing was learned in 10 steps, and nothing is exported: 7 had no supervised token, "
        "3 a loss or gradient that was not finite."
    )
    # Too many skips are the nearer reason.
    with pytest.raises(NonFiniteError):
        check_learned(counts(learned=0, worst_skips_in_a_row=9), 9)
