"""The target in a run, before it is loaded: where it computes, and whether it is the data's."""

from runtime.config import Config
from runtime.data.dataset import Dataset
from runtime.errors import ConfigError
from runtime.ranks.devices import Placement, place
from runtime.target.files import find_target


def place_targets(config: Config, placement: Placement, share: tuple[int, int]) -> Placement | None:
    """Devices of targets that have their own; None where those that train do it themselves.

    Args:
        config: The run file.
        placement: The devices that train.
        share: As in ``place``.

    Raises:
        ConfigError: The names are wrong, or of another kind than those that train.
    """
    names, field = config.run.target_devices, "run.target_devices"
    if not names:
        return None
    threads = placement.threads
    apart = place(names, dtype=config.target.dtype, threads=threads, share=share, field=field)
    if apart.kind != placement.kind:
        raise ConfigError(field, names, f"must be of the kind of run.devices, {placement.kind}")
    if apart.kind == "cuda" and not set(apart.devices).isdisjoint(placement.devices):
        used = ",".join(map(str, placement.devices))
        raise ConfigError(field, names, f"must be other GPUs than those that train, {used}")
    return apart


def check_target(config: Config, dataset: Dataset) -> None:
    """Refuse another target than the data's before it is loaded, which takes long.

    The files of a hub name may be yet to be downloaded: they are compared after the load only.

    Raises:
        DatasetError: The target's digest differs.
        TargetNotFoundError: There is no such target.
    """
    files = find_target(config.target.model)
    if files.weights():
        dataset.check_target(files.digest)
