"""Specs: the [masks] section into a list of masks, its errors, and digests that never move."""

import dataclasses
from pathlib import Path

import pytest

from maskgen.errors import MaskSpecError
from maskgen.mask_spec import MaskSpec, context_name, size_name
from maskgen.runfile import DEFAULT_CACHE, read_cache_location
from maskgen.spec import read_specs

LAYOUTS = {
    "name": "dflash",
    "family": "dflash",
    "kind": "layouts",
    "context": [128, 256],
    "anchors": 32,
    "draft_block_size": 4,
}
CAUSAL = {"name": "causal", "family": "causal", "Q_LEN": 64}


def read(*entries, **section):
    return read_specs({"masks": {"entry": list(entries), **section}, "run": {"seed": 1}})


def test_static_sizes_give_one_spec_each_with_defaults_filled_in():
    first, second = read({**CAUSAL, "Q_LEN": [1024, 4096], "KV_LEN": [1024, 8192]})
    assert (first.name, second.name) == ("causal/q1024-kv1024", "causal/q4096-kv8192")
    assert (second.Q_LEN, second.KV_LEN, second.BLOCK_SIZE) == (4096, 8192, (128, 128))
    assert second.params == {"offset": 0}
    assert (second.family, second.kind, second.revision) == ("causal", "static", 1)


def test_context_sizes_of_dflash():
    small, large = read(LAYOUTS)
    assert (small.name, large.name) == ("dflash/ctx128", "dflash/ctx256")
    assert (small.Q_LEN, small.KV_LEN) == (128, 256)
    assert (large.Q_LEN, large.KV_LEN) == (128, 384)
    assert large.params["draws"] == 8
    starts = [*range(0, 129, 16), 160, 192, 224]
    ends = [*range(144, 257, 16)]
    assert (large.params["answer_starts"], large.params["answer_ends"]) == (starts, ends)
    # From 0 to 128 with all ends, then only with those that lie behind.
    assert large.num_layouts == (9 * 8 + 6 + 4 + 2) * 8
    assert "draws" not in large.family_params
    assert large.family_params["draft_block_size"] == 4


def test_parametric_takes_no_layout_keys():
    (spec,) = read({**LAYOUTS, "kind": "parametric", "context": 128})
    assert spec.kind == "parametric"
    assert spec.num_layouts == 1
    with pytest.raises(MaskSpecError, match="draws"):
        read({**LAYOUTS, "kind": "parametric", "draws": 4})


def test_params_without_a_value_are_left_out_since_the_cache_has_no_null():
    (spec,) = read({**LAYOUTS, "context": 128})
    assert None not in spec.params.values()
    assert "window" not in spec.params


def test_a_static_entry_takes_what_a_batch_would_say():
    entry = {"name": "d", "family": "document", "Q_LEN": 4, "doc_ids": [0, 0, 1, 1]}
    (spec,) = read(entry)
    assert spec.params["doc_ids"] == [0, 0, 1, 1]
    with pytest.raises(MaskSpecError, match="doc_ids"):
        read({**entry, "kind": "parametric"})


def test_a_static_entry_without_a_required_batch_value_is_refused():
    entry = {"name": "d", "family": "dflash", "Q_LEN": 4, "KV_LEN": 8, "draft_block_size": 4}
    with pytest.raises(MaskSpecError, match="anchors = None: is required by a static entry"):
        read(entry)


def test_block_size_is_a_pair_inside():
    assert read(CAUSAL, BLOCK_SIZE=[64, 256])[0].BLOCK_SIZE == (64, 256)
    assert read({**CAUSAL, "BLOCK_SIZE": 32}, BLOCK_SIZE=64)[0].BLOCK_SIZE == (32, 32)


def test_a_mask_mod_entry_names_its_function():
    (spec,) = read({"name": "mine", "mask_mod": "pkg.masks:lower", "Q_LEN": 32, "H": 2})
    assert (spec.family, spec.is_function, spec.params) == ("pkg.masks:lower", True, {"H": 2})
    assert spec.name == "mine/q32-kv32"


def test_a_toml_file_is_read_whole(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        '[run]\nseed = 3\n[masks]\ncache = "a/b.zarr"\n'
        '[[masks.entry]]\nname = "causal"\nfamily = "causal"\nQ_LEN = 32\n'
    )
    assert [spec.name for spec in read_specs(file)] == ["causal/q32-kv32"]
    assert read_cache_location(file) == "a/b.zarr"
    assert read_cache_location({"masks": {}}) == DEFAULT_CACHE


def test_elements_of_p_eagle_are_named_by_their_sizes():
    entry = {"name": "p", "family": "p_eagle", "kind": "parametric", "num_depths": 2}
    specs = read_specs({"masks": {"entry": [{**entry, "Q_LEN": [32, 64]}]}})
    assert [spec.name for spec in specs] == ["p/q32-kv32", "p/q64-kv64"]


@pytest.mark.parametrize("file", ["demo.toml", "masks.toml"])
def test_the_run_files_of_the_project_are_valid(file):
    assert read_specs(Path(__file__).parents[2] / "configs" / file)


def test_frozen_run_files_have_the_masks_of_their_figures():
    """Whatever the defaults are now: these are the digests of November 2026."""
    folder = Path(__file__).parents[2] / "benchmarks" / "configs"
    assert [spec.digest[:12] for spec in read_specs(folder / "gpu.toml")] == [
        "092ad786e312", "477fb12a96cb", "158985f52608", "b8531e6e0cdb",
    ]  # fmt: skip
    assert len(read_specs(folder / "demo.toml")) == 4


def test_names_of_entries():
    assert context_name("dflash", 2048) == "dflash/ctx2048"
    assert size_name("causal", 8, 16) == "causal/q8-kv16"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({**CAUSAL, "famly": 1}, "famly.*did you mean 'family'"),
        ({**CAUSAL, "ofset": 7}, "ofset = 7: .*did you mean 'offset'"),
        ({**CAUSAL, "family": "casual"}, "casual.*did you mean 'causal'"),
        ({**CAUSAL, "kind": "layout"}, "layout.*did you mean 'layouts'"),
        ({**CAUSAL, "kind": "layouts"}, "for families that draw layouts"),
        (
            {"name": "p", "family": "p_eagle", "num_depths": 2, "kind": "layouts", "Q_LEN": 8},
            "for families that draw layouts; p_eagle has none",
        ),
        ({**CAUSAL, "kind": "parametric"}, "depend on the batch"),
        ({**CAUSAL, "mask_mod": "a:b"}, "one of family and mask_mod"),
        ({"name": "x", "Q_LEN": 4}, "one of family and mask_mod"),
        ({**CAUSAL, "name": "../x"}, "name.*letters, digits"),
        ({**CAUSAL, "name": "a//b"}, "name.*letters, digits"),
        ({"family": "causal"}, "name = None"),
        ({**CAUSAL, "Q_LEN": 0}, "Q_LEN = 0: must be an integer of at least 1"),
        ({**CAUSAL, "Q_LEN": []}, "Q_LEN.*must not be empty"),
        ({**CAUSAL, "Q_LEN": 1.5}, "Q_LEN = 1.5"),
        ({**CAUSAL, "Q_LEN": True}, "Q_LEN = True"),
        ({**CAUSAL, "KV_LEN": [1, 2]}, "one length for each Q_LEN"),
        ({**CAUSAL, "BLOCK_SIZE": 100}, "BLOCK_SIZE = 100: must be one or two multiples of 16"),
        ({**CAUSAL, "BLOCK_SIZE": [16, 16, 16]}, "one or two multiples"),
        ({**CAUSAL, "BLOCK_SIZE": 2048}, "up to 1024"),
        ({**CAUSAL, "BLOCK_SIZE": True}, "BLOCK_SIZE = True"),
        ({**CAUSAL, "offset": "far"}, "offset = 'far'"),
        ({**LAYOUTS, "anchors": 0}, "anchors = 0"),
        ({k: v for k, v in LAYOUTS.items() if k != "draft_block_size"}, "draft_block_size = None"),
        ({**LAYOUTS, "draws": 0}, "draws = 0"),
        # Neither size is dropped beside the other way to say it.
        ({**LAYOUTS, "Q_LEN": 64}, "Q_LEN = 64: follows from context"),
        ({**LAYOUTS, "kind": "parametric", "KV_LEN": [256, 384]}, "KV_LEN.*follows from context"),
        (
            {**{k: LAYOUTS[k] for k in LAYOUTS if k != "context"}, "Q_LEN": 64, "KV_LEN": 192},
            "anchors = 32: belongs to context",
        ),
        ({**LAYOUTS, "answer_starts": [127]}, "answer_starts.*at most context - 2 = 126"),
        ({**LAYOUTS, "answer_starts": [-1]}, "answer_starts = -1"),
        ({**LAYOUTS, "answer_ends": [129]}, "answer_ends.*at most context = 128"),
        ({**LAYOUTS, "answer_starts": [9], "answer_ends": [10]}, "2 past a start"),
        ({**LAYOUTS, "context": "long"}, "context = 'long'"),
        ({"name": "m", "mask_mod": "nowhere", "Q_LEN": 4}, "package.module:function"),
        ({"name": "m", "mask_mod": "a:b", "Q_LEN": 4, "kind": "layouts"}, "must be static"),
        ({"name": "m", "mask_mod": "a:b", "Q_LEN": 4, "window": 4}, "window.*is unknown"),
        ("causal", "must be a table"),
    ],
)
def test_bad_entries_name_the_field_and_the_rule(entry, message):
    with pytest.raises(MaskSpecError, match=message) as caught:
        read(entry)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "must be a \\[masks\\] section"),
        ({"masks": {"entrys": []}}, "entrys.*did you mean 'entry'"),
        ({"masks": {"cache": 3}}, "must be a path"),
        ({"masks": {}}, "at least one"),
        ({"masks": {"entry": [CAUSAL, CAUSAL]}}, "to one entry only"),
    ],
)
def test_bad_sections_are_refused(document, message):
    with pytest.raises(MaskSpecError, match=message):
        read_specs(document)


def test_a_file_that_is_missing_or_no_toml_is_refused(tmp_path):
    with pytest.raises(MaskSpecError, match="cannot be read"):
        read_specs(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[masks")
    with pytest.raises(MaskSpecError, match="must be TOML"):
        read_specs(broken)


def test_the_digest_depends_on_everything_but_the_name():
    (spec,) = read(CAUSAL)
    assert spec.digest == dataclasses.replace(spec, name="other").digest
    changes = {
        "family": "full",
        "kind": "parametric",
        "Q_LEN": 65,
        "KV_LEN": 65,
        "BLOCK_SIZE": (128, 64),
        "params": {"offset": 1},
        "revision": 2,
    }
    digests = {dataclasses.replace(spec, **{k: v}).digest for k, v in changes.items()}
    assert len(digests | {spec.digest}) == len(changes) + 1


def test_the_digest_is_the_same_on_any_machine():
    spec = MaskSpec(
        name="x",
        family="dflash",
        kind="layouts",
        Q_LEN=8,
        KV_LEN=24,
        BLOCK_SIZE=(16, 32),
        params={"draft_block_size": 4, "draws": 2, "answer_starts": [0, 8], "answer_ends": [16]},
        revision=1,
    )
    # sha256 of this text, taken with the sha256sum command:
    # {"BLOCK_SIZE":[16,32],"KV_LEN":24,"Q_LEN":8,"family":"dflash","kind":"layouts","params":
    # {"answer_ends":[16],"answer_starts":[0,8],"draft_block_size":4,"draws":2},"revision":1}
    # without the line break
    assert spec.digest == "9e7f2a6f3c193bf0fb7f7b7788f1bc62744f70dbafb6270bedf6e4a8ee7df96c"


def test_json_comes_back_as_it_was():
    for spec in read(CAUSAL, LAYOUTS):
        assert MaskSpec.from_json(spec.name, spec.to_json()) == spec


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draws": "many"}, "draws = 'many'"),
        ({"answer_starts": {}}, "answer_starts = {}"),
        ({"answer_ends": [129]}, "at most context = 128"),
    ],
)
def test_layouts_of_an_untrusted_cache_are_checked_as_they_are_counted(change, message):
    (spec,) = read({**LAYOUTS, "context": [128]})
    record = spec.to_json()
    record["params"] = {**record["params"], **change}
    with pytest.raises(MaskSpecError, match=message):
        _ = MaskSpec.from_json(spec.name, record).num_layouts


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "must have the fields"),
        ({"kind": "other"}, "kind = 'other'"),
        ({"family": 3}, "family is a string"),
        ({"params": []}, "params is an object"),
        ({"Q_LEN": 0}, "Q_LEN = 0"),
        ({"KV_LEN": "9"}, "KV_LEN = '9'"),
        ({"BLOCK_SIZE": [17, 16]}, "BLOCK_SIZE"),
        ({"revision": -1}, "revision = -1"),
        ({"own_family": True}, "own_family = True: says that family is the module:function"),
        ({"family": "a:b", "own_family": 1}, "own_family = 1"),
    ],
)
def test_json_of_an_untrusted_cache_is_checked(change, message):
    (spec,) = read(CAUSAL)
    with pytest.raises(MaskSpecError, match=message):
        MaskSpec.from_json("x", {**spec.to_json(), **change})
