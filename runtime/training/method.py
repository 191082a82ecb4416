"""A kind of training, as the run around it sees it: all that a third one would have to give.

A ``Method`` answers for a run file before anything is loaded. It loads a ``Trainee``: the module,
its loss, its rows, and what is published. Threads, ranks, graphs, checkpoints, resumes and metrics
are the run's, and the same for all. A class that inherits from them gets what most methods do.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor, device, nn

from maskgen.entry import MaskEntry
from maskgen.mask_spec import MaskSpec
from runtime.config import Config
from runtime.data.dataset import Dataset
from runtime.data.preparation import Preparation, tokens_only
from runtime.errors import ConfigError
from runtime.ranks.devices import Placement
from runtime.static.step import Objective
from runtime.training.entries import named_specs
from runtime.training.evaluation import Evaluation
from runtime.training.heldout import HeldOut
from runtime.training.inputs import Inputs, Rows, sample_rows
from runtime.training.limits import COMMON, Request, check_limits
from runtime.training.metrics import ratio
from runtime.training.parts import Parts
from runtime.training.plots import Plot
from runtime.training.saved_state import Checkpoint
from runtime.training.target_worker import RemoteTarget

C = TypeVar("C", bound=Config, contravariant=True)


class Trainee(Protocol):
    """What a run trains, loaded, with all that its steps read beside it."""

    sums: tuple[str, ...] = ("loss", "weight")
    """Names of an objective's sums; the first is the loss, the second its weight."""
    published: Mapping[str, Any]
    """What ``export`` needs beside the weights, as JSON; kept in every checkpoint."""
    memory_hint: str = (
        "raise train.accumulate, or lower train.global_batch or the longest rows in [masks]"
    )
    """What to lower where a device runs out of memory."""
    heldout: HeldOut | None = None
    """What it is scored by while it trains, of ``Inputs.heldout``; None where that is."""
    remote_targets: Sequence[RemoteTarget] = ()
    """Models on devices of their own that fill a slot's ``features``; mostly none."""

    @abstractmethod
    def module(self, device: device) -> nn.Module:
        """A module of float32 parameters on a device of this process, the same on each."""
        ...

    def stages(self, module: nn.Module) -> list[list[str]]:
        """All parameter names in groups, in the order in which the backward pass is done.

        One group unless said otherwise: then no gradient travels before the last is computed.
        """
        return [[name for name, _ in module.named_parameters()]]

    @abstractmethod
    def objective(
        self, module: nn.Module, length: int, entry: MaskEntry, batch: int, index: int
    ) -> Objective:
        """The loss of one bucket.

        Args:
            module: From ``module``, its parameters now in the dtype of compute.
            length: Of the bucket.
            entry: Its mask.
            batch: Rows of a micro-batch on the device.
            index: Which of the process's devices.
        """
        ...

    @abstractmethod
    def first_weights(self) -> Mapping[str, Tensor]:
        """Float32 weights to start from, by parameter name; asked of the leading process alone."""
        ...

    @abstractmethod
    def fill(self, tensors: Mapping[str, Tensor], row: int, number: int, *, epoch: int) -> None:
        """Write one row into a slot's host tensors, which are 0; called by several threads.

        Args:
            tensors: ``[batch, ...]`` by field name.
            row: Where in the batch.
            number: Which row of ``Inputs.rows``.
            epoch: Pass over the data, for what is drawn anew in each.

        Raises:
            SampleTooLongError: The data changed since the run began.
        """
        ...

    @abstractmethod
    def export(self, folder: Path, weights: Mapping[str, Tensor], run: Mapping[str, Any]) -> None:
        """Write what users take from the run: fp32 ``weights`` of the run and step in ``run``."""
        ...


class Method(Protocol[C]):
    """A kind of training: what it asks of a run file, and how it is loaded."""

    name: str
    """As ``run.method`` spells it."""
    product: str
    """What a run leaves, and the folder's name in the run folder."""
    plots: Sequence[Plot] = (Plot(key="loss", axis="loss", short="loss"),)
    """What of a metrics row people see, in the log and in the picture; the loss first."""
    legend: str = ""
    """What the lines of a run do not say of themselves."""

    @property
    @abstractmethod
    def config_type(self) -> type[Config]:
        """The sections of its run files."""
        ...

    def specs(self, config: C) -> dict[int, MaskSpec]:
        """The run's mask entries by bucket length, ascending: those that ``train.masks`` names.

        Raises:
            ConfigError: ``[masks]`` has none for it.
            MaskSpecError: ``[masks]`` is wrong.
        """
        return named_specs(config, config.train.masks, lambda spec: spec.Q_LEN)

    def heldout_specs(self, config: C) -> dict[int, MaskSpec]:
        """The entries that held-out rows are scored on, by bucket length, ascending.

        Asked where ``evaluate.every`` is above 0, and refused unless said otherwise.

        Raises:
            ConfigError: ``[masks]`` has none for it, or the method has no such score.
            MaskSpecError: ``[masks]`` is wrong.
        """
        rule = f"must be 0 where run.method = {config.run.method!r}, which has no such score yet"
        raise ConfigError("evaluate.every", config.evaluate.every, rule)

    def specs_beside(
        self, config: C, *, heldout: bool = False
    ) -> Mapping[str, Mapping[int, MaskSpec]]:
        """Further masks of the same buckets, where a step attends by more than one.

        Args:
            config: The run file.
            heldout: Of the buckets of ``heldout_specs``, else of those of ``specs``.

        Returns:
            A name of the method's own -> bucket length -> entry; none unless said otherwise.

        Raises:
            ConfigError: ``[masks]`` has none for it.
            MaskSpecError: ``[masks]`` is wrong.
        """
        del config, heldout
        return {}

    def preparation(self, config: C) -> Preparation:
        """What ``runtime.prepare`` makes of the prompts: tokens only, unless said otherwise.

        Raises:
            ConfigError: A setting cannot be met.
        """
        return tokens_only(config, max(self.specs(config)))

    def check(
        self, config: C, placement: Placement, ranks: int, dataset: Dataset | None = None
    ) -> None:
        """Refuse what cannot be done, before anything is loaded.

        Args:
            config: The run file.
            placement: Devices of this process.
            ranks: Devices of all processes.
            dataset: The prepared data, where they are there already.

        Raises:
            ConfigError: A setting cannot be met.
            DatasetError: The data are of other settings.
        """
        del dataset
        specs = self.specs(config)
        check_limits(COMMON, Request(config=config, specs=specs, placement=placement, ranks=ranks))

    def rows(self, config: C, dataset: Dataset, lengths: tuple[int, ...]) -> Rows:
        """Arrange samples into rows of buckets: a row each, unless said otherwise.

        Args:
            config: The run file.
            dataset: Training samples.
            lengths: Of the buckets, ascending.

        Raises:
            DatasetError: A sample fits no bucket.
        """
        del config
        return sample_rows(dataset, lengths)

    def parts(self, config: C, placement: Placement, dataset: Dataset | None) -> Parts | None:
        """What ``load`` would put on a device, without reading weights; None where nobody knows.

        Args:
            config: The run file.
            placement: Devices of this process.
            dataset: The prepared data, where they are there.

        Raises:
            ConfigError: The model cannot do what is asked.
            TargetNotFoundError: There is none.
        """
        del config, placement, dataset
        return None

    def began_from(self, config: C) -> Mapping[str, Any]:
        """Files that a run of random or given weights begins from, as JSON; mostly none.

        ``files``, name -> SHA-256, shapes a run; all of it is kept in ``run.json``.

        Raises:
            ConfigError: They are not there, and the run folder does not know them either.
        """
        del config
        return {}

    @abstractmethod
    def load(
        self,
        config: C,
        inputs: Inputs,
        placement: Placement,
        apart: Placement | None,
        *,
        ranks: int,
        fresh: bool,
        report: Callable[[str], None],
    ) -> Trainee:
        """Load the model and make ready what is trained.

        Args:
            config: The run file.
            inputs: Data and masks.
            placement: Devices of this process.
            apart: Devices of targets that have their own.
            ranks: Devices of all processes.
            fresh: Whether ``first_weights`` will be asked for.
            report: Takes a line for people.

        Raises:
            ConfigError: The model cannot do what is asked.
            TargetNotFoundError: There is none.
            DatasetError: The data were prepared with another.
        """
        ...

    def metrics(self, totals: Mapping[str, float], steps: int) -> dict[str, Any]:
        """The method's keys of a metrics row: ``loss`` and what else people read.

        Args:
            totals: The sums over an interval, by name, and the step's counters.
            steps: Of the interval.
        """
        del steps
        return {"loss": ratio(totals["loss"], totals["weight"])}

    @abstractmethod
    def evaluate(self, config: C, folder: str | Path | None) -> Evaluation:
        """Measure a product on held-out data.

        Args:
            config: The run file.
            folder: The product; the run's own if left out.

        Raises:
            CheckpointError: There is none.
            NoSamplesError: There are no held-out data for it.
        """
        ...

    def uses(self, folder: Path) -> Sequence[str]:
        """Commands that put a product to use, to be shown after its evaluation."""
        del folder
        return ()

    def closing_lines(self, config: C) -> dict[str, str]:
        """What a run's closing table says of the method's settings."""
        del config
        return {}

    def check_export(self, config: C) -> None:
        """Refuse a run file whose product nobody could use.

        Raises:
            ConfigError: What was trained is not what is exported.
        """
        del config

    @abstractmethod
    def export_checkpoint(self, checkpoint: Checkpoint, folder: Path) -> Path:
        """Write a checkpoint's product, as ``Trainee.export`` does.

        Raises:
            CheckpointError: The checkpoint is damaged.
            NothingLearnedError: Its weights are those that the run began with.
        """
        ...

    @abstractmethod
    def is_of(self, folder: Path, run: Mapping[str, Any]) -> bool:
        """Whether a folder is whole and holds the product of this run and step."""
        ...
