"""Settings of the whole suite, made before torch is imported."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from hypothesis import settings

# What CI draws is the same on every run; a developer's run draws anew and may find more.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
