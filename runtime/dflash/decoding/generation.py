"""Answers to a prompt as they come, written by a drafter and its target."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from maskgen.progress import say
from runtime.config import TargetConfig
from runtime.dflash.decoding.confidence import check_confidence
from runtime.dflash.decoding.speculate import DraftSession
from runtime.dflash.folder.files import read_network, read_target_record, same_target
from runtime.dflash.folder.saved_drafter import load_published
from runtime.errors import ConfigError, TargetNotFoundError
from runtime.prompts.conversation import Skipped, check_messages
from runtime.prompts.supervision import tokenise
from runtime.prompts.template import ChatTemplate, TemplateChoice
from runtime.ranks.devices import enter_thread, place
from runtime.target.model import Target


class Writer:
    """A drafter, its target and the chat template that both were trained with.

    Args:
        folder: Of the drafter.
        target_name: The target; the one that the drafter's folder names if left out.
        chat_template: As ``data.chat_template``; the one that the folder names if left out.
        keywords: Of the chat template, over those that the folder names.
        devices: As ``run.devices``; the first one is used.
        confidence: See ``DraftSession``.

    Raises:
        CheckpointError: There is no drafter that can be read.
        TargetNotFoundError: The target cannot be loaded.
        ConfigError: The template cannot be read, a device is not there, the drafter is of another
            kind of target, or it has no confidence head to cut its blocks by.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        target_name: str | None = None,
        chat_template: str | None = None,
        keywords: Mapping[str, Any],
        devices: str = "auto",
        confidence: float = 0.0,
    ) -> None:
        check_confidence(read_network(Path(folder)), confidence, "--confidence")
        record = read_target_record(folder) or {"name": TargetConfig().model}
        name = target_name or record["name"]
        if chat_template is None and "template" in record:
            choice = TemplateChoice.from_dict(record["template"])
        else:
            choice = TemplateChoice.read(chat_template or "target", {})
        choice = choice.with_keywords(keywords)
        placement = place(devices)
        where, dtype = placement.devices[0], placement.compute_dtype
        enter_thread(where, placement.threads)
        drafter = load_published(folder, device=where, dtype=dtype)
        say(f"loading target {name}")
        try:
            self.target = Target.load(name, device=where, dtype=dtype)
        except TargetNotFoundError as error:
            if target_name is None:
                raise TargetNotFoundError(f"{error}; name the drafter's with --target") from error
            raise
        self.template = ChatTemplate.of(self.target.tokenizer, choice)
        self.session = DraftSession(self.target, drafter, confidence=confidence)
        self.same_target = same_target(folder, self.target, say)
        """Whether the drafter was trained for this target; None where its folder does not say."""

    def stream(self, prompt: str, max_new_tokens: int) -> Iterator[tuple[int, str]]:
        """Answer a prompt, see ``stream_text``."""
        return stream_text(self.session, self.target, self.template, prompt, max_new_tokens)


def stream_text(
    session: DraftSession,
    target: Target,
    template: ChatTemplate,
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
