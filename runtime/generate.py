"""``python -m runtime.generate``: writes an answer with a drafter, and shows what it saved."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from maskgen.progress import say
from runtime.options import Command, devices_option

if TYPE_CHECKING:
    from runtime.dflash.speculate import DraftSession
    from runtime.prompts.template import ChatTemplate
    from runtime.target.model import Target

DEFAULT_TARGET = "smollm2-135m"


@click.command(cls=Command)
@click.option("--drafter", "folder", required=True, metavar="FOLDER", help="Drafter folder.")
@click.option("--prompt", required=True, help="What the user says.")
@click.option(
    "--target",
    "target_name",
    help="The model that the drafter was trained for: a name, a folder or a .gguf file.  "
    f"[default: as target.json in the drafter's folder says, else {DEFAULT_TARGET}]",
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
@devices_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(
    folder: str,
    prompt: str,
    target_name: str | None,
    chat_template: str | None,
    keywords: tuple[str, ...],
    max_new_tokens: int,
    devices: str | None,
    as_json: bool,
) -> None:
    """Answer a prompt by draft and verify: the target's own greedy text, in fewer calls."""
    from runtime.dflash.folder import read_target_record, same_target
    from runtime.dflash.speculate import DraftSession
    from runtime.errors import ConfigError, TargetNotFoundError
    from runtime.export import load_published
    from runtime.prompts.template import ChatTemplate, TemplateChoice
    from runtime.ranks.devices import enter_thread, place
    from runtime.target.model import Target

    if not prompt.strip():
        raise ConfigError("--prompt", prompt, "must not be empty")
    if not prompt.isascii() and any("\ud800" <= char <= "\udfff" for char in prompt):
        raise ConfigError("--prompt", prompt, "must be UTF-8")
    record = read_target_record(folder) or {"name": DEFAULT_TARGET}
    name = target_name or record["name"]
    if chat_template is None and "template" in record:
        choice = TemplateChoice.from_dict(record["template"])
    else:
        choice = TemplateChoice.read(chat_template or "target", {})
    choice = choice.with_keywords(_parse_keywords(keywords))
    placement = place(devices or "auto")
    where, dtype = placement.devices[0], placement.compute_dtype
    enter_thread(where, placement.threads)
    drafter = load_published(folder, device=where, dtype=dtype)
    say(f"loading target {name}")
    try:
        target = Target.load(name, device=where, dtype=dtype)
    except TargetNotFoundError as error:
        if target_name is None:
            raise TargetNotFoundError(f"{error}; name the drafter's with --target") from error
        raise
    template = ChatTemplate.of(target.tokenizer, choice)
    session = DraftSession(target, drafter)
    made_for = same_target(folder, target, say)
    counts, pieces = [], []
    for new, piece in stream_text(session, target, template, prompt, max_new_tokens):
        counts.append(new)
        pieces.append(piece)
        if not as_json:
            click.echo(piece, nl=False)
    calls = len(counts) - 1
    # The first token comes from prefill.
    tau = sum(counts[1:]) / calls if calls else 0.0
    if as_json:
        summary: dict[str, Any] = {"text": "".join(pieces), "tokens": sum(counts)}
        summary |= {"target_calls": calls, "tau": tau, "same_target": made_for}
        click.echo(json.dumps(summary))
    else:
        click.echo(f"\n[{sum(counts)} tokens, {calls} target calls after prefill, tau {tau:.2f}]")


def stream_text(
    session: "DraftSession",
    target: "Target",
    template: "ChatTemplate",
    prompt: str,
    max_new_tokens: int,
) -> Iterator[tuple[int, str]]:
    """Answer a prompt piece by piece.

    Args:
        session: Decodes.
        target: Its tokenizer and end tokens are used.
        template: Renders the prompt.
        prompt: One user message.
        max_new_tokens: Longest answer.

    Yields:
        New tokens of a target call, and the text that became certain with them: a character whose
        bytes are split over tokens comes whole, with the last of them.

    Raises:
        ConfigError: The prompt is no text, the template refuses it, or it is too long.
    """
    from runtime.errors import ConfigError
    from runtime.prompts.conversation import Skipped, check_messages
    from runtime.prompts.supervision import tokenise

    try:
        messages = check_messages([{"role": "user", "content": prompt}])
        prompt_ids = tokenise(template, messages, target.eos_token_ids).input_ids
    except Skipped as error:
        raise ConfigError("--prompt", prompt, f"cannot be asked: {error}") from error
    tokens: list[int] = []
    shown = ""
    for new in session.stream(prompt_ids, max_new_tokens):
        tokens += [token for token in new if token not in target.eos_token_ids]
        text = str(target.tokenizer.decode(tokens, skip_special_tokens=True))
        # An unfinished character decodes to the replacement sign.
        text = text.removesuffix("\ufffd")
        yield len(new), text[len(shown) :]
        shown = text


def _parse_keywords(settings: tuple[str, ...]) -> dict[str, Any]:
    from maskgen.runfile import read_value
    from runtime.config import Config, parse_config
    from runtime.errors import ConfigError

    keywords: dict[str, Any] = {}
    for setting in settings:
        key, separator, text = setting.partition("=")
        if not separator or not key:
            raise ConfigError("--template", setting, "must read KEY=VALUE")
        keywords[key] = read_value(text)
    return dict(parse_config({"data": {"template": keywords}}, Config).data.template)


if __name__ == "__main__":
    main()
