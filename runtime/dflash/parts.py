"""What a drafter's run puts on a device, by the target's config alone."""

from runtime.data.dataset import Dataset
from runtime.dflash.capabilities import Request
from runtime.dflash.network.drafter import Drafter
from runtime.dflash.settings import DFlashConfig
from runtime.dflash.step.buckets import run_specs
from runtime.dflash.targets import fit_drafter
from runtime.ranks.devices import Placement
from runtime.target.model import outline_target
from runtime.training.parts import Parts


def drafter_parts(config: DFlashConfig, placement: Placement, dataset: Dataset | None) -> Parts:
    """The drafter that fits the target, and what of the target stays beside it.

    Args:
        config: The run file.
        placement: Devices that train.
        dataset: Says whether features are stored; without it the run file does.

    Raises:
        ConfigError: The target cannot do what is asked.
        TargetNotFoundError: There is none.
    """
    ranks = len(placement.devices)
    request = Request(config=config, specs=run_specs(config), placement=placement, ranks=ranks)
    network = fit_drafter(request)
    outline = outline_target(config.target.model)
    ends = {"embedding": outline.embed_weight.numel()}
    if outline.head_weight is not outline.embed_weight:
        ends["head"] = outline.head_weight.numel()
    whole = {"target": sum(parameter.numel() for parameter in outline.model.parameters())}
    apart = bool(config.run.target_devices)
    stored = _stored(config, placement) if dataset is None else dataset.has_features
    return Parts(
        trained=Drafter(network, device="meta"),
        frozen=ends if stored or apart else whole,
        apart=whole if apart else {},
        compiled=("a layer of the drafter", "the loss"),
    )


def _stored(config: DFlashConfig, placement: Placement) -> bool:
    asked = config.data.features
    return asked == "stored" or (asked == "auto" and placement.kind == "cpu")
