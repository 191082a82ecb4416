"""Settings of the whole suite, made before torch is imported."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
from hypothesis import settings

# What CI draws is the same on every run; a developer's run draws anew and may find more.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


def pytest_collection_modifyitems(items):
    """Let torch warn of itself on a GPU: compiling imports and runs much of it."""
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(autouse=True)
def fresh_dynamo(request):
    """Start a test on a GPU without compiled code: a process of ours has one run, not twenty."""
    if request.node.get_closest_marker("gpu"):
        import torch

        torch._dynamo.reset()
