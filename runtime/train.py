"""``python -m runtime.train``: trains on prebuilt masks and exports what was learned."""

import contextlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from maskgen.runfile import with_run_file
from runtime.options import (
    Command,
    config_options,
    devices_option,
    overriding,
    print_config_option,
)

if TYPE_CHECKING:
    from runtime.training.result import RunResult


@click.command(cls=Command)
@config_options
@devices_option
@click.option(
    "--target-devices",
    help="Such as cuda:1: targets on devices of their own; overrides run.target_devices.",
)
@click.option("--anchors", help="Of drafters, layouts or data: overrides train.anchors.")
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
@print_config_option
@click.option(
    "--dry-run",
    is_flag=True,
    help="Say what the run will be, without reading weights, and do nothing else: buckets, steps, "
    "parameters, memory, graphs, time where it is known.",
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
    print_config: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Train: load, warm up, capture, freeze, run.

    A run that was stopped goes on from its newest checkpoint. Under torchrun the processes train
    together, and the first writes the files.
    """
    from cache.address import without_secrets_in
    from cache.advice import RUN_FILE
    from runtime.methods import printed_config, read_run
    from runtime.ranks.processes import join_processes
    from runtime.training.dry_run import dry_run as dry_run_of
    from runtime.training.dry_run_text import dry_run_text
    from runtime.training.job import Job
    from runtime.training.run_folder import taken

    options = {
        "run.devices": devices,
        "run.target_devices": target_devices,
        "train.anchors": anchors,
    }
    overrides = overriding(config_path, settings, options)
    if print_config:
        click.echo(printed_config(config_path, settings, overrides, as_json=as_json))
        return
    method, config = read_run(config_path, overrides)
    if dry_run:
        plan = dry_run_of(method, config, config_path)
        text = json.dumps(plan.as_dict()) if as_json else dry_run_text(plan)
        click.echo(without_secrets_in(with_run_file(text, config_path, overrides)))
        return
    processes = join_processes()

    def show(result: "RunResult", lines: Mapping[str, Any]) -> None:
        if not processes.leads:
            return
        if as_json:
            click.echo(json.dumps(job.record(result)))
        else:
            click.echo(result.summary)
            width = max(map(len, lines))
            click.echo("\n".join(f"{name:{width}} {value}" for name, value in lines.items()))

    folder = taken(config.run.folder) if processes.leads else contextlib.nullcontext()
    with processes.reporting_failures(), folder:
        job = Job(method, config, config_path, processes=processes)
        result = job.run(
            fresh=fresh, save_artifacts=save_artifacts, trust_artifacts=trust_artifacts, show=show
        )
    if result.signal is not None:
        # As a shell reports a command that a signal ended, so that a script stops here.
        click.get_current_context().exit(128 + result.signal)
    if processes.leads and not as_json:
        command = f"next: python -m runtime.evaluate {RUN_FILE}"
        click.echo(without_secrets_in(with_run_file(command, config_path, overrides)))


if __name__ == "__main__":
    main()
