"""Every key of a run file with its value, its default, and where the value comes from."""

import json
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from cache.address import without_secrets_in
from maskgen.listing import text_table
from maskgen.runfile import DEFAULT_CACHE
from maskgen.spec import DEFAULT_BLOCK_SIZE, read_specs
from runtime.config import Config
from runtime.rules import rules_of

RUN_FILE, SET, OPTION = "run file", "--set", "option"
DEFAULT, WORKED_OUT = "default", "other keys"
WIDEST = 48
"""Characters of a value in the table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One key."""

    key: str
    """``section.key``."""
    value: Any
    default: Any
    """What the key is where it is left out and so is all else."""
    origin: str
    """``run file``, ``--set``, ``option``, ``default``, or ``other keys``: left out, and worked out
    of those."""
    rule: str = ""
    """What the value must be beside its type."""
    shapes: bool = True
    """Whether another value makes another run, whose checkpoints do not go on with this one."""


def settings_of(
    config: Config, document: Mapping[str, Any], overrides: Sequence[str], given: int
) -> list[Setting]:
    """All keys of a run file, those of its method included, but for its mask entries.

    Args:
        config: What the run file and the overrides say together.
        document: The run file as it stands.
        overrides: ``section.key=value`` each.
        given: The first so many of them are of ``--set``, the others of options.
    """
    origins = _origins(document, overrides, given)
    hints, sections = typing.get_type_hints(type(config)), rules_of(type(config))
    defaults, found = type(config)(), []
    for section, of_section in sections.items():
        if not is_dataclass(hints[section]):
            continue
        for key, rules in rules_of(type(getattr(config, section))).items():
            name = f"{section}.{key}"
            value = getattr(getattr(config, section), key)
            default = getattr(getattr(defaults, section), key)
            left_out = DEFAULT if value == default else WORKED_OUT
            found.append(
                Setting(
                    key=name,
                    value=value,
                    default=default,
                    origin=origins.get(name, left_out),
                    rule=rules.described,
                    shapes=rules.shapes and of_section.shapes,
                )
            )
    for key, fallback in (("cache", DEFAULT_CACHE), ("BLOCK_SIZE", DEFAULT_BLOCK_SIZE)):
        name = f"masks.{key}"
        value = config.masks.get(key, fallback)
        origin = origins.get(name, DEFAULT)
        # The masks that were built shape a run, wherever they lie.
        shapes = key != "cache"
        found.append(Setting(key=name, value=value, default=fallback, origin=origin, shapes=shapes))
    return found


def _origins(
    document: Mapping[str, Any], overrides: Sequence[str], given: int
) -> Mapping[str, str]:
    origins = {
        f"{section}.{key}": RUN_FILE
        for section, table in document.items()
        if isinstance(table, Mapping)
        for key in table
    }
    for number, override in enumerate(overrides):
        # A table's own keys may be set one by one.
        name = ".".join(override.partition("=")[0].strip().split(".")[:2])
        origins[name] = SET if number < given else OPTION
    return origins


def entries_of(config: Config) -> list[dict[str, Any]]:
    """The masks that ``[masks]`` asks for, by the names that the cache has them under.

    Raises:
        MaskSpecError: ``[masks]`` is wrong.
    """
    if not config.masks.get("entry"):
        return []
    specs = read_specs({"masks": config.masks})
    return [
        {"name": spec.name, **spec.to_json(), "Q_LEN": spec.Q_LEN, "KV_LEN": spec.KV_LEN}
        for spec in specs
    ]


def settings_text(settings: Sequence[Setting], entries: Sequence[Mapping[str, Any]]) -> str:
    """A table for people: a line for each key, then one for each mask."""
    rows = [(s.key, _shown(s.value), *_rest(s)) for s in settings]
    table = text_table(("key", "value", "default", "from", "must be"), rows)
    columns = ("name", "family", "kind", "Q_LEN", "KV_LEN")
    masks = text_table(columns, [[str(entry[key]) for key in columns] for entry in entries])
    none = "no masks: there is no [[masks.entry]]"
    return without_secrets_in(f"{table}\n\n{masks if entries else none}")


def settings_json(settings: Sequence[Setting], entries: Sequence[Mapping[str, Any]]) -> str:
    """The same as JSON: ``settings``, a list of keys, and ``masks``, a list of entries."""
    found = {"settings": [asdict(item) for item in settings], "masks": list(entries)}
    return without_secrets_in(json.dumps(found, default=str))


def _rest(item: Setting) -> tuple[str, str, str]:
    default = "" if item.origin == DEFAULT else _shown(item.default)
    return default, item.origin, item.rule


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."
