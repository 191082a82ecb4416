"""Values at the limit of their rule are taken, the next is refused, in the words of the rule."""

import numpy as np
import pytest
import torch

from maskgen import RowIntervals
from maskgen.errors import MaskSpecError
from maskgen.families import families, spans_into
from maskgen.families.params import REQUIRED, Param, RuntimeParam, check_length, one_of

DFLASH = {"draft_block_size": 2, "anchors": [1, 3]}
SLIDING = {**DFLASH, "layer": "sliding", "convention": "vllm", "in_block": "bidirectional"}
P_EAGLE = {"num_depths": 2, "anchors": [0, 1, 1], "depths": [0, 0, 1]}
IDS = {"doc_ids": [0, 0, 1, 1], "inner": "prefix_lm"}
DIFFUSION = {"diffusion_block_size": 2, "variant": "packed"}

# family, Q_LEN, KV_LEN, what is just taken, what is not, the message
LIMITS = [
    (
        "causal", 4, 9, {"offset": 8}, {"offset": 9},
        "offset = 9: must lie between -4 and 9, both exclusive (-Q_LEN and KV_LEN)",
    ),
    (
        "causal", 4, 9, {"offset": -3}, {"offset": -4},
        "offset = -4: must lie between -4 and 9, both exclusive (-Q_LEN and KV_LEN)",
    ),
    ("sliding_window", 4, 4, {"window": 1}, {"window": 0}, "window = 0: must be at least 1"),
    (
        "sliding_window", 4, 4, {"window": 2**30}, {"window": 2**30 + 1},
        "window = 1073741825: must lie within 2**30 of zero",
    ),
    (
        "sink_window", 4, 4, {"sinks": 0, "window": 1}, {"sinks": -1, "window": 1},
        "sinks = -1: must be at least 0",
    ),
    ("full", 4, 5, {"lengths": [1, 5]}, {"lengths": [1, 6, 7]},
     "lengths = 7: each must be 1 to 5 tokens"),
    ("full", 4, 5, {"lengths": [5, 1]}, {"lengths": [1, 0]},
     "lengths = 0: each must be 1 to 5 tokens"),
    ("prefix_lm", 4, 5, {"prefix": 5}, {"prefix": 6}, "prefix = 6: must be at most KV_LEN = 5"),
    ("prefix_lm", 4, 5, {"prefix": 0}, {"prefix": -1}, "prefix = -1: must be at least 0"),
    (
        "prefix_lm", 4, 5, {"prefix_lens": [0, 5]}, {"prefix_lens": [0, 6]},
        "prefix_lens = 6: each must be 0 to 5 tokens",
    ),
    (
        "global_prefix_window", 4, 5,
        {"global_tokens": 5, "radius": 0}, {"global_tokens": 6, "radius": 0},
        "global_tokens = 6: must be at most KV_LEN = 5",
    ),
    (
        "document", 4, 4,
        {"doc_offsets": [[0, 1, 1], [0, 2, 4]]}, {"doc_offsets": [[0, 4], [0, 5]]},
        "doc_offsets = 5: must end between 1 and 4, the positions of a row",
    ),
    (
        "document", 4, 4, {"doc_offsets": [[0, 4], [0, 1]]}, {"doc_offsets": [[0, 4], [1, 4]]},
        "doc_offsets = 1: must start at 0",
    ),
    (
        "document", 4, 4, {"doc_ids": [[0] * 4, [-1, 0, -1, 1]]},
        {"doc_ids": [[0] * 4, [5, 0, 5, 1]]},
        "doc_ids = 5: equal ids must stand side by side: a document is one piece",
    ),
    (
        "document", 3, 5, {"doc_ids": [0] * 5}, {"doc_ids": [0] * 4},
        "doc_ids = [1, 4]: must name the document of each of the 5 positions",
    ),
    (
        "document", 5, 3, {"doc_ids": [0] * 5}, {"doc_ids": [0] * 3},
        "doc_ids = [1, 3]: must name the document of each of the 5 positions",
    ),
    (
        "document", 4, 4, {**IDS, "doc_prefix_lens": [9, 0]}, {**IDS, "doc_prefix_lens": [9]},
        "doc_prefix_lens = [1, 1]: must name a prefix for each of the 2 documents",
    ),
    (
        "document", 4, 4,
        {**IDS, "doc_ids": [[0] * 4, [0, 1, 2, -1]], "doc_prefix_lens": [1, 1, 1]},
        {**IDS, "doc_ids": [[0] * 4, [0, 1, 2, -1]], "doc_prefix_lens": [1, 1]},
        "doc_prefix_lens = [1, 2]: must name a prefix for each of the 3 documents",
    ),
    (
        "shared_prefix", 6, 6,
        {"doc_offsets": [0, 2, 4, 6], "prefix_docs": [0, 1, 2]},
        {"doc_offsets": [0, 2, 4, 6], "prefix_docs": [0, 1, 3]},
        "prefix_docs = 3: each must be the document's own number or that of one before it",
    ),
    (
        "shared_prefix", 6, 6,
        {"doc_offsets": [0, 2, 4, 6], "prefix_docs": [[0, 1, 1], [0, 0, 0]]},
        {"doc_offsets": [0, 2, 4, 6], "prefix_docs": [[0, 1, 1], [0, 0, 1]]},
        "prefix_docs = 1: a prefix document must have no prefix of its own: "
        "give it its own number",
    ),
    (
        "block_diffusion", 8, 8,
        {**DIFFUSION, "doc_offsets": [0, 4]}, {**DIFFUSION, "doc_offsets": [0, 5]},
        "doc_offsets = 5: must end between 1 and 4, the positions of a row",
    ),
    (
        "dflash", 4, 9, {**DFLASH, "anchors": [0, 4]}, {**DFLASH, "anchors": [0, 5]},
        "anchors = 5: each valid one must lie in the context, 0 to 4",
    ),
    (
        "dflash", 4, 9, {**DFLASH, "anchors": [2, 2]}, {**DFLASH, "anchors": [[1, 1], [3, 2]]},
        "anchors = [3, 2]: must ascend among the valid ones; sort them",
    ),
    (
        "dflash", 6, 11, {**DFLASH, "anchors": [1, 3, 4]}, {**DFLASH, "anchors": [1, 4, 3]},
        "anchors = [4, 3]: must ascend among the valid ones; sort them",
    ),
    (
        "dflash", 6, 11, {**DFLASH, "anchors": [1, 1, 4]}, {**DFLASH, "anchors": [[1, 3]] * 2},
        "anchors = [2, 2]: must name one anchor for each of the 3 draft blocks",
    ),
    (
        "dflash", 6, 11,
        {**DFLASH, "anchors": [1, 4, 0], "n_valid": [2]},
        {**DFLASH, "anchors": [1, 4, 0], "n_valid": [2, 3]},
        "anchors = [4, 0]: must ascend among the valid ones; sort them",
    ),
    (
        "dflash", 4, 9,
        {**DFLASH, "doc_ids": [[0] * 5, [-1, 1, -1, -1, 2]]},
        {**DFLASH, "doc_ids": [[0] * 5, [1, 2, 1, -1, 2]]},
        "doc_ids = 1: equal ids must stand side by side: a document is one piece",
    ),
    (
        "dflash", 4, 9, {**DFLASH, "doc_ids": [0] * 5}, {**DFLASH, "doc_ids": [0] * 6},
        "doc_ids = [1, 6]: must name the document of each of the 5 positions",
    ),
    ("dflash", 4, 9, DFLASH, {**DFLASH, "draft_block_size": 3},
     "Q_LEN = 4: must be a multiple of draft_block_size = 3"),
    (
        "dflash", 4, 9, DFLASH, {**DFLASH, "window": 3},
        "window = 3: is of sliding layers only; set layer = 'sliding'",
    ),
    (
        "document", 4, 4, {"doc_ids": [0] * 4}, {"doc_ids": [0] * 4, "doc_offsets": [0, 4]},
        "doc_offsets = None: give doc_ids or doc_offsets, not both",
    ),
    (
        "document", 4, 4, {"doc_offsets": [0, 2, 4, 4]}, {"doc_offsets": [[0, 4, 4], [0, 3, 2]]},
        "doc_offsets = [[0, 4, 4], [0, 3, 2]]: must ascend; only the last value may repeat, as "
        "padding",
    ),
    (
        "document", 4, 4, {**IDS, "doc_prefix_lens": [1, 1]}, {**IDS},
        "prefix = None: is required by inner family 'prefix_lm', or doc_prefix_lens in its place",
    ),
    (
        "document", 4, 4, {**IDS, "prefix": 4}, {**IDS, "prefix": 4, "doc_prefix_lens": [1, 1]},
        "doc_prefix_lens = 4: give prefix or doc_prefix_lens, not both",
    ),
    (
        "document", 4, 4, {**IDS, "prefix": 4}, {**IDS, "prefix": 5},
        "prefix = 5: must be at most KV_LEN = 4",
    ),
    (
        "document", 4, 4, {"doc_ids": [0] * 4, "inner": "chunked", "chunk": 1},
        {"doc_ids": [0] * 4, "inner": "chunked"},
        "chunk = None: is required by family 'chunked': tokens of a chunk",
    ),
    (
        "shared_prefix", 4, 4, {"doc_offsets": [0, 2, 4], "prefix_docs": [0, 0]},
        {"doc_offsets": [0, 2, 4], "prefix_docs": [0, 0, 0]},
        "prefix_docs = [1, 3]: must name a prefix for each of the 2 documents",
    ),
    (
        "block_diffusion", 4, 4, {"diffusion_block_size": 2},
        {"diffusion_block_size": 2, "doc_offsets": [0, 2]},
        "doc_offsets = 'training': is of variant 'packed' only",
    ),
    (
        "block_diffusion", 4, 4, {**DIFFUSION, "doc_offsets": [0, 2]}, DIFFUSION,
        "doc_offsets = None: is required by variant 'packed'",
    ),
    (
        "eagle3_ttt", 4, 4, {}, {"variant": "speculators", "lengths": [2]},
        "lengths = 'speculators': is of variant 'specforge' only",
    ),
    (
        "p_eagle", 4, 4,
        {"num_depths": 2, "anchors": [0, 2, 0, 2], "depths": [0, 0, 1, 1]},
        {"num_depths": 2, "anchors": [0, 2, 2, 0], "depths": [0, 0, 1, 1]},
        "anchors = [2, 0]: elements must ascend by depth and then by anchor, none twice; sort them",
    ),
    (
        "p_eagle", 3, 3, P_EAGLE, {**P_EAGLE, "depths": [[0, 0, 1], [0, 0, 2]]},
        "depths = 2: each must be 0 to 1, or -1 for padding",
    ),
    (
        "p_eagle", 3, 3, {**P_EAGLE, "anchors": [[0, 1, 1], [0, 1, 0]]},
        {**P_EAGLE, "anchors": [[0, 1, 1], [0, 1, 2]]},
        "anchors = 2: every anchor of a deeper element must stand at depth 0 too",
    ),
    (
        "p_eagle", 3, 3, {**P_EAGLE, "doc_ids": [[4, 5, 5], [7, 7, 7]]},
        {**P_EAGLE, "doc_ids": [[4, 5, 5], [7, 8, 7]]},
        "doc_ids = 7: of anchor 1 must be 8 at every depth, as at depth 0",
    ),
    (
        "p_eagle", 3, 3, {**P_EAGLE, "depths": [0, 0, -1]}, {**P_EAGLE, "depths": [0, -1, 0]},
        "depths = -1: padding must stand at the end of the row",
    ),
    (
        "p_eagle", 3, 3, P_EAGLE, {**P_EAGLE, "doc_ids": [0, 0]},
        "doc_ids = [1, 2]: must hold one value for each of the 3 elements",
    ),
    (
        "p_eagle", 3, 3, {**P_EAGLE, "window": 1}, {**P_EAGLE, "window": 0},
        "window = 0: must be at least 1",
    ),
    (
        "document", 4, 4,
        {"doc_offsets": [[0, 2, 4], [0, 4, 4]], "inner": "prefix_lm", "doc_prefix_lens": [1, 1]},
        {"doc_offsets": [[0, 2, 4], [0, 4, 4]], "inner": "prefix_lm", "doc_prefix_lens": [1]},
        "doc_prefix_lens = [1, 1]: must name a prefix for each of the 2 documents",
    ),
    (
        "document", 4, 4,
        {**IDS, "doc_ids": [[0, 0, -1, -1]], "doc_prefix_lens": [1]},
        {**IDS, "doc_ids": [[0, 0, -1, 1]], "doc_prefix_lens": [1]},
        "doc_prefix_lens = [1, 1]: must name a prefix for each of the 2 documents",
    ),
    (
        "dflash", 4, 9, {**DFLASH, "n_valid": [0, 2]}, {**DFLASH, "n_valid": [0, 3]},
        "n_valid = 3: each must be 0 to 2, the draft blocks",
    ),
    (
        "dflash", 4, 5, {**DFLASH, "anchors": [0, 0]}, {**DFLASH, "anchors": [0, 1]},
        "anchors = 1: each valid one must lie in the context, 0 to 0",
    ),
    (
        "dflash", 4, 9, {**SLIDING, "window": 2}, {**SLIDING, "window": 1},
        "window = 1: must be at least draft_block_size = 2: convention 'vllm' "
        "has no rule for the later slots of a shorter window",
    ),
    (
        "dflash", 4, 9, {**SLIDING, "in_block": "causal", "window": 1}, {**SLIDING, "window": None},
        "window = None: is required in a sliding layer",
    ),
    (
        "eagle3_ttt", 4, 8, {"lengths": [1, 4]}, {"lengths": [4, 5]},
        "lengths = 5: each must be 1 to 4 tokens",
    ),
    (
        "eagle3_ttt", 4, 8,
        {"variant": "speculators", "doc_ids": [0] * 4, "window": 1}, {"doc_ids": [0] * 4},
        "doc_ids = 'specforge': is of variant 'speculators' only",
    ),
    (
        "p_eagle", 3, 3, {**P_EAGLE, "num_depths": 2}, {**P_EAGLE, "num_depths": 1},
        "depths = 1: each must be 0 to 0, or -1 for padding",
    ),
    (
        "tree", 3, 3,
        {"parents": [[-1, -1, -1], [-1, 0, 1]], "max_depth": 3},
        {"parents": [[-1, -1, -1], [-1, 0, 1]], "max_depth": 2},
        "max_depth = 2: must be at least 3, the longest path of parents",
    ),
    (
        "tree", 3, 3, {"parents": [-1, 0, 1]}, {"parents": [[-1, 0, 1], [-1, 1, 0]]},
        "parents = 1: of node 1 must be -1 or a node before it",
    ),
    (
        "tree", 4, 4, {"parents": [-1, 0, 1, 0]}, {"parents": [[-1, 0, 0, 0], [-1, 0, 0, 1]]},
        "parents = 1: of node 3 must be on the path of node 2: depth-first order",
    ),
    ("tree", 3, 3, {"parents": [-1, 0, 1]}, {"parents": [-1, 0, -2]}, "parents = -2: each must be "
     "at least -1 (parent of each node, -1 for a root)"),
    (
        "natten", 15, 15,
        {"canvas": [3, 5], "kernel": [3, 5]}, {"canvas": [3, 5], "kernel": [3, 7]},
        "kernel = 7: must be at most the canvas, 5",
    ),
    (
        "natten", 15, 15,
        {"canvas": [3, 5], "kernel": [1, 1]}, {"canvas": [3, 5], "kernel": [1, 2]},
        "kernel = 2: must be odd: the window has a middle",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "Q", "KV", "taken", "refused", "message"), LIMITS)
def test_what_is_just_taken_and_what_is_not(name, Q, KV, taken, refused, message):
    families[name].intervals(Q, KV, **taken)
    families[name].mask_mod(Q, KV, **families[name].check(Q, KV, taken))
    with pytest.raises(MaskSpecError) as caught:
        families[name].intervals(Q, KV, **refused)
    assert str(caught.value) == message


def test_lengths_up_to_2_to_the_30():
    assert check_length("KV_LEN", np.int64(2**30)) == 2**30
    assert type(check_length("KV_LEN", np.int64(1))) is int
    families["causal"].check(2**30, 2**30, {})
    for field, lengths in (("Q_LEN", (2**30 + 1, 4)), ("KV_LEN", (4, 2**30 + 1))):
        with pytest.raises(MaskSpecError) as caught:
            families["causal"].check(*lengths, {})
        rule = "must be at most 2**30, so that int32 addresses it"
        assert str(caught.value) == f"{field} = 1073741825: {rule}"
    for value, rule in (
        (0, "must be at least 1: a mask has rows and columns"),
        ("4", "must be an integer number of tokens"),
    ):
        with pytest.raises(MaskSpecError) as caught:
            check_length("Q_LEN", value)
        assert str(caught.value) == f"Q_LEN = {value!r}: {rule}"


def test_spans_of_a_batch_up_to_what_int32_addresses():
    full = families["full"]
    full.check(2**30 - 1, 4, {"lengths": [1, 2]})
    full.check(2**30, 4, {"lengths": [1]})
    with pytest.raises(MaskSpecError) as caught:
        full.check(2**30, 4, {"lengths": [1, 2]})
    rule = "batch x spans a row x Q_LEN must be at most 2**31 - 1, found 2147483648"
    assert str(caught.value) == f"Q_LEN = 1073741824: {rule}"
    # Whichever of the parameters has the batch.
    for anchors, n_valid in (([[1]] * 2, [1]), ([[1]], [1, 1])):
        given = {"draft_block_size": 2**29, "anchors": anchors, "n_valid": n_valid}
        with pytest.raises(MaskSpecError, match="found 2147483648"):
            families["dflash"].check(2**29, 2**29 + 4, given)


@pytest.mark.parametrize("value", [-(2**30), -1, 0, 2**30])
def test_integers_within_2_to_the_30(value):
    param = Param("x", "int", "a number")
    assert param.check(value) == value
    for beyond in (2**30 + 1, -(2**30) - 1):
        with pytest.raises(MaskSpecError, match=r"must lie within 2\*\*30 of zero"):
            param.check(beyond)


@pytest.mark.parametrize(
    ("param", "value", "message"),
    [
        (Param("x", "str", "d"), 3, "x = 3: must be a string"),
        (Param("x", "str", "d"), None, "x = None: must be a string"),
        (
            Param("x", "str", "d", choices=("near", "far")),
            "nea",
            "x = 'nea': did you mean 'near'? valid: far, near",
        ),
        (Param("x", "str", "d", choices=("near", "far")), "b", "x = 'b': valid: far, near"),
        (Param("x", "bool", "d"), 0, "x = 0: must be true or false"),
        (Param("x", "int", "d"), None, "x = None: must be an integer"),
        (Param("x", "int", "d"), True, "x = True: must be an integer"),
        (Param("x", "ints", "d"), 3, "x = 3: must be a list of integers"),
        (Param("x", "ints", "d", minimum=1), [3, 1, 0], "x = 0: must be at least 1"),
        (Param("x", "ints", "d"), [3, "a"], "x = 'a': must be an integer"),
    ],
)
def test_what_a_static_parameter_is_not(param, value, message):
    with pytest.raises(MaskSpecError) as caught:
        param.check(value)
    assert str(caught.value) == message


def test_what_a_static_parameter_may_be():
    assert Param("x", "int", "d", default=None).check(None) is None
    assert Param("x", "ints", "d", default=None).check(None) is None
    assert Param("x", "int", "d", minimum=3).check(np.int32(3)) == 3
    assert type(Param("x", "int", "d").check(np.int32(3))) is int
    assert Param("x", "ints", "d").check((1, 2)) == [1, 2]
    assert Param("x", "bool", "d").check(False) is False
    assert Param("x", "str", "d").check("any") == "any"
    assert repr(REQUIRED) == "REQUIRED"


BATCH = RuntimeParam("x", "B, n", "what it is", minimum=-2, maximum=7)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[0], [8]], "x = 8: each must be at most 7 (what it is)"),
        ([0, -3, -2], "x = -3: each must be at least -2 (what it is)"),
        (3, "x = []: must have shape [B, n] or the same without the batch"),
        ([[[3]]], "x = [1, 1, 1]: must have shape [B, n] or the same without the batch"),
        ([[], []], "x = [2, 0]: must not be empty"),
        ([1, 2.5], "x = 2.5: must hold integers of shape [B, n]"),
        ([1, True], "x = True: must hold integers of shape [B, n]"),
        ([[1, 2], [3]], "x = [1, 2]: must hold integers of shape [B, n]"),
        (np.array([1.0]), "x = 'float64': must hold integers of shape [B, n]"),
        (np.array([True]), "x = 'bool': must hold integers of shape [B, n]"),
        (torch.tensor([1.0]), "x = 'torch.float32': must hold integers of shape [B, n]"),
        (torch.tensor([True]), "x = 'torch.bool': must hold integers of shape [B, n]"),
    ],
)
def test_what_a_batch_does_not_say(value, message):
    with pytest.raises(MaskSpecError) as caught:
        BATCH.check(value)
    assert str(caught.value) == message


def test_what_a_batch_may_say():
    assert BATCH.rank == 2
    for value in ([-2, 7], [[-2, 7]], (-2, 7), np.array([-2, 7]), torch.tensor([[-2, 7]])):
        found = BATCH.check(value)
        assert found.dtype == torch.int32
        assert found.tolist() == [[-2, 7]]
    mixed = [[torch.tensor(1), 2], [np.int64(3), torch.tensor(4)]]
    assert BATCH.check(mixed).tolist() == [[1, 2], [3, 4]]
    assert RuntimeParam("x", "B", "d").check(5).tolist() == [5]
    assert RuntimeParam("x", "B", "d").check([2**30]).tolist() == [2**30]
    with pytest.raises(MaskSpecError, match="at most 1073741824"):
        RuntimeParam("x", "B", "d").check([2**30 + 1])
    with pytest.raises(MaskSpecError, match="x = -1: each must be at least 0"):
        RuntimeParam("x", "B", "d").check([-1])


def test_the_nearest_name_comes_first():
    assert one_of("window", ["windows", "a"]) == "did you mean 'windows'? valid: a, windows"
    assert one_of("zzz", ["b", "a"]) == "valid: a, b"
    assert one_of("x", []) == "valid: none"


def test_what_is_required_is_named_with_what_it_is():
    for call in (families["dflash"].spans, families["dflash"].mask_mod):
        with pytest.raises(MaskSpecError) as caught:
            call(4, 9, draft_block_size=2)
        rule = "context position where each draft block starts"
        assert str(caught.value) == f"anchors = None: is required by family 'dflash': {rule}"
    with pytest.raises(MaskSpecError) as caught:
        families["sliding_window"].check(4, 4, {})
    rule = "is required by family 'sliding_window': keys a row may see, itself counted"
    assert str(caught.value) == f"window = None: {rule}"
    with pytest.raises(MaskSpecError) as caught:
        families["causal"].check(4, 4, {"ofset": 1})
    rule = "is no parameter of family 'causal': did you mean 'offset'? valid: offset"
    assert str(caught.value) == f"ofset = 1: {rule}"


def test_batch_sizes_agree_or_are_one():
    dflash = families["dflash"]
    for anchors, n_valid, B in (([[1, 3]] * 3, [1], 3), ([1, 3], [1, 2], 2), ([1, 3], [1], 1)):
        mask = dflash.spans(4, 9, draft_block_size=2, anchors=anchors, n_valid=n_valid)
        assert [side.shape for side in mask] == [(B, 1, 2, 4)] * 2
    with pytest.raises(MaskSpecError) as caught:
        dflash.intervals(4, 9, **{**DFLASH, "anchors": [[1, 3]] * 2}, n_valid=[1, 2, 2])
    rule = "runtime parameters must agree in their batch size or have 1"
    assert str(caught.value) == f"anchors = [2, 3]: {rule}"


def buffers(B, H, K, Q_LEN):
    return torch.full((2, B, H, K, Q_LEN), 7, dtype=torch.int32)


def test_spans_into_buffers_of_a_larger_batch_more_heads_and_more_slots():
    starts, ends = buffers(3, 2, 4, 6)
    spans_into(starts, ends, families["sink_window"], KV_LEN=8, sinks=1, window=2)
    wanted = families["sink_window"].intervals(6, 8, sinks=1, window=2)
    assert torch.equal(RowIntervals(starts, ends, 8).dense(), wanted.dense().expand(3, 2, 6, 8))
    assert not starts[:, :, 2:].any()
    assert not ends[:, :, 2:].any()
    starts, ends = buffers(2, 1, 1, 6)
    spans_into(starts, ends, "full", KV_LEN=8, lengths=torch.tensor([3, 8]).int())
    assert ends[:, 0, 0, 0].tolist() == [3, 8]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            [(1, 1, 1, 6)] * 2,
            "starts = [[1, 1, 1, 6], [1, 1, 1, 6]]: both buffers must hold [2, 1, 2, 6], "
            "B broadcast, K or more slots",
        ),
        ([(1, 1, 2, 6)] * 2, "starts = [[1, 1, 2, 6], [1, 1, 2, 6]]: both buffers must hold"),
        ([(3, 1, 2, 6)] * 2, "starts = [[3, 1, 2, 6], [3, 1, 2, 6]]: both buffers must hold"),
        ([(2, 1, 2, 6), (2, 1, 3, 6)], "starts = [[2, 1, 2, 6], [2, 1, 3, 6]]: both buffers must"),
    ],
)
def test_buffers_that_are_too_small_are_refused(shapes, message):
    starts, ends = (torch.zeros(shape, dtype=torch.int32) for shape in shapes)
    anchors = torch.tensor([[1, 2, 3]] * 2, dtype=torch.int32)
    with pytest.raises(MaskSpecError) as caught:
        spans_into(starts, ends, "dflash", KV_LEN=12, draft_block_size=2, anchors=anchors)
    assert str(caught.value).startswith(message)
    with pytest.raises(MaskSpecError) as caught:
        spans_into(starts, ends, "dflash", draft_block_size=2, anchors=anchors)
    rule = "is required: buffers of spans do not tell it"
    assert str(caught.value) == f"KV_LEN = None: {rule}"


def test_a_draw_of_more_samples_begins_with_that_of_fewer():
    one, four = (
        families["document"].draw("7" * 64, B, 20, 20, inner="causal")["doc_ids"] for B in (1, 4)
    )
    assert (one.shape, four.shape) == ((1, 20), (4, 20))
    assert torch.equal(one, four[:1])
    assert families["causal"].draw("7" * 64, 4, 20, 20) == {}
    other = families["document"].draw("8" * 64, 4, 20, 20, inner="causal")["doc_ids"]
    assert not torch.equal(four, other)
