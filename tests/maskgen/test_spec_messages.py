"""Specs at their limits, and what a refusal says: the field, the value and the rule, in full."""

import dataclasses

import pytest

from maskgen.build import layout_params
from maskgen.errors import MaskSpecError
from maskgen.mask_spec import MaskSpec
from maskgen.spec import read_specs

CAUSAL = {"name": "causal", "family": "causal", "Q_LEN": 64}
LAYOUTS = {
    "name": "draft",
    "family": "dflash",
    "kind": "layouts",
    "context": 128,
    "anchors": 32,
    "draft_block_size": 4,
}
DATA = {**LAYOUTS, "name": "data", "kind": "parametric"}
FUNCTION = {"name": "m", "mask_mod": "a.b:c", "Q_LEN": 4}


def read(*entries, **section):
    return read_specs({"masks": {"entry": list(entries), **section}})


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            [{**LAYOUTS, "answer_starts": [0, 127, 9]}],
            "masks.entry 'draft': answer_starts = [0, 127, 9]: must be at most context - 2 = 126",
        ),
        (
            [{**LAYOUTS, "answer_ends": [64, 129, 128]}],
            "masks.entry 'draft': answer_ends = [64, 129, 128]: must be at most context = 128",
        ),
        (
            [{**LAYOUTS, "answer_ends": [64, 0]}],
            "masks.entry 'draft': answer_ends = 0: must be at least 1",
        ),
        (
            [{**LAYOUTS, "answer_starts": [20, 9], "answer_ends": [10, 4]}],
            "masks.entry 'draft': answer_ends = [10, 4]: "
            "one end at least must be 2 past a start, and the starts are [20, 9]",
        ),
        (
            [{**LAYOUTS, "draws": 1.5}],
            "masks.entry 'draft': draws = 1.5: must be an integer",
        ),
        (
            [{**LAYOUTS, "context": [128, 0]}],
            "masks.entry 'draft': context = 0: must be an integer of at least 1",
        ),
        (
            [{**DATA, "Q_LEN": 128}],
            "masks.entry 'data': Q_LEN = 128: "
            "follows from context, anchors and draft_block_size; leave it out",
        ),
        (
            [{**{k: DATA[k] for k in DATA if k != "context"}, "Q_LEN": 8, "KV_LEN": 16}],
            "masks.entry 'data': anchors = 32: "
            "belongs to context; Q_LEN and draft_block_size say how many there are",
        ),
        (
            [{**CAUSAL, "Q_LEN": [8, 16, 32], "KV_LEN": [8, 16]}],
            "masks.entry 'causal': KV_LEN = [8, 16]: must have one length for each Q_LEN (3)",
        ),
        (
            [{**CAUSAL, "Q_LEN": [8, 0]}],
            "masks.entry 'causal': Q_LEN = 0: must be an integer of at least 1",
        ),
        (
            [{**CAUSAL, "Q_LEN": 8, "KV_LEN": [8, 9]}],
            "masks.entry 'causal': KV_LEN = [8, 9]: must have one length for each Q_LEN (1)",
        ),
        (
            [{**CAUSAL, "BLOCK_SIZE": [16, 24]}],
            "masks.entry 'causal': BLOCK_SIZE = [16, 24]: "
            "must be one or two multiples of 16 up to 1024",
        ),
        (
            [CAUSAL, {**CAUSAL, "name": "full", "family": "full"}, {**CAUSAL, "KV_LEN": 64}],
            "name = 'causal/q64-kv64': must be given to one entry only",
        ),
        ([CAUSAL, 3], "masks.entry[1] = 3: must be a table"),
        (
            [CAUSAL, {"family": "full"}],
            "masks.entry[1].name = None: must be letters, digits, '.', '_', '-', parted by '/'",
        ),
        (
            [{**CAUSAL, "mask_mod": "a:b"}],
            "masks.entry 'causal' = ['Q_LEN', 'family', 'mask_mod', 'name']: "
            "must have one of family and mask_mod",
        ),
        (
            [{**CAUSAL, "kind": "layouts"}],
            "masks.entry 'causal': kind = 'layouts': "
            "is for families that draw layouts; causal has none",
        ),
        (
            [{**CAUSAL, "kind": "parametric"}],
            "masks.entry 'causal': kind = 'parametric': "
            "is for masks that depend on the batch; causal does not",
        ),
        (
            [{**CAUSAL, "kind": 3}],
            "masks.entry 'causal': kind = 3: is unknown; valid are layouts, parametric, static",
        ),
        (
            [{**CAUSAL, "offset": 64}],
            "masks.entry 'causal': offset = 64: "
            "must lie between -64 and 64, both exclusive (-Q_LEN and KV_LEN)",
        ),
        (
            [{"name": "d", "family": "dflash", "Q_LEN": 4, "KV_LEN": 8, "draft_block_size": 4}],
            "masks.entry 'd': anchors = None: is required by a static entry of family dflash "
            "(context position where each draft block starts); "
            "kind = 'parametric' leaves it to the batch",
        ),
        (
            [{**FUNCTION, "kind": "parametric"}],
            "masks.entry 'm': kind = 'parametric': of a mask_mod must be static",
        ),
        (
            [{**FUNCTION, "mask_mod": "a.b"}],
            "masks.entry 'm': mask_mod = 'a.b': must read package.module:function",
        ),
        ([{**FUNCTION, "H": 0}], "masks.entry 'm': H = 0: must be an integer of at least 1"),
        ([{**FUNCTION, "B": 0}], "masks.entry 'm': B = 0: must be an integer of at least 1"),
        (
            [{**FUNCTION, "context": 4}],
            "masks.entry 'm': context = 4: is unknown; valid are "
            "B, BLOCK_SIZE, H, KV_LEN, Q_LEN, family, kind, mask_mod, name",
        ),
        ([], "masks.entry = []: must hold at least one [[masks.entry]] table"),
    ],
)
def test_a_refusal_says_the_field_the_value_and_the_rule(entries, message):
    with pytest.raises(MaskSpecError) as caught:
        read(*entries)
    assert str(caught.value) == message


@pytest.mark.parametrize("entries", [CAUSAL, 3, "causal"])
def test_entries_are_a_list(entries):
    with pytest.raises(MaskSpecError, match=r"masks.entry = .* at least one \[\[masks.entry\]\]"):
        read_specs({"masks": {"entry": entries}})


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        # A window ends before the answer's last token, and (0, 1) and (126, 1) have no position.
        ({"answer_starts": [0, 126], "answer_ends": [1, 128]}, [(0, 127), (126, 127)]),
        ({"answer_starts": 126, "answer_ends": 128}, [(126, 127)]),
        ({"context": 2, "answer_starts": 0, "answer_ends": 2}, [(0, 1)]),
    ],
)
def test_answers_reach_the_ends_of_the_context(change, windows):
    # As many anchors as there are positions at most, so that each of a window has one.
    (spec,) = read({**LAYOUTS, "anchors": 128, "draws": 1, **change})
    drawn = layout_params(spec)
    assert spec.num_layouts == len(windows)
    found = [
        row[:n] for row, n in zip(drawn["anchors"].tolist(), drawn["n_valid"].tolist(), strict=True)
    ]
    assert found == [list(range(*window)) for window in windows]


def test_other_kinds_have_one_layout():
    for spec in read(CAUSAL, DATA, FUNCTION):
        assert spec.num_layouts == 1


def test_each_context_has_answers_of_its_own():
    small, large = read({**LAYOUTS, "context": [8, 80]})
    assert small.params["answer_starts"] == [0, 1, 2, 3, 4, 5, 6]
    assert small.params["answer_ends"] == [4, 5, 6, 7, 8]
    assert large.params["answer_starts"] == [0, 5, 10, 15, 20, 25, 30, 35, 40, 50, 60, 70]
    assert large.params["answer_ends"] == [45, 50, 55, 60, 65, 70, 75, 80]


@pytest.mark.parametrize("size", [16, 1024, [16, 1024], [1024, 16], [48, 80]])
def test_the_smallest_and_the_largest_blocks_are_taken(size):
    wanted = (size, size) if isinstance(size, int) else tuple(size)
    assert wanted == read({**CAUSAL, "BLOCK_SIZE": size})[0].BLOCK_SIZE
    assert wanted == read(CAUSAL, BLOCK_SIZE=size)[0].BLOCK_SIZE
    for wrong in (0, 15, 1040):
        with pytest.raises(MaskSpecError, match="multiples of 16 up to 1024"):
            read({**CAUSAL, "BLOCK_SIZE": [16, wrong]})


@pytest.mark.parametrize("name", ["a", "A.b-c_d", "0/1/2", "x/y.z"])
def test_names_that_are_taken(name):
    assert read({**CAUSAL, "name": name})[0].name == f"{name}/q64-kv64"


@pytest.mark.parametrize("name", ["", ".a", "-a", "a/.b", "a b", "a/", "/a", "a\n", "ä", 3])
def test_names_that_are_refused(name):
    with pytest.raises(MaskSpecError, match=r"masks.entry\[0\].name = "):
        read({**CAUSAL, "name": name})


def test_a_functions_spec():
    first, second = read({**FUNCTION, "Q_LEN": [4, 5], "B": 3, "H": 2, "kind": "static"})
    assert (first.name, second.name) == ("m/q4-kv4", "m/q5-kv5")
    assert (first.family, first.kind, first.revision) == ("a.b:c", "static", 1)
    assert first.params == {"B": 3, "H": 2}
    assert first.BLOCK_SIZE == (128, 128)
    assert read({**FUNCTION, "mask_mod": "_a.b1:C.d"})[0].family == "_a.b1:C.d"
    assert read({**FUNCTION, "BLOCK_SIZE": [16, 32]})[0].BLOCK_SIZE == (16, 32)
    # sha256sum of {"BLOCK_SIZE":[128,128],"KV_LEN":4,"Q_LEN":4,"family":"a.b:c","kind":"static",
    # "params":{"B":3,"H":2},"revision":1} without the line break and the space
    assert first.digest == "dd838a638131253038cd1fa1f8d57845c1b3507180b2c4ac2e6d1cc09a95215a"


def test_the_sizes_of_a_static_draft_mask_are_given_as_they_are():
    static = {"family": "dflash", "draft_block_size": 4, "anchors": [3], "Q_LEN": 4, "KV_LEN": 20}
    (spec,) = read({"name": "d", **static})
    assert (spec.name, spec.kind, spec.params["anchors"]) == ("d/q4-kv20", "static", [3])
    with pytest.raises(MaskSpecError, match="context = 16: is unknown"):
        read({"name": "d", **static, "context": 16})


def test_a_parametric_draft_mask_may_be_given_by_its_lengths():
    entry = {"name": "d", "family": "dflash", "kind": "parametric", "draft_block_size": 4}
    (spec,) = read({**entry, "Q_LEN": 8, "KV_LEN": 24})
    assert (spec.name, spec.Q_LEN, spec.KV_LEN) == ("d/ctx16", 8, 24)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"Q_LEN": 0},
            "spec of 'x': Q_LEN = 0: must be an integer of at least 1; "
            "another maskgen wrote it: build it again",
        ),
        (
            {"kind": "other"},
            "spec of 'x': kind = 'other': must be one of static, layouts, parametric; "
            "another maskgen wrote it: build it again",
        ),
        (
            {"family": 3},
            "spec of 'x' = [3, {'offset': 0}]: family is a string, params is an object; "
            "another maskgen wrote it: build it again",
        ),
        (
            {"extra": 1},
            "spec of 'x' = ['BLOCK_SIZE', 'KV_LEN', 'Q_LEN', 'extra', 'family', 'kind', 'params', "
            "'revision']: must have the fields ['BLOCK_SIZE', 'KV_LEN', 'Q_LEN', 'family', 'kind', "
            "'params', 'revision']; another maskgen wrote it: build it again",
        ),
    ],
)
def test_a_record_of_another_maskgen_is_refused_with_its_name(change, message):
    (spec,) = read(CAUSAL)
    with pytest.raises(MaskSpecError) as caught:
        MaskSpec.from_json("x", {**spec.to_json(), **change})
    assert str(caught.value) == message


def test_a_record_lacking_a_field_is_refused():
    (spec,) = read(CAUSAL)
    for field in spec.to_json():
        record = {key: value for key, value in spec.to_json().items() if key != field}
        with pytest.raises(MaskSpecError, match="must have the fields"):
            MaskSpec.from_json("x", record)


def test_a_record_at_its_limits_is_read():
    (spec,) = read(CAUSAL)
    for change in ({"revision": 0}, {"Q_LEN": 1}, {"KV_LEN": 1}, {"BLOCK_SIZE": (1024, 16)}):
        wanted = dataclasses.replace(spec, **change)
        assert MaskSpec.from_json(spec.name, wanted.to_json()) == wanted
    for name in ("revision", "Q_LEN", "KV_LEN"):
        with pytest.raises(MaskSpecError, match=f"{name} = True"):
            MaskSpec.from_json("x", {**spec.to_json(), name: True})
