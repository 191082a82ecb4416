"""Data of a drafter's run: samples, and the target's features of them."""

from functools import partial

from runtime.data.preparation import Preparation
from runtime.dflash.buckets import run_specs
from runtime.dflash.capabilities import Request, check_request
from runtime.dflash.embedding import fed_scale
from runtime.dflash.settings import DFlashConfig
from runtime.dflash.targets import fit_drafter
from runtime.ranks.devices import Placement, place


def preparation(config: DFlashConfig) -> Preparation:
    """What the samples of a run file are to be.

    Raises:
        ConfigError: A part of the product cannot do what is asked.
        MaskSpecError: ``[masks]`` is wrong.
    """
    devices = config.run.devices.split(",")
    # One device does all the work here, so it gets the cores that workers would share.
    placement = place(devices[0], dtype=config.target.dtype, threads=config.run.threads)
    stores = _stores(config.data.features, placement)
    request = Request(
        config=config,
        specs=run_specs(config),
        placement=placement,
        ranks=len(devices),
        features="stored" if stores else "online",
    )
    check_request(request)
    return Preparation(
        config=config,
        placement=placement,
        context=max(request.specs),
        num_features=config.target.num_features,
        stores=stores,
        fit=partial(fit_drafter, request),
        check=partial(fed_scale, embedding=config.drafter.embedding),
    )


def _stores(features: str, placement: Placement) -> bool:
    return placement.kind == "cpu" if features == "auto" else features == "stored"
