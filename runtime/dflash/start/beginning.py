"""The published drafter that a run begins from, where ``drafter.init`` names its folder.

Its folder fixes the network. ``run.json`` keeps what it says, and the digests of its files, so that
a run goes on once the folder is gone, and is refused where it was changed.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from maskgen.mask_spec import MaskSpec
from runtime.data.dataset import Dataset
from runtime.data.folder import PREPARE
from runtime.dflash.folder.files import CONFIG_FILE, WEIGHTS_FILE, read_network
from runtime.dflash.network.config import DrafterConfig
from runtime.dflash.settings import STARTS, DFlashConfig, DrafterOptions
from runtime.errors import ConfigError, DatasetError
from runtime.files.digests import sha256_of_file
from runtime.target.outline import TargetOutline
from runtime.training.run_folder import kept_beginning

FIELD = "drafter.init"
PRODUCT = "drafter"
"""The folder in the run folder that a run leaves."""


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """A published drafter, by its config; its weights are not read."""

    folder: Path
    network: DrafterConfig
    published: Mapping[str, Any]
    """``config.json`` as it stands."""
    files: Mapping[str, str] | None
    """Name -> SHA-256, as the run kept them; None where the folder is there to be read."""

    def record(self) -> dict[str, Any]:
        """What a run keeps of it, see ``Method.began_from``."""
        names = (CONFIG_FILE, WEIGHTS_FILE)
        files = self.files or {name: sha256_of_file(self.folder / name) for name in names}
        return {
            "folder": str(self.folder),
            "files": dict(files),
            "config": dict(self.published),
        }

    @property
    def is_there(self) -> bool:
        """Whether its weights can be read."""
        return self.files is None

    def check_there(self) -> None:
        """Refuse a folder that is gone, where its weights are needed.

        Raises:
            ConfigError: It is.
        """
        if not self.is_there:
            raise _missing(self.folder)


def find_beginning(config: DFlashConfig) -> Beginning | None:
    """The drafter whose folder ``drafter.init`` names; None where it names none.

    Args:
        config: The run file. Of a folder that is gone its run folder is asked.

    Raises:
        ConfigError: There is no such folder.
        CheckpointError: The network here is another than the folder's config says.
    """
    name = config.drafter.init
    if name in STARTS:
        return None
    folder = Path(name)
    if name and all((folder / file).is_file() for file in (CONFIG_FILE, WEIGHTS_FILE)):
        network = read_network(folder)
        published = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        return Beginning(folder=folder, network=network, published=published, files=None)
    kept = kept_beginning(Path(config.run.folder))
    if kept.get("folder") != str(folder):
        raise _missing(folder)
    network = DrafterConfig.from_published(kept["config"])
    return Beginning(folder=folder, network=network, published=kept["config"], files=kept["files"])


def _missing(folder: Path) -> ConfigError:
    rule = (
        f"must be {' or '.join(map(repr, STARTS))}, or a folder with {CONFIG_FILE} and "
        f"{WEIGHTS_FILE} of a published drafter"
    )
    return ConfigError(FIELD, str(folder), rule)


def check_run(
    beginning: Beginning, config: DFlashConfig, specs: Mapping[int, MaskSpec]
) -> DrafterConfig:
    """The network of a run that begins from a drafter.

    Args:
        beginning: The drafter.
        config: The run file; what it leaves out follows the drafter.
        specs: Of the run's mask entries.

    Raises:
        ConfigError: The run file asks for another network, or the run would take the drafter's
            place.
    """
    network = beginning.network
    if beginning.folder.resolve() == (Path(config.run.folder) / PRODUCT).resolve():
        rule = "is where this run exports its own drafter; set another run.folder"
        raise ConfigError(FIELD, str(beginning.folder), rule)
    _compare(beginning, _asked(network, config, specs))
    _compare(beginning, _asked_layers(network, config.drafter))
    rank, confident = _with_heads(network, config.drafter)
    return replace(network, markov_rank=rank, confidence_head=confident)


def layers_of(config: DFlashConfig) -> tuple[tuple[str, ...], int | None]:
    """Kind of each layer and the window of a run's network: empty and None where no layer slides.

    Raises:
        ConfigError: There is no such folder as ``drafter.init`` says, or the run file asks for
            other layers than its.
        CheckpointError: As ``find_beginning``.
    """
    options, beginning = config.drafter, find_beginning(config)
    if beginning is None:
        return (options.layers, options.sliding_window) if options.slides else ((), None)
    _compare(beginning, _asked_layers(beginning.network, options))
    return beginning.network.layers, beginning.network.sliding_window


def heads_of(config: DFlashConfig) -> tuple[int, bool]:
    """Rank of a run's Markov head, 0 for none, and whether it has a confidence head.

    Raises:
        ConfigError: There is no such folder as ``drafter.init`` says.
        CheckpointError: As ``find_beginning``.
    """
    options, beginning = config.drafter, find_beginning(config)
    if beginning is None:
        return options.markov_rank, options.confidence
    return _with_heads(beginning.network, options)


def _with_heads(network: DrafterConfig, options: DrafterOptions) -> tuple[int, bool]:
    # Heads may be added; without them a run drafts what the folder drafts.
    rank = network.markov_rank or options.markov_rank
    return rank, network.confidence_head or options.confidence


def _compare(beginning: Beginning, asked: Iterable[tuple[str, Any, Any]]) -> None:
    for field, found, wanted in asked:
        if found != wanted:
            rule = f"must be {wanted!r}, as the drafter in {beginning.folder} has it"
            raise ConfigError(field, found, rule)


def _asked_layers(
    network: DrafterConfig, options: DrafterOptions
) -> Iterator[tuple[str, Any, Any]]:
    if options.layers:
        kinds = ["sliding" if slides else "full" for slides in network.slides]
        yield "drafter.layers", [*options.layers], kinds
    if options.sliding_window and network.layers:
        yield "drafter.sliding_window", options.sliding_window, network.sliding_window


def _asked(
    network: DrafterConfig, config: DFlashConfig, specs: Mapping[int, MaskSpec]
) -> Iterator[tuple[str, Any, Any]]:
    """What a run file says of a network: the field, its value, and the network's."""
    if config.drafter.num_layers:
        yield "drafter.num_layers", config.drafter.num_layers, network.num_hidden_layers
    if config.target.num_features:
        yield "target.num_features", config.target.num_features, len(network.target_layer_ids)
    for spec in specs.values():
        size = int(spec.params["draft_block_size"])
        yield "masks.entry.draft_block_size", size, network.draft_block_size
    options = config.drafter
    if options.markov_rank and network.markov_rank:
        yield "drafter.markov_rank", options.markov_rank, network.markov_rank
    if config.drafter.embedding == "rows" and network.embedding_scale != 1.0:
        yield "drafter.embedding", "rows", "module"


def check_target(beginning: Beginning, target: TargetOutline) -> None:
    """Refuse a target of other sizes than the drafter's.

    Raises:
        ConfigError: Its hidden size, vocabulary or number of layers differs.
    """
    network = beginning.network
    sizes = {
        "hidden size": (network.hidden_size, target.hidden_size),
        "vocabulary": (network.vocab_size, target.vocab_size),
        "number of layers": (network.num_target_layers, target.num_layers),
    }
    for name, (found, wanted) in sizes.items():
        if found != wanted:
            raise ConfigError(
                FIELD,
                str(beginning.folder),
                f"must be a drafter for {target.name!r}, whose {name} is {wanted}; this one is for "
                f"a target of {found}",
            )


def check_data(beginning: Beginning, dataset: Dataset) -> None:
    """Refuse data with the features of other layers than the drafter reads.

    Raises:
        DatasetError: They are.
    """
    wanted = beginning.network.target_layer_ids
    if dataset.layer_ids != wanted:
        raise DatasetError(
            f"{dataset.folder} was prepared for features of layers {list(dataset.layer_ids)}, and "
            f"the drafter in {beginning.folder} reads {list(wanted)}; {PREPARE}"
        )
