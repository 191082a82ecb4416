"""MaskSpec: everything that decides one mask, with the digest that names it on any machine."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cache
from maskgen.checks import checked_block_size, checked_int, in_field
from maskgen.errors import MaskSpecError

if TYPE_CHECKING:
    from maskgen.families.layouts import Layouts

KINDS = ("static", "layouts", "parametric")

_JSON_KEYS = ("BLOCK_SIZE", "KV_LEN", "Q_LEN", "family", "kind", "params", "revision")


@dataclass(frozen=True, kw_only=True)
class MaskSpec:
    """Everything that decides the contents of one entry."""

    name: str
    """Entry name in the cache; not part of the digest."""
    family: str
    """A name in ``maskgen.families``, or ``module:function`` of the user's own code."""
    kind: str
    """``static``, ``layouts`` or ``parametric``."""
    Q_LEN: int
    """Query rows, in tokens."""
    KV_LEN: int
    """KV columns, in tokens."""
    BLOCK_SIZE: tuple[int, int]
    """Tile sizes (Q, KV), in tokens."""
    params: Mapping[str, Any]
    """Parameters, defaults filled in; of layouts also those that the family's layouts take."""
    revision: int
    """The family's revision when the spec was read."""
    own_family: bool = False
    """Whether ``family`` is ``module:function`` of a family, and not of a mask_mod."""
    drawn_as: str | None = None
    """Of layouts that are those of another entry: the digest of its spec, 64 hex digits."""

    @property
    def is_code(self) -> bool:
        """Whether the mask comes from Python code that only this machine may have."""
        return ":" in self.family

    @property
    def is_function(self) -> bool:
        """Whether the mask is a FlexAttention mask_mod of the user's own."""
        return self.is_code and not self.own_family

    @property
    def family_params(self) -> dict[str, Any]:
        """The parameters that the family itself takes."""
        layouts = self._layouts()
        own = () if layouts is None else layouts.param_names
        return {key: value for key, value in self.params.items() if key not in own}

    @property
    def num_layouts(self) -> int:
        """Layouts in the entry; 1 for the other kinds.

        Raises:
            MaskSpecError: A parameter of the layouts breaks its rule, or the family has none.
        """
        if self.kind != "layouts":
            return 1
        layouts = self._layouts()
        if layouts is None:
            raise MaskSpecError(f"kind of {self.name!r}", self.kind, f"{self.family} has none here")
        with in_field(f"spec of {self.name!r}"):
            return layouts.count(layouts.check(self.Q_LEN, self.KV_LEN, self.params))

    def _layouts(self) -> "Layouts | None":
        if self.kind != "layouts":
            return None
        from maskgen.named_family import find_family

        family = find_family(self.family)
        return None if family is None else family.layouts

    def to_json(self) -> dict[str, Any]:
        """Return the spec as the cache keeps it: all fields but the name."""
        own = {"own_family": True} if self.own_family else {}
        drawn_as = {} if self.drawn_as is None else {"drawn_as": self.drawn_as}
        return {
            **own,
            **drawn_as,
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

    @property
    def draw_key(self) -> bytes:
        """What layouts are drawn by: the digest, or that of the entry whose layouts these are."""
        return bytes.fromhex(self.drawn_as or self.digest)

    @classmethod
    def from_json(cls, name: str, record: Mapping[str, Any]) -> "MaskSpec":
        """Read back what ``to_json`` returned; the record may come from an untrusted cache.

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
        own_family, drawn_as = record.get("own_family", False), record.get("drawn_as")
        optional = {"own_family": own_family, "drawn_as": drawn_as}
        if sorted(record) != sorted([*_JSON_KEYS, *(key for key in optional if optional[key])]):
            raise MaskSpecError(where, sorted(record), f"must have the fields {list(_JSON_KEYS)}")
        kind, family, params = record["kind"], record["family"], record["params"]
        if kind not in KINDS:
            raise MaskSpecError(f"{where}: kind", kind, f"must be one of {', '.join(KINDS)}")
        if not isinstance(family, str) or not isinstance(params, Mapping):
            raise MaskSpecError(where, [family, params], "family is a string, params is an object")
        if not isinstance(own_family, bool) or (own_family and ":" not in family):
            rule = "says that family is the module:function of one"
            raise MaskSpecError(f"{where}: own_family", own_family, rule)
        if drawn_as is not None and not (kind == "layouts" and _is_digest(drawn_as)):
            rule = "must be 64 hex digits, of layouts alone"
            raise MaskSpecError(f"{where}: drawn_as", drawn_as, rule)
        return cls(
            name=name,
            family=family,
            kind=kind,
            Q_LEN=checked_int(f"{where}: Q_LEN", record["Q_LEN"]),
            KV_LEN=checked_int(f"{where}: KV_LEN", record["KV_LEN"]),
            BLOCK_SIZE=checked_block_size(f"{where}: BLOCK_SIZE", record["BLOCK_SIZE"]),
            params=params,
            revision=checked_int(f"{where}: revision", record["revision"], minimum=0),
            own_family=own_family,
            drawn_as=drawn_as,
        )


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def context_name(name: str, context: int) -> str:
    """Return the entry name of a context bucket, ``dflash/ctx2048``."""
    return f"{name}/ctx{context}"


def size_name(name: str, Q_LEN: int, KV_LEN: int) -> str:
    """Return the entry name of a static size, ``causal/q1024-kv1024``."""
    return f"{name}/q{Q_LEN}-kv{KV_LEN}"
