"""Gradients into the flat tensor, and over the ranks, while the backward pass goes on.

In float32 the flat tensor itself is reduced, which rounds next to nothing of bfloat16 gradients. In
the dtype of compute copies of what the backward pass made are reduced first: half the bytes travel.
Of a step of several micro-batches it is their sum that travels, with the last of them.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from runtime.ranks.collectives import Group, Pending
from runtime.static.optimizer import FlatAdamW, Stage


class GradientExchange:
    """Copies each stage's gradients as they are finished and begins to reduce them.

    Args:
        optimizer: Its flat tensor receives the gradients.
        group: Collectives.
        reduce_dtype: ``float32`` or ``compute``, in which matrices are summed over the ranks.
    """

    def __init__(
        self, optimizer: FlatAdamW, group: Group, *, reduce_dtype: str = "float32"
    ) -> None:
        self.optimizer = optimizer
        self.group = group
        self.exact = reduce_dtype == "float32"
        self.reducing = False
        """Off while warming up, when the other ranks do not step along."""
        self._pending: list[Pending] = []
        self._reduced: list[tuple[Tensor, Tensor]] = []
        """Where each gradient that is reduced before it is copied goes, and the gradient."""
        self._unfinished: list[Stage] = []
        self._adds = False
        self._ends = True
        for stage in optimizer.stages:
            register_multi_grad_hook(stage.parameters, partial(self._finish_stage, stage))

    def _finish_stage(self, stage: Stage, grads: Sequence[Tensor | None]) -> None:
        self._unfinished = [other for other in self._unfinished if other is not stage]
        if self._adds:
            self._add_stage(stage, grads)
            return
        pairs = zip(stage.grad_views, grads, strict=True)
        found = [(view, grad) for view, grad in pairs if grad is not None]
        with torch.no_grad():
            if len(found) < len(grads):
                torch._foreach_zero_(list(stage.grad_views))
            if self.reducing and not self.exact:
                # Copies, since a gradient may be that of something else, too.
                matrices = [
                    (view, grad.clone(memory_format=torch.contiguous_format))
                    for view, grad in found
                    if grad.dim() >= 2
                ]
                found = [(view, grad) for view, grad in found if grad.dim() < 2]
                if matrices:
                    self._pending.append(self.group.start_all_reduces([g for _, g in matrices]))
                    self._reduced += matrices
            if found:
                torch._foreach_copy_([view for view, _ in found], [grad for _, grad in found])
        if self.reducing and self.exact and len(stage.matrices):
            self._pending.append(self.group.start_all_reduces([stage.matrices]))

    def _add_stage(self, stage: Stage, grads: Sequence[Tensor | None]) -> None:
        pairs = zip(stage.grad_views, grads, strict=True)
        found = [(view, grad) for view, grad in pairs if grad is not None]
        with torch.no_grad():
            if found:
                torch._foreach_add_([view for view, _ in found], [grad for _, grad in found])
            if not (self.reducing and self._ends and len(stage.matrices)):
                return
            sent = stage.matrices
            if not self.exact:
                # The sum over the micro-batches is exact; it is what travels that is rounded.
                sent = sent.to(self.optimizer.weights.dtype)
                self._reduced.append((stage.matrices, sent))
        self._pending.append(self.group.start_all_reduces([sent]))

    def backward(self, loss: Tensor, *, adds: bool = False, ends: bool = True) -> None:
        """Compute all gradients of ``loss`` into the flat tensor: 0 for what it does not depend on.

        Over several ranks the loss depends on the same parameters on each.

        Args:
            loss: Of a step, or of one of its micro-batches.
            adds: Whether they are added to what is there.
            ends: Whether the step ends with them, so that its gradients are reduced.
        """
        self._adds, self._ends = adds, ends
        self._unfinished = list(self.optimizer.stages)
        loss.backward()  # type: ignore[no-untyped-call]
        # No hook runs for a stage that the loss leaves out whole.
        for stage in list(self._unfinished):
            self._finish_stage(stage, [None] * len(stage.parameters))
        for parameter in self.optimizer.parameters:
            parameter.grad = None

    def finish(self) -> None:
        """Reduce vectors and sums, and wait for what is under way."""
        if not self.reducing:
            return
        self._pending.append(self.group.start_all_reduces([self.optimizer.tail]))
        for work in self._pending:
            work.wait()
        self._pending.clear()
        if self._reduced:
            views, grads = zip(*self._reduced, strict=True)
            torch._foreach_copy_(list(views), list(grads))
            self._reduced.clear()
