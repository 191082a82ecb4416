"""How many forms of one code object are compiled."""

from runtime.static.torch_internals import raise_recompile_limits

VARIANTS = 2
"""Forms of one code object for a bucket and a device: with gradients and without."""


def size_recompile_limits(num_buckets: int, num_devices: int) -> None:
    """Let every bucket of every device have its own compiled code.

    Dynamo counts entries per code object and by default falls back to eager attention, without a
    word, after 8. With ``fullgraph`` reaching the limit raises.
    """
    raise_recompile_limits(VARIANTS * num_buckets * num_devices)
