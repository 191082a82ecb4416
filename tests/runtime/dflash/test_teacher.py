"""The target as a teacher: whether its rows fit its own text, and which targets may be one."""

import pytest
import torch

from runtime.dflash.loss.head import block_targets
from runtime.dflash.loss.teacher import check_teacher, teacher_rows
from runtime.errors import ConfigError
from tests.runtime.tiny_gemma import gemma_target
from tests.runtime.tiny_llama import LAYERS, tiny_target
from tests.runtime.tiny_text import byte_target

BLOCK = 4


def greedy(target, ids, count):
    """The target's own text, by whole forward passes."""
    for _ in range(count):
        ids = [*ids, int(target.logits(torch.tensor([ids]))[0, -1].argmax())]
    return ids


def test_the_row_of_a_slot_is_where_the_target_predicts_its_token():
    # Positions 0..9 of two samples, named 100 * sample + position.
    last = (100 * torch.arange(2)[:, None] + torch.arange(10)).float()[..., None]
    anchors = torch.tensor([[0, 5], [2, 8]], dtype=torch.int32)
    rows = teacher_rows(last, anchors, BLOCK)
    # Slot 1 is drafted from the anchor's own row. Past the end stands the last one.
    assert rows[:, 0].tolist() == [0, 1, 2, 5, 6, 7, 102, 103, 104, 108, 109, 109]


@pytest.mark.parametrize("seed", [0, 1])
def test_on_the_targets_own_text_its_first_choice_is_every_supervised_slots_label(seed):
    target = byte_target(seed=seed)
    prompt = [5, 17, 60, 33, 90]
    ids = torch.tensor([greedy(target, prompt, 27)])
    supervised = torch.arange(ids.shape[1])[None] >= len(prompt)
    anchors = torch.arange(ids.shape[1], dtype=torch.int32)[None]
    targets = block_targets(
        ids,
        supervised,
        anchors,
        torch.tensor([ids.shape[1]], dtype=torch.int32),
        draft_block_size=BLOCK,
        gamma=4.0,
    )
    last = target.features(ids, (target.num_layers,))
    rows = teacher_rows(last, anchors, BLOCK)
    trained = targets.weights.flatten() > 0
    labels = targets.labels.flatten()[trained]
    assert len(labels) > 60
    assert len(labels.unique()) > 3
    chosen = (rows @ target.head_weight.T).argmax(-1)[trained]
    assert torch.equal(chosen, labels)
    # And the logits are the target's own, at the position before the slot's.
    wanted = target.logits(ids)[0]
    at = (anchors[0, :, None] + torch.arange(BLOCK - 1)).clamp(max=ids.shape[1] - 1).flatten()
    torch.testing.assert_close(rows @ target.head_weight.T, wanted[at], rtol=0, atol=1e-4)


IDS = torch.arange(3, 20)[None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_target_whose_head_says_all_may_teach(dtype):
    target = tiny_target()
    target.model.to(dtype)
    check_teacher(target, IDS)


def capped(logits):
    return 3 * torch.tanh(logits / 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "after",
    [
        capped,
        lambda logits: logits / 8,
        lambda logits: logits + torch.linspace(0, 1, logits.shape[-1]).to(logits.dtype),
        lambda logits: logits * float("nan"),
    ],
)
def test_logits_that_are_made_otherwise_are_refused(after, dtype):
    target = tiny_target()
    target.model.to(dtype)
    head = target.model.get_output_embeddings()
    head.register_forward_hook(lambda module, args, output: after(output))
    message = r"target\.model = 'tiny': must have logits that are its head times its last hidden"
    with pytest.raises(ConfigError, match=message + r".*lie up to .*train\.distill = 'none'"):
        check_teacher(target, IDS)


def test_a_cap_of_the_models_own_is_seen():
    check_teacher(gemma_target(), IDS)
    with pytest.raises(ConfigError, match=r"target\.model = 'gemma': .* capped"):
        check_teacher(gemma_target(final_logit_softcapping=1.0), IDS)


def test_a_target_without_a_final_norm_is_refused():
    target = tiny_target()
    target.final_norm = None
    with pytest.raises(ConfigError, match="must have a norm between its last layer and its head"):
        check_teacher(target, IDS)
    assert target.num_layers == LAYERS
