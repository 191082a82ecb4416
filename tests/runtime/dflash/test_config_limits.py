"""Both sides of every limit of a drafter's config, every key that is known, and whole messages."""

import math
import re

import pytest
import torch

from runtime.dflash.network.config import DrafterConfig, rope_frequencies
from runtime.dflash.published.config import yarn_factor
from runtime.errors import CheckpointError, ConfigError
from tests.runtime.dflash.test_drafter import make_config
from tests.runtime.dflash.test_published_keys import LLAMA3, QWEN3_8B, YARN, inner, read

LARGEST = {
    "hidden_size": 1_048_576,
    "intermediate_size": 4_194_304,
    "num_hidden_layers": 1_024,
    "num_attention_heads": 4_096,
    "num_key_value_heads": 4_096,
    "head_dim": 4_096,
    "vocab_size": 16_777_216,
    "num_target_layers": 4_096,
    "max_position_embeddings": 2_147_483_647,
}
FIT = {
    # What else must hold where one number is the largest, or 1.
    "num_key_value_heads": {"num_attention_heads": 4_096},
    "vocab_size": {"mask_token_id": 0},
    "num_target_layers": {"target_layer_ids": (0,)},
    "num_attention_heads": {"num_key_value_heads": 1},
}


@pytest.mark.parametrize("name", LARGEST)
def test_a_size_is_taken_up_to_its_largest(name):
    fit, largest = FIT.get(name, {}), LARGEST[name]
    assert getattr(make_config(**fit, **{name: largest}), name) == largest
    if name != "head_dim":
        assert getattr(make_config(**fit, **{name: 1}), name) == 1
    for value in (0, largest + 1):
        with pytest.raises(ConfigError) as caught:
            make_config(**fit, **{name: value})
        said = f"{name} = {value}: must be at least 1 and at most {largest}"
        assert str(caught.value) == said


@pytest.mark.parametrize(
    ("accepted", "refused", "message"),
    [
        (
            [{"num_key_value_heads": heads} for heads in (1, 2, 4)],
            [{"num_key_value_heads": heads} for heads in (3, 8)],
            "must divide num_attention_heads = 4",
        ),
        (
            [{"head_dim": size} for size in (16, 18)],
            [{"head_dim": size} for size in (14, 15, 17)],
            "must be even, for RoPE, and at least 16, for FlexAttention",
        ),
        (
            [{"draft_block_size": size} for size in (2, 4096)],
            [{"draft_block_size": size} for size in (-1, 0, 1, 4097)],
            "must be at least 2, as slot 0 is the known token, and at most 4096",
        ),
        (
            [{"mask_token_id": token} for token in (0, 39)],
            [{"mask_token_id": token} for token in (-1, 40)],
            "must be a row of the target's embedding, in [0, 40)",
        ),
        (
            [{"target_layer_ids": ids} for ids in ((0,), (5,), (5, 0), tuple(range(6)))],
            [{"target_layer_ids": ids} for ids in ((), (-1,), (6,), (0, 6), (6, 0), (2, 3, 2))],
            "must name one or more layers in [0, 6), each once",
        ),
        *(
            (
                [{name: value} for value in (1, 1e-30, 1e30)],
                [{name: value} for value in (0, -1.0, math.inf, math.nan, True, "1", None)],
                "must be a finite number above 0",
            )
            for name in ("rms_norm_eps", "rope_theta", "embedding_scale")
        ),
    ],
)
def test_what_is_just_inside_is_taken_and_what_is_just_outside_is_named(accepted, refused, message):
    for change in accepted:
        make_config(**change)
    for change in refused:
        ((name, value),) = change.items()
        with pytest.raises(ConfigError) as caught:
            make_config(**change)
        assert str(caught.value) == f"{name} = {value!r}: {message}"


LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    "scaling",
    [
        LINEAR,
        {**LINEAR, "factor": 1},
        LLAMA3,
        {**LLAMA3, "low_freq_factor": 3.99},
        YARN,
        {"rope_type": "yarn", "factor": 4.0},
        *(
            {**YARN, key: value}
            for key in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
            for value in (None, 0, 2.5)
        ),
        *({**YARN, "truncate": value} for value in (True, False, None)),
    ],
)
def test_scalings_with_all_that_they_may_have(scaling):
    assert make_config(rope_scaling=scaling).rope_scaling == scaling


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({}, "rope_type must be one of linear, llama3, yarn"),
        ({"rope_type": None}, "rope_type must be one of linear, llama3, yarn"),
        ({"rope_type": "default"}, "rope_type must be one of linear, llama3, yarn"),
        *(
            ({**LINEAR, "factor": factor}, "linear needs factor, a number above 0")
            for factor in (0, -1, None, True, math.inf)
        ),
        *(
            ({k: v for k, v in LLAMA3.items() if k != key}, f"llama3 needs {key}, a number above 0")
            for key in LLAMA3
            if key != "rope_type"
        ),
        ({**LINEAR, "beta_fast": 2.0}, "linear knows no beta_fast"),
        ({**LLAMA3, "truncate": True}, "llama3 knows no truncate"),
        *(
            ({**YARN, "mscale": value}, "mscale must be a number")
            for value in (-1.0, "2", [1], math.nan)
        ),
        ({**LLAMA3, "low_freq_factor": 4.0}, "high_freq_factor must be above low_freq_factor"),
        ({**LLAMA3, "low_freq_factor": 5.0}, "high_freq_factor must be above low_freq_factor"),
    ],
)
def test_what_a_scaling_may_not_be_is_named_with_all_of_it(scaling, message):
    with pytest.raises(ConfigError) as caught:
        make_config(rope_scaling=scaling)
    assert str(caught.value) == f"rope_scaling = {scaling!r}: {message}"


def test_a_published_config_is_all_that_servers_read():
    config = make_config(
        rope_scaling=LINEAR, embedding_scale=3.0, num_hidden_layers=3, rms_norm_eps=1e-5
    )
    assert config.to_published() == {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 3,
        "dflash_config": {
            "block_size": 3,
            "mask_token_id": 39,
            "target_layer_ids": [1, 3],
            "input_embedding_scale": 3.0,
        },
        "num_target_layers": 6,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention"] * 3,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "rope_scaling": LINEAR,
        "rope_parameters": {**LINEAR, "rope_theta": 1e4},
        "sliding_window": None,
        "use_sliding_window": False,
        "max_position_embeddings": 512,
        "max_window_layers": 3,
        "vocab_size": 40,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    plain = make_config().to_published()
    assert plain["rope_scaling"] is None
    assert plain["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e4}
    assert DrafterConfig.from_published(config.to_published()) == config


@pytest.mark.parametrize(("factor", "own"), [(4.0, 1.138629436), (1.0, 1.0), (0.5, 1.0)])
def test_yarns_own_factor(factor, own):
    assert yarn_factor(factor) == pytest.approx(own)
    assert yarn_factor(1.0001) == pytest.approx(1.00001)
    said = read(rope_scaling={**YARN, "factor": factor, "attn_factor": 2.0}).rope_scaling
    assert said["attention_factor"] == pytest.approx(2 * own)


def test_linear_scaling_divides_every_frequency():
    plain, one = rope_frequencies(make_config())
    scaled, factor = rope_frequencies(make_config(rope_scaling={**LINEAR, "factor": 4.0}))
    assert (one, factor) == (1.0, 1.0)
    assert scaled == pytest.approx([frequency / 4 for frequency in plain])
    with torch.device("meta"):
        assert rope_frequencies(make_config())[0] == plain


FALSE = (
    *("is_causal", "causal", "sample_from_anchor", "query_zero_predicts_next", "use_swa"),
    *("attention_sink_bias", "add_swa_attention_sink_bias", "add_full_attention_sink_bias"),
    *("attention_bias", "mlp_bias", "use_gemma_norm", "fc_norm", "norm_before_fc"),
    *("norm_before_residual", "norm_output", "has_own_embed_tokens", "has_own_lm_head"),
    *("enable_confidence_head", "confidence_head_with_markov", "parallel_drafting"),
)
TRUE = ("is_neox_style", "rope_is_neox_style", "qk_norm", "use_qk_norm", "use_aux_hidden_state")
ONE = ("attention_value_scale", "partial_rotary_factor", "logit_scale", "output_multiplier")
NONE = (
    *("final_logit_softcapping", "quantization_config", "compression_config", "emb_dim"),
    *("gru_hidden_dim", "pure_draft_prefix_len", "shift_label", "conv_kernel_size"),
    *("conv_group_size", "selector_rank", "selector_top_k", "markov_head_type"),
    *("markov_draft_topk", "dspark_config", "eagle_config", "pard_token"),
    *("speculators_model_type", "speculators_config", "transformer_layer_config"),
)
OTHERS = {
    "architectures": (["DFlashDraftModel"], [[], ["Other"], "DFlashDraftModel"]),
    "model_type": ("qwen3", ["qwen2", ["qwen3"]]),
    "hidden_act": ("swish", ["gelu", "SiLU"]),
    "projector_type": ("dflash", ["domino", True]),
    "markov_rank": (0, [1, False]),
}
KNOWN = {
    **{key: (False, [True, 0, "false"]) for key in FALSE},
    **{key: (True, [False, 1, "true"]) for key in TRUE},
    **{key: (1.0, [0.5, True, "1"]) for key in ONE},
    **{key: (None, [0, False, "", {}, 1]) for key in NONE},
    **OTHERS,
}
HARMLESS = (
    *("_name_or_path", "transformers_version", "auto_map", "torch_dtype", "dtype", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
    *("initializer_range", "output_attentions", "output_hidden_states", "return_dict"),
    *("torchscript", "use_bfloat16", "is_encoder_decoder", "is_decoder", "problem_type"),
    *("add_cross_attention", "cross_attention_hidden_size", "tie_encoder_decoder", "id2label"),
    *("label2id", "finetuning_task", "task_specific_params", "tokenizer_class", "prefix"),
    *("chunk_size_feed_forward", "pruned_heads", "pretraining_tp", "gradient_checkpointing"),
    *("attn_implementation", "_attn_implementation", "_attn_implementation_autoset"),
    *("attention_dropout", "max_window_layers", "sliding_window", "swa_window_size"),
    *("num_anchors", "loss_decay_gamma", "loss_type", "dpace_alpha"),
    *("tie_word_embeddings", "mask_token", "target_model_type", "target_model_name_or_path"),
)


@pytest.mark.parametrize("place", ["", "dflash_config."])
@pytest.mark.parametrize("key", KNOWN)
def test_a_key_of_another_network_may_say_what_this_one_does_and_nothing_else(key, place):
    accepted, refused = KNOWN[key]

    def said(value):
        if not place:
            return {key: value}
        return {key: None, **inner(**{key: value})}

    assert read(**said(accepted)) == read(**said(None)) == read()
    for value in refused:
        wanted = rf"^{re.escape(place + key)} = .*: must be .*missing"
        with pytest.raises(CheckpointError, match=wanted):
            read(**said(value))


@pytest.mark.parametrize("key", HARMLESS)
def test_a_key_without_a_meaning_here_may_say_anything(key):
    for value in (None, True, 7, "x", {"a": [1]}):
        assert read(**{key: value}) == read()
        assert read(**{key: None, **inner(**{key: value})}) == read()


@pytest.mark.parametrize(
    ("key", "equal"),
    [
        ("rope_dim", ("head_dim", 128)),
        ("target_hidden_size", ("hidden_size", 4096)),
        ("draft_vocab_size", ("vocab_size", 151936)),
        ("target_vocab_size", ("vocab_size", 151936)),
    ],
)
def test_a_size_said_twice_must_be_one(key, equal):
    other, size = equal
    for value in (None, size, float(size)):
        assert read(**{key: value}) == read()
    for value in (size - 1, size + 1, 0):
        for change, place in (({key: value}, key), (inner(**{key: value}), f"dflash_config.{key}")):
            with pytest.raises(CheckpointError) as caught:
                read(**change)
            assert str(caught.value) == (
                f"{place} = {value}: must be {other} = {size} or missing; serve that drafter with "
                "a program that builds its network"
            )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"hidden_act": "gelu"},
            'hidden_act = "gelu": must be "silu" or "swish" or missing, since here the activation '
            "is SiLU; serve that drafter with a program that builds its network",
        ),
        (
            {"num_experts": 8},
            "num_experts = 8: is no key that is known here, and may stand for another network; "
            "remove it if it does not, else serve that drafter with a program that builds its "
            "network",
        ),
        (
            {"layer_types": ["full_attention"] * 4},
            "layer_types names 4 layers: must be num_hidden_layers = 5",
        ),
        (
            {"layer_types": ["full_attention", "chunked_attention"]},
            'layer_types = ["full_attention", "chunked_attention"]: every layer must be '
            "full_attention or sliding_attention; serve that drafter with a program that builds "
            "its network",
        ),
        (
            {"layer_types": None, "use_sliding_window": True},
            "use_sliding_window is set without layer_types: they must say which layers slide; "
            "serve that drafter with a program that builds its network",
        ),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 9, 17, 25, 33]},
            "eagle_aux_hidden_state_layer_ids = [1, 9, 17, 25, 33]: must be target_layer_ids + 1, "
            "[2, 10, 18, 26, 34]",
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": {**YARN, "rope_theta": 2e6}},
            "rope_theta = 1000000.0 and rope_scaling.rope_theta = 2000000.0 must be equal",
        ),
        (
            {"rope_parameters": LINEAR, "rope_scaling": YARN},
            f"rope_parameters = {LINEAR} and rope_scaling = {YARN} must be equal",
        ),
        (
            {"rope_scaling": {**LINEAR, "type": "yarn"}},
            'rope_scaling.rope_type = "linear" and rope_scaling.type = "yarn" must be equal',
        ),
        (
            {"rope_parameters": {"factor": 2.0}},
            'rope_parameters = {"factor": 2.0}: must have a rope_type for its keys',
        ),
        (
            {"rope_scaling": {**YARN, "attn_factor": 2.0, "attention_factor": 2.0}},
            "rope_scaling.attn_factor = 2.0 and rope_scaling.attention_factor = 2.0 must say the "
            "same: attention_factor = attn_factor x 1.13863",
        ),
        (
            {"hidden_size": None},
            "must hold 'hidden_size', and it is missing; export the drafter again",
        ),
        (
            {"vocab_size": "x" * 80},
            'vocab_size = "' + "x" * 56 + "...: must be an integer",
        ),
        ({"head_dim": "x" * 58}, 'head_dim = "' + "x" * 58 + '": must be an integer'),
        (
            {"block_size": 8, **inner(block_size=9)},
            "block_size = 8 and dflash_config.block_size = 9 must be equal",
        ),
    ],
)
def test_what_is_wrong_is_said_whole(change, said):
    with pytest.raises(CheckpointError) as caught:
        read(**change)
    assert str(caught.value) == said


def test_nothing_is_missing_where_null_stands_for_it():
    assert read(dflash_config=None, mask_token_id=151669, target_layer_ids=[1, 9, 17, 25, 33]) == (
        read()
    )
    assert read(mask_token_id=None) == read()
    assert read(mask_token_id=151669) == read()
    assert read(input_embedding_scale=2, **inner(input_embedding_scale=None)).embedding_scale == 2
    assert read(layer_types=None, use_sliding_window=False) == read()
    assert read(rope_theta=None, rope_parameters={"rope_theta": 1e6}) == read()
    assert read(rope_scaling={**YARN, "partial_rotary_factor": 1.0}).rope_scaling == YARN


@pytest.mark.parametrize("table", ["rope_parameters", "rope_scaling"])
def test_a_table_says_itself_which_part_of_a_head_turns(table):
    with pytest.raises(CheckpointError, match=rf"^{table} = 0\.5: must be 1 or missing"):
        read(**{table: {**YARN, "partial_rotary_factor": 0.5}})


def test_the_largest_number_is_the_largest_float():
    assert read(rope_theta=1e308).rope_theta == 1e308
    for value in (10**309, -(10**309)):
        with pytest.raises(CheckpointError, match=r"^rope_theta = .*: must be a finite number"):
            DrafterConfig.from_published({**QWEN3_8B, "rope_theta": value})
