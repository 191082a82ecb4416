import pytest
import torch
from transformers.cache_utils import DynamicLayer

from runtime.data.answer import distinct_share
from runtime.data.answers import KVBuffer, answer_all, step_count
from tests.runtime.tiny_llama import prompts, tiny_target


def answered(target, questions, limits, **options):
    """All answers, in the order of the prompts."""
    found = {}
    for batch in answer_all(target, questions, limits, **options):
        found |= batch
    return [found[row] for row in range(len(questions))]


def greedy(target, prompt, limit):
    """Token by token, each from a whole forward pass of the model itself."""
    ids = list(prompt)
    for _ in range(limit):
        logits = target.model(input_ids=torch.tensor([ids])).logits
        ids.append(int(logits[0, -1].argmax()))
        if ids[-1] in target.eos_token_ids:
            break
    return ids[len(prompt) :]


def ending_target():
    """Some answers end early, at different lengths."""
    target = tiny_target(initializer_range=0.4)
    target.model.generation_config.eos_token_id = [2, 5, 9]
    return target


@pytest.mark.parametrize("batch", [1, 3, 20])
def test_answers_equal_greedy_decoding_one_by_one(batch):
    target = ending_target()
    questions = prompts(9)
    limits = [1, 12, 7, 12, 12, 3, 12, 12, 12]
    answers = answered(target, questions, limits, batch=batch)
    expected = [greedy(target, *pair) for pair in zip(questions, limits, strict=True)]
    assert [answer.token_ids for answer in answers] == expected
    ends = [tokens[-1] in (2, 5, 9) for tokens in expected]
    assert [answer.ended for answer in answers] == ends
    assert 0 < sum(ends) < 9, "the model must end some answers and not others"


def test_what_is_left_between_two_batches_is_batched_as_before():
    target = ending_target()
    questions = prompts(10)[::-1] + prompts(3)
    batches = list(answer_all(target, questions, [5] * 13, batch=3))
    assert [len(batch) for batch in batches] == [3, 3, 3, 3, 1]
    left = [row for batch in batches[2:] for row in batch]
    rest = sorted(left)
    again = list(answer_all(target, [questions[row] for row in rest], [5] * len(rest), batch=3))
    assert [[rest[row] for row in batch] for batch in again] == [list(b) for b in batches[2:]]


def test_the_longest_prompts_come_first():
    """A batch that is too large for the memory fails at once, and not after hours."""
    target = ending_target()
    lengths = [3, 9, 5, 9, 4, 1, 7]
    questions = [[3] * length for length in lengths]
    rows = [list(batch) for batch in answer_all(target, questions, [2] * 7, batch=2)]
    assert rows == [[1, 3], [6, 2], [4, 0], [5]]


def test_steps_reported_are_the_steps_announced():
    target = ending_target()
    questions = prompts(7)
    limits = [6, 6, 6, 6, 2, 2, 2]
    done = []
    answered(target, questions, limits, batch=3, advance=done.append)
    assert sum(done) == step_count(questions, limits, 3)


def test_sliding_layers_keep_their_own_cache():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    from runtime.target.model import Target

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=24, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=5,
        initializer_range=0.4, pad_token_id=0, eos_token_id=2, bos_token_id=1,
    )  # fmt: skip
    target = Target(Gemma2ForCausalLM(config), tiny_target().tokenizer, name="sliding")
    questions = prompts(3)
    answers = answered(target, questions, [8] * 3, batch=3)
    assert [a.token_ids for a in answers] == [greedy(target, q, 8) for q in questions]


def test_buffer_holds_what_a_dynamic_layer_holds():
    generator = torch.Generator().manual_seed(0)
    buffer, plain = KVBuffer(), DynamicLayer()
    for length in (5, 1, 70, 1, 1):
        keys, values = torch.randn(2, 3, 2, length, 4, generator=generator)
        for found, expected in zip(
            buffer.update(keys, values), plain.update(keys, values), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert buffer.get_seq_length() == plain.get_seq_length()
    index = torch.tensor([2, 0])
    buffer.batch_select_indices(index)
    plain.batch_select_indices(index)
    keys = torch.randn(2, 2, 1, 4, generator=generator)
    for found, expected in zip(buffer.update(keys, keys), plain.update(keys, keys), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("tokens", "share"),
    [
        ([], 1.0),
        ([1, 2, 3], 1.0),
        ([1, 2, 3, 4], 1.0),
        ([1, 1, 1, 1, 1, 1], 1 / 3),
        ([1, 2, 1, 2, 1, 2, 1], 1 / 2),
        ([1, 2, 3, 4, 5, 1, 2, 3, 4], 5 / 6),
    ],
)
def test_share_of_distinct_4grams(tokens, share):
    assert distinct_share(tokens) == pytest.approx(share)


class Counting:
    """A tiny model that says a fixed word of each prompt, and what it was fed."""

    def __init__(self, target):
        self.target = target
        self.fed = []

    def __getattr__(self, name):
        return getattr(self.target, name)

    def extend(self, ids, cache, **options):
        self.fed.append(tuple(ids.shape))
        assert options["last_only"], "logits of a whole prompt may be gigabytes"
        assert {type(layer) for layer in cache.layers} == {KVBuffer}
        return self.target.extend(ids, cache, **options)


def test_rows_that_have_ended_leave_the_batch_once_they_are_many():
    target = Counting(ending_target())
    questions = [[3 + i] * 5 for i in range(8)]
    limits = [1, 2, 3, 3, 3, 6, 6, 6]
    answers = answered(target, questions, limits, batch=8)
    left, rows, expected = [len(answer.token_ids) for answer in answers], 8, [(8, 5)]
    for step in range(1, max(left)):
        running = sum(length > step for length in left)
        # Below 85 % of the rows.
        rows = running if running < 0.85 * rows else rows
        expected.append((rows, 1))
    assert target.fed == expected
    assert {shape[0] for shape in target.fed} > {8}


@pytest.mark.parametrize("longest", [64, 65, 130])
def test_answers_longer_than_the_room_of_a_buffer(longest):
    target = tiny_target(initializer_range=0.4)
    target.model.generation_config.eos_token_id = None
    target.tokenizer.eos_token = None
    questions = [[5, 7, 9], [4]]
    answers = answered(target, questions, [longest, 3], batch=2)
    expected = [greedy(target, q, n) for q, n in zip(questions, (longest, 3), strict=True)]
    assert [answer.token_ids for answer in answers] == expected
    assert [answer.ended for answer in answers] == [False, False]


def test_an_answer_that_ends_at_its_limit_is_ended():
    target = ending_target()
    questions = prompts(9)
    whole = answered(target, questions, [12] * 9, batch=9)
    rows = [row for row, answer in enumerate(whole) if answer.ended]
    limits = [len(answer.token_ids) for answer in whole]
    assert answered(target, questions, limits, batch=9) == whole
    shorter = answered(target, questions, [max(1, limit - 1) for limit in limits], batch=9)
    assert not any(shorter[row].ended for row in rows if limits[row] > 1)


@pytest.mark.parametrize(("batch", "count"), [(1, 1 + 2 + 3 + 4), (2, 4 + 2), (3, 4 + 1), (9, 4)])
def test_steps_are_the_longest_limit_of_each_batch(batch, count):
    # Longest prompts first: limits 4, 3, 2, 1.
    questions = [[3], [3, 4], [3, 4, 5], [3, 4, 5, 6]]
    assert step_count(questions, [1, 2, 3, 4], batch) == count
    assert step_count([], [], batch) == 0


def test_steps_are_reported_as_they_are_done_and_the_rest_when_a_batch_ends():
    target, done = ending_target(), []
    questions = prompts(4)
    found = list(answer_all(target, questions, [30] * 4, batch=4, advance=done.append))
    longest = max(len(answer.token_ids) for answer in found[0].values())
    assert done == [*[1] * longest, 30 - longest]
    assert list(answer_all(target, [], [], batch=4)) == []


@pytest.mark.parametrize(
    ("tokens", "n", "share"),
    [([1, 1, 1], 1, 1 / 3), ([1, 2, 1, 2], 2, 2 / 3), ([1, 2], 2, 1.0), ([1], 2, 1.0)],
)
def test_share_of_distinct_grams_of_other_lengths(tokens, n, share):
    assert distinct_share(tokens, n) == pytest.approx(share)


def test_a_buffer_is_written_in_place_until_it_is_full():
    buffer = KVBuffer()
    one = torch.ones(1, 1, 1, 2)
    first, _ = buffer.update(one, one)
    places = set()
    for number in range(2, 70):
        keys, values = buffer.update(number * one, -number * one)
        places.add(keys.data_ptr())
        assert keys[0, 0, :, 0].tolist() == list(range(1, number + 1))
        assert values[0, 0, :, 0].tolist() == [1.0] + [-float(i) for i in range(2, number + 1)]
    # 1 + 64 positions, then another buffer.
    assert len(places) == 2
    assert first.data_ptr() in places
