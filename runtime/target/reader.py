"""Reading a target through transformers: whole, or refused in one line that names the file.

transformers goes on where it should not: it fills missing tensors with random values and ignores a
torn generation config. Its readers raise what they like. This is the one border to them.
"""

import copy
import io
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from typing import Any

import torch

from runtime.errors import ConfigError, TargetNotFoundError, TrainingError
from runtime.target.checks import check_files
from runtime.target.files import TargetFiles, damaged, read_object
from runtime.target.outline import TargetOutline

LISTED = 5
"""Tensors that a refusal names."""
OLD_BUFFERS = re.compile(r"\b(attn|attention|self_attention)\.(masked_)?bias$")
"""Causal masks, which old checkpoints hold beside the parameters."""


def read_outline(files: TargetFiles, name: str) -> TargetOutline:
    """The model on the meta device and the tokenizer; no weights are read.

    Args:
        files: From ``find_target(name)``.
        name: As the user gave it.

    Raises:
        TargetNotFoundError: A package is missing, a file is damaged or foreign, or transformers
            cannot read what lies beside the weights.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    check_files(files)
    source, options = _source(files)
    with _reading(name, _part(files, "config.json")):
        config = AutoConfig.from_pretrained(source, **options)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    _read_generation_config(model, files, name)
    with _reading(name, _part(files, "the tokenizer")):
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    return TargetOutline(model, tokenizer, name=name)


def read_model(
    files: TargetFiles, outline: TargetOutline, device: torch.device, dtype: str | torch.dtype
) -> Any:
    """Read the weights of a target, all of them.

    Args:
        files: The outline's.
        outline: From ``read_outline``.
        device: Where the weights go.
        dtype: Of the weights, as ``resolve_dtype`` takes it.

    Raises:
        ConfigError: The dtype is unknown.
        TargetNotFoundError: The files are incomplete, or transformers cannot read them.
    """
    from transformers import AutoModelForCausalLM

    weights_dtype = resolve_dtype(dtype, device)
    source, options = _source(files)
    with _reading(outline.name, _part(files, "the weights")):
        model, loading = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=weights_dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    if files.hub_name is not None:
        check_files(files)
    _check_complete(outline, loading)
    _read_generation_config(model, files, outline.name)
    return _finite(model.to(device), outline.name)


def _source(files: TargetFiles) -> tuple[str, dict[str, Any]]:
    # Code that comes with a model is never run, nor is the user asked whether it should be.
    options: dict[str, Any] = {"trust_remote_code": False}
    if files.hub_name is not None:
        return files.hub_name, options
    options["local_files_only"] = True
    if files.gguf_file is not None:
        options["gguf_file"] = files.gguf_file
    return str(files.folder), options


def _part(files: TargetFiles, what: str) -> str:
    """How an error calls a part of a target: a GGUF file is all parts in one."""
    if files.gguf_file is not None:
        return f"{files.folder / files.gguf_file}, a GGUF file,"
    return f"{what} in {files.hub_name or files.folder}"


def _read_generation_config(model: Any, files: TargetFiles, name: str) -> None:
    """Read it once more, strictly: transformers takes another one where it cannot read it."""
    path = files.folder / "generation_config.json"
    if files.gguf_file is not None or not path.exists():
        return
    from transformers import GenerationConfig

    with _reading(name, str(path)):
        generation = GenerationConfig.from_dict(read_object(path))
    ends = generation.eos_token_id
    rows = getattr(model.config.get_text_config(), "vocab_size", 2**31)
    for end in ends if isinstance(ends, list) else [ends or 0]:
        if type(end) is not int or not 0 <= end < rows:
            raise damaged(path, f"eos_token_id must be token ids below {rows}, found {ends!r}")
    model.generation_config = generation


@contextmanager
def _reading(name: str, what: str) -> Iterator[None]:
    """The border: whatever a reader raises becomes one line that names the file."""
    try:
        with quiet_transformers():
            yield
    except (TrainingError, MemoryError, torch.OutOfMemoryError):
        raise
    except ImportError as error:
        packages = "gguf accelerate" if "gguf" in f"{name} {error}".lower() else "what it names"
        raise TargetNotFoundError(
            f"target {name!r} needs packages that are not installed ({_line(error)}); "
            f"run: pip install {packages}"
        ) from error
    except Exception as error:
        raise TargetNotFoundError(
            f"target {name!r}: {what} must be of a causal language model that transformers loads, "
            f"without code of its own, and reading gave {_line(error)}; fetch the model again or "
            "choose another one"
        ) from error


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    shown = f"{text[:300]} ..." if len(text) > 300 else text
    return f"{type(error).__name__}: {shown}"


def _check_complete(outline: TargetOutline, loading: dict[str, Any]) -> None:
    """Refuse tensors that the files lack, and those that show that config and files are of two."""
    found: dict[str, list[str]] = {
        "lack": sorted(loading["missing_keys"]),
        "have another shape than config.json says for": [
            f"{key} {list(ours)} instead of {list(theirs)}"
            for key, ours, theirs in sorted(loading["mismatched_keys"])
        ],
        "hold what config.json does not name": sorted(
            key for key in loading["unexpected_keys"] if _is_left_out(key, outline)
        ),
        "give no": sorted(map(str, loading.get("conversion_errors") or ())),
        "cannot be read:": sorted(map(str, loading["error_msgs"])),
    }
    for what, names in found.items():
        if names:
            more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
            raise TargetNotFoundError(
                f"target {outline.name!r}: its files {what} {', '.join(names[:LISTED])}{more}; "
                "fetch the model again, or set config.json right"
            )


def _is_left_out(key: str, outline: TargetOutline) -> bool:
    """Whether an unexpected tensor is a parameter that the model should have.

    One of a module that it has, or of a decoder layer.
    """
    modules = dict(outline.model.named_modules())
    module, _, name = key.rpartition(".")
    if OLD_BUFFERS.search(key) is not None or name not in ("weight", "bias"):
        return False
    where = next((name for name, module in modules.items() if module is outline.layers), None)
    layer = re.match(rf"{re.escape(str(where))}\.(\d+)\.", key)
    # Layers that predict further tokens stand after the others, and nothing here reads them.
    extra = int(getattr(outline.config, "num_nextn_predict_layers", 0) or 0)
    if layer is not None:
        return not 0 <= int(layer[1]) - outline.num_layers < extra
    return module in modules


def _finite(model: Any, name: str) -> Any:
    """The model itself, if all its parameters are finite."""
    named = [
        (key, value)
        for key, value in model.named_parameters()
        if value.is_floating_point() and value.element_size() >= 2 and value.numel()
    ]
    # One wait for the device, not one for each tensor.
    finite = [torch.stack(value.aminmax()).isfinite().all() for _, value in named]
    bad = [
        key
        for (key, _), is_finite in zip(named, torch.stack(finite).tolist(), strict=True)
        if not is_finite
    ]
    if bad:
        raise TargetNotFoundError(
            f"target {name!r}: {len(bad)} of its tensors hold NaN or infinity, first {bad[0]}; "
            "fetch the model again"
        )
    return model


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """Turn a config's dtype into torch's.

    Raises:
        ConfigError: It is none of auto, float32 and bfloat16.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if dtype not in known:
        raise ConfigError("target.dtype", dtype, "must be one of auto, float32, bfloat16")
    return known[dtype]


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without reports, which are ours to make, and without bars where no terminal shows them."""
    from transformers.utils import logging

    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.set_verbosity_error()
    with ExitStack() as stack:
        stack.callback(logging.set_verbosity, verbosity)
        if not sys.stderr.isatty():
            logging.disable_progress_bar()
            if shown:
                stack.callback(logging.enable_progress_bar)
            # The reader of GGUF files draws its bar past that switch.
            stack.enter_context(redirect_stderr(io.StringIO()))
        yield


def plain_model(model: Any) -> Any:
    """A copy that transformers saves; it calls quantized what came of a GGUF file."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    return plain
