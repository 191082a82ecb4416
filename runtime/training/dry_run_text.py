"""What a run will be, as a page for people."""

from collections.abc import Mapping

from cache.address import without_secrets_in
from maskgen.listing import human_bytes, text_table
from runtime.training.dry_run import DryRun


def dry_run_text(found: DryRun) -> str:
    """Buckets, then steps and time, parameters and memory of a device, and what is not known."""
    pages = [text_table(("bucket", "rows", "padding", "steps an epoch"), _buckets(found))]
    if not found.buckets:
        pages = []
    lines = _lines(found)
    width = max(map(len, lines))
    pages.append("\n".join(f"{name:{width}}  {value}" for name, value in lines.items()))
    if found.parameters:
        counted = {name: f"{count:,}" for name, count in _summed(found.parameters).items()}
        pages.append(text_table(("trained", "parameters"), counted.items()))
    for title, memory in (
        ("memory of a device", found.memory),
        ("memory of a target's device", found.memory_apart),
    ):
        if memory:
            sizes = {name: human_bytes(size) for name, size in _summed(memory).items()}
            pages.append(text_table((title, "bytes"), sizes.items()))
    pages.append("not known:\n" + "\n".join(f"- {line}" for line in found.unknown))
    return without_secrets_in("\n\n".join(pages))


def _buckets(found: DryRun) -> list[tuple[str, ...]]:
    return [
        (str(use.length), str(use.rows), f"{use.padding:.1%}", str(use.steps))
        for use in found.buckets
    ]


def _summed(counts: Mapping[str, int]) -> dict[str, int]:
    return {**counts, "sum": sum(counts.values())}


def _lines(found: DryRun) -> dict[str, str]:
    lines = {"devices": f"{', '.join(found.devices)} ({found.dtype})"}
    if found.samples is not None and found.padding is not None:
        lines["samples"] = f"{found.samples}, padding {found.padding:.1%} of their rows"
    lines["steps"] = f"{found.steps}, {found.rows_a_device} rows of a device at once"
    if found.steps_an_epoch is not None:
        lines["steps an epoch"] = f"{found.steps_an_epoch}, with {found.empty_rows} empty rows"
        lines["epochs"] = f"{found.epochs:.2f}"
    graphs = f"{found.graphs} on each device" if found.graphs else "none, the CPU runs eagerly"
    lines["captured graphs"] = graphs
    if found.compiled:
        lines["compiled"] = f"{', '.join(found.compiled)}, for each bucket"
    if found.step_ms is not None:
        lines["time"] = (
            f"{found.steps} steps of {found.step_ms:.1f} ms, as in this folder's metrics: "
            f"{found.seconds:.0f} s beside loading and warm-up"
        )
    return lines
