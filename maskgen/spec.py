"""The ``[masks]`` section of a run file -> the list of masks to build, each with a digest.

::

    [masks]
    cache = "build/masks.zarr"      # a folder; the default
    BLOCK_SIZE = 128                # int or [Q, KV]; an entry may have its own

    [[masks.entry]]
    name = "causal"                 # entries causal/q1024-kv1024 and causal/q4096-kv8192
    family = "causal"               # or mask_mod = "module:function", with optional B and H
    Q_LEN = [1024, 4096]
    KV_LEN = [1024, 8192]           # left out: as Q_LEN
    offset = 0                      # any other key is a parameter of the family

    [[masks.entry]]
    name = "dflash"                 # entries dflash/ctx128 and dflash/ctx256
    family = "dflash"
    kind = "layouts"                # static (the default), layouts or parametric
    context = [128, 256]            # KV_LEN = context + Q_LEN
    anchors = 32                    # Q_LEN = anchors * draft_block_size
    draft_block_size = 4
    draws = 8                       # layouts for each pair of answer start and end
    answer_starts = [0, 64]         # left out: 0, 1/8, 1/4 and 1/2 of the context
    answer_ends = [96, 128]         # left out: 5/8, 3/4, 7/8 and all of the context
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cache
from maskgen.checks import check_known, checked_block_size, checked_int, checked_ints, nearest
from maskgen.errors import MaskSpecError
from maskgen.runfile import masks_section
from maskgen.windows import (
    Window,
    answer_windows,
    default_answer_ends,
    default_answer_starts,
)

if TYPE_CHECKING:
    from maskgen.families.family import Family

KINDS = ("static", "layouts", "parametric")
DEFAULT_BLOCK_SIZE = 128
DEFAULT_DRAWS = 8
MASK_MOD_REVISION = 1
"""Revision in the specs of ``module:function`` entries."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_SIZE_KEYS = ("name", "family", "mask_mod", "kind", "BLOCK_SIZE", "Q_LEN", "KV_LEN")
_LAYOUT_KEYS = ("draws", "answer_starts", "answer_ends")
_JSON_KEYS = ("BLOCK_SIZE", "KV_LEN", "Q_LEN", "family", "kind", "params", "revision")


@dataclass(frozen=True, kw_only=True)
class MaskSpec:
    """Everything that decides the contents of one entry."""

    name: str
    """Entry name in the cache; not part of the digest."""
    family: str
    """A name in ``maskgen.families``, or ``module:function`` of a FlexAttention mask_mod."""
    kind: str
    """``static``, ``layouts`` or ``parametric``."""
    Q_LEN: int
    """Query rows, in tokens."""
    KV_LEN: int
    """KV columns, in tokens."""
    BLOCK_SIZE: tuple[int, int]
    """Tile sizes (Q, KV), in tokens."""
    params: Mapping[str, Any]
    """Parameters, defaults filled in; of layouts also ``draws``, ``answer_starts`` and
    ``answer_ends``."""
    revision: int
    """The family's revision when the spec was read."""

    @property
    def is_function(self) -> bool:
        """Whether the mask comes from Python code that only this machine may have."""
        return ":" in self.family

    @property
    def family_params(self) -> dict[str, Any]:
        """The parameters that the family itself takes."""
        return {key: value for key, value in self.params.items() if key not in _LAYOUT_KEYS}

    @property
    def windows(self) -> list[Window]:
        """Where the anchors of layouts may fall; none for the other kinds."""
        if self.kind != "layouts":
            return []
        return answer_windows(self.params["answer_starts"], self.params["answer_ends"])

    @property
    def num_layouts(self) -> int:
        """Layouts in the entry: draws for each window; 1 for the other kinds."""
        if self.kind != "layouts":
            return 1
        return int(self.params["draws"]) * len(self.windows)

    def to_json(self) -> dict[str, Any]:
        """Return the spec as the cache keeps it: all fields but the name."""
        return {
            "BLOCK_SIZE": list(self.BLOCK_SIZE),
            "KV_LEN": self.KV_LEN,
            "Q_LEN": self.Q_LEN,
            "family": self.family,
            "kind": self.kind,
            "params": dict(self.params),
            "revision": self.revision,
        }

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON, 64 hex digits: keys draws and sampled checks."""
        return cache.sha256_hex(cache.canonical_json(self.to_json()))

    @classmethod
    def from_json(cls, name: str, record: Mapping[str, Any]) -> "MaskSpec":
        """Read back what ``to_json`` gave; the record may come from an untrusted cache.

        Raises:
            MaskSpecError: A field is missing, unknown, or of another type or range.
        """
        try:
            return cls._from_json(name, record)
        except MaskSpecError as error:
            rule = f"{error.rule}; another maskgen wrote it: build it again"
            raise MaskSpecError(error.field, error.value, rule) from error

    @classmethod
    def _from_json(cls, name: str, record: Mapping[str, Any]) -> "MaskSpec":
        where = f"spec of {name!r}"
        if sorted(record) != list(_JSON_KEYS):
            raise MaskSpecError(where, sorted(record), f"must have the fields {list(_JSON_KEYS)}")
        kind, family, params = record["kind"], record["family"], record["params"]
        if kind not in KINDS:
            raise MaskSpecError(f"{where}: kind", kind, f"must be one of {', '.join(KINDS)}")
        if not isinstance(family, str) or not isinstance(params, Mapping):
            raise MaskSpecError(where, [family, params], "family is a string, params is an object")
        if kind == "layouts":
            checked_int(f"{where}: draws", params.get("draws"))
            lists = {
                key: checked_ints(f"{where}: {key}", params.get(key), minimum=0)
                for key in ("answer_starts", "answer_ends")
            }
            params = {**params, **lists}
        return cls(
            name=name,
            family=family,
            kind=kind,
            Q_LEN=checked_int(f"{where}: Q_LEN", record["Q_LEN"]),
            KV_LEN=checked_int(f"{where}: KV_LEN", record["KV_LEN"]),
            BLOCK_SIZE=checked_block_size(f"{where}: BLOCK_SIZE", record["BLOCK_SIZE"]),
            params=params,
            revision=checked_int(f"{where}: revision", record["revision"], minimum=0),
        )


def context_name(name: str, context: int) -> str:
    """Return the entry name of a context bucket, ``dflash/ctx2048``."""
    return f"{name}/ctx{context}"


def size_name(name: str, Q_LEN: int, KV_LEN: int) -> str:
    """Return the entry name of a static size, ``causal/q1024-kv1024``."""
    return f"{name}/q{Q_LEN}-kv{KV_LEN}"


def read_specs(source: str | Path | Mapping[str, Any]) -> list[MaskSpec]:
    """Read the masks of a run file, in its order; lists of sizes give one spec each.

    Args:
        source: A TOML file, or the whole parsed document.

    Raises:
        MaskSpecError: The file cannot be read; a key, family or kind is unknown (the nearest valid
            name is given); a value breaks its rule; two entries have one name.
    """
    section = masks_section(source)
    default_block = section.get("BLOCK_SIZE", DEFAULT_BLOCK_SIZE)
    entries = section.get("entry", [])
    if not isinstance(entries, list) or not entries:
        raise MaskSpecError("masks.entry", entries, "must hold at least one [[masks.entry]] table")
    specs: dict[str, MaskSpec] = {}
    for index, table in enumerate(entries):
        if not isinstance(table, dict):
            raise MaskSpecError(f"masks.entry[{index}]", table, "must be a table")
        for spec in _entry_specs(f"masks.entry[{index}]", table, default_block):
            if spec.name in specs:
                raise MaskSpecError("name", spec.name, "must be given to one entry only")
            specs[spec.name] = spec
    return list(specs.values())


def _entry_specs(where: str, table: Mapping[str, Any], default_block: Any) -> Iterable[MaskSpec]:
    name = table.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise MaskSpecError(
            f"{where}.name", name, "must be letters, digits, '.', '_', '-', parted by '/'"
        )
    where = f"masks.entry {name!r}"
    block_size = checked_block_size(f"{where}: BLOCK_SIZE", table.get("BLOCK_SIZE", default_block))
    if ("family" in table) == ("mask_mod" in table):
        raise MaskSpecError(where, sorted(table), "must have one of family and mask_mod")
    if "mask_mod" in table:
        yield from _function_specs(where, name, table, block_size)
        return
    family = _family(where, table["family"])
    kind = _kind(where, table.get("kind", "static"), family)
    takes_context = kind != "static" and _has_context(family)
    param_names = [param.name for param in family.params]
    if kind == "static":
        # Here the mask of one batch is meant, so what a batch says is part of the spec.
        param_names += family.runtime_params
    known = [*_SIZE_KEYS, *param_names]
    if takes_context:
        known += ["context", "anchors"]
    if kind == "layouts":
        known += _LAYOUT_KEYS
    check_known(where, table, known)
    given = {key: table[key] for key in param_names if key in table}
    for Q_LEN, KV_LEN in _sizes(where, table, takes_context):
        params = _family_params(where, family, kind, Q_LEN, KV_LEN, given)
        entry_name = size_name(name, Q_LEN, KV_LEN)
        if takes_context:
            entry_name = context_name(name, KV_LEN - Q_LEN)
        if kind == "layouts":
            params = {**params, **_layout_params(where, table, KV_LEN - Q_LEN)}
        yield MaskSpec(
            name=entry_name,
            family=family.name,
            kind=kind,
            Q_LEN=Q_LEN,
            KV_LEN=KV_LEN,
            BLOCK_SIZE=block_size,
            params=params,
            revision=family.revision,
        )


def _function_specs(
    where: str, name: str, table: Mapping[str, Any], block_size: tuple[int, int]
) -> Iterable[MaskSpec]:
    check_known(where, table, ("B", "H", *_SIZE_KEYS))
    function = table["mask_mod"]
    if not isinstance(function, str) or not _FUNCTION.fullmatch(function):
        raise MaskSpecError(f"{where}: mask_mod", function, "must read package.module:function")
    if table.get("kind", "static") != "static":
        raise MaskSpecError(f"{where}: kind", table["kind"], "of a mask_mod must be static")
    params = {key: checked_int(f"{where}: {key}", table[key]) for key in "BH" if key in table}
    for Q_LEN, KV_LEN in _sizes(where, table, takes_context=False):
        yield MaskSpec(
            name=size_name(name, Q_LEN, KV_LEN),
            family=function,
            kind="static",
            Q_LEN=Q_LEN,
            KV_LEN=KV_LEN,
            BLOCK_SIZE=block_size,
            params=params,
            revision=MASK_MOD_REVISION,
        )


def _sizes(where: str, table: Mapping[str, Any], takes_context: bool) -> Sequence[tuple[int, int]]:
    if takes_context and "context" in table:
        for key in ("Q_LEN", "KV_LEN"):
            if key in table:
                rule = "follows from context, anchors and draft_block_size; leave it out"
                raise MaskSpecError(f"{where}: {key}", table[key], rule)
        anchors = checked_int(f"{where}: anchors", table.get("anchors"))
        draft = checked_int(f"{where}: draft_block_size", table.get("draft_block_size"))
        Q_LEN = anchors * draft
        contexts = checked_ints(f"{where}: context", table["context"], minimum=1)
        return [(Q_LEN, context + Q_LEN) for context in contexts]
    if takes_context and "anchors" in table:
        rule = "belongs to context; Q_LEN and draft_block_size say how many there are"
        raise MaskSpecError(f"{where}: anchors", table["anchors"], rule)
    q_lens = checked_ints(f"{where}: Q_LEN", table.get("Q_LEN"), minimum=1)
    kv_lens = checked_ints(f"{where}: KV_LEN", table.get("KV_LEN", q_lens), minimum=1)
    if len(kv_lens) != len(q_lens):
        raise MaskSpecError(
            f"{where}: KV_LEN", kv_lens, f"must have one length for each Q_LEN ({len(q_lens)})"
        )
    return list(zip(q_lens, kv_lens, strict=True))


def _family_params(
    where: str, family: "Family", kind: str, Q_LEN: int, KV_LEN: int, given: Mapping[str, Any]
) -> dict[str, Any]:
    try:
        checked = family.check(Q_LEN, KV_LEN, given)
    except MaskSpecError as error:
        raise MaskSpecError(f"{where}: {error.field}", error.value, error.rule) from error
    missing = [param for param in family.runtime if param.required and param.name not in checked]
    if kind == "static" and missing:
        raise MaskSpecError(
            f"{where}: {missing[0].name}",
            None,
            f"is required by a static entry of family {family.name} ({missing[0].doc}); "
            "kind = 'parametric' leaves it to the batch",
        )
    # A spec is JSON: what a batch says stays as it was written.
    return {key: given[key] if key in family.runtime_params else checked[key] for key in checked}


def _layout_params(where: str, table: Mapping[str, Any], context: int) -> dict[str, Any]:
    given = table.get("answer_starts", default_answer_starts(context))
    starts = checked_ints(f"{where}: answer_starts", given, minimum=0)
    if max(starts) > context - 2:
        # An anchor needs a later supervised token, so the last position is no candidate.
        raise MaskSpecError(
            f"{where}: answer_starts", starts, f"must be at most context - 2 = {context - 2}"
        )
    given = table.get("answer_ends", default_answer_ends(context))
    ends = checked_ints(f"{where}: answer_ends", given, minimum=1)
    if max(ends) > context:
        raise MaskSpecError(f"{where}: answer_ends", ends, f"must be at most context = {context}")
    if not answer_windows(starts, ends):
        rule = f"one end at least must be 2 past a start, and the starts are {starts}"
        raise MaskSpecError(f"{where}: answer_ends", ends, rule)
    draws = checked_int(f"{where}: draws", table.get("draws", DEFAULT_DRAWS))
    return {"draws": draws, "answer_starts": starts, "answer_ends": ends}


def _family(where: str, name: Any) -> "Family":
    # torch loads with the families; what only lists a cache does without.
    from maskgen.families import families

    if not isinstance(name, str) or name not in families:
        raise MaskSpecError(f"{where}: family", name, nearest(str(name), families))
    return families[name]


def _has_context(family: "Family") -> bool:
    """Whether the rows are draft blocks at anchors in a context, so that KV = context + Q."""
    # P-EAGLE has anchors too, but its rows are the tokens themselves.
    names = {param.name for param in family.params} | set(family.runtime_params)
    return {"anchors", "draft_block_size"} <= names


def _kind(where: str, kind: Any, family: "Family") -> str:
    if kind not in KINDS:
        raise MaskSpecError(f"{where}: kind", kind, nearest(str(kind), KINDS))
    if kind == "layouts" and not _has_context(family):
        raise MaskSpecError(
            f"{where}: kind", kind, f"is for draft blocks after a context; {family.name} has none"
        )
    if kind == "parametric" and not family.runtime_params:
        raise MaskSpecError(
            f"{where}: kind", kind, f"is for masks that depend on the batch; {family.name} does not"
        )
    return str(kind)
