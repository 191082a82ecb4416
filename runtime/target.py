"""The frozen target model: its tokens, hidden states, logits and the numbers a drafter needs.

Shapes: B samples, Q new tokens, S tokens, H hidden size, K feature layers, V vocabulary.
"""

import copy
import inspect
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runtime.errors import ConfigError, TargetNotFoundError
from runtime.target_files import find_target, read_target
from runtime.unpacked import unpacked

LAYER_NAMES = ("layers", "h", "blocks")
NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f")


class Target:
    """A frozen causal language model with its tokenizer.

    Build it with ``load``; the constructor takes a model that exists already.
    """

    def __init__(self, model: Any, tokenizer: Any, *, name: str, digest: str = "") -> None:
        model.eval()
        model.requires_grad_(False)
        decoder = model.get_decoder()
        self.model: Any = model
        """The transformers model, in eval mode and without gradients."""
        self.tokenizer: Any = tokenizer
        self.name: str = name
        """What it was loaded as."""
        self.digest: str = digest
        """See ``TargetFiles.digest``; empty for a model that was built in memory."""
        self.config: Any = getattr(decoder, "config", model.config)
        """Config of the text model."""
        self.layers: nn.ModuleList = _child(decoder, LAYER_NAMES, "decoder layers")
        """The decoder layers, first to last."""
        self.final_norm: nn.Module = _child(decoder, NORM_NAMES, "final norm")
        """The norm between the last layer and the head."""
        self.cache_argument: str = _cache_argument(model)
        """Name of the forward argument that takes the KV cache; transformers renamed it."""
        self._decoder = decoder
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters

    @classmethod
    def load(
        cls,
        name_or_path: str | Path,
        *,
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype = "auto",
    ) -> "Target":
        """Load a target by name.

        Args:
            name_or_path: ``smollm2-135m``, a folder, a .gguf file, or a hub name.
            device: Where the weights go.
            dtype: Of the weights; ``auto`` is bfloat16 on a GPU and float32 on the CPU.

        Raises:
            TargetNotFoundError: It is not there, or transformers cannot read it.
        """
        files = find_target(name_or_path)
        name = str(name_or_path)
        model, tokenizer = read_target(unpacked(files, name), name, torch.device(device), dtype)
        return cls(model, tokenizer, name=name, digest=files.digest)

    def on(self, device: torch.device) -> "Target":
        """A twin for another thread, on this device or another.

        On this device it shares the weights, but not the modules: ``features`` hooks into those.
        """
        shared: dict[int, Any] = {}
        if device == self.device:
            tensors = (*self.model.parameters(), *self.model.buffers())
            shared = {id(tensor): tensor for tensor in tensors}
        model = copy.deepcopy(self.model, shared).to(device)
        return Target(model, self.tokenizer, name=self.name, digest=self.digest)

    @property
    def device(self) -> torch.device:
        """Where the embedding lies."""
        return self.embed_weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights and the hidden states."""
        return self.embed_weight.dtype

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.embed_weight.shape[1]

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

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
        """Spread ``count`` feature layers over the model.

        Raises:
            ConfigError: The model has too few layers for ``count`` different ones.

        Source: DFlash, arXiv 2602.06036 (as its public trainers round it).
        """
        if count == 1:
            return (self.num_layers // 2,)
        last = self.num_layers - 3
        ids = tuple(round(1 + i * (last - 1) / (count - 1)) for i in range(count))
        if len(set(ids)) < count:
            raise ConfigError(
                "target.num_features",
                count,
                f"must be at most {max(1, last)} for a target of {self.num_layers} layers",
            )
        return ids

    @torch.no_grad()
    def features(self, input_ids: Tensor, layer_ids: Sequence[int]) -> Tensor:
        """Outputs of the given layers for whole, right-padded samples.

        Causal attention alone keeps padding out, as padding lies after every token; there is no
        attention mask and no host synchronisation, so a CUDA graph may capture the call.

        Args:
            input_ids: ``[B, S]``, int32 or int64.
            layer_ids: 0-based decoder layers whose output is taken, in this order.

        Returns:
            ``[B, S, K * H]`` in the target's dtype.
        """
        with self._recording(layer_ids) as outputs:
            self._decoder(input_ids=input_ids, **self._fresh(input_ids))
        return torch.cat([outputs[layer] for layer in layer_ids], dim=-1)

    @torch.no_grad()
    def logits(self, input_ids: Tensor) -> Tensor:
        """Next-token logits ``[B, S, V]`` of whole, right-padded samples ``[B, S]``."""
        logits: Tensor = self.model(input_ids=input_ids, **self._fresh(input_ids)).logits
        return logits

    def new_cache(self) -> Any:
        """An empty KV cache (a transformers ``DynamicCache``) for ``extend``."""
        from transformers import DynamicCache

        return DynamicCache(config=self.config)

    @torch.no_grad()
    def extend(
        self,
        input_ids: Tensor,
        cache: Any,
        *,
        layer_ids: Sequence[int] = (),
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        last_only: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Feed tokens after those that a cache holds; the cache grows by them.

        Args:
            input_ids: ``[B, Q]``.
            cache: From ``new_cache``.
            layer_ids: Layers whose outputs are wanted too.
            position_ids: ``[B, Q]``; counted on from the cache's length when None.
            attention_mask: ``[B, cached + Q]``, 1 for tokens and 0 for left padding.
            last_only: Logits of the last token only.

        Returns:
            Logits ``[B, Q, V]`` (``[B, 1, V]`` with ``last_only``) and features
            ``[B, Q, K * H]``, None without ``layer_ids``.
        """
        if position_ids is None:
            past = int(cache.get_seq_length())
            positions = torch.arange(past, past + input_ids.shape[1], device=input_ids.device)
            position_ids = positions[None]
        options: dict[str, Any] = {self.cache_argument: cache}
        if last_only and self._takes_logits_to_keep:
            options["logits_to_keep"] = 1
        with self._recording(layer_ids) as outputs:
            logits: Tensor = self.model(
                input_ids=input_ids,
                position_ids=position_ids,
                attention_mask=attention_mask,
                use_cache=True,
                **options,
            ).logits
        features = torch.cat([outputs[i] for i in layer_ids], dim=-1) if layer_ids else None
        return (logits[:, -1:] if last_only else logits), features

    def _fresh(self, input_ids: Tensor) -> dict[str, Any]:
        # An empty cache keeps transformers from testing the positions for packed documents, which
        # would wait for the device; attention then runs as plain causal attention.
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        return {self.cache_argument: self.new_cache(), "position_ids": positions, "use_cache": True}

    @contextmanager
    def _recording(self, layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        outputs: dict[int, Tensor] = {}

        def record(layer: int, output: Any) -> None:
            outputs[layer] = output[0] if isinstance(output, tuple) else output

        handles = []
        for layer in layer_ids:
            if not 0 <= layer < self.num_layers:
                raise ConfigError(
                    "layer_ids", layer, f"must be at least 0 and below {self.num_layers}"
                )
            handles.append(
                self.layers[layer].register_forward_hook(
                    lambda _module, _args, output, layer=layer: record(layer, output)
                )
            )
        try:
            yield outputs
        finally:
            for handle in handles:
                handle.remove()


def _child(decoder: nn.Module, names: Sequence[str], what: str) -> Any:
    for name in names:
        child = getattr(decoder, name, None)
        if isinstance(child, nn.Module):
            return child
    raise TargetNotFoundError(
        f"a target must keep its {what} under one of {', '.join(names)}; "
        f"{type(decoder).__name__} does not"
    )


def _cache_argument(model: Any) -> str:
    parameters = inspect.signature(model.get_decoder().forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"
