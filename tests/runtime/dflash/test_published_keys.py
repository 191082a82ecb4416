import contextlib
import itertools
import json
from dataclasses import replace

import pytest

from runtime.dflash.network.drafter import DrafterConfig
from runtime.errors import CheckpointError, ConfigError

QWEN3_8B = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "model_type": "qwen3",
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "num_target_layers": 36,
    "num_hidden_layers": 5,
    "layer_types": ["full_attention"] * 5,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
"""As z-lab publishes one."""
IDS = [1, 9, 17, 25, 33]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(**changes):
    published = json.loads(json.dumps({**QWEN3_8B, **changes}))
    return DrafterConfig.from_published(
        {key: value for key, value in published.items() if value != "missing"}
    )


def inner(**changes):
    return {"dflash_config": {**QWEN3_8B["dflash_config"], **changes}}


def test_a_drafter_of_z_lab_is_read():
    config = read()
    assert (config.draft_block_size, config.mask_token_id) == (16, 151669)
    assert config.target_layer_ids == tuple(IDS)
    assert (config.rope_theta, config.rope_scaling, config.embedding_scale) == (1e6, None, 1.0)


def test_the_first_drafters_keep_their_keys_at_the_top():
    old = read(dflash_config="missing", mask_token_id=151669, target_layer_ids=IDS)
    assert old == read()
    assert read(block_size="missing", **inner(block_size=16)) == read()
    # As both servers and z-lab's class read it where neither place has one.
    assert read(block_size="missing").draft_block_size == 16


@pytest.mark.parametrize(
    "harmless",
    [
        {"is_causal": False},
        {"is_causal": None},
        inner(causal=False, use_swa=False, use_aux_hidden_state=True),
        {"partial_rotary_factor": 1.0},
        {"partial_rotary_factor": 1},
        {"rope_dim": 128, "is_neox_style": True, "rope_is_neox_style": True},
        {"sample_from_anchor": False, "query_zero_predicts_next": False},
        {"draft_vocab_size": 151936, "target_hidden_size": 4096},
        {"eagle_aux_hidden_state_layer_ids": [2, 10, 18, 26, 34]},
        {"attention_value_scale": 1.0, "use_gemma_norm": False, "attention_sink_bias": False},
        {"hidden_act": "swish", "markov_rank": 0, "enable_confidence_head": False},
        {"layer_types": "missing", "sliding_window": 2048},
        {"use_sliding_window": True, "sliding_window": 4096},
        {"quantization_config": None, "final_logit_softcapping": None},
        {"transformers_version": "5.15.0", "torch_dtype": "bfloat16", "use_cache": False},
        {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": None},
        {"initializer_range": 0.02, "attention_dropout": 0.1, "tie_word_embeddings": True},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
        inner(mask_token="<|MASK|>", block_size=16, input_embedding_scale=1.0),
    ],
)
def test_keys_that_change_nothing_are_accepted(harmless):
    assert read(**harmless) == read()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"is_causal": True}, "is_causal = true"),
        (inner(causal=True), r"dflash_config\.causal = true"),
        (inner(is_causal=True), r"dflash_config\.is_causal = true"),
        (inner(use_swa=True, swa_window_size=2048), r"dflash_config\.use_swa = true"),
        ({"use_swa": True}, "use_swa = true"),
        ({"layer_types": ["sliding_attention"] * 4 + ["full_attention"]}, "use_sliding_window = "),
        ({"layer_types": ["chunked_attention"] * 5}, "layer_types = "),
        ({"layer_types": ["full_attention"] * 4}, "layer_types names 4 layers"),
        ({"layer_types": ["full_attention"] * 6}, "layer_types names 6 layers"),
        ({"layer_types": "full_attention"}, "layer_types = "),
        ({"layer_types": "missing", "use_sliding_window": True}, "use_sliding_window"),
        ({"is_neox_style": False}, "is_neox_style = false"),
        ({"rope_is_neox_style": False}, "rope_is_neox_style = false"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25}}, "rope_parameter"),
        ({"rope_dim": 64}, "rope_dim = 64"),
        ({"hidden_act": "gelu"}, 'hidden_act = "gelu"'),
        ({"hidden_act": "swigluoai"}, 'hidden_act = "swigluoai"'),
        ({"attention_bias": True}, "attention_bias = true"),
        ({"mlp_bias": True}, "mlp_bias = true"),
        ({"use_gemma_norm": True}, "use_gemma_norm = true"),
        (inner(attention_sink_bias=True), r"dflash_config\.attention_sink_bias = true"),
        ({"attention_value_scale": 0.707}, "attention_value_scale = 0.707"),
        ({"sample_from_anchor": True}, "sample_from_anchor = true"),
        (inner(sample_from_anchor=True), "slot k must predict anchor"),
        ({"query_zero_predicts_next": True}, "query_zero_predicts_next = true"),
        ({"draft_vocab_size": 32000}, "draft_vocab_size = 32000"),
        ({"target_hidden_size": 5120}, "target_hidden_size = 5120"),
        ({"eagle_aux_hidden_state_layer_ids": IDS}, "eagle_aux_hidden_state_layer_ids = "),
        ({"architectures": ["DFlash2DraftModel"]}, "architectures = "),
        ({"architectures": ["Qwen3DSparkModel", "DFlashDraftModel"]}, "architectures = "),
        ({"model_type": "llama"}, 'model_type = "llama"'),
        (inner(conv_kernel_size=2), "DFlash 2"),
        (inner(selector_rank=256), "DFlash 2"),
        (inner(projector_type="domino"), "Domino"),
        (inner(emb_dim=256), "Domino"),
        ({"markov_rank": 256}, "DSpark"),
        ({"enable_confidence_head": True}, "DSpark"),
        ({"parallel_drafting": True}, "EAGLE"),
        ({"speculators_model_type": "dflash"}, "speculators"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"output_multiplier": 0.2}, "output_multiplier = 0.2"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30"),
        ({"has_own_lm_head": True}, "has_own_lm_head = true"),
        ({"num_experts": 8}, "num_experts = 8: is no key that is known"),
        (inner(gate="x" * 200), r"dflash_config\.gate = .xxx.*\.\.\.: is no key"),
        # As numbers, true is 1 and false is 0.
        ({"is_causal": 0}, "is_causal = 0"),
        ({"partial_rotary_factor": True}, "partial_rotary_factor = true"),
        (inner(input_embedding_scale=0), "embedding_scale = 0: must be a finite number above 0"),
    ],
)
def test_another_network_is_refused_by_name(change, named):
    with pytest.raises((CheckpointError, ConfigError), match=named) as caught:
        read(**change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (inner(block_size=8), "block_size = 16 and dflash_config.block_size = 8 must be equal"),
        ({"mask_token_id": 3}, "mask_token_id = 3 and dflash_config.mask_token_id = 151669"),
        ({"input_embedding_scale": 2, **inner(input_embedding_scale=3)}, "must be equal"),
        ({"rope_parameters": {"rope_theta": 10000.0}}, "rope_theta = 1000000 and rope_parameters."),
        ({"rope_parameters": YARN, "rope_scaling": LLAMA3}, "must be equal"),
        ({"rope_scaling": {**YARN, "type": "linear"}}, "must be equal"),
        ({"rope_scaling": {**YARN, "attn_factor": 1.5, "attention_factor": 1.5}}, "the same"),
        # Twice 1.138629, and a thousandth more or less.
        ({"rope_scaling": {**YARN, "attn_factor": 2.0, "attention_factor": 2.2795}}, "the same"),
        ({"rope_scaling": {**YARN, "attn_factor": 2.0, "attention_factor": 2.275}}, "the same"),
    ],
)
def test_two_values_of_one_thing_are_refused(change, message):
    with pytest.raises(CheckpointError, match=message):
        read(**change)


WRONG = ["4096", True, [4096], {"a": 1}, float("nan"), float("inf"), -1, 10**400]
WRONG_INTEGERS = [4096.5, 4096.0, 0, 10**30]
NUMBERS = {"rms_norm_eps", "rope_theta"}
INTEGERS = {
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "vocab_size", "num_target_layers", "max_position_embeddings"),
    "block_size",
}


@pytest.mark.parametrize("key", sorted(INTEGERS | NUMBERS))
def test_a_number_is_a_number(key):
    others = {k: v for k, v in QWEN3_8B.items() if k != "layer_types"}
    for value in (*WRONG, *(WRONG_INTEGERS if key in INTEGERS else ())):
        with pytest.raises((CheckpointError, ConfigError), match=key):
            DrafterConfig.from_published({**others, key: value})
    if key != "block_size":
        with pytest.raises(CheckpointError, match=f"must hold '{key}', and it is missing"):
            read(**{key: "missing"})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dflash_config": [1]}, "dflash_config = .1.: must be an object"),
        ({"dflash_config": "x"}, 'dflash_config = "x": must be an object'),
        (inner(target_layer_ids=[1, "9"]), "target_layer_ids = .*: must be a list of integers"),
        (inner(target_layer_ids=[True, 9]), "target_layer_ids = .*: must be a list of integers"),
        (inner(target_layer_ids=9), "target_layer_ids = 9: must be a list of integers"),
        (inner(target_layer_ids=[]), "must name one or more layers"),
        (inner(target_layer_ids=[1, 1]), "each once"),
        (inner(target_layer_ids=[1, 36]), r"in \[0, 36\)"),
        (inner(mask_token_id="151669"), "mask_token_id = .*: must be an integer"),
        (inner(mask_token_id=151936), "must be a row of the target's embedding"),
        ({"rope_parameters": [1]}, "rope_parameters = .1.: must be an object"),
        ({"rope_parameters": {"rope_theta": "1e6"}}, "rope_parameters.rope_theta = "),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope_type must be one of"),
        ({"rope_scaling": {"factor": 4.0}}, "must have a rope_type"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type must be one of"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn needs factor"),
        ({"rope_scaling": {**YARN, "factor": "4"}}, "yarn needs factor, a number above 0"),
        ({"rope_scaling": {**YARN, "beta_fast": [32]}}, "beta_fast must be a number"),
        ({"rope_scaling": {**YARN, "mrope_section": [1, 2]}}, "yarn knows no mrope_section"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "high_freq_factor must be above"),
        ({"rope_scaling": {**LLAMA3, "attn_factor": 1.0}}, "attn_factor = 1.0: must be a number, "),
        ({"rope_parameters": {"rope_theta": 1e6, "mrope_section": [1]}}, "must have a rope_type"),
    ],
)
def test_wrong_types_and_ranges_are_named(change, named):
    with pytest.raises((CheckpointError, ConfigError), match=named):
        read(**change)


def test_whatever_a_key_holds_nothing_else_is_raised():
    """Any value in any place is read, or refused by one of the two errors."""
    values = [None, True, 0, -1, 2.5, "", "x", [], [[]], {}, {"rope_type": {}}, 10**400]
    keys = [*QWEN3_8B, "input_embedding_scale", "draft_vocab_size", "rope_parameters", "causal"]
    for key, value in itertools.product(keys, values):
        for change in ({key: value}, inner(**{key: value})):
            with contextlib.suppress(CheckpointError, ConfigError):
                DrafterConfig.from_published({**QWEN3_8B, **change})


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("scaling", [YARN, LLAMA3, {"rope_type": "linear", "factor": 2.0}])
def test_scalings_are_read_from_either_table(place, scaling):
    assert read(**{place: scaling}).rope_scaling == scaling
    kind = scaling["rope_type"]
    old = {**{k: v for k, v in scaling.items() if k != "rope_type"}, "type": kind}
    assert read(**{place: old}).rope_scaling == scaling


def test_either_name_of_yarns_factor_is_read():
    # 0.1 ln 4 + 1 = 1.138629
    relative = read(rope_scaling={**YARN, "attn_factor": 2.0}).rope_scaling
    assert relative["attention_factor"] == pytest.approx(2.277259)
    both = {**YARN, "attention_factor": 2.277259, "attn_factor": 2.0}
    assert read(rope_scaling=both).rope_scaling == {**YARN, "attention_factor": 2.277259}


@pytest.mark.parametrize(
    "said", [{"attention_factor": 1.5}, {"mscale": 1.0, "mscale_all_dim": 0.5}]
)
def test_yarns_factor_is_written_under_both_names(said):
    published = read(rope_scaling={**YARN, **said}).to_published()
    for table in (published["rope_scaling"], published["rope_parameters"]):
        factor = said.get("attention_factor", 1.138629 / 1.069315)
        assert table["attention_factor"] == pytest.approx(factor, rel=1e-5)
        assert table["attn_factor"] == pytest.approx(factor / 1.138629, rel=1e-5)
    assert DrafterConfig.from_published(published).to_published() == published


def test_yarn_without_a_factor_is_written_as_it_is():
    assert read(rope_scaling=YARN).to_published()["rope_scaling"] == YARN


def test_the_embedding_scale_is_written_and_read():
    config = read(**inner(input_embedding_scale=33.94))
    assert config.embedding_scale == 33.94
    assert config.to_published()["dflash_config"]["input_embedding_scale"] == 33.94
    assert read(input_embedding_scale=33.94) == config


HEADS = {
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
DSPARK = {
    "architectures": ["Qwen3DSparkModel"],
    "mask_token_id": 151669,
    "target_layer_ids": IDS,
    "sample_from_anchor": False,
    **HEADS,
}


def test_a_dspark_drafter_is_read():
    config = read(**DSPARK)
    assert (config.markov_rank, config.confidence_head) == (256, True)
    assert replace(config, markov_rank=0, confidence_head=False) == read()
    without = read(**{**DSPARK, "enable_confidence_head": False})
    assert (without.markov_rank, without.confidence_head) == (256, False)


@pytest.mark.parametrize(
    "said",
    [
        {"sample_from_anchor": True},
        {"sample_from_anchor": "missing"},
        {"sample_from_anchor": None},
        {"sample_from_anchor": "missing", **inner(sample_from_anchor=True)},
    ],
)
def test_a_dspark_drafter_samples_from_the_anchor_unless_it_says_no(said):
    config = read(**{**DSPARK, **said})
    assert config == replace(read(**DSPARK), sample_from_anchor=True)
    assert (config.reach, read(**DSPARK).reach, read().reach) == (17, 16, 16)
    published = config.to_published()
    assert published["sample_from_anchor"] is True
    assert DrafterConfig.from_published(published) == config


@pytest.mark.parametrize(
    "same",
    [
        {"architectures": ["DSparkDraftModel"]},
        {"dspark_config": HEADS},
        dict.fromkeys(HEADS, "missing") | {"dspark_config": HEADS},
        dict.fromkeys(HEADS, "missing") | inner(**HEADS, projector_type="dspark"),
        {"dflash_config": "missing"},
        {"markov_head_type": "missing"},
        {"markov_head_type": None},
        inner(sample_from_anchor=False),
    ],
)
def test_dspark_keys_may_stand_where_servers_look_for_them(same):
    assert read(**{**DSPARK, **same}) == read(**DSPARK)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        # No server looks for it there, and each takes a missing one for true.
        (
            {"sample_from_anchor": "missing", **inner(sample_from_anchor=False)},
            "sample_from_anchor = false must stand at the top",
        ),
        (inner(sample_from_anchor=True), "sample_from_anchor = false and dflash_config.* = true"),
        ({"sample_from_anchor": 0}, "sample_from_anchor = 0: must be true or false"),
        ({"markov_head_type": "gated"}, 'markov_head_type = "gated": must be "vanilla"'),
        ({"markov_head_type": "rnn"}, 'markov_head_type = "rnn": must be "vanilla"'),
        ({"markov_rank": 0}, "markov_rank = 0: must be at least 1"),
        ({"markov_rank": -1}, "markov_rank = -1"),
        ({"markov_rank": 10**9}, "markov_rank = 1000000000: must be .* at most"),
        ({"markov_rank": "256"}, 'markov_rank = "256": must be an integer'),
        ({"markov_rank": "missing"}, "must hold 'markov_rank'"),
        ({"dspark_config": {"markov_rank": 128}}, "markov_rank = 256 and dspark_config.* = 128"),
        ({"dspark_config": [1]}, "dspark_config = .1.: must be an object"),
        ({"enable_confidence_head": 1}, "enable_confidence_head = 1: must be true or false"),
        ({"confidence_head_with_markov": False}, "confidence_head_with_markov = false: must be"),
        ({"confidence_head_with_markov": "missing"}, "confidence_head_with_markov = null"),
        ({"markov_draft_topk": 8}, "markov_draft_topk = 8"),
        ({"architectures": ["Qwen3DSparkModel", "x"]}, "architectures = "),
        ({"is_causal": True}, "is_causal = true"),
        ({"conv_kernel_size": 2}, "DFlash 2"),
        (inner(projector_type="domino"), "Domino"),
        ({"draft_vocab_size": 32000}, "draft_vocab_size = 32000"),
    ],
)
def test_another_dspark_is_refused_by_name(change, named):
    with pytest.raises((CheckpointError, ConfigError), match=named) as caught:
        read(**{**DSPARK, **change})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", [key for key in DSPARK if key != "architectures"])
def test_a_dflash_config_may_not_say_what_is_dsparks(key):
    """But for what it says of itself with these keys, too."""
    change = {key: DSPARK[key]}
    if key in ("mask_token_id", "target_layer_ids", "sample_from_anchor"):
        assert read(**change) == read()
        return
    with pytest.raises(CheckpointError, match=f"{key} = .*DSpark's"):
        read(**change)
    with pytest.raises(CheckpointError, match=r"dspark_config = .*DSpark's"):
        read(dspark_config=change)


@pytest.mark.parametrize("confident", [True, False])
def test_a_dspark_config_is_written_as_it_is_read(confident):
    config = read(**{**DSPARK, "enable_confidence_head": confident})
    published = config.to_published()
    assert DrafterConfig.from_published(json.loads(json.dumps(published))) == config
    told = {**DSPARK, "enable_confidence_head": confident, "confidence_head_with_markov": confident}
    assert told.items() <= published.items()
    assert published["dspark_config"] == {key: told[key] for key in HEADS}
    plain = read().to_published()
    assert {key: value for key, value in published.items() if key not in told} == {
        **{key: value for key, value in plain.items() if key not in told},
        "dspark_config": published["dspark_config"],
    }


def test_a_drafter_without_heads_is_published_as_ever():
    """Byte for byte: what is served may be compared by its digest."""
    assert set(read().to_published()) & ({*DSPARK, "dspark_config"} - {"architectures"}) == set()
    assert read().to_published()["architectures"] == ["DFlashDraftModel"]
