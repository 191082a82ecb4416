"""A run file with its target, data and masks, as the commands make them."""

import json

from click.testing import CliRunner

from maskgen.cli import main as maskgen
from runtime.prepare import main as prepare
from tests.runtime.test_train import RUN_FILE
from tests.runtime.tiny_text import byte_target


def command(main, *args, code=0):
    """Run a command in this process and check its exit code."""
    done = CliRunner().invoke(main, list(map(str, args)))
    assert done.exit_code == code, done.output
    return done


def make_root(folder, *, prompts=12):
    target = byte_target()
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    lines = [{"prompt": f"tell me {'more ' * (i % 4)}{i}"} for i in range(prompts)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "run.toml").write_text(RUN_FILE.format(root=folder))
    command(prepare, "--config", folder / "run.toml")
    command(maskgen, "build", folder / "run.toml")
    return folder


def options(root, name, **settings):
    """Of a command that trains in a run folder of its own."""
    given = {"run.folder": root / name, **settings}
    return [
        "--config",
        str(root / "run.toml"),
        *(part for key, value in given.items() for part in ("--set", f"{key}={value}")),
    ]
