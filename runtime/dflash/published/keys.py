"""The keys of a drafter's ``config.json``: which are read, and what every other one may say.

A network is what its weights and these keys say together, so a config is read only where each key
is known: it is read, or it must say what the network here does, or it changes nothing.

Source: what z-lab's classes, vLLM, SGLang and the public trainers read and write
(docs/drafter-folder.md).
"""

from collections.abc import Mapping
from typing import Any

INNER = "dflash_config"
"""Its keys may as well stand at the top level."""
INNER_OF_DSPARK = "dspark_config"
"""The same, of DSpark alone."""
SIZES: Mapping[str, int] = {
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_hidden_layers": 2**10,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**12,
    "vocab_size": 2**24,
    "num_target_layers": 2**12,
    "max_position_embeddings": 2**31 - 1,
}
"""Integers that are read under the names that they have here, and the largest of each."""
READ = {
    *SIZES,
    *("block_size", "mask_token_id", "target_layer_ids", "rms_norm_eps", "input_embedding_scale"),
    *("rope_theta", "rope_parameters", "rope_scaling", "layer_types", "use_sliding_window"),
    *("sliding_window", "swa_window_size"),
    "eagle_aux_hidden_state_layer_ids",
}
WAY = "a draft block sees itself both ways in full layers, and causally in sliding ones"
SLOT = "slot k must predict anchor+k"
SINKS = "attention has no sinks"
BIAS = "projections have no bias"
ROPE = "RoPE turns the halves of each whole head"
NORMS = "layers have Qwen3's norms"
HEAD = "logits are those of the target's own head"
SHARED = "embedding and head are the target's"
WEIGHTS = "weights are not quantised"
DOMINO = "there is no recurrent head, Domino's"
DFLASH2 = "there are no convolutions and no selector, DFlash 2's"
DSPARK = "there are no Markov and confidence heads, DSpark's"
EAGLE = "the network is DFlash's, not EAGLE's"
CONVERTED = "the keys are z-lab's, vLLM's and SGLang's, to which speculators converts"
FIXED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "architectures": ((["DFlashDraftModel"],), "the network is DFlash's"),
    "model_type": (("qwen3",), "layers are Qwen3's"),
    "is_causal": ((False,), WAY),
    "causal": ((False,), WAY),
    "sample_from_anchor": ((False,), SLOT),
    "query_zero_predicts_next": ((False,), SLOT),
    "use_swa": ((False,), "layer_types say which layers slide"),
    "attention_sink_bias": ((False,), SINKS),
    "add_swa_attention_sink_bias": ((False,), SINKS),
    "add_full_attention_sink_bias": ((False,), SINKS),
    "attention_value_scale": ((1,), "values are taken as they are projected"),
    "attention_bias": ((False,), BIAS),
    "mlp_bias": ((False,), BIAS),
    "hidden_act": (("silu", "swish"), "the activation is SiLU"),
    "use_gemma_norm": ((False,), "norms multiply by their weight"),
    "is_neox_style": ((True,), ROPE),
    "rope_is_neox_style": ((True,), ROPE),
    "partial_rotary_factor": ((1,), ROPE),
    "qk_norm": ((True,), NORMS),
    "use_qk_norm": ((True,), NORMS),
    "fc_norm": ((False,), NORMS),
    "norm_before_fc": ((False,), NORMS),
    "norm_before_residual": ((False,), NORMS),
    "norm_output": ((False,), NORMS),
    "use_aux_hidden_state": ((True,), "the context is the target's features"),
    "logit_scale": ((1,), HEAD),
    "output_multiplier": ((1,), HEAD),
    "final_logit_softcapping": ((), HEAD),
    "has_own_embed_tokens": ((False,), SHARED),
    "has_own_lm_head": ((False,), SHARED),
    "quantization_config": ((), WEIGHTS),
    "compression_config": ((), WEIGHTS),
    "projector_type": (("dflash",), DOMINO),
    "emb_dim": ((), DOMINO),
    "gru_hidden_dim": ((), DOMINO),
    "pure_draft_prefix_len": ((), DOMINO),
    "shift_label": ((), DOMINO),
    "conv_kernel_size": ((), DFLASH2),
    "conv_group_size": ((), DFLASH2),
    "selector_rank": ((), DFLASH2),
    "selector_top_k": ((), DFLASH2),
    "markov_rank": ((0,), DSPARK),
    "markov_head_type": ((), DSPARK),
    "markov_draft_topk": ((), DSPARK),
    "dspark_config": ((), DSPARK),
    "enable_confidence_head": ((False,), DSPARK),
    "confidence_head_with_markov": ((False,), DSPARK),
    "eagle_config": ((), EAGLE),
    "parallel_drafting": ((False,), EAGLE),
    "pard_token": ((), EAGLE),
    "speculators_model_type": ((), CONVERTED),
    "speculators_config": ((), CONVERTED),
    "transformer_layer_config": ((), CONVERTED),
}
"""Key -> the values that it may have beside null, and what they stand for."""
DSPARKS = ("Qwen3DSparkModel", "DSparkDraftModel")
"""Names of the architecture with DSpark's heads: of such a config what follows holds as well."""
READ_OF_DSPARK = {
    *("markov_rank", "enable_confidence_head", "confidence_head_with_markov"),
    "sample_from_anchor",
}
FIXED_OF_DSPARK: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "architectures": (tuple([name] for name in DSPARKS), "the network is DSpark's"),
    "markov_head_type": (("vanilla",), "the Markov head is vanilla, not gated and no rnn"),
    "projector_type": (("dspark", "dflash"), DOMINO),
}
EQUAL: Mapping[str, str] = {
    "rope_dim": "head_dim",
    "target_hidden_size": "hidden_size",
    "draft_vocab_size": "vocab_size",
    "target_vocab_size": "vocab_size",
}
"""Key -> the one that it must be equal to, unless it is null."""
IGNORED = {
    # What transformers writes into any config.
    *("_name_or_path", "transformers_version", "auto_map", "torch_dtype", "dtype", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
    *("initializer_range", "output_attentions", "output_hidden_states", "return_dict"),
    *("torchscript", "use_bfloat16", "is_encoder_decoder", "is_decoder", "problem_type"),
    *("add_cross_attention", "cross_attention_hidden_size", "tie_encoder_decoder", "id2label"),
    *("label2id", "finetuning_task", "task_specific_params", "tokenizer_class", "prefix"),
    *("chunk_size_feed_forward", "pruned_heads", "pretraining_tp", "gradient_checkpointing"),
    *("attn_implementation", "_attn_implementation", "_attn_implementation_autoset"),
    # Training only, or without a meaning beside layer_types.
    *("attention_dropout", "max_window_layers"),
    *("num_anchors", "loss_decay_gamma", "loss_type", "dpace_alpha"),
    # Embedding and head are the target's; its name and the mask's text come with their numbers.
    *("tie_word_embeddings", "mask_token", "target_model_type", "target_model_name_or_path"),
}
