"""``python -m runtime.compare``: two runs beside each other."""

import json
from pathlib import Path

import click

from runtime.options import Command


@click.command(cls=Command)
@click.argument("first", metavar="RUN")
@click.argument("second", metavar="RUN")
@click.option("--png", metavar="FILE", help="Draw the curves of both into a picture, too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with every common step.")
def main(first: str, second: str, png: str | None, as_json: bool) -> None:
    """Compare two run folders: settings that differ, curves, evaluations, time.

    Reads what runtime.train and runtime.evaluate left there, and loads no model.
    """
    from cache.address import without_secrets_in
    from maskgen.border import after_result
    from runtime.methods import find_method
    from runtime.training.comparison import compare_runs
    from runtime.training.comparison_text import comparison_text
    from runtime.training.past_run import read_past_run
    from runtime.training.picture import draw_runs

    runs = [read_past_run(Path(name)) for name in (first, second)]
    method = find_method(runs[0].method)
    found = compare_runs(runs[0], runs[1], method.config_type, method.plots)

    def show() -> None:
        text = json.dumps(found.as_dict()) if as_json else comparison_text(found, method.plots)
        click.echo(without_secrets_in(text))

    with after_result(show):
        if png:
            named = {name: run.rows.values() for name, run in zip("AB", runs, strict=True)}
            draw_runs(named, method.plots, png)


if __name__ == "__main__":
    main()
