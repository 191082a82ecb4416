"""The frozen target model: its hidden states, logits and cached decoding.

Shapes: B samples, Q new tokens, S tokens, H hidden size, K feature layers, V vocabulary.
"""

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runtime.errors import ConfigError
from runtime.target.files import TargetFiles, find_target
from runtime.target.gguf_copy import unpacked
from runtime.target.outline import NO_FINAL_NORM, TargetOutline, cache_argument
from runtime.target.reader import read_model, read_outline


class _AllRecordedError(Exception):
    """Every layer that is wanted has run, and what follows in the model is not needed."""


class Target(TargetOutline):
    """A frozen causal language model with its tokenizer.

    Build it with ``load``; the constructor takes a model that exists already.

    Raises:
        ConfigError: The model cannot be a target, see ``TargetOutline.unusable``.
    """

    layers: nn.ModuleList

    def __init__(self, model: Any, tokenizer: Any, *, name: str, digest: str = "") -> None:
        super().__init__(model, tokenizer, name=name)
        self.check_usable()
        model.eval()
        model.requires_grad_(False)
        self.digest: str = digest
        """See ``TargetFiles.digest``; empty for a model that was built in memory."""
        self._cache_argument = str(cache_argument(self.decoder))
        self._takes = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in inspect.signature(self.decoder.forward).parameters

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
            TargetNotFoundError: It is not there, incomplete, or transformers cannot read it.
            ConfigError: The model cannot be a target.
        """
        files, outline = _outlined(str(name_or_path))
        outline.check_usable()
        # transformers would read into the caller's default device.
        with torch.device("cpu"):
            model = read_model(files, outline, torch.device(device), dtype)
        digest = find_target(name_or_path).digest
        return cls(model, outline.tokenizer, name=outline.name, digest=digest)

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

    def in_dtype(self, dtype: torch.dtype) -> "Target":
        """A twin on this device with the weights in another dtype.

        Buffers are shared as they are: positions of rotary embeddings need float32.
        """
        shared: dict[int, Any] = {id(buffer): buffer for buffer in self.model.buffers()}
        for weight in self.model.parameters():
            shared[id(weight)] = nn.Parameter(weight.to(dtype), requires_grad=False)
        model = copy.deepcopy(self.model, shared)
        return Target(model, self.tokenizer, name=self.name, digest=self.digest)

    @property
    def device(self) -> torch.device:
        """Where the embedding lies."""
        return self.embed_weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights and the hidden states."""
        return self.embed_weight.dtype

    @torch.no_grad()
    def features(self, input_ids: Tensor, layer_ids: Sequence[int]) -> Tensor:
        """Outputs of the given layers for whole, right-padded samples.

        Causal attention alone keeps padding out, as padding lies after every token; there is no
        attention mask and no host synchronisation, so a CUDA graph may capture the call.

        Args:
            input_ids: ``[B, S]``, int32 or int64.
            layer_ids: 0-based decoder layers whose output is taken, in this order; the number of
                layers stands for the last hidden state, after the final norm.

        Returns:
            ``[B, S, K * H]`` in the target's dtype.

        Raises:
            ConfigError: There is no such layer, or no final norm.
        """
        # Where the layers behind cost seconds; a captured call is left to end as the model ends it.
        on_cpu = self.device.type == "cpu"
        with self._recording(layer_ids, stop=on_cpu) as outputs, suppress(_AllRecordedError):
            self.decoder(input_ids=input_ids, **self._fresh(input_ids))
        return torch.cat([outputs[layer] for layer in layer_ids], dim=-1)

    @torch.no_grad()
    def logits(self, input_ids: Tensor) -> Tensor:
        """Next-token logits ``[B, S, V]`` of whole, right-padded samples ``[B, S]``."""
        with self._recording(()):
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
            layer_ids: Layers whose outputs are wanted too, as ``features`` takes them.
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
        options = self._cached(cache, position_ids)
        if last_only and "logits_to_keep" in self._takes:
            options["logits_to_keep"] = 1
        with self._recording(layer_ids) as outputs:
            logits: Tensor = self.model(
                input_ids=input_ids, attention_mask=attention_mask, **options
            ).logits
        features = torch.cat([outputs[i] for i in layer_ids], dim=-1) if layer_ids else None
        return (logits[:, -1:] if last_only else logits), features

    def _fresh(self, input_ids: Tensor) -> dict[str, Any]:
        # An empty cache keeps transformers from testing the positions for packed documents, which
        # would wait for the device; attention then runs as plain causal attention.
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        return self._cached(self.new_cache(), positions)

    def _cached(self, cache: Any, position_ids: Tensor) -> dict[str, Any]:
        options: dict[str, Any] = {self._cache_argument: cache, "use_cache": True}
        # Models without it take distances from the cache and the attention mask.
        return {**options, "position_ids": position_ids} if self._takes_positions else options

    @contextmanager
    def _recording(
        self, layer_ids: Sequence[int], *, stop: bool = False
    ) -> Iterator[dict[int, Tensor]]:
        """Keep layers' outputs while the model runs, in its own dtype whatever autocast says.

        With ``stop`` the model's call ends by ``_AllRecordedError`` once they are there.
        """
        outputs: dict[int, Tensor] = {}

        def record(layer: int, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.dim() != 3 or hidden.shape[-1] != self.hidden_size:
                shape = tuple(hidden.shape)
                raise ConfigError(
                    "target.model", self.name, f"its layers return {shape}, not [B, S, hidden size]"
                )
            outputs[layer] = hidden
            if stop and outputs.keys() == modules.keys():
                raise _AllRecordedError

        modules = {layer: self._layer(layer) for layer in layer_ids}
        handles = [
            module.register_forward_hook(
                lambda _module, _args, output, layer=layer: record(layer, output)
            )
            for layer, module in modules.items()
        ]
        try:
            with torch.autocast(self.device.type, enabled=False):
                yield outputs
        finally:
            for handle in handles:
                handle.remove()

    def _layer(self, layer: int) -> nn.Module:
        if layer == self.num_layers:
            if self.final_norm is None:
                raise ConfigError("target.model", self.name, NO_FINAL_NORM)
            return self.final_norm
        if not 0 <= layer < self.num_layers:
            raise ConfigError("layer_ids", layer, f"must be at least 0 and below {self.num_layers}")
        return self.layers[layer]


def outline_target(name_or_path: str | Path) -> TargetOutline:
    """Read what there is of a target beside its weights.

    Args:
        name_or_path: As ``Target.load`` takes it.

    Raises:
        TargetNotFoundError: It is not there, or transformers cannot read it.
    """
    return _outlined(str(name_or_path))[1]


def _outlined(name: str) -> tuple[TargetFiles, TargetOutline]:
    files = unpacked(find_target(name), name)
    return files, read_outline(files, name)
