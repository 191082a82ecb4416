"""Bad parameters are refused with the field, the value and the rule."""

import re
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest
import torch

from maskgen.errors import MaskSpecError
from maskgen.families import families
from maskgen.families.dflash import SLIDING_RULES
from maskgen.families.params import REQUIRED

DFLASH = {"draft_block_size": 2, "anchors": [1, 3]}
P_EAGLE = {"num_depths": 2, "anchors": [0, 1, 1], "depths": [0, 0, 1]}

# family, Q_LEN, KV_LEN, parameters, field, value, words of the rule
BAD = [
    ("causal", 0, 4, {}, "Q_LEN", 0, "at least 1"),
    ("causal", 4, 0, {}, "KV_LEN", 0, "at least 1"),
    ("causal", -3, 4, {}, "Q_LEN", -3, "at least 1"),
    ("causal", 4.0, 4, {}, "Q_LEN", 4.0, "must be an integer"),
    ("causal", True, 4, {}, "Q_LEN", True, "must be an integer"),
    ("causal", 4, 2**31, {}, "KV_LEN", 2**31, r"2\*\*30"),
    ("causal", 4, 4, {"ofset": 1}, "ofset", 1, "no parameter of family 'causal'.*'offset'"),
    ("causal", 4, 4, {"offset": 4}, "offset", 4, "between -4 and 4"),
    ("causal", 4, 9, {"offset": -4}, "offset", -4, "between -4 and 9"),
    ("causal", 4, 4, {"offset": 1.5}, "offset", 1.5, "must be an integer"),
    ("causal", 4, 4, {"offset": "1"}, "offset", "1", "must be an integer"),
    ("sliding_window", 4, 4, {}, "window", None, "required by family 'sliding_window'"),
    ("sliding_window", 4, 4, {"window": 0}, "window", 0, "at least 1"),
    ("sliding_window", 4, 4, {"window": -2}, "window", -2, "at least 1"),
    ("sliding_window", 4, 4, {"window": 2**31}, "window", 2**31, r"2\*\*30"),
    ("sliding_window", 4, 4, {"window": 2, "inclusive": 1}, "inclusive", 1, "true or false"),
    ("sliding_window", 4, 4, {"window": 2, "offset": 9}, "offset", 9, "between"),
    ("sink_window", 4, 4, {"sinks": -1, "window": 2}, "sinks", -1, "at least 0"),
    ("sink_window", 4, 4, {"sinks": 1, "window": 0}, "window", 0, "at least 1"),
    ("chunked", 4, 4, {"chunk": 0}, "chunk", 0, "at least 1"),
    ("full", 4, 4, {"lengths": [0]}, "lengths", 0, "1 to 4"),
    ("full", 4, 4, {"lengths": [3, 5]}, "lengths", 5, "1 to 4"),
    ("full", 4, 4, {"lengths": [2.5]}, "lengths", 2.5, "must hold integers"),
    ("full", 4, 4, {"lengths": [[1]]}, "lengths", [1, 1], r"shape \[B\]"),
    ("full", 4, 4, {"lengths": []}, "lengths", [0], "must not be empty"),
    ("full", 4, 4, {"lengths": "no"}, "lengths", "no", "integers of shape"),
    ("prefix_lm", 4, 4, {}, "prefix", None, "required by family 'prefix_lm', or prefix_lens"),
    ("prefix_lm", 4, 4, {"prefix": 5}, "prefix", 5, "at most KV_LEN = 4"),
    ("prefix_lm", 4, 4, {"prefix": -1}, "prefix", -1, "at least 0"),
    ("prefix_lm", 4, 4, {"prefix_lens": [5]}, "prefix_lens", 5, "0 to 4"),
    ("prefix_lm", 4, 4, {"prefix": 1, "prefix_lens": [1]}, "prefix_lens", 1, "not both"),
    ("document", 4, 4, {}, "doc_ids", None, "give doc_ids or doc_offsets"),
    ("document", 4, 4, {"doc_ids": [0, 0, 1]}, "doc_ids", [1, 3], "each of the 4 positions"),
    ("document", 4, 4, {"doc_ids": [0, 1, 1, 0]}, "doc_ids", 0, "side by side"),
    ("document", 4, 4, {"doc_offsets": [0]}, "doc_offsets", [[0]], "a start and an end"),
    ("document", 4, 4, {"doc_offsets": [1, 4]}, "doc_offsets", 1, "start at 0"),
    ("document", 4, 4, {"doc_offsets": [0, 2, 2, 4]}, "doc_offsets", [[0, 2, 2, 4]], "ascend"),
    ("document", 4, 4, {"doc_offsets": [0, 3, 2]}, "doc_offsets", [[0, 3, 2]], "ascend"),
    ("document", 4, 4, {"doc_offsets": [0, 5]}, "doc_offsets", 5, "between 1 and 4"),
    ("document", 4, 4, {"doc_offsets": [0, 0]}, "doc_offsets", 0, "between 1 and 4"),
    (
        "document",
        4,
        4,
        {"doc_ids": [0] * 4, "doc_offsets": [0, 4]},
        "doc_offsets",
        None,
        "not both",
    ),
    ("document", 4, 4, {"doc_ids": [0] * 4, "inner": "casual"}, "inner", "casual", "'causal'"),
    ("document", 4, 4, {"doc_ids": [0] * 4, "window": 2}, "window", 2, "inner family 'causal'"),
    (
        "document",
        4,
        4,
        {"doc_ids": [0] * 4, "inner": "sliding_window"},
        "window",
        None,
        "required by family 'sliding_window'",
    ),
    (
        "document",
        4,
        4,
        {"doc_ids": [0] * 4, "doc_prefix_lens": [1]},
        "doc_prefix_lens",
        "causal",
        "inner = 'prefix_lm' only",
    ),
    (
        "document",
        4,
        4,
        {"doc_ids": [0] * 4, "inner": "prefix_lm"},
        "prefix",
        None,
        "or doc_prefix_lens",
    ),
    (
        "document",
        4,
        4,
        {"doc_ids": [0] * 4, "inner": "prefix_lm", "doc_prefix_lens": [-1]},
        "doc_prefix_lens",
        -1,
        "at least 0",
    ),
    (
        "document",
        4,
        4,
        {"doc_ids": [0] * 4, "inner": "prefix_lm", "prefix": 1, "doc_prefix_lens": [1]},
        "doc_prefix_lens",
        1,
        "not both",
    ),
    (
        "document",
        4,
        4,
        {"doc_ids": [0, 0, 1, 1], "inner": "prefix_lm", "doc_prefix_lens": [1]},
        "doc_prefix_lens",
        [1, 1],
        "each of the 2 documents",
    ),
    (
        "shared_prefix",
        4,
        4,
        {"doc_offsets": [0, 2, 4], "prefix_docs": [0]},
        "prefix_docs",
        [1, 1],
        "each of the 2 documents",
    ),
    (
        "shared_prefix",
        4,
        4,
        {"doc_offsets": [0, 2, 4], "prefix_docs": [1, 1]},
        "prefix_docs",
        1,
        "one before it",
    ),
    (
        "shared_prefix",
        4,
        4,
        {"doc_offsets": [0, 1, 2, 4], "prefix_docs": [0, 0, 1]},
        "prefix_docs",
        1,
        "no prefix of its own",
    ),
    ("shared_prefix", 4, 4, {"doc_offsets": [0, 4]}, "prefix_docs", None, "required"),
    (
        "global_prefix_window",
        4,
        4,
        {"global_tokens": 5, "radius": 1},
        "global_tokens",
        5,
        "at most KV_LEN",
    ),
    (
        "global_prefix_window",
        4,
        4,
        {"global_tokens": 1, "radius": -1},
        "radius",
        -1,
        "at least 0",
    ),
    ("block_diffusion", 5, 5, {"diffusion_block_size": 2}, "Q_LEN", 5, "must be even"),
    ("block_diffusion", 4, 6, {"diffusion_block_size": 2}, "KV_LEN", 6, "must equal Q_LEN = 4"),
    (
        "block_diffusion",
        4,
        4,
        {"diffusion_block_size": 2, "doc_offsets": [0, 2]},
        "doc_offsets",
        "training",
        "variant 'packed' only",
    ),
    (
        "block_diffusion",
        4,
        4,
        {"diffusion_block_size": 2, "variant": "packed"},
        "doc_offsets",
        None,
        "required by variant 'packed'",
    ),
    (
        "block_diffusion",
        4,
        4,
        {"diffusion_block_size": 2, "variant": "packed", "doc_offsets": [0, 4]},
        "doc_offsets",
        4,
        "between 1 and 2",
    ),
    ("dflash", 4, 9, {"draft_block_size": 2}, "anchors", None, "required by family 'dflash'"),
    ("dflash", 4, 9, {"draft_block_size": 0, "anchors": [1]}, "draft_block_size", 0, "least 1"),
    ("dflash", 5, 9, DFLASH, "Q_LEN", 5, "multiple of draft_block_size = 2"),
    ("dflash", 4, 4, DFLASH, "KV_LEN", 4, "more than Q_LEN = 4"),
    ("dflash", 4, 9, {**DFLASH, "anchors": [1]}, "anchors", [1, 1], "2 draft blocks"),
    ("dflash", 4, 9, {**DFLASH, "anchors": [1, 5]}, "anchors", 5, "0 to 4"),
    ("dflash", 4, 9, {**DFLASH, "anchors": [-1, 3]}, "anchors", -1, "0 to 4"),
    ("dflash", 4, 9, {**DFLASH, "anchors": [3, 1]}, "anchors", [3, 1], "ascend.*sort them"),
    ("dflash", 4, 9, {**DFLASH, "n_valid": [3]}, "n_valid", 3, "0 to 2"),
    ("dflash", 4, 9, {**DFLASH, "n_valid": [-1]}, "n_valid", -1, "at least 0"),
    (
        "dflash",
        4,
        9,
        {**DFLASH, "anchors": [[1, 3]] * 2, "n_valid": [1, 2, 2]},
        "anchors",
        [2, 3],
        "agree in their batch size",
    ),
    ("dflash", 4, 9, {**DFLASH, "doc_ids": [0] * 4}, "doc_ids", [1, 4], "each of the 5 pos"),
    ("dflash", 4, 9, {**DFLASH, "doc_ids": [0, 1, 0, 2, 2]}, "doc_ids", 0, "side by side"),
    ("dflash", 4, 9, {**DFLASH, "layer": "sliding"}, "window", None, "required in a sliding"),
    ("dflash", 4, 9, {**DFLASH, "window": 4}, "window", 4, "sliding layers only"),
    ("dflash", 4, 9, {**DFLASH, "layer": "sliding", "window": 0}, "window", 0, "at least 1"),
    ("dflash", 4, 9, {**DFLASH, "layer": "windowed"}, "layer", "windowed", "full, sliding"),
    ("dflash", 4, 9, {**DFLASH, "convention": "speculator"}, "convention", "speculator", "'spec"),
    (
        "dflash",
        4,
        9,
        {
            **DFLASH,
            "layer": "sliding",
            "window": 1,
            "convention": "vllm",
            "in_block": "bidirectional",
        },
        "window",
        1,
        "at least draft_block_size = 2",
    ),
    ("eagle3_ttt", 4, 9, {}, "KV_LEN", 9, "multiple of Q_LEN = 4"),
    ("eagle3_ttt", 4, 8, {"lengths": [5]}, "lengths", 5, "1 to 4"),
    ("eagle3_ttt", 4, 8, {"window": 2}, "window", "specforge", "'speculators' only"),
    (
        "eagle3_ttt",
        4,
        8,
        {"variant": "modelopt", "lengths": [2]},
        "lengths",
        "modelopt",
        "'specforge' only",
    ),
    ("p_eagle", 3, 4, P_EAGLE, "KV_LEN", 4, "must equal Q_LEN = 3"),
    ("p_eagle", 4, 4, P_EAGLE, "anchors", [1, 3], "each of the 4 elements"),
    ("p_eagle", 3, 3, {**P_EAGLE, "depths": [0, 0, 2]}, "depths", 2, "0 to 1"),
    ("p_eagle", 3, 3, {**P_EAGLE, "depths": [0, 0, -2]}, "depths", -2, "at least -1"),
    ("p_eagle", 3, 3, {**P_EAGLE, "depths": [0, -1, 1]}, "depths", -1, "end of the row"),
    ("p_eagle", 3, 3, {**P_EAGLE, "anchors": [-1, 1, 1]}, "anchors", -1, "at least 0"),
    ("p_eagle", 3, 3, {**P_EAGLE, "anchors": [1, 0, 0]}, "anchors", [1, 0], "sort them"),
    ("p_eagle", 3, 3, {**P_EAGLE, "anchors": [0, 1, 2]}, "anchors", 2, "at depth 0 too"),
    ("p_eagle", 3, 3, {**P_EAGLE, "anchors": [1, 1, 1]}, "anchors", [1, 1], "none twice"),
    ("p_eagle", 3, 3, {**P_EAGLE, "doc_ids": [0, 1, -1]}, "doc_ids", -1, "of anchor 1 must be 1"),
    (
        "p_eagle",
        4,
        4,
        {"num_depths": 1, "anchors": [2, 3, 5, 9], "depths": [0] * 4, "doc_ids": [1, -1, 1, 1]},
        "doc_ids",
        1,
        "side by side",
    ),
    ("p_eagle", 3, 3, {**P_EAGLE, "depths": [0, 0, 0]}, "anchors", [1, 1], "none twice"),
    ("p_eagle", 3, 3, {**P_EAGLE, "doc_ids": [0, 1, 0]}, "doc_ids", 0, "must be 1 at every"),
    ("tree", 4, 3, {"parents": [-1, 0, 0, 0]}, "KV_LEN", 3, "at least Q_LEN = 4"),
    ("tree", 3, 3, {"parents": [-1, 0]}, "parents", [1, 2], "each of the 3 nodes"),
    ("tree", 3, 3, {"parents": [-1, 1, 0]}, "parents", 1, "a node before it"),
    ("tree", 3, 3, {"parents": [-1, 0, -2]}, "parents", -2, "at least -1"),
    ("tree", 4, 4, {"parents": [-1, 0, 0, 1]}, "parents", 1, "depth-first order"),
    ("tree", 3, 3, {"parents": [-1, 0, 1], "max_depth": 2}, "max_depth", 2, "at least 3"),
    ("natten", 6, 6, {"canvas": [2, 3], "kernel": [1]}, "kernel", [1], "dimensions.*2"),
    ("natten", 6, 6, {"canvas": [1, 2, 3], "kernel": [1]}, "canvas", [1, 2, 3], r"\[H, W\]"),
    ("natten", 6, 6, {"canvas": [6], "kernel": [4]}, "kernel", 4, "must be odd"),
    ("natten", 6, 6, {"canvas": [6], "kernel": [7]}, "kernel", 7, "at most the canvas, 6"),
    ("natten", 5, 5, {"canvas": [6], "kernel": [3]}, "Q_LEN", 5, "the canvas, 6 cells"),
    ("natten", 6, 5, {"canvas": [6], "kernel": [3]}, "KV_LEN", 5, "the canvas, 6 cells"),
    ("natten", 6, 6, {"canvas": "6", "kernel": [3]}, "canvas", "6", "list of integers"),
    ("natten", 6, 6, {"canvas": [6], "kernel": [0]}, "kernel", 0, "at least 1"),
]


@pytest.mark.parametrize(("name", "Q_LEN", "KV_LEN", "params", "field", "value", "rule"), BAD)
def test_bad_parameter_is_refused(name, Q_LEN, KV_LEN, params, field, value, rule):
    with pytest.raises(MaskSpecError, match=rule) as caught:
        families[name].intervals(Q_LEN, KV_LEN, **params)
    assert caught.value.field == field
    assert caught.value.value == value


def test_an_unknown_family_is_refused_with_the_nearest_name():
    with pytest.raises(MaskSpecError, match="did you mean 'sliding_window'"):
        families["slidin_window"]


def test_an_unknown_name_far_from_all_is_refused_with_the_list():
    with pytest.raises(MaskSpecError, match="valid: block_diffusion, causal"):
        families["zzz"]


def test_spans_past_int32_addressing_are_refused():
    params = {"canvas": [2**14, 2**15], "kernel": [5, 3]}
    with pytest.raises(MaskSpecError, match=r"at most 2\*\*31 - 1") as caught:
        families["natten"].check(2**29, 2**29, params)
    assert caught.value.field == "Q_LEN"


def test_check_fills_defaults_as_json_knows_them():
    checked = families["dflash"].check(4, 9, {"draft_block_size": 2})
    assert checked == {
        "draft_block_size": 2,
        "layer": "full",
        "in_block": "default",
        "convention": "specforge",
    }
    assert families["natten"].check(6, 6, {"canvas": (6,), "kernel": (3,)}) == {
        "canvas": [6],
        "kernel": [3],
    }


def test_a_window_as_long_as_a_block_bounds_nothing_within_it():
    bound = {"layer": "sliding", "convention": "vllm", "in_block": "bidirectional"}
    mask = families["dflash"].intervals(4, 9, **DFLASH, **bound, window=2)
    assert mask.dense()[0, 0, :, 5:].tolist() == [
        [True, True, False, False],
        [True, True, False, False],
        [False, False, True, True],
        [False, False, True, True],
    ]


@pytest.mark.parametrize("anchor", [-3, 0, 5])
def test_a_row_of_padding_alone_sees_nothing(anchor):
    params = {"num_depths": 2, "anchors": [[0, 1], [anchor, anchor]], "depths": [[0, 0], [-1, -1]]}
    for more in ({}, {"doc_ids": [0, 0]}, {"window": 1}):
        mask = families["p_eagle"].intervals(2, 2, **params, **more)
        assert mask.dense()[1].any().item() is False
        assert mask.dense()[0].any()


def test_values_of_unused_anchors_do_not_matter():
    families["dflash"].check(
        6, 20, {"draft_block_size": 2, "anchors": [5, 99, -1], "n_valid": torch.tensor([1])}
    )


@pytest.mark.parametrize("family", families.values(), ids=lambda family: family.name)
def test_family_describes_itself(family):
    assert family.revision == 1
    assert family.formula
    assert family.source
    assert family.runtime_params == tuple(given.name for given in family.runtime)
    names = [param.name for param in family.params] + list(family.runtime_params)
    assert len(names) == len(set(names))
    assert not {"Q_LEN", "KV_LEN", "device"} & set(names)
    assert all(param.doc for param in (*family.params, *family.runtime))
    function = getattr(import_module("maskgen.families"), family.name)
    assert callable(function)
    assert function.__doc__.count("Raises:") == 1


def test_public_names():
    package = import_module("maskgen.families")
    assert list(package.__all__) == sorted(package.__all__)
    assert set(families) < set(package.__all__)
    assert [family.name for family in families.values()] == list(families)


@pytest.mark.parametrize("family", families.values(), ids=lambda family: family.name)
def test_a_function_has_the_defaults_of_its_family(family):
    arguments = signature(getattr(import_module("maskgen.families"), family.name)).parameters
    for param in family.params:
        if param.name in arguments and param.default is not REQUIRED:
            assert arguments[param.name].default == param.default, param.name
    for given in family.runtime:
        if not given.required:
            assert arguments[given.name].default is None


def test_every_family_and_parameter_is_documented():
    page = Path(__file__).parents[3].joinpath("docs", "families.md").read_text("utf-8")
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    for family in families.values():
        # The column of parameters, in whole words: `depths` is not met by `num_depths`.
        words = set(re.findall(r"\w+", rows[family.name].split(" | ")[2]))
        for param in (*family.params, *family.runtime):
            inner_only = family.name == "document" and param.name in {
                "window",
                "inclusive",
                "sinks",
                "chunk",
                "prefix",
            }
            assert inner_only or param.name in words, (family.name, param.name)
    assert all(f"`{name}`" in page for name in SLIDING_RULES)
