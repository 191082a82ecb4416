"""The table and the verdict of an evaluation, from plain values."""

from dataclasses import replace

import pytest

from runtime.dflash.decoding.scores import DrafterScore, EvaluationResult, Mismatch


def mismatch(gap, prompt=4, position=7):
    return Mismatch(prompt=prompt, position=position, speculative=11, greedy=12, gap=gap)


def score(**changes):
    values = {
        "tau": 1.23456,
        "target_calls": 81,
        "new_tokens": 100,
        "kept": (70, 7, 4),
        "acceptance": (0.1358, 0.04938),
        "tokens_per_s": 55.55,
        "mismatches": (),
    }
    return DrafterScore(**{**values, **changes})


def result(**changes):
    values = {
        "prompts": 24,
        "without_prompt": 2,
        "repetitive": 3,
        "max_new_tokens": 64,
        "draft_block_size": 3,
        "device": "cuda:1",
        "dtype": "bfloat16",
        "greedy_tokens_per_s": 44.44,
        "trained": score(),
        "untrained": score(
            tau=1.0, target_calls=90, new_tokens=91, acceptance=(0.5, 0.25), tokens_per_s=33.33
        ),
    }
    return EvaluationResult(**{**values, **changes})


TABLE = """\
                  untrained    trained
tau                   1.000      1.235
slot 1 kept           50.0%      13.6%
slot 2 kept           25.0%       4.9%
target calls             90         81
tokens/s               33.3       55.5
mismatches                0          0
24 held-out prompts, 100 tokens; left out: 3 repetitive, 2 without a prompt
the target alone: 44.4 tokens/s (cuda:1, bfloat16)
tau: tokens that a call of the target gives, 1 without drafts; slot k kept: calls that kept k drafts
a draft and its check take 0.99 calls of the target alone and give tau tokens: 1.25 times as fast
for a larger tau: first more prompts of more kinds (data.prompts), then more steps (train.steps)"""


def test_the_table_has_the_untrained_drafter_first_and_every_slot():
    assert result().table() == TABLE


@pytest.mark.parametrize(("speed", "slower"), [(44.43, True), (44.44, False), (44.45, False)])
def test_only_a_drafter_slower_than_the_target_is_explained(speed, slower):
    table = result(trained=score(tokens_per_s=speed)).table()
    assert ("so drafts cost more time here than they save until tau is above" in table) == slower
    assert (": 1.00 times as fast" in table) == (not slower)


def test_the_speed_is_explained_by_what_a_draft_costs():
    """At twice the time a call and 1.5 tokens of it, drafts are slower by a quarter."""
    found = result(greedy_tokens_per_s=10.0, trained=score(tau=1.5, tokens_per_s=7.5)).table()
    assert "\na draft and its check take 2.00 calls of the target alone, so " in found
    assert "a draft and its" not in result(greedy_tokens_per_s=0.0).table()


@pytest.mark.parametrize(("compared", "shown"), [(0, False), (24, False), (4, True)])
def test_the_prompts_of_each_drafter_are_shown_where_they_differ(compared, shown):
    lines = result(compared=compared).table().splitlines()
    assert (lines[1] == "prompts                   4         24") == shown


@pytest.mark.parametrize(("confidence", "said"), [(0.0, False), (0.25, True)])
def test_a_cut_of_the_blocks_is_told(confidence, said):
    table = result(confidence=confidence).table()
    assert ("\ntrained: blocks were cut before drafts below 0.25" in table) == said


@pytest.mark.parametrize(("same", "said"), [(None, False), (True, False), (False, True)])
def test_a_drafter_of_another_target_is_said_to_be_one(same, said):
    wanted = "\nthe drafter was trained for another target than this one"
    assert result(same_target=same).table().endswith(wanted) == said


def test_every_mismatch_of_both_drafters_is_a_line():
    first = mismatch(0.01234, prompt=1, position=2)
    second = replace(mismatch(None), speculative=None)
    third = mismatch(2.0, prompt=9)
    found = result(untrained=score(mismatches=(first,)), trained=score(mismatches=(second, third)))
    assert found.mismatches == (first, second, third)
    lines = found.table().splitlines()
    assert lines[6] == "mismatches                1          2"
    assert lines[-3:] == [
        "mismatch: prompt 1, token 2: 11 instead of 12, worst logit 0.0123 below the best",
        "mismatch: prompt 4, token 7: None instead of 12, one text is the beginning of the other",
        "mismatch: prompt 9, token 7: 11 instead of 12, worst logit 2 below the best",
    ]


@pytest.mark.parametrize(
    ("dtype", "gap", "tie"),
    [
        ("float32", 0.0, True),
        ("float32", 1e-3, True),
        ("float32", 1.001e-3, False),
        ("bfloat16", 0.5, True),
        ("bfloat16", 0.501, False),
        ("bfloat16", None, False),
    ],
)
@pytest.mark.parametrize("which", ["trained", "untrained"])
def test_texts_are_exact_but_for_ties_of_the_dtype(which, dtype, gap, tie):
    found = result(dtype=dtype, **{which: score(mismatches=(mismatch(0.0), mismatch(gap)))})
    assert mismatch(gap).is_tie(dtype) == tie
    assert found.exact == tie
    assert found.as_dict()["exact"] == tie
    assert result(dtype=dtype).exact


def test_plain_values_are_all_of_them():
    found = result(trained=score(mismatches=(mismatch(0.5),)), same_target=True)
    values = found.as_dict()
    assert values["trained"] == {
        "tau": 1.23456,
        "target_calls": 81,
        "new_tokens": 100,
        "kept": [70, 7, 4],
        "acceptance": [0.1358, 0.04938],
        "tokens_per_s": 55.55,
        "mismatches": [{"prompt": 4, "position": 7, "speculative": 11, "greedy": 12, "gap": 0.5}],
    }
    assert values["untrained"]["target_calls"] == 90
    del values["trained"], values["untrained"]
    assert values == {
        "prompts": 24,
        "without_prompt": 2,
        "repetitive": 3,
        "max_new_tokens": 64,
        "draft_block_size": 3,
        "device": "cuda:1",
        "dtype": "bfloat16",
        "greedy_tokens_per_s": 44.44,
        "same_target": True,
        "compared": 0,
        "confidence": 0.0,
        "exact": True,
    }
