"""What a run may ask of a drafter that a part of the product cannot do yet; see ``limits``."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from maskgen.families import families
from runtime.dflash.network.config import DrafterConfig
from runtime.dflash.settings import DFlashConfig
from runtime.dflash.start.likeness import unlike
from runtime.training import limits
from runtime.training.limits import COMMON, Limit, beyond_positions, check_limits, unusable_target

STEP = "the training step"
DECODING = "decoding"
EXPORT = "export"
HAND_OVER = "handing features over"
SCORING = "scoring held-out text with features of another device"
HIDDEN_STATES = "reading hidden states"
DISTILLING = "distilling from the target"
STARTING = "starting from the target's layers"

KIND_OF_ANCHORS = {"layouts": "layouts", "data": "parametric"}
"""Kind of the mask entries by ``train.anchors``."""
DRAFTED: Mapping[str, tuple[Any, ...]] = {"in_block": ("default", "bidirectional")}
"""Values of a mask parameter that decoding and export follow, where its default is not the only
one. All else that an entry may say is refused, so a new parameter is, too."""
FREE = ("draft_block_size", "convention")
"""Mask parameters of which every value is followed; a convention is of sliding layers alone."""


@dataclass(frozen=True, kw_only=True)
class Request(limits.Request):
    """What a command is asked to do with a drafter."""

    config: DFlashConfig
    features: str | None = None
    """``stored`` or ``online``, as the data hold them or will hold them."""
    network: DrafterConfig | None = None
    """The drafter's."""


def check_request(request: Request, parts: Collection[str] | None = None) -> None:
    """Refuse what cannot be done.

    Args:
        request: What is asked for.
        parts: The parts that the command uses; all of them where left out.

    Raises:
        ConfigError: One of ``LIMITS`` applies, the first one.
    """
    check_limits(LIMITS, request, parts)


def _unlike_kind(request: Request) -> str | None:
    """An entry of another family or kind than the run's steps take."""
    kind = KIND_OF_ANCHORS[request.config.train.anchors]
    for spec in request.specs.values():
        if (spec.family, spec.kind) != ("dflash", kind):
            return f"{spec.name}: {spec.family}, {spec.kind}"
    return None


def _draft_block_size(request: Request) -> int | None:
    sizes = (int(spec.params.get("draft_block_size", 2)) for spec in request.specs.values())
    return next((size for size in sizes if size < 2), None)


def _parameter(name: str, default: Any) -> Callable[[Request], Any]:
    followed = DRAFTED.get(name, (default,))

    def found(request: Request) -> Any:
        values = (spec.params.get(name, default) for spec in request.specs.values())
        return next((value for value in values if value not in followed), None)

    return found


def _unlike_entries(request: Request) -> dict[str, Any] | None:
    """What the entries of a run say differently: a drafter learns one mask in every bucket."""
    specs = list(request.specs.values())
    for spec in specs[1:]:
        ours, theirs = specs[0].family_params, spec.family_params
        for name in ours | theirs:
            if ours.get(name) != theirs.get(name):
                return {name: [ours.get(name), theirs.get(name)]}
    return None


def _idle_targets(request: Request) -> str | None:
    return (request.features == "stored" and request.config.run.target_devices) or None


def _scored_from_afar(request: Request) -> int | None:
    return (request.config.run.target_devices and request.config.evaluate.every) or None


def _no_final_norm(request: Request) -> str | None:
    distill, outline = request.config.train.distill, request.outline
    lacks = outline is not None and outline.final_norm is None
    return distill if lacks and request.config.train.has_teacher else None


def _whole_softmax(request: Request) -> str | None:
    train = request.config.train
    return train.softmax if train.has_teacher and train.softmax != "all" else None


def _many_layers(request: Request) -> int | None:
    wanted, outline = request.config.drafter, request.outline
    too_many = outline is not None and wanted.num_layers > outline.num_layers
    return wanted.num_layers if too_many and wanted.init == "target" else None


def _unlike_target(request: Request) -> str | None:
    if request.config.drafter.init != "target" or not (request.outline and request.network):
        return None
    reason = unlike(request.outline, request.network)
    return f"target ({reason})" if reason else None


LIMITS: tuple[Limit, ...] = (
    Limit(
        field="train.masks",
        parts=(STEP,),
        found=_unlike_kind,
        rule="it must name entries of family dflash, of kind layouts where train.anchors = "
        "'layouts' and parametric where it is 'data'",
    ),
    Limit(
        field="masks.entry.draft_block_size",
        parts=(STEP, DECODING),
        found=_draft_block_size,
        rule="it must be at least 2, since slot 0 is a token that is known",
    ),
    *(
        Limit(
            field=f"masks.entry.{param.name}",
            parts=(DECODING, EXPORT),
            found=_parameter(param.name, param.default),
            rule=f"leave it out, or set {param.name} to one of "
            f"{', '.join(map(str, DRAFTED.get(param.name, (param.default,))))}; sliding layers "
            "have entries beside these, see drafter.layers",
        )
        for param in families["dflash"].params
        if param.name not in FREE
    ),
    Limit(
        field="train.masks",
        parts=(STEP, EXPORT),
        found=_unlike_entries,
        rule="all entries of a run must agree, since they train one drafter",
    ),
    *COMMON,
    Limit(
        field="run.target_devices",
        parts=(HAND_OVER,),
        found=_idle_targets,
        rule="it must be empty where features are stored beside the samples; or prepare the data "
        'with data.features = "online"',
    ),
    Limit(
        field="evaluate.every",
        parts=(SCORING,),
        found=_scored_from_afar,
        rule="it must be 0 where run.target_devices names devices",
    ),
    Limit(
        field="target.model",
        parts=(HIDDEN_STATES, DECODING),
        found=unusable_target,
        rule="choose a target from docs/targets.md",
    ),
    Limit(
        field="masks.entry.context",
        parts=(HIDDEN_STATES,),
        found=beyond_positions,
        rule="set contexts that the target's positions reach",
    ),
    Limit(
        field="train.distill",
        parts=(DISTILLING,),
        found=_no_final_norm,
        rule="it must be 'none' for a target without a norm between its last layer and its head",
    ),
    Limit(
        field="train.softmax",
        parts=(STEP,),
        found=_whole_softmax,
        rule="it must be 'all' with train.distill",
    ),
    Limit(
        field="drafter.num_layers",
        parts=(STARTING,),
        found=_many_layers,
        rule='have no more layers than the target, or set drafter.init = "random"',
    ),
    Limit(
        field="drafter.init",
        parts=(STARTING,),
        found=_unlike_target,
        rule='set drafter.init = "random"',
    ),
)
"""The table. Rows on the run file come first: they need no target and no device."""
