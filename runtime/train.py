"""``python -m runtime.train``: trains a drafter on prebuilt masks and exports it."""

import contextlib
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from maskgen.border import after_result
from maskgen.progress import say
from maskgen.runfile import with_run_file
from runtime.options import Command, config_options, devices_option, overriding

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.dflash.settings import DFlashConfig
    from runtime.ranks.processes import Processes
    from runtime.training.inputs import Session
    from runtime.training.outcome import StepCounts
    from runtime.training.trainer import RunResult


@click.command(cls=Command)
@config_options
@devices_option
@click.option(
    "--target-devices",
    help="Such as cuda:1: targets on devices of their own; overrides run.target_devices.",
)
@click.option("--anchors", type=click.Choice(["layouts", "data"]), help="Overrides train.anchors.")
@click.option("--fresh", is_flag=True, help="Forget the run folder's checkpoints and start over.")
@click.option(
    "--save-artifacts", is_flag=True, help="Save what the warm-up compiled beside the masks."
)
@click.option(
    "--trust-artifacts",
    is_flag=True,
    help="Load what --save-artifacts saved. It is code that runs as you: only for a cache whose "
    "artifacts come from a machine that you trust.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the closing table as JSON.")
def main(
    config_path: str,
    settings: tuple[str, ...],
    devices: str | None,
    target_devices: str | None,
    anchors: str | None,
    fresh: bool,
    save_artifacts: bool,
    trust_artifacts: bool,
    as_json: bool,
) -> None:
    """Train a drafter: load, warm up, capture, freeze, run.

    A run that was stopped goes on from its newest checkpoint. Under torchrun the processes train
    together, and the first writes the files.
    """
    options = {
        "run.devices": devices,
        "run.target_devices": target_devices,
        "train.anchors": anchors,
    }
    from runtime.dflash.settings import as_dflash
    from runtime.methods import read_run

    overrides = overriding(config_path, settings, options)
    config = as_dflash(read_run(config_path, overrides)[1])
    from runtime.ranks.processes import join_processes
    from runtime.training.run_folder import held

    processes = join_processes()

    def show(result: "RunResult", rows: Mapping[str, Any]) -> None:
        if not processes.leads:
            return
        if as_json:
            click.echo(json.dumps({**_record(config, result), "summary": result.summary}))
        else:
            click.echo(result.summary)
            width = max(map(len, rows))
            click.echo("\n".join(f"{name:{width}} {value}" for name, value in rows.items()))

    folder = held(config.run.folder) if processes.leads else contextlib.nullcontext()
    with processes.telling_failures(), folder:
        result = train(
            config,
            config_path,
            fresh=fresh,
            save_artifacts=save_artifacts,
            trust_artifacts=trust_artifacts,
            processes=processes,
            show=show,
        )
    if result.signal is not None:
        # As a shell reports a command that a signal ended, so that a script stops here.
        sys.exit(128 + result.signal)
    if processes.leads and not as_json:
        from cache.address import without_secrets_in
        from cache.advice import RUN_FILE

        command = f"next: python -m runtime.evaluate {RUN_FILE}"
        click.echo(without_secrets_in(with_run_file(command, config_path, overrides)))


def train(
    config: "DFlashConfig",
    config_path: str,
    *,
    fresh: bool = False,
    save_artifacts: bool = False,
    trust_artifacts: bool = False,
    processes: "Processes | None" = None,
    show: "Callable[[RunResult, Mapping[str, Any]], None]" = lambda result, rows: None,
) -> "RunResult":
    """Run the whole of a training command.

    Args:
        config: The run file.
        config_path: Its path, named in errors.
        fresh: Delete the run folder's checkpoints first.
        save_artifacts: Save what the warm-up compiled, see ``runtime.static.artifacts``.
        trust_artifacts: Load it; it is code.
        processes: All that train together; this one alone if left out.
        show: Takes how the run ended and the rows of its closing table, before the export.

    Returns:
        How the run ended.
    """
    import torch

    import cache
    from runtime.dflash.capabilities import Request
    from runtime.dflash.embedding import fed_scale, serving_note
    from runtime.dflash.folder import target_record
    from runtime.dflash.initialise import initial_drafter
    from runtime.export import save_published
    from runtime.ranks.devices import enter_thread, place
    from runtime.ranks.processes import single_process
    from runtime.static.artifacts import WarmUp
    from runtime.target.model import Target
    from runtime.training.checkpoint import check_writable, remove_checkpoints
    from runtime.training.inputs import open_session, run_specs
    from runtime.training.outcome import check_learned
    from runtime.training.picture import draw_run
    from runtime.training.run_folder import (
        finish,
        starting_point,
        write_run_file,
    )
    from runtime.training.targets import (
        check_target,
        fit_drafter,
        frozen_targets,
        place_targets,
        remote_targets,
    )
    from runtime.training.trainer import Trainer, nothing_run

    processes = processes or single_process()
    report = say if processes.leads else _say_nothing
    share = (processes.local_rank, processes.local_size)
    placement = place(
        config.run.devices, dtype=config.target.dtype, threads=config.run.threads, share=share
    )
    apart = place_targets(config, placement, share)
    ranks = len(placement.devices) * processes.size
    session = open_session(config, config_path, placement=placement, ranks=ranks)
    # Known by its digest alone: a finished run of another target is not this one.
    check_target(config, session.dataset)
    folder = Path(config.run.folder)
    found = None
    if processes.leads:
        if not fresh:
            found = starting_point(folder, session, report)
        check_writable(folder / "checkpoints")
    checkpoint, state = found or (None, None)
    first_step = checkpoint.step if checkpoint is not None else 0
    # How often to save shapes no result, but at every save all ranks compare their weights.
    saving = {**session.shaping["train"], "save_every": config.train.save_every}
    first_step = _agree_on_start(processes, first_step, {**session.shaping, "train": saving})

    def shown(result: "RunResult") -> AbstractContextManager[None]:
        rows = _closing_rows(config, session, result, first_step)
        return after_result(partial(show, result, rows))

    if first_step >= config.train.steps:
        counts = _counts_of_leader(processes, state)
        check_learned(counts, config.train.max_skipped)
        report(f"this run is finished: {first_step} steps; --fresh starts over")
        result = nothing_run(counts, placement)
        with shown(result):
            if checkpoint is not None:
                finish(checkpoint, folder, report)
        processes.end()
        return result
    network = fit_drafter(
        Request(config=config, specs=run_specs(config), placement=placement, ranks=ranks)
    )
    enter_thread(placement.devices[0], placement.threads)
    warm_up = WarmUp(
        cache.open_store(config.cache),
        session.mask_version,
        (*placement.devices, *(apart.devices if apart else ())),
        save=save_artifacts and processes.leads,
        trust=trust_artifacts,
        report=report,
    )
    report(f"loading target {config.target.model}")
    target = Target.load(
        config.target.model,
        device=(apart or placement).devices[0],
        dtype=placement.compute_dtype,
    )
    session.dataset.check_target(target.digest, network.target_layer_ids)
    network = replace(network, embedding_scale=fed_scale(target, config.drafter.embedding))
    note = serving_note(network, target)
    if note is not None:
        report(note)
    weights = None
    if processes.leads and state is None:
        weights = initial_drafter(target, session.dataset, config, network).state_dict()
    trainer = Trainer(
        config=config,
        placement=placement,
        drafter_config=network,
        targets=frozen_targets(target, placement, session.dataset, remote=apart is not None),
        remote_targets=remote_targets(target, apart, session.dataset) if apart else (),
        entries=session.entries,
        dataset=session.dataset,
        plan=session.plan,
        fingerprint=session.fingerprint,
        report=report,
        processes=processes,
    )
    # What the steps need of it they hold; the rest need not stay on a GPU.
    del target
    try:
        # Told before the groups are left, so that others hear the cause, not that it broke them.
        with processes.telling_failures():
            trainer.prepare()
            warm_up.finish()
            trainer.start_from(weights=weights, state=state)
            if processes.leads:
                # Not before: until here the command may still be refused.
                write_run_file(folder, config, session)
                if fresh:
                    remove_checkpoints(folder / "checkpoints")
            if state is not None:
                report(f"resuming from step {first_step} of {config.train.steps}")
            result = trainer.run(first_step)
            if processes.leads:
                scale = torch.tensor(
                    session.dataset.feature_scale, dtype=torch.float32, device="cpu"
                )
                with shown(result):
                    if result.counts.learned:
                        save_published(
                            folder / "drafter",
                            network,
                            trainer.drafter_weights(),
                            feature_scale=scale,
                            target=target_record(session.dataset.meta),
                            run={"fingerprint": session.fingerprint, "step": result.steps},
                        )
                draw_run(folder)
            # A launcher ends all processes once one has left with an exit code other than 0.
            processes.end()
    finally:
        trainer.teardown()
    if result.signal is None:
        check_learned(result.counts, config.train.max_skipped)
    return result


def _record(config: "DFlashConfig", result: "RunResult") -> dict[str, Any]:
    folder = Path(config.run.folder)
    return {
        "run_folder": str(folder),
        "drafter": str(folder / "drafter") if result.counts.learned else None,
        "steps": result.steps,
        "total_steps": config.train.steps,
        "skipped_steps": result.counts.skipped,
        "empty_steps": result.counts.empty,
        "seconds": result.seconds,
        "signal": result.signal.name if result.signal is not None else None,
        "anchors": config.train.anchors,
        "threads": dict(result.rates),
    }


def _closing_rows(
    config: "DFlashConfig", session: "Session", result: "RunResult", first_step: int
) -> dict[str, Any]:
    from runtime.training.picture import PICTURE_FILE

    folder = Path(config.run.folder)
    count = result.steps - first_step
    rows: dict[str, Any] = {
        "run folder": str(folder),
        "steps": f"{result.steps} of {config.train.steps}",
        **_unlearned_rows(result.counts),
        **({f"time of these {count} steps": f"{result.seconds:.0f} s"} if count else {}),
        **result.rates,
        "mask version": session.mask_version[:16],
        "anchors": config.train.anchors,
        "drafter": str(folder / "drafter")
        if result.counts.learned
        else "none, nothing was learned",
        "picture": str(folder / PICTURE_FILE),
    }
    if result.signal is not None:
        name = result.signal.name
        goes_on = f"the same command goes on from step {result.steps}"
        done = result.steps >= config.train.steps
        rows["stopped by"] = f"{name}; {'all steps were done' if done else goes_on}"
    return rows


def _unlearned_rows(counts: "StepCounts") -> dict[str, str]:
    """Of steps that changed nothing, if there are any."""
    found = {
        "skipped": (counts.skipped, "a loss or gradient that was not finite"),
        "empty": (counts.empty, "no supervised token"),
    }
    return {
        name: f"{count} of the steps, which had {cause}"
        for name, (count, cause) in found.items()
        if count
    }


def _counts_of_leader(processes: "Processes", state: "Mapping[str, Tensor] | None") -> "StepCounts":
    """What became of the steps of a finished run, whose state process 0 has read."""
    from runtime.training.outcome import StepCounts, step_counts

    mine = None if state is None else json.dumps(step_counts(state).as_dict())
    return StepCounts(**json.loads(processes.from_leader("counts", mine)))


def _agree_on_start(processes: "Processes", first_step: int, shaping: Mapping[str, Any]) -> int:
    """The step that process 0 begins with, if this process sees what that one sees."""
    from runtime.errors import TrainingError
    from runtime.training.differences import told_differences

    mine = json.dumps({"step": first_step, "shaping": shaping}) if processes.leads else None
    start = json.loads(processes.from_leader("start", mine))
    told = told_differences(start["shaping"], shaping, "{name}: {now} here, {was} on process 0")
    if told:
        raise TrainingError(
            f"process {processes.rank} has other settings, data or masks than process 0 ({told}); "
            "give every host the same run file, data folder and mask cache"
        )
    return int(start["step"])


def _say_nothing(line: str) -> None:
    del line


if __name__ == "__main__":
    main()
