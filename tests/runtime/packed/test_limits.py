"""What packed fine-tuning refuses: every row, and what it lets pass."""

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

from maskgen.spec import read_specs
from runtime.config import parse_config
from runtime.errors import ConfigError
from runtime.packed.limits import LIMITS, MODEL, STEP, check_request
from runtime.packed.settings import PackedConfig
from runtime.ranks.devices import Placement
from runtime.target.outline import TargetOutline
from runtime.training.limits import Request
from tests.runtime.tiny_llama import tiny_model, tiny_tokenizer

GPU = Placement((torch.device("cuda", 0),), torch.bfloat16, 1)
CPU = Placement((torch.device("cpu"),), torch.float32, 1)
ENTRY = {"name": "packed", "family": "document", "kind": "parametric", "Q_LEN": [128, 256]}


def asked(entry=ENTRY, *, placement=CPU, ranks=1, block_size=128, outline=None, **sections):
    raw = {"masks": {"BLOCK_SIZE": block_size, "entry": [entry]}, **sections}
    specs = {spec.Q_LEN: spec for spec in read_specs(raw)}
    config = parse_config({"run": {"method": "packed"}, **raw}, PackedConfig)
    return Request(config=config, specs=specs, placement=placement, ranks=ranks, outline=outline)


def llama(positions=256):
    model = tiny_model(max_position_embeddings=positions)
    return TargetOutline(model, tiny_tokenizer(), name="tiny")


def mamba():
    config = MambaConfig(vocab_size=24, hidden_size=16, state_size=4, num_hidden_layers=1)
    with torch.device("meta"):
        model = MambaForCausalLM(config)
    return TargetOutline(model, tiny_tokenizer(), name="mamba")


REFUSED = [
    (asked({**ENTRY, "family": "causal", "kind": "static"}), "train.masks", "causal, static"),
    (asked({**ENTRY, "inner": "full"}), "train.masks", "document, parametric, full"),
    (asked({**ENTRY, "Q_LEN": 128, "KV_LEN": 256}), "train.masks", "128 rows, 256 keys"),
    (asked(placement=GPU, block_size=64), "masks.BLOCK_SIZE", "set masks.BLOCK_SIZE = 128"),
    (asked(train={"global_batch": 3}, ranks=2), "train.global_batch", "number of devices, 2"),
    (asked(run={"method": "packed", "target_devices": "cpu"}), "run.target_devices", "be empty"),
    (asked(outline=mamba()), "target.model", "mamba.*docs/targets.md"),
    (asked(outline=llama(255)), "masks.entry.Q_LEN", "256, of the target's 255 positions"),
]


@pytest.mark.parametrize(("request_", "field", "words"), REFUSED, ids=[f for _, f, _ in REFUSED])
def test_what_is_refused_says_the_field_and_what_to_set(request_, field, words):
    with pytest.raises(ConfigError, match=f"(?s)^{field} = .*{words}"):
        check_request(request_)


def test_every_row_is_tried():
    assert {limit.field for limit in LIMITS} == {field for _, field, _ in REFUSED}


@pytest.mark.parametrize(
    "request_",
    [
        asked(),
        asked({**ENTRY, "inner": "causal", "KV_LEN": [128, 256]}),
        asked(placement=GPU),
        asked(block_size=64),
        asked(train={"global_batch": 4}, ranks=2),
        asked(outline=llama(256)),
    ],
)
def test_what_can_be_done_passes(request_):
    check_request(request_)


def test_parts_that_are_not_used_are_not_asked():
    check_request(asked(outline=mamba()), (STEP,))
    with pytest.raises(ConfigError, match=r"target\.model"):
        check_request(asked(outline=mamba()), (MODEL,))
