from pathlib import Path

import attn_gym.masks
import pytest

from benchmarks.attention_gym_masks import CASES, outcome

DOCS = Path(__file__).parents[2] / "docs" / "mask_mods.md"
SMALL = [case for case in CASES if case.Q_LEN * case.KV_LEN <= 1 << 20]


@pytest.mark.parametrize("case", SMALL, ids=[f"{case.name} {case.Q_LEN}" for case in SMALL])
def test_a_generator_comes_out_as_the_docs_say(case):
    row = next(line for line in DOCS.read_text().splitlines() if f"| `{case.name}` |" in line)
    size = (
        f"{case.Q_LEN} x {case.KV_LEN}, {case.size}"
        if case.size
        else f"{case.Q_LEN} x {case.KV_LEN}"
    )
    assert f"| {size} | {outcome(case)} |" in row


def test_every_generator_of_the_package_has_its_row():
    generators = {name for name in dir(attn_gym.masks) if name.startswith("generate_")}
    assert {case.name for case in CASES} == generators | {"causal_mask", "batchify_mask_mod"}
