"""AdamW over one flat fp32 master copy, with clip, schedule and skip all on the device.

The module's parameters become views into one flat tensor of the compute dtype, its gradients views
into one flat fp32 tensor with room for a few sums at the end: matrices first, in the order in which
the backward pass finishes them, then vectors, then sums. Each stage's slice can be reduced as soon
as it is written. Compiled code reads 16 bytes at once, so each parameter begins where it may, and
the gaps between them are and stay 0. One fused kernel per group updates the masters, one copy
refreshes the parameters. Nothing is read on the host.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ALIGNMENT = 8
"""In elements: a parameter begins at a multiple of it, at 16 bytes in bfloat16."""


def flat_size(module: nn.Module) -> int:
    """Numbers in each flat tensor of a module's optimizer: its parameters, aligned."""
    return sum(map(_aligned, module.parameters()))


def _aligned(parameter: Tensor) -> int:
    return -(-parameter.numel() // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """One more warm-up and cosine, once the ones before are over."""

    start: int
    """Steps before it."""
    warmup_steps: int
    total_steps: int
    """Its own."""


@dataclass(frozen=True, kw_only=True)
class AdamWSettings:
    """Hyperparameters; the schedule is linear warm-up, then cosine."""

    lr: float
    min_lr_ratio: float
    warmup_steps: int
    total_steps: int
    betas: tuple[float, float]
    weight_decay: float
    """On matrices only; vectors (norms) take none."""
    clip: float
    """Largest global gradient norm; 0 does not clip."""
    later: tuple[Cycle, ...] = ()
    """What follows ``total_steps``, in order; without any the last learning rate stays."""


@dataclass(frozen=True)
class _Place:
    name: str
    shape: torch.Size
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()


@dataclass(frozen=True, eq=False)
class Stage:
    """Parameters whose gradients the backward pass finishes together."""

    parameters: tuple[nn.Parameter, ...]
    grad_views: tuple[Tensor, ...]
    """Where each gradient goes, in the order of ``parameters``."""
    matrices: Tensor
    """float32, flat: all gradients of the stage's matrices, and the gaps between them."""


class FlatAdamW:
    """AdamW on a module, flat, capturable.

    Args:
        module: Its parameters are moved into a flat tensor of ``dtype`` on ``device``.
        settings: Hyperparameters.
        device: Where all state lives.
        dtype: Compute dtype of the parameters; with float32 they are the masters themselves.
        num_sums: Floats reduced along with the gradients.
        stages: Parameter names in the order in which the backward pass finishes them; one stage
            of all if left out.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: AdamWSettings,
        *,
        device: torch.device,
        dtype: torch.dtype,
        num_sums: int,
        stages: Sequence[Sequence[str]] | None = None,
    ) -> None:
        self.settings = settings
        parameters = dict(module.named_parameters())
        stages = stages or [list(parameters)]
        names = [name for stage in stages for name in stage]
        named = [(name, parameters.pop(name)) for name in names]
        assert not parameters, f"stages must name every parameter, and leave out {list(parameters)}"
        named.sort(key=lambda item: item[1].dim() < 2)
        self.places: list[_Place] = []
        start = matrices = 0
        for name, parameter in named:
            self.places.append(_Place(name, parameter.shape, start))
            start += _aligned(parameter)
            matrices = start if parameter.dim() >= 2 else matrices
        self.master = torch.zeros(start, dtype=torch.float32, device=device)
        self.weights = self.master
        if dtype != torch.float32:
            self.weights = torch.zeros(start, dtype=dtype, device=device)
        self.reduced = torch.zeros(start + num_sums, dtype=torch.float32, device=device)
        self.grads, self.sums = self.reduced[:start], self.reduced[start:]
        self.parameters: list[nn.Parameter] = []
        self._grad_views: list[Tensor] = []
        for place, (_, parameter) in zip(self.places, named, strict=True):
            self._view(self.master, place).copy_(parameter.detach())
            parameter.data = self._view(self.weights, place)
            self.parameters.append(parameter)
            self._grad_views.append(self._view(self.grads, place))
        self.refresh()
        self.stages = [self._stage(stage) for stage in stages]
        self.tail = self.reduced[matrices:]
        """Gradients of the vectors, then the sums."""
        self.lr = torch.zeros((), dtype=torch.float32, device=device)
        self.grad_norm = torch.zeros((), dtype=torch.float32, device=device)
        self._adamw = self._make_adamw(matrices, device)

    def _stage(self, names: Sequence[str]) -> "Stage":
        order = {place.name: index for index, place in enumerate(self.places)}
        indices = sorted(order[name] for name in names)
        spans = [self.places[i] for i in indices if len(self.places[i].shape) >= 2]
        start, stop = (spans[0].start, spans[-1].stop) if spans else (0, 0)
        return Stage(
            tuple(self.parameters[i] for i in indices),
            tuple(self._grad_views[i] for i in indices),
            self.grads[start:stop],
        )

    def _make_adamw(self, matrices: int, device: torch.device) -> torch.optim.AdamW:
        groups = []
        for span, decay in (
            (slice(0, matrices), self.settings.weight_decay),
            (slice(matrices, len(self.master)), 0.0),
        ):
            master = nn.Parameter(self.master[span])
            master.grad = self.grads[span]
            groups.append({"params": [master], "weight_decay": decay})
        adamw = torch.optim.AdamW(
            groups,
            lr=self.lr,
            betas=self.settings.betas,
            fused=True,
            capturable=device.type == "cuda",
        )
        for group in adamw.param_groups:
            for master in group["params"]:
                adamw.state[master] = {
                    "step": torch.zeros((), dtype=torch.float32, device=device),
                    "exp_avg": torch.zeros_like(master),
                    "exp_avg_sq": torch.zeros_like(master),
                }
        return adamw

    @staticmethod
    def _view(flat: Tensor, place: _Place) -> Tensor:
        return flat[place.start : place.stop].view(place.shape)

    @property
    def steps(self) -> Tensor:
        """Steps taken, float32 scalar on the device; skipped ones are not counted."""
        step: Tensor = next(iter(self._adamw.state.values()))["step"]
        return step

    def step(self, denominator: Tensor, schedule_step: Tensor) -> Tensor:
        """Update the masters from summed gradients, unless these are not finite.

        Args:
            denominator: float32 scalar; the gradients are of a sum and are divided by it. 0 skips.
            schedule_step: float32 scalar, steps begun before this one.

        Returns:
            float32 scalar: 1 when the step was skipped.
        """
        self._set_lr(schedule_step)
        safe = torch.where(denominator > 0, denominator, 1.0)
        self.grad_norm.copy_(torch.linalg.vector_norm(self.grads) / safe)
        clip = self.settings.clip
        coefficient = (clip / (self.grad_norm + 1e-6)).clamp(max=1.0) if clip else 1.0
        finite = torch.isfinite(self.grad_norm) & (denominator > 0)
        skipped = (~finite).float()
        # The attributes that GradScaler sets: the fused kernel divides by the one and skips by
        # the other, which saves a pass over the gradients and a read on the host.
        self._adamw.grad_scale = torch.where(finite, safe / coefficient, 1.0)  # type: ignore[attr-defined]
        self._adamw.found_inf = skipped  # type: ignore[attr-defined]
        self._adamw.step()
        self.refresh()
        return skipped

    def _set_lr(self, step: Tensor) -> None:
        s = self.settings
        lr = self._lr_of(step, s.warmup_steps, s.total_steps)
        for cycle in s.later:
            own = self._lr_of(step - cycle.start, cycle.warmup_steps, cycle.total_steps)
            lr = torch.where(step >= cycle.start, own, lr)
        self.lr.copy_(lr)

    def _lr_of(self, step: Tensor, warmup_steps: int, total_steps: int) -> Tensor:
        s = self.settings
        warmup = (step + 1) / max(1, warmup_steps)
        progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
        cosine = 0.5 * (1 + torch.cos(math.pi * progress.clamp(0, 1)))
        decayed = s.min_lr_ratio + (1 - s.min_lr_ratio) * cosine
        return s.lr * torch.minimum(warmup, decayed)

    def refresh(self) -> None:
        """Make the parameters equal to the masters."""
        if self.weights is not self.master:
            self.weights.copy_(self.master)

    def state(self) -> dict[str, Tensor]:
        """Master weights and moments by parameter name, and the step count; views, not copies."""
        state: dict[str, Tensor] = {"step": self.steps}
        entries = list(self._adamw.state.values())
        matrices = len(entries[0]["exp_avg"])
        for place in self.places:
            state[f"master.{place.name}"] = self._view(self.master, place)
            group, first = (0, 0) if place.start < matrices else (1, matrices)
            local = _Place(place.name, place.shape, place.start - first)
            for key in ("exp_avg", "exp_avg_sq"):
                state[f"{key}.{place.name}"] = self._view(entries[group][key], local)
        return state

    def flat_state(self) -> list[Tensor]:
        """All that ``state`` views, whole, with the gaps: masters, moments and step counts."""
        entries = self._adamw.state.values()
        moments = [entry[key] for entry in entries for key in ("exp_avg", "exp_avg_sq", "step")]
        return [self.master, *moments]

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take what ``state`` returned, from any device."""
        for name, tensor in self.state().items():
            found = state[name]
            # A copy would repeat what is smaller.
            assert found.shape == tensor.shape, f"{name} is {found.shape}, not {tensor.shape}"
            tensor.copy_(found)
        for entry in self._adamw.state.values():
            entry["step"].copy_(state["step"])
        self.refresh()
