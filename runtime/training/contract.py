"""What a method, and what it loads and makes, must be for the run around it."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from maskgen.entry import MaskEntry
from runtime.errors import ConfigError
from runtime.static.buffers import Field
from runtime.static.step import Objective
from runtime.training.method import Method, Trainee

FIELD = "run.method"
SHOWN = 3
"""Names of parameters in an error."""


def check_method(name: str, method: Method[Any]) -> None:
    """Refuse what is no method.

    Args:
        name: As the run file spells it.
        method: What it names.

    Raises:
        ConfigError: It is a class, or lacks members.
    """
    if isinstance(method, type):
        rule = f"must be a method, found the class {method.__name__}; write {method.__name__}()"
        raise ConfigError(FIELD, name, rule)
    _check_members(name, "the method", method, Method)


def checked_trainee(name: str, trainee: Trainee) -> Trainee:
    """What a method loaded, refusing what it makes where that is not as ``Trainee`` says.

    Args:
        name: Of the method, as the run file spells it.
        trainee: What is trained.

    Raises:
        ConfigError: It lacks members.
    """
    _check_members(name, "what load returns", trainee, Trainee)
    return cast("Trainee", _Checked(name, trainee))


class _Checked:
    def __init__(self, name: str, trainee: Trainee) -> None:
        self._name = name
        self._trainee = trainee
        self._shapes: dict[str, list[int]] = {}

    def __getattr__(self, member: str) -> Any:
        return getattr(self._trainee, member)

    def module(self, device: torch.device) -> nn.Module:
        """The module on a device.

        Raises:
            ConfigError: Its parameters are of another dtype than float32.
        """
        module = self._trainee.module(device)
        named = dict(module.named_parameters())
        found = [f"{key} {_dtype(it)}" for key, it in named.items() if it.dtype != torch.float32]
        if found:
            rule = f"the module's parameters must be float32, found {_listed(found)}"
            raise ConfigError(FIELD, self._name, rule)
        self._shapes = {key: list(parameter.shape) for key, parameter in named.items()}
        return module

    def objective(
        self, module: nn.Module, length: int, entry: MaskEntry, batch: int, index: int
    ) -> Objective:
        """The loss of one bucket, which checks its sums."""
        objective = self._trainee.objective(module, length, entry, batch, index)
        return _CheckedObjective(self._name, objective, self._trainee.sums)

    def first_weights(self) -> Mapping[str, Tensor]:
        """The first weights; the module was made before.

        Raises:
            ConfigError: They are not the module's parameters, each by its name and shape.
        """
        weights = self._trainee.first_weights()
        wanted = self._shapes
        found = {key: list(weight.shape) for key, weight in weights.items()}
        faults = {
            "lacks": [key for key in wanted if key not in found],
            "has beyond them": [key for key in found if key not in wanted],
            "differs in": [
                f"{key} {shape} instead of {wanted[key]}"
                for key, shape in found.items()
                if shape != wanted.get(key, shape)
            ],
        }
        told = ", ".join(f"{what} {_listed(keys)}" for what, keys in faults.items() if keys)
        if told:
            rule = f"first_weights must be all parameters of the module by name, and {told}"
            raise ConfigError(FIELD, self._name, rule)
        return weights


class _CheckedObjective:
    def __init__(self, name: str, objective: Objective, sums: tuple[str, ...]) -> None:
        self.name = name
        self.objective = objective
        self.sums = sums

    @property
    def fields(self) -> Mapping[str, Field]:
        """The static inputs, by name."""
        return self.objective.fields

    def __call__(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Compute the loss and the sums.

        Raises:
            ConfigError: The sums are of another dtype or shape.
        """
        loss, sums = self.objective(inputs)
        # Neither reads the device, so a capture does not record them.
        found = _described(sums)
        wanted = f"float32 [{len(self.sums)}]"
        if found != wanted:
            rule = f"an objective's sums {', '.join(self.sums)} must be {wanted}, found {found}"
            raise ConfigError(FIELD, self.name, rule)
        return loss, sums


def _check_members(name: str, what: str, found: object, kind: type[Any]) -> None:
    members = [key for key in {**kind.__annotations__, **vars(kind)} if not key.startswith("_")]
    missing = [key for key in members if not hasattr(found, key)]
    if missing:
        rule = f"{what} must have {', '.join(missing)}, found {type(found).__name__}"
        raise ConfigError(FIELD, name, f"{rule}; see docs/methods.md")


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _described(found: object) -> str:
    if not isinstance(found, Tensor):
        return type(found).__name__
    return f"{_dtype(found)} {list(found.shape)}"


def _listed(names: list[str]) -> str:
    more = [f"and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return ", ".join([*names[:SHOWN], *more])
