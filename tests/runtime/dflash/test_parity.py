"""The exported folder, the training step and decoding compute one drafter.

The measure is ``plain_drafter``, which shares no code with the product.
"""

import dataclasses

import pytest
import torch

from runtime.dflash.decoding.speculate import DraftSession
from runtime.dflash.folder.saved_drafter import load_published, save_published
from runtime.dflash.loss.head import HeadLoss
from runtime.dflash.start.initialise import drafter_config, random_start
from runtime.dflash.step.draft_batch import DraftBatch
from runtime.dflash.step.draft_loss import draft_loss
from runtime.static.attention import dense_attention
from runtime.target.frozen import FrozenTarget
from runtime.target.model import Target
from tests.runtime.plain_drafter import WRONG, WRONG_WINDOW, first_block
from tests.runtime.tiny_gemma import gemma_target
from tests.runtime.tiny_llama import prompts, tiny_target

LAYER_IDS = (1, 2, 3)
BLOCK = 4
SCALE = torch.tensor([2.0, 0.5, 4.0])
ROPES = {
    "llama": None,
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.7,
    },
}


def make_target(kind):
    if kind == "gemma":
        return gemma_target()
    rope = ROPES.get(kind)
    options = {"rope_parameters": {**rope, "rope_theta": 1e4}} if rope else {}
    return tiny_target(**options)


def make_drafter(network, seed=3):
    """Weights that bf16 holds exactly, large enough that every part of the network shows."""
    generator = torch.Generator().manual_seed(seed)
    drafter = random_start(network, generator)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0.0, 0.2, generator=generator)
    return drafter.to(torch.bfloat16).float().requires_grad_(False)


@dataclasses.dataclass
class Case:
    target: Target
    drafter: object
    folder: object
    prompt: list
    product: torch.Tensor


SLIDING = {"layers": ("sliding", "full"), "sliding_window": 6}


@pytest.fixture(scope="module", params=[*ROPES, "gemma", "sliding"])
def case(request, tmp_path_factory):
    target = make_target(request.param)
    network = drafter_config(
        target, num_layers=2, draft_block_size=BLOCK, target_layer_ids=LAYER_IDS
    )
    if request.param == "sliding":
        network = dataclasses.replace(network, **SLIDING)
    drafter = make_drafter(network)
    folder = save_published(
        tmp_path_factory.mktemp(request.param), network, drafter.state_dict(), feature_scale=SCALE
    )
    prompt = prompts(9)[8]
    session = DraftSession(target, load_published(folder, dtype=torch.float32))
    return Case(target, drafter, folder, prompt, session.first_block(prompt).clone())


def step_logits(case, drafter):
    """What the training step makes of the block whose anchor follows the prompt."""
    target, n = case.target, len(case.prompt)
    answer = int(target.logits(torch.tensor([case.prompt]))[0, -1].argmax())
    input_ids = torch.tensor([[*case.prompt, answer, 5, 6, 7]])
    S = input_ids.shape[1]
    mask = torch.zeros(1, 1, BLOCK, S + BLOCK, dtype=torch.bool)
    mask[..., :n] = mask[..., S:] = True
    near = mask.clone()
    for slot in range(BLOCK):
        near[..., slot, : n + slot - 5] = near[..., slot, S + slot + 1 :] = False
    rows = []

    def head_loss(x, head, labels, weights):
        rows.append(x @ head.T)
        return HeadLoss(x.sum(), labels)

    draft_loss(
        drafter,
        FrozenTarget(
            embed_weight=target.embed_weight,
            head_weight=target.head_weight,
            feature_scale=SCALE,
            features=None,
        ),
        DraftBatch(
            input_ids,
            target.features(input_ids, LAYER_IDS),
            torch.tensor([[n]], dtype=torch.int32),
            dense_attention(mask),
            sliding=dense_attention(near) if drafter.config.layers else None,
        ),
        torch.zeros(1, 1, BLOCK - 1, dtype=torch.int64),
        torch.ones(1, 1, BLOCK - 1),
        head_loss=head_loss,
    )
    return rows[0].detach()


def test_the_folder_holds_the_products_drafter(case):
    found = first_block(case.folder, case.target.model, case.prompt)
    torch.testing.assert_close(found, case.product, rtol=0, atol=1e-5)


def test_the_training_step_computes_what_decoding_does(case):
    torch.testing.assert_close(step_logits(case, case.drafter), case.product, rtol=0, atol=1e-5)


@pytest.mark.parametrize("wrong", WRONG)
def test_one_thing_wrong_at_a_time_shows(case, wrong):
    found = first_block(case.folder, case.target.model, case.prompt, wrong, SCALE)
    config = case.drafter.config
    is_there = wrong != "rope scaling" or config.rope_scaling is not None
    is_there &= wrong not in WRONG_WINDOW or bool(config.layers)
    assert ((found - case.product).abs().max() > 1e-2) == is_there
