"""What the files of a target must be before transformers reads them.

Cheap: of weights only headers are read.
"""

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from runtime.errors import TargetNotFoundError
from runtime.target.files import JSON_FILES, TargetFiles, check_kind, damaged, read_object

FLOATS = ("F64", "F32", "F16", "BF16")
"""Of safetensors. Weights of another dtype are numbers that belong to a scale."""


def check_files(files: TargetFiles) -> None:
    """Refuse files that are torn or something else than their name says.

    What a hub name has yet to download is not looked at.

    Raises:
        TargetNotFoundError: Names the file and what it is.
    """
    weights = files.weights()
    for path in (*files.texts(), *weights):
        check_kind(path)
        if path.name in JSON_FILES:
            read_object(path)
    for path in weights:
        _check_weights(path)
    if files.gguf_file is not None:
        return
    config = read_object(files.folder / "config.json")
    _check_dtypes(files, config, weights)
    adapter = files.folder / "adapter_config.json"
    if adapter.exists():
        raise TargetNotFoundError(
            f"{adapter}: an adapter lies beside the model; merge it into the weights, or remove it"
        )
    if "auto_map" in config and not _is_known(config):
        raise TargetNotFoundError(
            f"{files.folder / 'config.json'}: model type {config.get('model_type')!r} comes with "
            "code of its own (auto_map), which is never run; choose a model that transformers has"
        )


def _is_known(config: dict[str, Any]) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return config.get("model_type") in CONFIG_MAPPING


def _check_weights(path: Path) -> None:
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt"):
                return
        except (SafetensorError, OSError) as error:
            raise damaged(path, f"it is damaged or cut, {_size(path)} long ({error})") from error
    with path.open("rb") as stream:
        start = stream.read(4)
    if path.suffix == ".gguf" and start not in (b"GGUF", b"FUGG"):
        raise damaged(path, "it is no GGUF file")
    if path.suffix == ".bin" and start.startswith(b"PK") and not zipfile.is_zipfile(path):
        raise damaged(path, f"it is cut, {_size(path)} long")


def _check_dtypes(files: TargetFiles, config: dict[str, Any], weights: Sequence[Path]) -> None:
    """Refuse quantised weights that transformers would take for plain ones."""
    text = config.get("text_config")
    places = (config, text if isinstance(text, dict) else {})
    said = next((c["quantization_config"] for c in places if c.get("quantization_config")), None)
    if said is None:
        for path in weights:
            if path.suffix == ".safetensors":
                _check_plain(path)
        return
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    method = said.get("quant_method") if isinstance(said, dict) else None
    # One of them is known by its widths.
    names = {f"{method}{width}" for width in ("", "_4bit", "_8bit")}
    if method is not None and names.isdisjoint(AUTO_QUANTIZATION_CONFIG_MAPPING):
        raise TargetNotFoundError(
            f"{files.folder / 'config.json'}: weights are quantised by {method!r}, which "
            "transformers does not read; choose a copy of the model that is not quantised"
        )


def _check_plain(path: Path) -> None:
    with safe_open(path, framework="pt") as stream:
        for key in stream.keys():  # noqa: SIM118 - it is no mapping
            dtype = stream.get_slice(key).get_dtype()
            if key.endswith(".weight") and dtype not in FLOATS:
                raise TargetNotFoundError(
                    f"{path}: {key} is {dtype}, quantised, and config.json has no "
                    "quantization_config; choose a copy of the model that is not quantised"
                )


def _size(path: Path) -> str:
    return f"{path.stat().st_size:,} bytes"
