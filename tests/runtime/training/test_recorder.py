"""What a row of the log says, by hand: means, shares and speeds of its own interval."""

from types import SimpleNamespace

import numpy as np
import pytest

from runtime.config import TrainConfig
from runtime.data.plan import NO_ROW, Step
from runtime.dflash.method import METHOD
from runtime.training import metrics as metrics_module
from runtime.training import recorder as recorder_module
from runtime.training.metrics import interval_metrics, read_metrics
from runtime.training.recorder import Recorder

TOTALS = {
    "loss": 30.0,
    "weight": 12.0,
    "anchors": 40.0,
    "anchors_kept": 24.0,
    "tokens": 50.0,
    "blocks": 16.0,
    "accepted": 20.0,
    "correct_1": 9.0,
    "correct_2": 3.0,
    "count_1": 24.0,
    "count_2": 0.0,
    "steps": 100.0,
    "skipped": 2.0,
    "skips_in_a_row": 0.0,
    "worst_skips_in_a_row": 1.0,
    "grad_norm": 0.75,
}


def test_a_row_by_hand():
    learned = METHOD.metrics(TOTALS, 8)
    row = interval_metrics(TOTALS, learned, step=108, lr=3e-4, tokens=1000, seconds=4.0, steps=8)
    assert row == {
        "step": 108,
        "loss": 2.5,
        "tau_forced": 1.25,
        "accuracy": [0.375, None],
        "lr": 3e-4,
        "grad_norm": 0.75,
        "anchors_kept": 0.6,
        "anchors_per_step": 3.0,
        "skipped": 2,
        "tokens_per_s": 250.0,
        "step_ms": 500.0,
    }


def test_each_row_has_the_tokens_steps_and_time_of_its_own_interval(tmp_path, monkeypatch, capsys):
    clock = SimpleNamespace(now=0.0)
    for module in (metrics_module, recorder_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    replica = SimpleNamespace(read_totals=lambda: TOTALS, lr=lambda: 1e-3)
    recorder = Recorder(
        folder=tmp_path,
        train=TrainConfig(steps=5, log_every=2, max_skipped=8),
        plan=SimpleNamespace(lengths=np.array([10, 100, 1000, 10_000])),
        method=METHOD,
        published={},
        fingerprint="f",
        report=print,
        first_step=0,
    )
    clock.now = 7.0
    recorder.start()
    batches = [(0, 1), (2, NO_ROW), (3, 3), (1, 1), (NO_ROW, 0)]
    for number, samples in enumerate(batches):
        clock.now += 0.5 * (number + 1)
        recorder.after_step(replica, number + 1, Step(number, 0, 16, samples))
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [2, 4, 5]
    assert [row["step_ms"] for row in rows] == [750.0, 1750.0, 2500.0]
    assert [row["tokens_per_s"] for row in rows] == pytest.approx(
        [1110 / 1.5, 20_200 / 3.5, 10 / 2.5]
    )
    assert [row["anchors_per_step"] for row in rows] == [12.0, 12.0, 24.0]
