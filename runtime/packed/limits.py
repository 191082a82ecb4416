"""What packed fine-tuning cannot do yet, of what a run file may ask; see ``training.limits``."""

from collections.abc import Collection

from runtime.training.limits import (
    COMMON,
    Limit,
    Request,
    beyond_positions,
    check_limits,
    unusable_target,
)

STEP = "the training step"
MODEL = "the model"


def _unlike_entries(request: Request) -> str | None:
    for spec in request.specs.values():
        inner = spec.family_params.get("inner", "causal")
        if (spec.family, spec.kind, inner) != ("document", "parametric", "causal"):
            return f"{spec.name}: {spec.family}, {spec.kind}, {inner}"
        if spec.Q_LEN != spec.KV_LEN:
            return f"{spec.name}: {spec.Q_LEN} rows, {spec.KV_LEN} keys"
    return None


def _targets(request: Request) -> str | None:
    return request.config.run.target_devices or None


LIMITS: tuple[Limit, ...] = (
    Limit(
        field="train.masks",
        parts=(STEP,),
        found=_unlike_entries,
        rule="it must name entries of family document, of kind parametric, as wide as long, with "
        "inner = 'causal'",
    ),
    *COMMON,
    Limit(
        field="run.target_devices",
        parts=(STEP,),
        found=_targets,
        rule="it must be empty: the model itself is trained",
    ),
    Limit(
        field="target.model",
        parts=(MODEL,),
        found=unusable_target,
        rule="choose a causal LM from docs/targets.md",
    ),
    Limit(
        field="masks.entry.Q_LEN",
        parts=(MODEL,),
        found=beyond_positions,
        rule="set row lengths that the model's positions reach",
    ),
)


def check_request(request: Request, parts: Collection[str] | None = None) -> None:
    """Refuse what cannot be done.

    Raises:
        ConfigError: One of ``LIMITS`` applies, the first one.
    """
    check_limits(LIMITS, request, parts)
