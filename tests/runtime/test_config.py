import os
from datetime import date

import pytest

from maskgen.runfile import SECTIONS
from runtime.config import Config, overridden, parse_config, read_file
from runtime.dflash.settings import DFlashConfig
from runtime.errors import ConfigError
from runtime.shaping import shaping_settings


def parse(raw):
    return parse_config(raw, DFlashConfig)


def read(path, overrides=()):
    return parse_config(overridden(read_file(path), overrides, DFlashConfig), DFlashConfig)


def test_the_demo_run_file_is_read():
    config = read("configs/demo.toml")
    assert config.target.model == "smollm2-135m"
    assert config.cache == "build/masks.zarr"


def test_what_shapes_a_run():
    """Part of each run's fingerprint: with another value here no run of before would resume."""
    assert shaping_settings(read("benchmarks/configs/demo.toml").as_dict(), DFlashConfig) == {
        "run": {"seed": 1},
        "target": {"dtype": "auto", "num_features": 5},
        "drafter": {"num_layers": 4, "init": "target", "embedding": "module"},
        "train": {
            "masks": "dflash",
            "anchors": "layouts",
            "steps": 520,
            "global_batch": 4,
            "lr": 1e-3,
            "min_lr_ratio": 0.0,
            "warmup_ratio": 0.04,
            "beta1": 0.9,
            "beta2": 0.95,
            "weight_decay": 0.0,
            "clip": 1.0,
            "gamma": 2.0,
            "reduce_dtype": "float32",
        },
    }


def test_another_method_makes_another_run():
    """The default is left out: runs of releases without methods stay what they are."""
    for method, shape in (("dflash", {"seed": 1}), ("a:b", {"method": "a:b", "seed": 1})):
        settings = parse({"run": {"method": method}}).as_dict()
        assert shaping_settings(settings, DFlashConfig)["run"] == shape


def test_where_a_run_runs_shapes_nothing():
    run = {"folder": "f", "devices": "cpu", "target_devices": "cpu", "threads": 2}
    settings = parse({"run": run, "data": {"batch": 3}, "evaluate": {"prompts": 1}}).as_dict()
    assert shaping_settings(settings, DFlashConfig) == shaping_settings(
        parse({}).as_dict(), DFlashConfig
    )


def test_keys_of_one_method_are_unknown_to_another():
    for raw in ({"target": {"num_features": 3}}, {"train": {"gamma": 1.0}}):
        with pytest.raises(ConfigError, match="unknown key in"):
            parse_config(raw, Config)
    with pytest.raises(ConfigError, match=r"unknown section; known are data, evaluate, masks"):
        parse_config({"drafter": {}}, Config)


def test_settings_that_this_release_does_not_know_shape_a_run():
    settings = parse({}).as_dict()
    settings["train"]["momentum"] = 0.5
    assert shaping_settings(settings, DFlashConfig)["train"]["momentum"] == 0.5


@pytest.mark.parametrize(
    ("key", "other"),
    [
        ("loss", "dpace"),
        ("dpace_alpha", 0.25),
        ("distill", "l1"),
        ("distill_share", 0.5),
    ],
)
def test_a_key_newer_than_the_first_runs_shapes_only_those_that_set_it(key, other):
    """A run of before it, whose record has no such key, goes on with its default."""
    settings = parse({}).as_dict()
    shaping = shaping_settings(settings, DFlashConfig)
    assert key not in shaping["train"]
    without = {**settings, "train": {k: v for k, v in settings["train"].items() if k != key}}
    assert shaping_settings(without, DFlashConfig) == shaping
    changed = shaping_settings(parse({"train": {key: other}}).as_dict(), DFlashConfig)
    assert changed["train"] == {**shaping["train"], key: other}


def test_the_sections_are_those_that_settings_may_name():
    assert sorted(parse({}).as_dict()) == sorted(SECTIONS)


def test_defaults_fill_what_a_file_leaves_out():
    config = parse({"train": {"lr": 1}})
    assert config.train.lr == 1.0
    assert isinstance(config.train.lr, float)
    assert config.train.beta1 == 0.9


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"trian": {"steps": 3}}, r"^section = 'trian': unknown section; did you mean 'train'\?"),
        (
            {"train": {"stepz": 3}},
            r"^train\.stepz = 3: unknown key in \[train\]; did you mean 'steps'\?",
        ),
        ({"evaluate": {"prompt": "x"}}, r"^evaluate\.prompt = 'x': unknown key in \[evaluate\]"),
        ({"train": {"zzz": 3}}, r"known are accumulate, anchors, beta1"),
        ({"train": 3}, r"must be a table, \[train\]"),
        ({"train": {"steps": "3"}}, "must be of type int"),
        ({"train": {"steps": True}}, "must be of type int"),
        ({"train": {"steps": 0}}, "must be at least 1"),
        ({"train": {"anchors": "both"}}, "must be one of layouts, data"),
        ({"data": {"prompts": [1]}}, "must be a list of strings"),
        ({"train": {"lr": float("nan")}}, "must be finite"),
        ({"train": {"lr": float("inf")}}, "must be finite"),
        ({"train": {"beta2": 1.5}}, "must be below 1"),
        # What float32 makes of them is what a step would train with.
        ({"train": {"lr": 1e-60}}, "lr = 1e-60: must be above 0 in float32"),
        ({"train": {"weight_decay": 4e38}}, r"weight_decay = 4e\+38: must be finite in float32"),
        ({"train": {"beta1": 1 - 1e-9}}, "must be below 1 in float32"),
        ({"run": {"seed": -1}}, "must be at least 0"),
        ({"run": {"threads": 99_999_999}}, "must be at most 1024"),
        ({"train": {"steps": 1 << 64}}, "must be at most 1000000000"),
    ],
)
def test_a_bad_value_names_its_field_and_the_rule(raw, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse(raw)
    assert caught.value.exit_code == 2


COUNTS = {
    "target.num_features": 1,
    "data.heldout": 0,
    "data.max_new_tokens": 1,
    "data.batch": 1,
    "data.min_answer_tokens": 1,
    "drafter.num_layers": 1,
    "train.max_skipped": 1,
    "train.log_every": 1,
    "train.save_every": 1,
    "train.keep": 1,
    "evaluate.every": 0,
    "evaluate.samples": 0,
    "evaluate.patience": 0,
    "evaluate.prompts": 1,
    "evaluate.compared": 0,
    "evaluate.max_new_tokens": 1,
}
"""Integers without a largest value, and the least of each."""
RANGES = {
    "run.seed": (0, 2**63 - 1),
    "run.threads": (0, 1024),
    "train.steps": (1, 10**9),
    "train.global_batch": (1, 10**6),
    "train.accumulate": (1, 10**6),
    "drafter.sliding_window": (1, 2**30),
    "drafter.markov_rank": (0, 2**14),
}
NUMBERS = {
    **dict.fromkeys(("train.weight_decay", "train.clip", "train.gamma"), ([0, 1e30], [-1e-9])),
    **dict.fromkeys(
        (
            *("data.min_distinct_4grams", "train.min_lr_ratio", "train.warmup_ratio"),
            "evaluate.confidence",
        ),
        ([0, 0.5, 1], [-1e-9, 1.000001]),
    ),
    **dict.fromkeys(("train.beta1", "train.beta2"), ([0, 0.999999], [-1e-9, 1])),
    "train.lr": ([1e-30, 1e30], [0, -1e-9]),
    **dict.fromkeys(
        ("train.dpace_alpha", "train.distill_share"),
        ([1e-30, 0.5, 1], [0, -1e-9, 1e-300, 1.000001]),
    ),
}
"""Floats, and what is taken and refused."""


def read_one(key, value):
    section, name = key.split(".")
    return getattr(getattr(parse({section: {name: value}}), section), name)


def test_every_number_has_its_limits():
    """The last that is taken and the first that is not, of each; a key without any is a slip."""
    sections = parse({}).as_dict().items()
    kinds = {
        f"{section}.{name}": type(value)
        for section, values in sections
        for name, value in values.items()
    }
    assert {key for key, kind in kinds.items() if kind is int} == {*COUNTS, *RANGES}
    assert {key for key, kind in kinds.items() if kind is float} == {*NUMBERS}
    tried = {
        **{key: ([least, 10**6], [least - 1]) for key, least in COUNTS.items()},
        **{key: ([*both], [both[0] - 1, both[1] + 1]) for key, both in RANGES.items()},
        **NUMBERS,
    }
    for key, (taken, refused) in tried.items():
        for value in taken:
            assert read_one(key, value) == value, key
            assert type(read_one(key, value)) is kinds[key], key
        for value in (*refused, True, "1", None):
            with pytest.raises(ConfigError) as caught:
                read_one(key, value)
            assert (caught.value.field, caught.value.value) == (key, value)


def test_an_override_of_what_is_no_table(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("run = 3\n")
    with pytest.raises(ConfigError, match=r"run = 3: must be a table, \[run\]"):
        read(path, ["run.folder=x"])
    path.write_text("[data]\ntemplate = 3\n")
    with pytest.raises(ConfigError, match=r"data\.template = 3: must be a table"):
        read(path, ["data.template.a=1"])


def test_overrides_are_toml_or_a_bare_word(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[train]\nsteps = 5\n")
    settings = [
        "train.steps=6",
        "train.steps=7",
        "run.devices=cpu,cpu",
        'data.prompts=["a", "b"]',
        "train.lr=2e-3",
    ]
    config = read(path, settings)
    assert config.train.steps == 7
    assert config.run.devices == "cpu,cpu"
    assert config.data.prompts == ("a", "b")
    assert config.train.lr == 2e-3


def test_keywords_of_the_chat_template(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[data]\ntemplate = {enable_thinking = true, names = ["a", 2]}\n')
    assert read(path).data.template == {"enable_thinking": True, "names": ["a", 2]}
    changed = read(path, ["data.template.enable_thinking=false", "data.template.effort=low"])
    assert changed.data.template == {"enable_thinking": False, "names": ["a", 2], "effort": "low"}
    assert read(path, ["data.template={a = 1}"]).data.template == {"a": 1}
    assert parse({}).data.template == {}


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (False, r"data\.template = False: must be a table"),
        ({"day": date(2026, 1, 2)}, r"data\.template\.day = .*: must be a text, a finite number"),
        ({"a": [float("nan")]}, r"data\.template\.a = \[nan\]: must be a text"),
    ],
)
def test_keywords_that_cannot_be_kept_are_refused(template, message):
    with pytest.raises(ConfigError, match=message):
        parse({"data": {"template": template}})


@pytest.mark.parametrize("override", ["train", "steps=3", "train.=3", "train..a=1"])
def test_a_malformed_override_is_refused(tmp_path, override):
    path = tmp_path / "run.toml"
    path.write_text("")
    with pytest.raises(ConfigError, match=r"must read section\.key=value"):
        read(path, [override])


def test_a_setting_of_no_section_is_refused(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[train]\nsteps = 3\n")
    message = r"drafters\.num_layers=2': section is unknown; did you mean 'drafter'\?"
    with pytest.raises(ConfigError, match=message):
        read(path, ["drafters.num_layers=2"])


def test_a_setting_that_is_no_utf_8_is_refused(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("")
    with pytest.raises(ConfigError, match="must be UTF-8"):
        read(path, [os.fsdecode(b"data.folder=caf\xe9")])


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[train\n")
    with pytest.raises(ConfigError, match="must be TOML"):
        read(broken)
