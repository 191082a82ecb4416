"""The mask that SDPA takes on the CPU, cell by cell, and attention by hand in fp64."""

import pytest
import torch

from runtime.static import attention
from runtime.static.attention import dense_attention, dense_mask, flex_attention_over


def test_a_cell_is_seen_in_any_span_of_its_row():
    # One head; two spans a row: empty, touching, inside out, and past the last key.
    starts = torch.tensor([[[[0, 2, 3, 5], [4, 4, 0, 1]]]], dtype=torch.int32)
    ends = torch.tensor([[[[2, 4, 1, 6], [4, 6, 0, 2]]]], dtype=torch.int32)
    found = dense_mask(starts, ends, 5)
    assert found.dtype == torch.bool
    assert found.int().tolist() == [
        [[[1, 1, 0, 0, 0], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0], [0, 1, 0, 0, 0]]]
    ]


def test_samples_and_heads_have_masks_of_their_own():
    starts = torch.tensor([[[[0]], [[1]]], [[[2]], [[3]]]], dtype=torch.int32)
    found = dense_mask(starts, starts + 1, 4)
    assert found.shape == (2, 2, 1, 4)
    assert found.int().flatten(0, 2).tolist() == torch.eye(4, dtype=torch.int).tolist()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_over_a_mask_equals_the_formula(kv_heads):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 3, 8, generator=generator)
    k, v = (torch.randn(2, kv_heads, 5, 8, generator=generator) for _ in range(2))
    mask = torch.rand(2, 1, 3, 5, generator=generator) < 0.6
    mask[..., 0] = True
    found = dense_attention(mask)(q, k, v)
    assert found.shape == q.shape
    for b in range(2):
        for h in range(4):
            group = h // (4 // kv_heads)
            scores = q[b, h].double() @ k[b, group].double().T / 8**0.5
            share = scores.masked_fill(~mask[b, 0], float("-inf")).softmax(dim=-1)
            wanted = (share @ v[b, group].double()).float()
            torch.testing.assert_close(found[b, h], wanted)


@pytest.mark.parametrize(("kv_heads", "grouped"), [(4, False), (2, True), (1, True)])
def test_on_a_gpu_the_one_kernel_is_asked_for_with_the_mask(monkeypatch, kv_heads, grouped):
    """What it computes is compared on a GPU; here, what is asked of it."""
    asked = []
    monkeypatch.setattr(
        attention, "flex_attention", lambda *given, **options: asked.append((given, options)) or 5
    )
    mask = object()
    q, k, v = torch.zeros(1, 4, 3, 8), *torch.zeros(2, 1, kv_heads, 5, 8)
    assert flex_attention_over(mask, scale=0.25)(q, k, v) == 5
    (((found_q, found_k, found_v), options),) = asked
    assert found_q is q
    assert found_k is k
    assert found_v is v
    assert options == {
        "block_mask": mask,
        "scale": 0.25,
        "enable_gqa": grouped,
        "kernel_options": {"BACKEND": "TRITON"},
    }
