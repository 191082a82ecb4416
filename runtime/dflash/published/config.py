"""What a drafter's ``config.json`` says about its network, key by key and type by type."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from runtime.dflash.published.keys import (
    DSPARKS,
    EQUAL,
    FIXED,
    FIXED_OF_DSPARK,
    IGNORED,
    INNER,
    INNER_OF_DSPARK,
    READ,
    READ_OF_DSPARK,
    SIZES,
    WAY,
)
from runtime.dflash.published.values import (
    is_bool,
    is_int,
    is_ints,
    is_number,
    missing,
    same,
    shown,
    take,
    wrong_type,
)
from runtime.errors import CheckpointError

ELSEWHERE = "serve that drafter with a program that builds its network"
KINDS: Mapping[str, str] = {"full_attention": "full", "sliding_attention": "sliding"}
"""The kinds of layers, by their names in ``layer_types``."""


def network_settings(published: Mapping[str, Any]) -> dict[str, Any]:
    """What a ``config.json`` says about the network, as the fields of ``DrafterConfig``.

    Raises:
        CheckpointError: A key is missing, unknown or of a wrong type, is there twice with two
            values, or says what the network here does not do.
    """
    is_dspark = published.get("architectures") in [[name] for name in DSPARKS]
    flat, places = _flatten(published, (INNER, INNER_OF_DSPARK) if is_dspark else (INNER,))
    read = READ | READ_OF_DSPARK if is_dspark else READ
    fixed = {key: allowed for key, allowed in FIXED.items() if key not in read}
    if is_dspark:
        fixed |= FIXED_OF_DSPARK
    for key, value in flat.items():
        _check_known(key, value, places[key], fixed, read)
    ints = {name: take(flat, name, is_int, "an integer") for name in SIZES}
    _check_equal(flat, ints, places)
    layers = _layers(flat, ints["num_hidden_layers"], places)
    mask_token_id = take(flat, "mask_token_id", is_int, "an integer")
    layer_ids = take(flat, "target_layer_ids", is_ints, "a list of integers")
    shifted = flat.get("eagle_aux_hidden_state_layer_ids")
    if shifted is not None and shifted != [layer + 1 for layer in layer_ids]:
        raise CheckpointError(
            f"eagle_aux_hidden_state_layer_ids = {shifted!r}: must be target_layer_ids + 1, "
            f"{[layer + 1 for layer in layer_ids]}"
        )
    theta, scaling = _rope(flat)
    return {
        **ints,
        "draft_block_size": take(flat, "block_size", is_int, "an integer", 16),
        "mask_token_id": mask_token_id,
        "target_layer_ids": tuple(layer_ids),
        "embedding_scale": take(flat, "input_embedding_scale", is_number, "a finite number", 1.0),
        "rms_norm_eps": take(flat, "rms_norm_eps", is_number, "a finite number"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        **layers,
        **(_heads(published, flat) if is_dspark else {}),
    }


def _heads(published: Mapping[str, Any], flat: Mapping[str, Any]) -> dict[str, Any]:
    """What a DSpark config says about its heads."""
    # Servers look for this key at the top level alone, and take a missing one for true.
    if published.get("sample_from_anchor") is None and flat.get("sample_from_anchor") not in (
        None,
        True,
    ):
        raise CheckpointError(
            f"sample_from_anchor = {shown(flat['sample_from_anchor'])} must stand at the top "
            "level, where servers look for it"
        )
    from_anchor = take(flat, "sample_from_anchor", is_bool, "true or false", True)
    rank = take(flat, "markov_rank", is_int, "an integer")
    if rank < 1:
        raise CheckpointError(f"markov_rank = {rank}: must be at least 1, as this is DSpark's")
    confident = take(flat, "enable_confidence_head", is_bool, "true or false", False)
    if confident and flat.get("confidence_head_with_markov") is not True:
        raise CheckpointError(
            f"confidence_head_with_markov = {shown(flat.get('confidence_head_with_markov'))}: "
            f"must be true, since here the confidence head reads the token before; {ELSEWHERE}"
        )
    return {
        "markov_rank": rank,
        "confidence_head": confident,
        "sample_from_anchor": from_anchor,
    }


def _flatten(
    published: Mapping[str, Any], groups: Sequence[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """All keys at one level, and where each stood."""
    flat = {key: value for key, value in published.items() if key not in groups}
    places = {key: key for key in flat}
    for group in groups:
        inner = published.get(group)
        if inner is not None and not isinstance(inner, Mapping):
            raise wrong_type(group, inner, "an object")
        for key, value in (inner or {}).items():
            # Null is the same as missing.
            if flat.get(key) is not None and value is not None and not same(flat[key], value):
                raise CheckpointError(
                    f"{places[key]} = {shown(flat[key])} and {group}.{key} = {shown(value)} "
                    "must be equal"
                )
            if flat.get(key) is None:
                flat[key], places[key] = value, f"{group}.{key}"
    return flat, places


def _check_known(
    key: str,
    value: Any,
    place: str,
    fixed: Mapping[str, tuple[tuple[Any, ...], str]] = FIXED,
    read: Collection[str] = READ,
) -> None:
    if key in fixed:
        allowed, meaning = fixed[key]
        if value is None or any(same(value, other) for other in allowed):
            return
        may = " or ".join([*map(shown, allowed), "missing"])
        raise CheckpointError(
            f"{place} = {shown(value)}: must be {may}, since here {meaning}; {ELSEWHERE}"
        )
    if key not in {*read, *IGNORED, *EQUAL}:
        raise CheckpointError(
            f"{place} = {shown(value)}: is no key that is known here, and may stand for another "
            f"network; remove it if it does not, else {ELSEWHERE}"
        )


def _check_equal(flat: Mapping[str, Any], ints: Mapping[str, int], places: Any) -> None:
    for key, other in EQUAL.items():
        if flat.get(key) is not None and not same(flat[key], ints[other]):
            raise CheckpointError(
                f"{places[key]} = {shown(flat[key])}: must be {other} = {ints[other]} or missing; "
                f"{ELSEWHERE}"
            )


def _layers(flat: Mapping[str, Any], number: int, places: Mapping[str, str]) -> dict[str, Any]:
    """``layers`` and ``sliding_window``, or nothing where no layer slides."""
    kinds = flat.get("layer_types")
    if kinds is None:
        # Then sliding layers follow from this one key.
        if flat.get("use_sliding_window") not in (None, False):
            raise CheckpointError(
                "use_sliding_window is set without layer_types: they must say which layers slide; "
                f"{ELSEWHERE}"
            )
        return {}
    if not isinstance(kinds, list) or not {*map(str, kinds)} <= KINDS.keys():
        raise CheckpointError(
            f"layer_types = {shown(kinds)}: every layer must be {' or '.join(KINDS)}; {ELSEWHERE}"
        )
    if len(kinds) != number:
        raise CheckpointError(
            f"layer_types names {len(kinds)} layers: must be num_hidden_layers = {number}"
        )
    layers = tuple(KINDS[kind] for kind in kinds)
    if "sliding" not in layers:
        return {}
    if flat.get("use_sliding_window") is False:
        raise CheckpointError(
            "use_sliding_window = false: must be true or missing, since layer_types names sliding "
            "layers"
        )
    for key in ("is_causal", "causal"):
        if flat.get(key) is not None:
            raise CheckpointError(
                f"{places[key]} = {shown(flat[key])}: must be missing, since servers take it for "
                f"all layers and here {WAY}; {ELSEWHERE}"
            )
    window = take(flat, "sliding_window", is_int, "an integer")
    other = flat.get("swa_window_size")
    if other is not None and not same(other, window):
        raise CheckpointError(
            f"{places['swa_window_size']} = {shown(other)}: must be sliding_window = {window} or "
            "missing, since servers read one or the other"
        )
    return {"layers": layers, "sliding_window": window}


def _rope(flat: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """``rope_theta`` and the scaling, from the two tables and the one key that may hold them."""
    found: dict[str, dict[str, Any] | None] = {}
    thetas: dict[str, Any] = {"rope_theta": flat.get("rope_theta")}
    for name in ("rope_parameters", "rope_scaling"):
        table = flat.get(name)
        if table:
            if not isinstance(table, Mapping):
                raise wrong_type(name, table, "an object")
            thetas[f"{name}.rope_theta"] = table.get("rope_theta")
            found[name] = _scaling(name, table)
    if len(found) == 2 and found["rope_parameters"] != found["rope_scaling"]:
        raise CheckpointError(
            f"rope_parameters = {found['rope_parameters']} and rope_scaling = "
            f"{found['rope_scaling']} must be equal"
        )
    thetas = {name: theta for name, theta in thetas.items() if theta is not None}
    for name, theta in thetas.items():
        if not is_number(theta):
            raise wrong_type(name, theta, "a finite number")
    if not thetas:
        raise missing("rope_theta")
    if len(set(thetas.values())) > 1:
        said = " and ".join(f"{name} = {theta}" for name, theta in thetas.items())
        raise CheckpointError(f"{said} must be equal")
    return float(next(iter(thetas.values()))), next(iter(found.values()), None)


def _scaling(name: str, table: Mapping[str, Any]) -> dict[str, Any] | None:
    scaling = {key: value for key, value in table.items() if key != "rope_theta"}
    _check_known("partial_rotary_factor", scaling.pop("partial_rotary_factor", None), name)
    kind = scaling.pop("type", "default")
    kind = scaling.pop("rope_type", kind)
    if table.get("type", kind) != kind:
        raise CheckpointError(
            f"{name}.rope_type = {shown(kind)} and {name}.type = {shown(table['type'])} must be "
            "equal"
        )
    if kind == "default":
        if scaling:
            raise CheckpointError(f"{name} = {shown(table)}: must have a rope_type for its keys")
        return None
    # Servers multiply yarn's own factor by the one, transformers takes the other instead of it.
    relative, factor = scaling.pop("attn_factor", None), scaling.get("factor")
    if relative is not None:
        if kind != "yarn" or not (is_number(relative) and is_number(factor)):
            raise wrong_type(f"{name}.attn_factor", relative, "a number, for yarn")
        own = yarn_factor(factor or 1.0)
        said = scaling.setdefault("attention_factor", relative * own)
        if not is_number(said) or not math.isclose(said, relative * own, rel_tol=1e-5):
            raise CheckpointError(
                f"{name}.attn_factor = {relative} and {name}.attention_factor = {said} must say "
                f"the same: attention_factor = attn_factor x {own:.6g}"
            )
    return {"rope_type": kind, **scaling}


def yarn_factor(factor: float) -> float:
    """The factor on cos and sin that yarn has of itself.

    Source: YaRN, arXiv 2309.00071, equation 22.
    """
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
