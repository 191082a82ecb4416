"""A target without its weights: its config, its modules on the meta device and its tokenizer.

What it says is known before gigabytes are read: the sizes that a drafter takes from it, and why it
cannot be a target at all.
"""

import inspect
import json
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runtime.errors import ConfigError

logger = logging.getLogger(__name__)
LAYER_NAMES = ("layers", "h", "blocks")
NORM_NAMES = (
    "norm",
    "final_layernorm",
    "final_layer_norm",
    "final_norm",
    "layer_norm",
    "layernorm",
    "ln_f",
    "norm_f",
    "embedding_norm",
)
NO_FINAL_NORM = (
    "must have a norm between its last layer and its head for its last hidden state, found none "
    f"under {', '.join(NORM_NAMES)}"
)
LAYER_KINDS = ("full_attention", "sliding_attention", "chunked_attention", "attention")
"""Layers that keep keys and values of every token, which a cache without config can rewind."""

CROSS = ("encoder_attn", "crossattention", "cross_attn")
"""Attention over an encoder's output. Such decoders count positions by the cache, padding too."""


class TargetOutline:
    """What is known of a causal language model by its modules, whether they hold weights or not.

    Args:
        model: A transformers model; on the meta device where the weights are not read.
        tokenizer: Its tokenizer.
        name: What it was asked for as.
    """

    def __init__(self, model: Any, tokenizer: Any, *, name: str) -> None:
        self.model: Any = model
        """The transformers model."""
        self.tokenizer: Any = tokenizer
        self.name: str = name
        self.decoder: Any = _decoder(model)
        """The part of the model that maps tokens to hidden states."""
        self.config: Any = getattr(self.decoder, "config", model.config)
        """Config of the text model."""
        self.layers: nn.ModuleList | None = _child(self.decoder, LAYER_NAMES, nn.ModuleList)
        """The decoder layers, first to last; None where they are kept otherwise."""
        self.final_norm: nn.Module | None = _child(self.decoder, NORM_NAMES, nn.Module)
        """The norm between the last layer and the head; None where there is none."""

    @property
    def embed_weight(self) -> Tensor:
        """Token embedding ``[V, H]``."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def head_weight(self) -> Tensor:
        """Output head ``[V, H]``; the embedding itself where they are tied."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.embed_weight.shape[1]

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers or ())

    @property
    def vocab_size(self) -> int:
        """V: rows of the embedding, which may be more than the tokenizer has tokens."""
        return self.embed_weight.shape[0]

    @property
    def max_positions(self) -> int | None:
        """Longest sequence that the model was made for, in tokens; None when it does not say."""
        value = getattr(self.config, "max_position_embeddings", None)
        return None if value is None else int(value)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer: the generation config's and the tokenizer's."""
        generation = getattr(self.model, "generation_config", None)
        found: set[int] = set()
        for value in (
            getattr(generation, "eos_token_id", None),
            getattr(self.tokenizer, "eos_token_id", None),
        ):
            if isinstance(value, int):
                found.add(value)
            elif value is not None:
                found.update(int(item) for item in value)
        return frozenset(found)

    @property
    def mask_token_id(self) -> int:
        """The embedding row that stands for a token to be drafted.

        The tokenizer's own mask token; else the first row that no token uses; else the last
        special token that is neither in the chat template nor one of eos, bos, pad and unk; else
        the pad or unk token, when it does not end an answer.

        Raises:
            ConfigError: The tokenizer has none of these.
        """
        tokenizer = self.tokenizer
        own = getattr(tokenizer, "mask_token_id", None)
        if own is not None and own < self.vocab_size:
            return int(own)
        if len(tokenizer) < self.vocab_size:
            return len(tokenizer)
        ends = self.eos_token_ids
        named = {tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id} | ends
        template = getattr(tokenizer, "chat_template", None)
        text = template if isinstance(template, str) else json.dumps(template)
        free = [
            int(token_id)
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.special
            and token_id < self.vocab_size
            and token_id not in named
            and str(token) not in text
        ]
        if free:
            return max(free)
        for token_id in (tokenizer.pad_token_id, tokenizer.unk_token_id):
            if token_id is not None and token_id not in ends:
                return int(token_id)
        raise ConfigError(
            "target.model",
            self.name,
            "must have an embedding row that text does not use, for the mask token",
        )

    def default_layer_ids(self, count: int) -> tuple[int, ...]:
        """See ``spread_layer_ids``."""
        return spread_layer_ids(self.num_layers, count)

    @property
    def unusable(self) -> str | None:
        """Why the model cannot be a target, such as ``MambaForCausalLM: its ...``; None if it can.

        Whole samples, batched answers and draft and verify all need the output of each layer for
        each token, and a cache of keys and values from which tokens can be taken back.
        """
        reason = self._unusable()
        return None if reason is None else f"{type(self.model).__name__} {reason}"

    def check_usable(self) -> None:
        """Refuse a model that cannot be a target.

        Raises:
            ConfigError: See ``unusable``.
        """
        if self.unusable is not None:
            raise ConfigError("target.model", self.name, f"{self.unusable}; choose another target")

    def _unusable(self) -> str | None:
        if not self.layers:
            return f"keeps decoder layers under none of {', '.join(LAYER_NAMES)}"
        config = self.config
        kinds = set(getattr(config, "layer_types", None) or ()) - set(LAYER_KINDS)
        if getattr(self.model, "_is_stateful", False) or kinds:
            named = f" ({', '.join(sorted(map(str, kinds)))})" if kinds else ""
            return f"has layers{named} whose state cannot be rewound, as draft and verify must"
        if any(name.rpartition(".")[2] in CROSS for name, _ in self.layers.named_modules()):
            return "is the decoder of a model that has an encoder too"
        if cache_argument(self.decoder) is None:
            return "takes no cache of keys and values"
        shapes = []
        for part in (self.model.get_input_embeddings(), self.model.get_output_embeddings()):
            weight = getattr(part, "weight", None)
            shapes.append(tuple(weight.shape) if isinstance(weight, Tensor) else None)
        hidden = getattr(config, "hidden_size", None)
        if shapes[0] is None or shapes[0] != shapes[1] or hidden not in (None, shapes[0][1]):
            return (
                f"has an embedding of shape {shapes[0]}, a head of {shapes[1]} and hidden size "
                f"{hidden}, where both must be [vocabulary, hidden size]"
            )
        return self._odd_output() if self.embed_weight.is_meta else None

    @torch.no_grad()
    def _odd_output(self) -> str | None:
        """What is odd about the layers' outputs for a few tokens, each ``[1, 4, H]`` and one."""
        shapes: list[tuple[int, ...]] = []

        def record(module: nn.Module, args: object, output: Any) -> None:
            shapes.append(tuple((output[0] if isinstance(output, tuple) else output).shape))

        assert self.layers is not None, "looked at before"
        hooks = [layer.register_forward_hook(record) for layer in self.layers]
        try:
            self.decoder(input_ids=torch.zeros(1, 4, dtype=torch.int64, device="meta"))
        except Exception:
            # What follows may depend on values, which a model without weights has not.
            logger.debug("%s cannot be tried without weights", self.name, exc_info=True)
        finally:
            for hook in hooks:
                hook.remove()
        if len(shapes) > self.num_layers:
            return "runs its layers more than once for a token"
        odd = next((shape for shape in shapes if shape != (1, 4, self.hidden_size)), None)
        return f"has layers that return {odd}, not [B, S, hidden size]" if odd else None


def cache_argument(decoder: nn.Module) -> str | None:
    """Name of the forward argument that takes the KV cache; transformers renamed it."""
    parameters = inspect.signature(decoder.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in parameters), None)


def spread_layer_ids(num_layers: int, count: int) -> tuple[int, ...]:
    """Spread ``count`` feature layers over a model, none where it is 0.

    Raises:
        ConfigError: The model has too few layers for ``count`` different ones.

    Source: DFlash, arXiv 2602.06036 (as its public trainers round it).
    """
    if count == 0:
        return ()
    if count == 1:
        return (num_layers // 2,)
    last = num_layers - 3
    if count > last:
        raise ConfigError(
            "target.num_features",
            count,
            f"must be at most {max(1, last)} for a target of {num_layers} layers",
        )
    return tuple(round(1 + i * (last - 1) / (count - 1)) for i in range(count))


def _decoder(model: Any) -> Any:
    """The module that holds the decoder layers; ``get_decoder`` returns others for some models."""
    found = [model.get_decoder()]
    found += [getattr(model, name, None) for name in (model.base_model_prefix, "model", "decoder")]
    for part in found:
        if isinstance(part, nn.Module) and _child(part, LAYER_NAMES, nn.ModuleList) is not None:
            return part
    return found[0]


def _child(module: nn.Module, names: Sequence[str], kind: type[Any]) -> Any:
    children = dict(module.named_children())
    return next((children[name] for name in names if isinstance(children.get(name), kind)), None)
