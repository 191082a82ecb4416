"""DFlash's loss over one bucket's static inputs.

features -> labels and draft inputs -> drafter -> loss and sums
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from runtime.dflash.loss.head import HeadLoss
from runtime.dflash.loss.vocabulary import SeenTokens
from runtime.dflash.step.draft_bucket import DraftBucket
from runtime.dflash.step.recipe import Recipe
from runtime.dflash.step.sums import loss_sums
from runtime.static.buffers import Field


class DraftObjective:
    """The loss of one bucket.

    Its weight is the sum of the weights that ``block_targets`` gives, known before the forward
    pass. With D-PACE, whose own weights follow the logits, that is the number of supervised slots:
    the sum of its own would undo what it says of a block, and with slots, not blocks, counted, the
    gradients that ``train.clip`` sees keep their scale where answers end inside a block.

    Args:
        bucket: With a teacher where the recipe has one.
        recipe: Of the loss.
        loss_of: ``draft_loss`` by that recipe, one for all buckets of a drafter, see
            ``loss_on_device``.
        seen: The tokens that the loss is taken over; None for all.
    """

    def __init__(
        self,
        bucket: DraftBucket,
        recipe: Recipe,
        loss_of: Callable[..., HeadLoss],
        *,
        seen: SeenTokens | None = None,
    ) -> None:
        self.bucket = bucket
        self.recipe = recipe
        self.loss_of = loss_of
        self.seen = None
        self._scored = bucket.target
        if seen is not None:
            head_weight = bucket.target.head_weight
            self.seen = seen.to(head_weight.device)
            self._scored = replace(bucket.target, head_weight=head_weight[self.seen.ids])

    @property
    def fields(self) -> Mapping[str, Field]:
        """The bucket's."""
        return self.bucket.fields

    def __call__(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The summed loss with its graph, and the sums of ``sum_names``."""
        bucket = self.bucket
        batch = bucket.read(inputs)
        targets = bucket.targets(inputs, gamma=self.recipe.gamma)
        result = self.loss_of(
            bucket.drafter,
            self._scored,
            batch,
            targets.labels,
            targets.weights,
            seen=self.seen,
        )
        return result.loss, loss_sums(result, targets, bucket.n_valid)
