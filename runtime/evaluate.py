"""``python -m runtime.evaluate``: measures on held-out data what a run learned."""

import json
from pathlib import Path

import click

from maskgen.border import after_result
from runtime.options import (
    Command,
    config_options,
    devices_option,
    overriding,
    print_config_option,
)


@click.command(cls=Command)
@config_options
@devices_option
@click.option(
    "--drafter",
    "--model",
    "product",
    metavar="FOLDER",
    help="Drafter or model to evaluate.  [default: that of the run folder]",
)
@print_config_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(
    config_path: str,
    settings: tuple[str, ...],
    devices: str | None,
    product: str | None,
    print_config: bool,
    as_json: bool,
) -> None:
    """Measure on held-out data what a run learned.

    Of a drafter that is the acceptance length, of a fine-tuned model the loss before and after.
    Exits with 3 when a speculative text differs from the target's own by more than rounding.
    """
    from runtime.methods import printed_config, read_run
    from runtime.training.evaluation import keep_evaluation

    overrides = overriding(config_path, settings, {"run.devices": devices})
    if print_config:
        click.echo(printed_config(config_path, settings, overrides, as_json=as_json))
        return
    method, config = read_run(config_path, overrides)
    result = method.evaluate(config, product)

    def show() -> None:
        click.echo(json.dumps(result.as_dict()) if as_json else result.table())

    with after_result(show):
        keep_evaluation(Path(config.run.folder), result, None if product else method.plots)
    if not as_json:
        folder = Path(product or Path(config.run.folder) / method.product)
        click.echo("".join(f"next: {line}\n" for line in method.uses(folder)), nl=False)
    if not result.exact:
        click.get_current_context().exit(3)


if __name__ == "__main__":
    main()
