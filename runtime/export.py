"""``python -m runtime.export``: writes what a run's checkpoint is worth to others."""

import json
from pathlib import Path

import click

from runtime.options import Command, config_options, overriding


@click.command(cls=Command)
@config_options
@click.option("--step", type=int, help="Step of the checkpoint.  [default: what train.export says]")
@click.option("--out", metavar="FOLDER", help="Where to write.  [default: in the run folder]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(
    config_path: str, settings: tuple[str, ...], step: int | None, out: str | None, as_json: bool
) -> None:
    """Write a checkpoint as what the run leaves.

    A drafter is a folder that SGLang and vLLM serve, a fine-tuned model one that transformers
    loads.
    """
    from runtime.methods import read_run
    from runtime.training.choice import choose_checkpoint

    method, config = read_run(config_path, overriding(config_path, settings))
    method.check_export(config)
    run_folder = Path(config.run.folder)
    best = step is None and config.train.export == "best"
    checkpoint = choose_checkpoint(run_folder / "checkpoints", step, best=best)
    product = method.product
    folder = method.export_checkpoint(checkpoint, Path(out) if out else run_folder / product)
    if as_json:
        click.echo(json.dumps({"folder": str(folder), "step": checkpoint.step}))
    else:
        scored = best and checkpoint.merit is not None
        which = ", the best on held-out data of those that are kept" if scored else ""
        click.echo(f"{folder}: {product} of step {checkpoint.step}{which}")


if __name__ == "__main__":
    main()
