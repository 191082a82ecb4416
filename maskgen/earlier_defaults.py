"""Masks of layouts as an earlier release built them, where their parameters were left out.

A mask is known by its values, not by what its entry leaves out, so the defaults of an earlier
release are asked for by writing them into the entry.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from maskgen.mask_spec import MaskSpec
from maskgen.named_family import find_family


def earlier_defaults(spec: MaskSpec) -> Mapping[str, Any]:
    """The parameters that a spec has by today's defaults, with an earlier release's.

    Returns:
        Name -> value; empty where one of them is not today's default, or none changed.
    """
    family = find_family(spec.family) if spec.kind == "layouts" else None
    layouts = None if family is None else family.layouts
    if layouts is None or layouts.earlier_fn is None:
        return {}
    earlier = layouts.earlier_fn(spec.Q_LEN, spec.KV_LEN)
    given = {key: value for key, value in spec.params.items() if key not in earlier}
    today = layouts.check(spec.Q_LEN, spec.KV_LEN, given)
    return earlier if all(spec.params.get(key) == today[key] for key in earlier) else {}


def as_earlier(spec: MaskSpec) -> MaskSpec:
    """The spec that an earlier release read where these parameters were left out."""
    return replace(spec, params={**spec.params, **earlier_defaults(spec)})
