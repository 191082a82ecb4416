"""One target for each kind of outcome, through all commands; docs/targets.md has the others."""

import pytest

from tests.runtime.try_targets import CASES, try_target

TARGETS = [
    # Starts from the target, with plain RoPE where the target's depends on the length.
    ("Llama, dynamic RoPE", "target", ""),
    # Windows of 8 tokens, which all samples are longer than, and an embedding that is scaled.
    ("Gemma 2", "random", 'drafter.init = "target (its activation is gelu_pytorch_tanh'),
    # No intermediate size, no RoPE, no RMSNorm.
    ("GPT-2", "random", 'drafter.init = "target (its activation is gelu_new'),
    # Positions by ALiBi: the model takes no position_ids.
    ("MPT", "random", "drafter.init = 'target (its RoPE is of kind none"),
    ("Phi-3, longrope", "random", "drafter.init = 'target (its RoPE is of kind longrope"),
]
REFUSED = {
    "Qwen3-Next": "has layers (linear_attention) whose state cannot be rewound",
    "Mamba": "has layers (linear_attention) whose state cannot be rewound",
    "OPT, projected embedding": "has an embedding of shape (264, 32)",
    "BERT as a decoder": "keeps decoder layers under none of layers, h, blocks",
}


@pytest.mark.parametrize(("name", "init", "line"), TARGETS, ids=[name for name, *_ in TARGETS])
def test_targets_that_go_all_the_way(tmp_path, name, init, line):
    outcome = try_target(name, tmp_path)
    assert (outcome.init, outcome.answers_equal, outcome.drafted_equal) == (init, True, True)
    assert outcome.line.startswith(line)


@pytest.mark.parametrize("name", REFUSED)
def test_targets_that_are_refused_before_anything_is_answered(tmp_path, name):
    outcome = try_target(name, tmp_path)
    assert outcome.init == "-"
    assert outcome.line.startswith("target.model = ")
    assert REFUSED[name] in outcome.line
    assert not (tmp_path / "data").exists()


def test_every_case_has_a_name_of_its_own_in_the_docs(request):
    page = (request.config.rootpath / "docs" / "targets.md").read_text()
    for name in CASES:
        assert f"| {name} |" in page, name
