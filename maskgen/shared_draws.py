"""Entries of layouts that are those of another entry: one draw, several masks over it.

The key of a draw is the digest of a spec, so two entries never draw alike by themselves. One that
says ``drawn_as`` takes the key of the other, which knows nothing of it and stays as it was built.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from maskgen.errors import MaskSpecError
from maskgen.mask_spec import MaskSpec


def with_shared_draws(specs: Mapping[str, MaskSpec], drawn_as: Mapping[str, Any]) -> list[MaskSpec]:
    """Return the specs in their order, those that are drawn as another with its digest.

    Args:
        specs: All entries of a run file by name.
        drawn_as: Of some of them the other entry's name, ``dflash`` for ``dflash/ctx128``.

    Raises:
        MaskSpecError: There is no such entry of layouts, it is drawn as another itself, or its
            sizes or draws are not the same.
    """
    return [
        replace(spec, drawn_as=_source(spec, drawn_as[name], specs, drawn_as).digest)
        if name in drawn_as
        else spec
        for name, spec in specs.items()
    ]


def _source(
    spec: MaskSpec, name: Any, specs: Mapping[str, MaskSpec], drawn_as: Mapping[str, Any]
) -> MaskSpec:
    where = f"masks.entry {spec.name.rpartition('/')[0]!r}: drawn_as"
    other = specs.get(f"{name}/{spec.name.rpartition('/')[2]}")
    if other is None or other.kind != "layouts" or other.name in drawn_as:
        rule = (
            f"must name an entry of kind 'layouts' that has {spec.name!r}'s size and draws its own"
        )
        raise MaskSpecError(where, name, rule)
    ours, theirs = _draw_of(spec), _draw_of(other)
    for key in theirs:
        if ours.get(key) != theirs[key]:
            rule = f"{key} must be the other's, {theirs[key]}, and is {ours.get(key)}"
            raise MaskSpecError(where, name, rule)
    return other


def _draw_of(spec: MaskSpec) -> dict[str, Any]:
    """What a draw depends on beside its key."""
    # torch loads with the families; what only lists a cache does without.
    from maskgen.named_family import get_family

    after = get_family(spec.family).after_context
    sizes = {"family": spec.family, "Q_LEN": spec.Q_LEN, "KV_LEN": spec.KV_LEN}
    size = {} if after is None else {after.size: spec.params[after.size]}
    own = {key: value for key, value in spec.params.items() if key not in spec.family_params}
    return {**sizes, **size, **own}
