"""The ``[masks]`` section of a run file -> the list of masks to build, each with a digest.

::

    [masks]
    cache = "build/masks.zarr"      # a folder; the default
    BLOCK_SIZE = 128                # int or [Q, KV]; an entry may have its own

    [[masks.entry]]
    name = "causal"                 # entries causal/q1024-kv1024 and causal/q4096-kv8192
    family = "causal"               # or "module:function", which returns a Family of your own;
                                    # or mask_mod = "module:function", with optional B and H
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
    answer_starts = [0, 64]         # left out: sixteenths of the context
    answer_ends = [96, 128]         # left out: its sixteenths past the half

    [[masks.entry]]
    name = "dflash-sliding"         # another mask of the same draft blocks
    drawn_as = "dflash"             # the layouts of that entry; sizes and draws must be its own
    layer = "sliding"
    window = 2048
    # family, kind, context, anchors, draft_block_size, draws, ... as above
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maskgen.checks import (
    check_known,
    checked_block_size,
    checked_int,
    checked_ints,
    in_field,
    nearest,
)
from maskgen.errors import MaskSpecError
from maskgen.mask_spec import KINDS, MaskSpec, context_name, size_name
from maskgen.runfile import masks_section
from maskgen.shared_draws import with_shared_draws

if TYPE_CHECKING:
    from maskgen.families.after_context import AfterContext
    from maskgen.families.family import Family

DEFAULT_BLOCK_SIZE = 128
MASK_MOD_REVISION = 1
"""Revision in the specs of ``module:function`` entries."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_SIZE_KEYS = ("name", "family", "mask_mod", "kind", "BLOCK_SIZE", "Q_LEN", "KV_LEN")


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
    drawn_as: dict[str, Any] = {}
    for index, table in enumerate(entries):
        if not isinstance(table, dict):
            raise MaskSpecError(f"masks.entry[{index}]", table, "must be a table")
        for spec in _entry_specs(f"masks.entry[{index}]", table, default_block):
            if spec.name in specs:
                raise MaskSpecError("name", spec.name, "must be given to one entry only")
            specs[spec.name] = spec
            if "drawn_as" in table:
                drawn_as[spec.name] = table["drawn_as"]
    return with_shared_draws(specs, drawn_as)


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
    family = _load_family(where, table["family"])
    kind = _kind(where, table.get("kind", "static"), family)
    # Of a static entry the groups' positions are given, and their number with them.
    context_rule = family.after_context if kind != "static" else None
    param_names = [param.name for param in family.params]
    if kind == "static":
        # Here the mask of one batch is meant, so what a batch says is part of the spec.
        param_names += family.runtime_params
    known = [*_SIZE_KEYS, *param_names]
    if context_rule is not None:
        known += ["context", context_rule.count]
    layouts = family.layouts if kind == "layouts" else None
    if layouts is not None:
        known += [*layouts.param_names, "drawn_as"]
    check_known(where, table, known)
    given = {key: table[key] for key in param_names if key in table}
    for Q_LEN, KV_LEN in _sizes(where, table, context_rule):
        params = _family_params(where, family, kind, Q_LEN, KV_LEN, given)
        entry_name = size_name(name, Q_LEN, KV_LEN)
        if context_rule is not None:
            entry_name = context_name(name, KV_LEN - Q_LEN)
        if layouts is not None:
            with in_field(where):
                params |= layouts.check(Q_LEN, KV_LEN, table)
        yield MaskSpec(
            name=entry_name,
            family=table["family"],
            kind=kind,
            Q_LEN=Q_LEN,
            KV_LEN=KV_LEN,
            BLOCK_SIZE=block_size,
            params=params,
            revision=family.revision,
            own_family=":" in table["family"],
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
    for Q_LEN, KV_LEN in _sizes(where, table, None):
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


def _sizes(
    where: str, table: Mapping[str, Any], after: "AfterContext | None"
) -> Sequence[tuple[int, int]]:
    if after is not None and "context" in table:
        for key in ("Q_LEN", "KV_LEN"):
            if key in table:
                rule = f"follows from context, {after.count} and {after.size}; leave it out"
                raise MaskSpecError(f"{where}: {key}", table[key], rule)
        count = checked_int(f"{where}: {after.count}", table.get(after.count))
        size = checked_int(f"{where}: {after.size}", table.get(after.size))
        Q_LEN = count * size
        contexts = checked_ints(f"{where}: context", table["context"], minimum=1)
        return [(Q_LEN, context + Q_LEN) for context in contexts]
    if after is not None and after.count in table:
        rule = f"belongs to context; Q_LEN and {after.size} say how many there are"
        raise MaskSpecError(f"{where}: {after.count}", table[after.count], rule)
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
    with in_field(where):
        checked = family.check(Q_LEN, KV_LEN, given)
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


def _load_family(where: str, name: Any) -> "Family":
    # torch loads with the families; what only lists a cache does without.
    from maskgen.families import families
    from maskgen.named_family import is_path, load_family

    if not isinstance(name, str) or not (is_path(name) or name in families):
        raise MaskSpecError(f"{where}: family", name, nearest(str(name), families))
    if is_path(name) and not _FUNCTION.fullmatch(name):
        raise MaskSpecError(f"{where}: family", name, "must read package.module:function")
    with in_field(where):
        return load_family(name)


def _kind(where: str, kind: Any, family: "Family") -> str:
    if kind not in KINDS:
        raise MaskSpecError(f"{where}: kind", kind, nearest(str(kind), KINDS))
    if kind == "layouts" and family.layouts is None:
        raise MaskSpecError(
            f"{where}: kind", kind, f"is for families that draw layouts; {family.name} has none"
        )
    if kind == "parametric" and not family.runtime_params:
        raise MaskSpecError(
            f"{where}: kind", kind, f"is for masks that depend on the batch; {family.name} does not"
        )
    return str(kind)
