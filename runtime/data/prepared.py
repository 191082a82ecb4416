"""Whether prepared samples are those that a run file asks for."""

import json
from typing import Any

from runtime.config import DataConfig
from runtime.data.dataset import Dataset
from runtime.data.folder import PREPARE
from runtime.errors import DatasetError
from runtime.prompts.template import TemplateChoice


def sample_settings(data: DataConfig) -> dict[str, Any]:
    """The settings of ``[data]`` that decide what the samples of a folder are."""
    names = ("max_new_tokens", "min_answer_tokens", "min_distinct_4grams", "too_long")
    return {name: getattr(data, name) for name in names}


def check_prepared(data: DataConfig, dataset: Dataset) -> None:
    """Refuse data that were prepared by other settings than the run file's.

    Prompt files are not compared: a run needs none of them.

    Raises:
        DatasetError: A setting, or the chat template, its text or its keywords differ.
        ConfigError: The template is a file that cannot be read.
    """
    found = dict(dataset.meta.get("settings", {}))
    found |= {k: v for k, v in dataset.meta.get("split", {}).items() if k == "heldout"}
    for name, asked in {**sample_settings(data), "heldout": data.heldout}.items():
        if found.get(name, asked) != asked:
            raise DatasetError(
                f"{dataset.folder} was prepared with data.{name} = {found[name]!r}, and the run "
                f"asks for {asked!r}; {PREPARE}"
            )
    _check_template(data, dataset)


def _check_template(data: DataConfig, dataset: Dataset) -> None:
    asked = TemplateChoice.read(data.chat_template, data.template).as_dict()
    found = dataset.meta.get("template", TemplateChoice().as_dict())
    if asked != found:
        shown = [
            json.dumps({k: choice[k] for k in ("chat_template", "keywords")})
            for choice in (found, asked)
        ]
        raise DatasetError(
            f"{dataset.folder} was rendered with {shown[0]}, and the run asks for "
            f"{'another text of it' if shown[0] == shown[1] else shown[1]}; {PREPARE}"
        )
