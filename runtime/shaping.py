"""The settings that shape a run: what makes two runs compute other things."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from runtime.config import Config
from runtime.rules import Rules, rules_of


def shaping_settings(settings: Mapping[str, Any], kind: type[Config]) -> dict[str, Any]:
    """The sections of a run file that shape a run, less the keys and values that do not.

    Data and masks are known by their digests, and so is the target.

    Args:
        settings: As ``Config.as_dict`` returns them, of this release or an earlier one.
        kind: Whose rules say what shapes a run.

    Raises:
        LookupError: A section is missing.
    """
    hints, rules = typing.get_type_hints(kind), rules_of(kind)
    sections = [name for name in rules if dataclasses.is_dataclass(hints[name])]
    return {
        name: _shaping_keys(settings[name], rules_of(hints[name]))
        for name in sections
        if rules[name].shapes
    }


def _shaping_keys(table: Mapping[str, Any], rules: Mapping[str, Rules]) -> dict[str, Any]:
    known = {key: rules.get(key, Rules()) for key in table}
    return {
        key: value
        for key, value in table.items()
        # Settings that were kept as JSON have lists for tuples.
        if known[key].shapes
        and (tuple(value) if isinstance(value, list) else value) not in known[key].left_out
    }


def with_left_out(shaping: Mapping[str, Any], kind: type[Config]) -> dict[str, Any]:
    """What ``shaping_settings`` returned, with the values at which it left keys out."""
    hints, rules = typing.get_type_hints(kind), rules_of(kind)
    full = dict(shaping)
    for name in rules:
        if dataclasses.is_dataclass(hints[name]) and name in full:
            keys = rules_of(typing.cast("type", hints[name])).items()
            left_out = {key: rule.left_out[0] for key, rule in keys if rule.left_out}
            full[name] = {**left_out, **full[name]}
    return full
