"""``python -m runtime.prepare``: prompt files into tokenised samples that the target answered."""

import json
import shlex
import sys
from pathlib import Path

import click

from runtime.options import (
    Command,
    config_options,
    devices_option,
    overriding,
    print_config_option,
)


@click.command(cls=Command)
@config_options
@click.option("--target", help="A folder, a .gguf file or a hub name; overrides target.model.")
@devices_option
@click.option(
    "--pack-answers",
    metavar="FILE",
    help="Write the answers into a file for data.shipped, and no data folder; one of earlier "
    "answers is replaced, and no other.",
)
@print_config_option
@click.option("--json", "as_json", is_flag=True, help="Print the closing table as JSON.")
def main(
    config_path: str,
    settings: tuple[str, ...],
    target: str | None,
    devices: str | None,
    pack_answers: str | None,
    print_config: bool,
    as_json: bool,
) -> None:
    """Prepare data: read prompts, let the target answer them, write tokenised samples.

    Does nothing when the folder has just what these prompts, target and settings make, whole.
    """
    from runtime.data.written import DROPPED
    from runtime.errors import ConfigError
    from runtime.methods import printed_config, read_run
    from runtime.training.wanted_masks import wanted_masks

    if pack_answers == "":
        # As a path it would be the current folder.
        raise ConfigError("--pack-answers", pack_answers, "must name a file")
    options = {"target.model": target, "run.devices": devices}
    overrides = overriding(config_path, settings, options)
    if print_config:
        click.echo(printed_config(config_path, settings, overrides, as_json=as_json))
        return
    method, config = read_run(config_path, overrides)
    # What train refuses before it loads anything is refused here before anything is answered.
    wanted_masks(method, config)
    preparation = method.preparation(config)
    method.check(config, preparation.placement, len(config.run.devices.split(",")))
    if pack_answers:
        lines = {**preparation.pack(Path(pack_answers), _command()), "places": {}}
    else:
        lines = preparation.run()
    if as_json:
        click.echo(json.dumps(lines))
    else:
        places = lines.pop("places")
        for name, value in lines.items():
            where = ", ".join(places.get(name.removeprefix(DROPPED), ()))
            click.echo(f"{name:36} {value}" + (f"  {where}" if where else ""))


def _command() -> str:
    return shlex.join(["python", "-m", "runtime.prepare", *sys.argv[1:]])


if __name__ == "__main__":
    main()
