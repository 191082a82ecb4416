"""When a run is scored, what its score costs, and what is said of it."""

from types import SimpleNamespace

import numpy as np
import pytest

from runtime.config import Config, EvaluateConfig, TrainConfig, parse_config
from runtime.data.plan import Step
from runtime.dflash.method import METHOD
from runtime.errors import ConfigError
from runtime.methods import read_run
from runtime.packed.method import METHOD as PACKED
from runtime.packed.settings import PackedConfig
from runtime.training import metrics as metrics_module
from runtime.training import recorder as recorder_module
from runtime.training import watch as watch_module
from runtime.training.heldout import HeldOutRow
from runtime.training.metrics import read_metrics
from runtime.training.recorder import Recorder
from runtime.training.watch import Watch
from tests.runtime.training.test_recorder import TOTALS

TAUS = [1.25, 2.0, 1.5]


class Clock:
    """Time that only passes where it is told to."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        for module in (metrics_module, recorder_module, watch_module):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))


def watch_of(**evaluate):
    rows = [HeldOutRow(bucket=16, sample=sample) for sample in (0, 0, 3)]
    heldout = SimpleNamespace(name="tau", more_is_better=True, rows=rows)
    train = TrainConfig(steps=5, log_every=2)
    return Watch(heldout, Config(train=train, evaluate=EvaluateConfig(**evaluate)))


def replica_of(clock, taus=TAUS, seconds=100.0, queued=3.0):
    """Steps are still queued where a score is asked for, and each score takes its time."""
    left = iter(taus)

    def sums():
        clock.now += seconds
        tau = next(left)
        return np.array([[4 * tau, 4.0], [8 * tau, 8.0]])

    def synchronize():
        clock.now += queued

    return SimpleNamespace(
        read_totals=lambda: TOTALS,
        lr=lambda: 1e-3,
        pool=SimpleNamespace(synchronize=synchronize),
        scoring=SimpleNamespace(sums=sums),
    )


@pytest.mark.parametrize(
    ("every", "wanted"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (5, [5]), (9, [5])]
)
def test_scores_are_due_every_so_often_and_after_the_last_step(every, wanted):
    watch = watch_of(every=every)
    assert [step for step in range(1, 6) if watch.is_due(step)] == wanted


def test_the_time_of_scores_is_none_of_the_steps(tmp_path, monkeypatch, capsys):
    clock = Clock(monkeypatch)
    watch = watch_of(every=2)
    recorder = Recorder(
        folder=tmp_path,
        train=watch.config.train,
        plan=SimpleNamespace(lengths=np.array([10, 100])),
        method=METHOD,
        published={},
        fingerprint="f",
        report=print,
        first_step=0,
        watch=watch,
    )
    replica = replica_of(clock)
    recorder.start()
    for number in range(5):
        clock.now += 2.0
        recorder.after_step(replica, number + 1, Step(number, 0, 16, (0, 1)))
    rows = read_metrics(tmp_path / "metrics.jsonl")
    scored = [row for row in rows if "heldout_tau" in row]
    assert scored == [
        {"step": step, "heldout_tau": tau, "heldout_low": tau, "heldout_high": tau}
        for step, tau in zip((2, 4, 5), TAUS, strict=True)
    ]
    # Two steps of 2 s; what was queued when a score was asked for is of the interval after it.
    assert [row["step_ms"] for row in rows if "loss" in row] == [2000.0, 3500.0, 5000.0]
    said = capsys.readouterr().err.splitlines()
    assert said[2] == "step 2/5  held-out tau 1.250 (1.250 to 1.250)  107 s"
    assert watch.closing_lines(600.0) == {
        "held-out tau": "1.500 (1.500 to 1.500) at step 5",
        "best held-out tau": "2.000 (2.000 to 2.000) at step 4",
        "scoring": "3 times, 300.0 s, 50.0% of the run",
    }


def test_what_is_announced():
    assert watch_of(every=2).announcement() == (
        "held-out tau: every 2 steps, on 2 samples, with the 95 % interval by bootstrap over them"
    )


def test_nothing_is_said_where_nothing_was_scored():
    assert watch_of(every=2).closing_lines(9.0) == {}


@pytest.mark.parametrize(("path", "every"), [("configs/demo.toml", 0), ("configs/gpu.toml", 250)])
def test_runs_are_scored_where_asked_and_all_of_the_demo_can_be(path, every):
    method, config = read_run(path)
    assert config.evaluate.every == every
    scored = method.heldout_specs(config)
    assert scored.keys() == method.specs(config).keys()
    assert {spec.kind for spec in scored.values()} == {"parametric"}


def test_packed_runs_have_no_score_yet():
    config = parse_config({"evaluate": {"every": 3}}, PackedConfig)
    with pytest.raises(ConfigError, match=r"evaluate\.every = 3: must be 0 where run\.method"):
        PACKED.heldout_specs(config)
