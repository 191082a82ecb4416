"""Features of samples: which forward passes make them, and their size by hand."""

import math
from types import SimpleNamespace

import pytest
import torch

from runtime.data import features as features_module
from runtime.data.features import features_of, is_finite, scale_of
from tests.runtime.tiny_llama import HIDDEN, prompts, tiny_target

LAYERS = (1, 4)


class Recording:
    """A target whose features are each token's id and its column, and what it was asked."""

    device = torch.device("cpu")

    def __init__(self):
        self.asked = []

    def features(self, ids, layer_ids):
        self.asked.append((ids.tolist(), tuple(layer_ids), ids.dtype))
        columns = torch.arange(ids.shape[1]).expand_as(ids)
        return torch.stack([ids, columns], dim=-1).float()


@pytest.mark.parametrize("limit", [5, 6, 100])
def test_samples_of_similar_length_share_a_pass_of_so_many_tokens(monkeypatch, limit):
    monkeypatch.setattr(features_module, "FORWARD_TOKENS", limit)
    target, samples = Recording(), [[11, 12, 13], [21], [31, 32], [41, 42, 43, 44, 45, 46, 47, 48]]
    found = features_of(target, LAYERS, samples)
    for sample, features in zip(samples, found, strict=True):
        assert features.dtype == torch.bfloat16
        assert features.tolist() == [[token, i] for i, token in enumerate(sample)]
        assert features.untyped_storage().nbytes() == features.numel() * 2, "no view of a batch"
    expected = {
        5: [[[21, 0], [31, 32]], [[11, 12, 13]], [samples[3]]],
        6: [[[21, 0, 0], [31, 32, 0], [11, 12, 13]], [samples[3]]],
        100: [[s + [0] * (8 - len(s)) for s in sorted(samples, key=len)]],
    }
    assert [rows for rows, _, _ in target.asked] == expected[limit]
    assert {(layers, dtype) for _, layers, dtype in target.asked} == {(LAYERS, torch.int64)}


def test_a_batch_that_fills_the_limit_exactly_is_whole(monkeypatch):
    target = Recording()
    monkeypatch.setattr(features_module, "FORWARD_TOKENS", 12)
    features_of(target, LAYERS, [[7] * 4] * 7)
    assert [len(rows) for rows, _, _ in target.asked] == [3, 3, 1]


def test_features_are_those_of_each_sample_alone_and_told_of(capsys):
    target, samples = tiny_target(), prompts(5)
    for sample, features in zip(samples, features_of(target, LAYERS, samples), strict=True):
        alone = target.features(torch.tensor([sample]), LAYERS)[0]
        assert features.shape == (len(sample), 2 * HIDDEN)
        torch.testing.assert_close(features.float(), alone, rtol=0.01, atol=0.01)
    assert "features of 5 samples: 100 % (" in capsys.readouterr().err
    assert features_of(target, LAYERS, []) == []


def test_the_scale_by_hand():
    # K = 2, H = 2; the first token is left out, whatever stands there.
    first = torch.tensor([[1e4] * 4, [3.0, 4.0, 0.0, 2.0]])
    second = torch.tensor([[-1e4] * 4, [1.0, 1.0, 2.0, 2.0], [0.0, 0.0, 6.0, 0.0]])
    squares = [(9 + 16) / 2 + (1 + 1) / 2 + 0, (0 + 4) / 2 + (4 + 4) / 2 + 36 / 2]
    expected = [math.sqrt(square / 3) for square in squares]
    assert scale_of([first, second], 2) == pytest.approx(expected, rel=1e-12)
    assert scale_of([second, first], 2) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_sample_that_is_not_finite_counts_for_nothing(bad):
    good = torch.tensor([[0.0, 0.0], [3.0, 5.0]])
    for place in ((0, 0), (1, 1)):
        spoilt = torch.tensor([[0.0, 0.0], [100.0, 100.0]])
        spoilt[place] = bad
        assert not is_finite(spoilt)
        assert scale_of([spoilt, good, spoilt], 2) == [3.0, 5.0]
    assert is_finite(good)


def test_a_scale_of_nothing_is_none():
    assert scale_of([], 3) == [0.0, 0.0, 0.0]
    assert scale_of([torch.ones(1, 4)], 2) == [0.0, 0.0]


def test_a_scale_is_summed_in_float64():
    """2^24 + 1 is no float32."""
    large = torch.full((2, 1), 4096.0)
    ones = torch.ones(3, 1)
    assert scale_of([large, ones], 1) == [math.sqrt((2**24 + 2) / 3)]


def test_features_go_to_the_device_of_the_target(monkeypatch):
    made = []
    real = torch.tensor

    def recorded(*args, **options):
        made.append(options.get("device"))
        return real(*args, **{**options, "device": "cpu"})

    target = Recording()
    elsewhere = SimpleNamespace(device=torch.device("meta"), features=target.features)
    monkeypatch.setattr(torch, "tensor", recorded)
    features_of(elsewhere, LAYERS, [[1, 2]])
    assert made == [torch.device("meta")]
