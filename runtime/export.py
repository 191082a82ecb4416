"""A drafter out of a run and into one: the folder that servers read, written and loaded.

SGLang drops weight names that it does not know without a word, so the names written here are
exactly the drafter's: no prefix, no embedding, no head, no rotary buffer.

``python -m runtime.export`` writes such a folder from a run's checkpoint.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from maskgen.progress import say
from runtime.options import Command, config_options, overriding

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from runtime.dflash.drafter import Drafter, DrafterConfig
    from runtime.training.saved_state import Checkpoint

MASTER = "master."
"""Prefix of the fp32 weights in a checkpoint."""
SERVED_DTYPES = {"torch.bfloat16", "torch.float16", "torch.float32"}
"""Of weights; any other is a number that a missing scale belongs to."""
TARGET = "target"
FEATURE_SCALE = "feature_scale"
"""What a checkpoint has beside the keys of ``config.json``."""


@click.command(cls=Command)
@config_options
@click.option("--step", type=int, help="Step of the checkpoint.  [default: the newest]")
@click.option(
    "--out", metavar="FOLDER", help="Where to write.  [default: drafter in the run folder]"
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(
    config_path: str, settings: tuple[str, ...], step: int | None, out: str | None, as_json: bool
) -> None:
    """Write a checkpoint as a drafter folder that SGLang and vLLM serve."""
    from runtime.dflash.capabilities import EXPORT, Request, check_request
    from runtime.dflash.settings import as_dflash
    from runtime.methods import read_run
    from runtime.training.inputs import run_specs

    _, read = read_run(config_path, overriding(config_path, settings))
    config = as_dflash(read)
    specs = run_specs(config) if config.masks else {}
    check_request(Request(config=config, specs=specs), (EXPORT,))
    run_folder = Path(config.run.folder)
    checkpoint = _choose_checkpoint(run_folder / "checkpoints", step)
    folder = export_checkpoint(checkpoint, Path(out) if out else run_folder / "drafter")
    if as_json:
        click.echo(json.dumps({"folder": str(folder), "step": checkpoint.step}))
    else:
        click.echo(f"{folder}: drafter of step {checkpoint.step}")


def servable(drafter: "Drafter", feature_scale: "Tensor | None" = None) -> "Drafter":
    """Make a drafter take the target's raw features, and need no gradient.

    Args:
        drafter: As trained, on features divided by ``feature_scale``; changed in place.
        feature_scale: ``[K]``; None where it has been folded.

    Returns:
        The drafter.
    """
    from runtime.dflash.drafter import fold_feature_scale

    drafter.requires_grad_(False).eval()
    if feature_scale is not None:
        drafter.fc.weight.copy_(fold_feature_scale(drafter.fc.weight, feature_scale))
    return drafter


def save_published(
    folder: str | Path,
    config: "DrafterConfig",
    weights: "Mapping[str, Tensor]",
    *,
    feature_scale: "Tensor | None" = None,
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
    import torch

    from runtime.dflash.drafter import fold_feature_scale
    from runtime.dflash.folder import CONFIG_FILE, WEIGHTS_FILE, replace_files
    from runtime.files.tensors import save_tensors

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
    device: "torch.device | str" = "cpu",
    dtype: "torch.dtype | None" = None,
) -> "Drafter":
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
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from runtime.dflash.drafter import Drafter
    from runtime.dflash.folder import WEIGHTS_FILE, WRITTEN, check_files, read_network
    from runtime.errors import CheckpointError

    where = Path(folder)
    config = read_network(where)
    check_files(where)
    path = where / WEIGHTS_FILE
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} must be a safetensors file ({error}); {WRITTEN}") from error
    _check_weights(str(path), config, weights)
    other = sorted({str(t.dtype) for t in weights.values()} - SERVED_DTYPES)
    if other:
        raise CheckpointError(f"{path} must hold floats of 16 or 32 bits, found {', '.join(other)}")
    _check_finite(str(path), weights)
    drafter = Drafter(config, device="meta")
    drafter.to_empty(device="cpu").to(dtype or weights["fc.weight"].dtype)
    drafter.load_state_dict(weights)
    return servable(drafter.to(device))


def export_checkpoint(checkpoint: "Checkpoint", folder: Path) -> Path:
    """Write a checkpoint's drafter, as ``save_published`` does.

    Raises:
        CheckpointError: The checkpoint is damaged.
        NothingLearnedError: Its weights are those that the run began with.
    """
    import torch

    from runtime.dflash.drafter import DrafterConfig
    from runtime.dflash.embedding import serving_note
    from runtime.errors import NothingLearnedError

    published = dict(checkpoint.drafter)
    scale = torch.tensor(published.pop(FEATURE_SCALE), dtype=torch.float32, device="cpu")
    target = published.pop(TARGET, None)
    state = checkpoint.load()
    if "step" in state and state["step"] == 0:
        raise NothingLearnedError(
            f"nothing was learned up to step {checkpoint.step} of {checkpoint.folder}: its weights "
            "are those that the run began with"
        )
    weights = {
        name.removeprefix(MASTER): tensor
        for name, tensor in state.items()
        if name.startswith(MASTER)
    }
    network = DrafterConfig.from_published(published)
    note = serving_note(network)
    if note is not None:
        say(note)
    return save_published(
        folder, network, weights, feature_scale=scale, target=target, run=run_of(checkpoint)
    )


def run_of(checkpoint: "Checkpoint") -> dict[str, Any]:
    """What ``target.json`` says of the run that a drafter is from."""
    return {"fingerprint": checkpoint.fingerprint, "step": checkpoint.step}


def _choose_checkpoint(root: Path, step: int | None) -> "Checkpoint":
    from runtime.dflash.folder import TRAIN
    from runtime.errors import CheckpointError
    from runtime.training.checkpoint import find_checkpoints, newest_good

    found = find_checkpoints(root)
    chosen = [item for item in found if step in (None, item.step)]
    if not chosen:
        steps = ", ".join(str(item.step) for item in found) or "none"
        wanted = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        advice = "choose one of them with --step" if found else TRAIN
        raise CheckpointError(f"{root} must hold {wanted}, found {steps}; {advice}")
    if step is not None:
        return chosen[0]

    def checked(checkpoint: "Checkpoint") -> "Checkpoint":
        checkpoint.check()
        return checkpoint

    good = newest_good(chosen, checked)
    if good is None:
        raise CheckpointError(f"{root} holds damaged checkpoints only; {TRAIN}")
    return good


def _check_weights(what: str, config: "DrafterConfig", weights: "Mapping[str, Tensor]") -> None:
    from runtime.dflash.drafter import Drafter
    from runtime.errors import CheckpointError

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


def _check_finite(what: str, weights: "Mapping[str, Tensor]") -> None:
    from runtime.errors import CheckpointError

    broken = next((name for name, tensor in weights.items() if not tensor.isfinite().all()), None)
    if broken is not None:
        raise CheckpointError(
            f"{what} must be finite, and {broken} is not: its training broke down; train it again, "
            "with a smaller train.lr"
        )


def _write_object(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
