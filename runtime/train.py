"""``python -m runtime.train``: trains a drafter on prebuilt masks and exports it."""

import contextlib
import fcntl
import json
import platform
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runtime.options import config_options, reporting

if TYPE_CHECKING:
    from runtime.config import Config
    from runtime.dataset import Dataset
    from runtime.devices import Placement
    from runtime.step import FrozenTarget
    from runtime.target import Target
    from runtime.trainer import RunResult


@click.command()
@config_options
@click.option("--devices", help="Such as cpu,cpu or cuda:0,cuda:1; overrides run.devices.")
@click.option("--anchors", type=click.Choice(["layouts", "data"]), help="Overrides train.anchors.")
@click.option("--fresh", is_flag=True, help="Forget the run folder's checkpoints and start over.")
@click.option("--json", "as_json", is_flag=True, help="Print the closing table as JSON.")
def main(
    config_path: str,
    settings: tuple[str, ...],
    devices: str | None,
    anchors: str | None,
    fresh: bool,
    as_json: bool,
) -> None:
    """Train a drafter: load, warm up, capture, freeze, run.

    A run that was stopped goes on from its newest checkpoint.
    """
    overrides = [*settings]
    overrides += [f"run.devices={devices}"] if devices else []
    overrides += [f"train.anchors={anchors}"] if anchors else []
    with reporting():
        from runtime.config import read_config

        config = read_config(config_path, overrides)
        with run_folder(config.run.folder):
            result, rows = train(config, config_path, fresh=fresh)
    if as_json:
        click.echo(json.dumps({**rows, "summary": result.summary}))
    else:
        click.echo(result.summary)
        click.echo("\n".join(f"{name:16} {value}" for name, value in rows.items()))
    if result.signal is not None:
        # As a shell reports a command that a signal ended, so that a script stops here.
        sys.exit(128 + result.signal)


@contextlib.contextmanager
def run_folder(name: str) -> Iterator[None]:
    """Make the run folder and hold it for this process alone.

    Raises:
        ConfigError: It is no folder, or cannot be made.
        TrainingError: Another process trains there.
    """
    from runtime.errors import ConfigError, TrainingError

    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise ConfigError("run.folder", name, f"must be a writable folder ({error})") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise TrainingError(
                f"another process trains in {name}; wait for it, or use another run.folder"
            ) from error
        yield


def train(
    config: "Config", config_path: str, *, fresh: bool = False
) -> tuple["RunResult", dict[str, Any]]:
    """Run the whole of a training command.

    Args:
        config: The run file.
        config_path: Its path, named in errors.
        fresh: Delete the run folder's checkpoints first.

    Returns:
        How the run ended, and the rows of the closing table.
    """
    import torch

    from runtime.checkpoint import latest_state
    from runtime.devices import enter_thread, place
    from runtime.export import save_published
    from runtime.initialise import drafter_config, initial_drafter
    from runtime.metrics import METRICS_FILE, read_metrics
    from runtime.picture import PICTURE_FILE, draw_metrics
    from runtime.session import open_session
    from runtime.target import Target
    from runtime.trainer import Trainer

    placement = place(config.run.devices, dtype=config.target.dtype, threads=config.run.threads)
    session = open_session(config, config_path)
    folder = Path(config.run.folder)
    if fresh:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    found = latest_state(folder / "checkpoints", session.fingerprint, _say)
    first_step, state = found or (0, None)
    enter_thread(placement.devices[0], placement.threads)
    _say(f"loading target {config.target.model}")
    target = Target.load(
        config.target.model, device=placement.devices[0], dtype=placement.compute_dtype
    )
    layer_ids = target.default_layer_ids(config.target.num_features)
    session.dataset.check_target(target.digest, layer_ids)
    network = drafter_config(
        target,
        num_layers=config.drafter.num_layers,
        draft_block_size=session.draft_block_size,
        target_layer_ids=layer_ids,
    )
    _write_run_file(folder, config, session.mask_version, session.fingerprint)
    weights = None
    if state is None:
        weights = initial_drafter(target, session.dataset, config, network).state_dict()
    trainer = Trainer(
        config=config,
        placement=placement,
        drafter_config=network,
        targets=frozen_targets(target, placement, session.dataset),
        entries=session.entries,
        dataset=session.dataset,
        plan=session.plan,
        fingerprint=session.fingerprint,
        report=_say,
    )
    try:
        trainer.prepare()
        trainer.start_from(weights=weights, state=state)
        if state is not None:
            _say(f"resuming from step {first_step} of {config.train.steps}")
        result = trainer.run(first_step)
        scale = torch.tensor(session.dataset.feature_scale)
        save_published(folder / "drafter", network, trainer.drafter_weights(), feature_scale=scale)
    finally:
        trainer.teardown()
    draw_metrics(read_metrics(folder / METRICS_FILE), folder / PICTURE_FILE)
    rows: dict[str, Any] = {
        "run folder": str(folder),
        "steps": f"{result.steps} of {config.train.steps}",
        "training time": f"{result.seconds:.0f} s",
        "mask version": session.mask_version[:16],
        "anchors": config.train.anchors,
        "drafter": str(folder / "drafter"),
        "picture": str(folder / PICTURE_FILE),
    }
    if result.signal is not None:
        name = result.signal.name
        rows["stopped by"] = f"{name}; the same command goes on from step {result.steps}"
    return result, rows


def frozen_targets(
    target: "Target", placement: "Placement", dataset: "Dataset"
) -> list["FrozenTarget"]:
    """The target's frozen parts on every device, its layers too where features come online."""
    import torch

    from runtime.step import FrozenTarget

    scale = torch.tensor(dataset.feature_scale, dtype=torch.float32)
    targets = []
    for device in placement.devices:
        local, features = target, None
        if not dataset.has_features:
            local = target if device == target.device else target.on(device)
            features = partial(local.features, layer_ids=dataset.layer_ids)
        targets.append(
            FrozenTarget(
                embed_weight=local.embed_weight.to(device),
                head_weight=local.head_weight.to(device),
                feature_scale=scale.to(device),
                features=features,
            )
        )
    return targets


def _write_run_file(folder: Path, config: "Config", version: str, fingerprint: str) -> None:
    import torch

    record = {
        "config": config.as_dict(),
        "mask_version": version,
        "fingerprint": fingerprint,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    text = json.dumps(record, indent=1, default=str)
    (folder / "run.json").write_text(text + "\n", encoding="utf-8")


def _say(line: str) -> None:
    click.echo(line, err=True)
    sys.stderr.flush()


if __name__ == "__main__":
    main()
