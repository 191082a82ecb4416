"""``python -m runtime.generate``: writes an answer with a drafter, and shows what it saved."""

import json
from typing import Any

import click

from maskgen.runfile import read_value
from runtime.config import Config, TargetConfig, parse_config
from runtime.errors import ConfigError
from runtime.options import Command, devices_option


@click.command(cls=Command)
@click.option("--drafter", "folder", required=True, metavar="FOLDER", help="Drafter folder.")
@click.option("--prompt", required=True, help="What the user says.")
@click.option(
    "--target",
    "target_name",
    help="The model that the drafter was trained for: a name, a folder or a .gguf file.  "
    f"[default: as target.json in the drafter's folder says, else {TargetConfig().model}]",
)
@click.option(
    "--chat-template",
    metavar="NAME",
    help="As data.chat_template: target, plain or a jinja file.  [default: as the drafter was "
    "trained, by target.json, else target]",
)
@click.option(
    "--template",
    "keywords",
    multiple=True,
    metavar="KEY=VALUE",
    help="A keyword of the chat template, the value in TOML, over those that the drafter was "
    "trained with; may be given again.",
)
@click.option(
    "--max-new-tokens", default=256, show_default=True, type=click.IntRange(min=1), metavar="N"
)
@click.option(
    "--confidence",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0, 1),
    metavar="X",
    help="Cut a draft block before the first draft of less confidence, for a drafter with a "
    "confidence head; 0 never cuts. The text is the same.",
)
@devices_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(
    folder: str,
    prompt: str,
    target_name: str | None,
    chat_template: str | None,
    keywords: tuple[str, ...],
    max_new_tokens: int,
    confidence: float,
    devices: str | None,
    as_json: bool,
) -> None:
    """Answer a prompt by draft and verify: the target's own greedy text, in fewer calls."""
    from runtime.dflash.decoding.generation import Writer

    if not prompt.strip():
        raise ConfigError("--prompt", prompt, "must not be empty")
    if not prompt.isascii() and any("\ud800" <= char <= "\udfff" for char in prompt):
        raise ConfigError("--prompt", prompt, "must be UTF-8")
    writer = Writer(
        folder,
        target_name=target_name,
        chat_template=chat_template,
        keywords=_parse_keywords(keywords),
        devices=devices or "auto",
        confidence=confidence,
    )
    counts, pieces = [], []
    for new, piece in writer.stream(prompt, max_new_tokens):
        counts.append(new)
        pieces.append(piece)
        if not as_json:
            click.echo(piece, nl=False)
    calls = len(counts) - 1
    # The first token comes from prefill.
    tau = sum(counts[1:]) / calls if calls else 0.0
    if as_json:
        summary: dict[str, Any] = {"text": "".join(pieces), "tokens": sum(counts)}
        summary |= {"target_calls": calls, "tau": tau, "same_target": writer.same_target}
        click.echo(json.dumps(summary))
    else:
        click.echo(f"\n[{sum(counts)} tokens, {calls} target calls after prefill, tau {tau:.2f}]")


def _parse_keywords(settings: tuple[str, ...]) -> dict[str, Any]:
    keywords: dict[str, Any] = {}
    for setting in settings:
        key, separator, text = setting.partition("=")
        if not separator or not key:
            raise ConfigError("--template", setting, "must read KEY=VALUE")
        keywords[key] = read_value(text)
    return dict(parse_config({"data": {"template": keywords}}, Config).data.template)


if __name__ == "__main__":
    main()
