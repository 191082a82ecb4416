"""The target of a drafter's run: what fits it, and its frozen parts on every device."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from maskgen.progress import say
from runtime.data.dataset import Dataset
from runtime.dflash.capabilities import Request, check_request
from runtime.dflash.network.config import DrafterConfig
from runtime.dflash.start.beginning import check_run, check_target, find_beginning
from runtime.dflash.start.initialise import drafter_config, made_up
from runtime.ranks.devices import Placement
from runtime.target.frozen import FrozenTarget
from runtime.target.model import Target, outline_target
from runtime.training.target_worker import RemoteTarget


def fit_drafter(request: Request) -> DrafterConfig:
    """Refuse a target that cannot do what a run asks of it, before its weights are read.

    Args:
        request: What is asked for, as far as it is known without the target.

    Returns:
        The config of the drafter that fits the target, or of that which the run begins from;
        ``embedding_scale`` of the first is known with the weights only.

    Raises:
        ConfigError: The target cannot do it, or its sizes make no drafter.
        TargetNotFoundError: There is no such target, or a file of it is damaged.
    """
    config = request.config
    asked = replace(request, outline=outline_target(config.target.model))
    check_request(asked)
    assert asked.outline is not None, "it was read above"
    beginning = find_beginning(config)
    if beginning is not None:
        check_target(beginning, asked.outline)
        network = check_run(beginning, config, request.specs)
    else:
        sizes = {int(spec.params["draft_block_size"]) for spec in request.specs.values()}
        network = drafter_config(
            asked.outline,
            num_layers=config.drafter.num_layers,
            draft_block_size=sizes.pop(),
            target_layer_ids=asked.outline.default_layer_ids(config.target.num_features),
            embedding="rows",
        )
        options = config.drafter
        network = replace(
            network, markov_rank=options.markov_rank, confidence_head=options.confidence
        )
        if options.slides:
            network = replace(network, layers=options.layers, sliding_window=options.sliding_window)
    check_request(replace(asked, network=network))
    for note in made_up(asked.outline) if beginning is None else ():
        say(note)
    return network


def frozen_targets(
    target: Target,
    placement: Placement,
    dataset: Dataset,
    *,
    remote: bool = False,
    teacher: bool = False,
) -> list[FrozenTarget]:
    """What the drafter's step needs of the target, on every device.

    Args:
        target: Loaded on some device.
        placement: The drafters' devices.
        dataset: Where it has no features, the step computes them.
        remote: Whether they come from targets on other devices instead.
        teacher: Whether features end with the last hidden state.
    """
    scale = torch.tensor(dataset.feature_scale, dtype=torch.float32, device="cpu")
    targets = []
    for device in placement.devices:
        local, features = target, None
        if not dataset.has_features and not remote:
            local = target.on(device)
            features = _features(local, dataset, teacher)
        targets.append(
            FrozenTarget(
                embed_weight=local.embed_weight.to(device),
                head_weight=local.head_weight.to(device),
                feature_scale=scale.to(device),
                features=features,
                remote_dtype=target.dtype if remote else None,
            )
        )
    return targets


def remote_targets(
    target: Target, placement: Placement, dataset: Dataset, *, teacher: bool = False
) -> list[RemoteTarget]:
    """A target on every device of its own; see ``frozen_targets``."""
    return [
        RemoteTarget(device, _features(target.on(device), dataset, teacher))
        for device in placement.devices
    ]


def _features(target: Target, dataset: Dataset, teacher: bool) -> Callable[[Tensor], Tensor]:
    last = (target.num_layers,) if teacher else ()
    return partial(target.features, layer_ids=(*dataset.layer_ids, *last))
