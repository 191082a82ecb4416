"""Data of a drafter's run: samples, and the target's features of them."""

from functools import partial

import torch

from maskgen.progress import say
from runtime.data.preparation import Preparation
from runtime.dflash.capabilities import Request, check_request
from runtime.dflash.folder.embedding import fed_scale
from runtime.dflash.folder.files import same_target
from runtime.dflash.folder.saved_drafter import load_published
from runtime.dflash.loss.teacher import check_teacher
from runtime.dflash.network.config import DrafterConfig
from runtime.dflash.settings import DFlashConfig
from runtime.dflash.start.beginning import Beginning, check_run, find_beginning
from runtime.dflash.step.buckets import run_specs
from runtime.dflash.targets import fit_drafter
from runtime.errors import ConfigError
from runtime.ranks.devices import Placement, multiplies_in_bfloat16, place
from runtime.target.model import Target
from runtime.target.outline import spread_layer_ids

PROBES = 64
"""Tokens that a teacher is tried on, spread over the vocabulary: there are no samples yet."""


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
    beginning = find_beginning(config)
    number, layer_ids = config.target.num_features, None
    if beginning is not None:
        network = check_run(beginning, config, request.specs)
        number, layer_ids = len(network.target_layer_ids), _unusual(network)
    return Preparation(
        config=config,
        placement=placement,
        context=max(request.specs),
        num_features=number,
        layer_ids=layer_ids,
        stores=stores,
        fit=partial(_fit, request, beginning),
        check=partial(_check, config=config, beginning=beginning),
        last_hidden=config.train.has_teacher,
        features_dtype=_features_dtype(config.data.features_dtype, placement) if stores else None,
    )


def _unusual(network: DrafterConfig) -> tuple[int, ...] | None:
    """The layers that a drafter reads, where the rule would spread them otherwise."""
    layer_ids = network.target_layer_ids
    try:
        usual = spread_layer_ids(network.num_target_layers, len(layer_ids))
    except ConfigError:
        return layer_ids
    return None if layer_ids == usual else layer_ids


def _fit(request: Request, beginning: Beginning | None) -> None:
    fit_drafter(request)
    if beginning is not None and beginning.is_there:
        # Read for its checks alone: weights that cannot be trained on are refused here, too.
        load_published(beginning.folder)


def _check(target: Target, *, config: DFlashConfig, beginning: Beginning | None) -> None:
    if beginning is None:
        fed_scale(target, config.drafter.embedding)
    else:
        same_target(beginning.folder, target, say)
    if config.train.has_teacher:
        step = max(1, target.vocab_size // PROBES)
        check_teacher(target, torch.arange(0, target.vocab_size, step, device="cpu")[None])


def _features_dtype(asked: str, placement: Placement) -> torch.dtype | None:
    fast = asked == "bfloat16" and multiplies_in_bfloat16(placement.devices[0])
    return torch.bfloat16 if fast and placement.compute_dtype != torch.bfloat16 else None


def _stores(features: str, placement: Placement) -> bool:
    return placement.kind == "cpu" if features == "auto" else features == "stored"
