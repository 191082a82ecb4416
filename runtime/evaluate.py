"""``python -m runtime.evaluate``: measures a drafter on held-out prompts."""

import json
import shlex
import sys
from pathlib import Path

import click

from maskgen.border import after_result
from runtime.options import Command, config_options, devices_option, overriding


@click.command(cls=Command)
@config_options
@devices_option
@click.option(
    "--drafter",
    "drafter_folder",
    metavar="FOLDER",
    help="Drafter to evaluate.  [default: drafter in the run folder]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(
    config_path: str,
    settings: tuple[str, ...],
    devices: str | None,
    drafter_folder: str | None,
    as_json: bool,
) -> None:
    """Measure acceptance length on held-out prompts, untrained against trained.

    Exits with 3 when a speculative text differs from the target's own by more than rounding.
    """
    from runtime.dflash.evaluation import evaluate, keep_result
    from runtime.dflash.settings import as_dflash
    from runtime.methods import read_run

    _, read = read_run(config_path, overriding(config_path, settings, {"run.devices": devices}))
    config = as_dflash(read)
    result = evaluate(config, drafter_folder)

    def show() -> None:
        click.echo(json.dumps(result.as_dict()) if as_json else result.table())

    with after_result(show):
        keep_result(config, result, draw=not drafter_folder)
    if not as_json:
        folder = shlex.quote(drafter_folder or str(Path(config.run.folder) / "drafter"))
        click.echo(f'next: python -m runtime.generate --drafter {folder} --prompt "..."')
    if not result.exact:
        sys.exit(3)


if __name__ == "__main__":
    main()
