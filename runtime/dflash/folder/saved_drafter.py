"""The folder that servers read, written out of a run and loaded into one.

SGLang drops weight names that it does not know without a word, so the names written here are
exactly the drafter's: no prefix, no embedding, no head, no rotary buffer.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from maskgen.progress import say
from runtime.dflash.folder.embedding import serving_note
from runtime.dflash.folder.files import (
    AGAIN,
    CONFIG_FILE,
    WEIGHTS_FILE,
    check_files,
    read_network,
    replace_files,
)
from runtime.dflash.network.drafter import Drafter, DrafterConfig, fold_feature_scale
from runtime.errors import CheckpointError
from runtime.files.tensors import save_tensors
from runtime.training.saved_state import Checkpoint

COPIES = ("embed_tokens.weight", "lm_head.weight")
"""Of the target's weights, frozen, which DSpark's trainer writes beside a drafter's; not read."""
SERVED_DTYPES = {"torch.bfloat16", "torch.float16", "torch.float32"}
"""Of weights; any other is a number that a missing scale belongs to."""
TARGET = "target"
FEATURE_SCALE = "feature_scale"
"""What a checkpoint has beside the keys of ``config.json``."""


def servable(drafter: Drafter, feature_scale: Tensor | None = None) -> Drafter:
    """Make a drafter take the target's raw features, and need no gradient.

    Args:
        drafter: As trained, on features divided by ``feature_scale``; changed in place.
        feature_scale: ``[K]``; None where it has been folded.

    Returns:
        The drafter.
    """
    drafter.requires_grad_(False).eval()
    if feature_scale is not None:
        drafter.fc.weight.copy_(fold_feature_scale(drafter.fc.weight, feature_scale))
    return drafter


def save_published(
    folder: str | Path,
    config: DrafterConfig,
    weights: Mapping[str, Tensor],
    *,
    feature_scale: Tensor | None = None,
    target: Mapping[str, Any] | None = None,
    run: Mapping[str, Any] | None = None,
) -> Path:
    """Write a drafter as SGLang, vLLM and ``load_published`` read it.

    Each file appears whole or not at all; the config comes last, and never stands beside files of
    another drafter.

    Args:
        folder: Made where it is missing; the three files in it are replaced.
        config: The network.
        weights: By their published names, as trained.
        feature_scale: ``[K]``, folded into ``fc``; None where it has been.
        target: For which it was trained, see ``drafter_folder.target_record``; None if unknown.
        run: Fingerprint and step that the weights are from, kept where the target is known.

    Returns:
        The folder.

    Raises:
        CheckpointError: The weights are not exactly those of ``config``, or not finite.
    """
    where = Path(folder)
    _check_weights("the weights to publish", config, weights)
    published = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in weights.items()
    }
    if feature_scale is not None:
        # Folded before rounding, so that the served weight is rounded once.
        folded = fold_feature_scale(weights["fc.weight"].detach().float(), feature_scale)
        published["fc.weight"] = folded.to("cpu", torch.bfloat16).contiguous()
    _check_finite("the weights to publish", published)
    replace_files(
        where,
        {
            WEIGHTS_FILE: lambda path: save_tensors(published, path, {"format": "pt"}),
            CONFIG_FILE: lambda path: _write_object(path, config.to_published()),
        },
        None if target is None else {**target, **({} if run is None else {"run": dict(run)})},
    )
    return where


def load_published(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Drafter:
    """Read a drafter folder, checked name by name and shape by shape.

    Args:
        folder: Written by ``save_published`` or another DFlash trainer.
        device: Where the drafter goes.
        dtype: What it computes in; as in the file if left out.

    Returns:
        A frozen drafter that takes raw features.

    Raises:
        CheckpointError: A file is missing, unreadable or says what the network here does not do,
            or the weights are not exactly those that the config names, or not finite.
    """
    where = Path(folder)
    config = read_network(where)
    check_files(where)
    path = where / WEIGHTS_FILE
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} must be a safetensors file ({error}); {AGAIN}") from error
    if config.markov_rank:
        weights = {name: tensor for name, tensor in weights.items() if name not in COPIES}
    _check_weights(str(path), config, weights)
    other = sorted({str(t.dtype) for t in weights.values()} - SERVED_DTYPES)
    if other:
        raise CheckpointError(f"{path} must hold floats of 16 or 32 bits, found {', '.join(other)}")
    _check_finite(str(path), weights)
    drafter = Drafter(config, device="meta")
    drafter.to_empty(device="cpu").to(dtype or weights["fc.weight"].dtype)
    drafter.load_state_dict(weights)
    return servable(drafter.to(device))


def export_checkpoint(checkpoint: Checkpoint, folder: Path) -> Path:
    """Write a checkpoint's drafter, as ``save_published`` does.

    Raises:
        CheckpointError: The checkpoint is damaged.
        NothingLearnedError: Its weights are those that the run began with.
    """
    published = dict(checkpoint.published)
    scale = torch.tensor(published.pop(FEATURE_SCALE), dtype=torch.float32, device="cpu")
    target = published.pop(TARGET, None)
    weights = checkpoint.learned_weights()
    network = DrafterConfig.from_published(published)
    note = serving_note(network)
    if note is not None:
        say(note)
    return save_published(
        folder, network, weights, feature_scale=scale, target=target, run=checkpoint.run
    )


def _check_weights(what: str, config: DrafterConfig, weights: Mapping[str, Tensor]) -> None:

    drafter = Drafter(config, device="meta")
    wanted = {name: tuple(t.shape) for name, t in drafter.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    wrong = sorted({name for name, _ in wanted.items() ^ found.items()})
    if wrong:
        raise CheckpointError(
            f"{what} must be the {len(wanted)} tensors that the drafter's config names; "
            f"{len(wrong)} differ, first {wrong[0]}: expected {wanted.get(wrong[0], 'none')}, "
            f"found {found.get(wrong[0], 'none')}"
        )


def _check_finite(what: str, weights: Mapping[str, Tensor]) -> None:

    broken = next((name for name, tensor in weights.items() if not tensor.isfinite().all()), None)
    if broken is not None:
        raise CheckpointError(
            f"{what} must be finite, and {broken} is not: its training broke down; train it again, "
            "with a smaller train.lr"
        )


def _write_object(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
