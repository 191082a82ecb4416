"""Whatever ends one of a run's threads reaches the thread that waits for it."""

import threading
from types import SimpleNamespace

import pytest
import torch

from runtime.data.plan import Step
from runtime.ranks.collectives import on_every_rank
from runtime.signals import Stopped
from runtime.static.channels import Channel, Lane
from runtime.static.graph import GraphPool
from runtime.training.feeder import Feeder
from runtime.training.target_worker import TargetWorker
from runtime.training.worker import Coordinator, Worker

CPU = torch.device("cpu")
STEP = Step(0, 0, 16, (0,))

# A thread that hands nothing on would leave the test waiting.
pytestmark = pytest.mark.timeout(60)
ERRORS = pytest.mark.parametrize(
    "error", [OSError("disk is gone"), Stopped(15), SystemExit(3), KeyboardInterrupt()], ids=repr
)


def raising(error):
    def function(*args, **kwargs):
        raise error

    return function


def device(**parts):
    return SimpleNamespace(device=CPU, threads=1, pool=GraphPool(CPU), **parts)


def got(lane, kind):
    with pytest.raises(kind) as caught:
        lane.get()
    return caught.value


@ERRORS
def test_of_a_worker_the_coordinator_keeps_it(error):
    coordinator = Coordinator(10)
    worker = Worker(
        rank=0,
        stepper=device(run=raising(error)),
        source=SimpleNamespace(get=lambda: (STEP, None)),
        coordinator=coordinator,
        first_step=4,
    )
    worker.run()
    assert worker.error is coordinator.error is error
    assert coordinator.failed.is_set()
    assert worker.finished == 4
    assert not coordinator.may_begin(4)


@ERRORS
def test_of_a_feeder_its_receiver_raises_it(error):
    lane = Lane([Channel()])
    free = SimpleNamespace(get=raising(error))
    Feeder(
        replica=device(group=SimpleNamespace(rank=0, size=1), free=free),
        lane=lane,
        trainee=None,
        plan=[STEP],
        steps=(0, 1),
        parts=1,
    ).run()
    assert got(lane, type(error)) is error


@ERRORS
def test_of_a_target_every_rank_raises_it(error):
    inlets, outlets = ([Lane([Channel()], rank, 2) for rank in range(2)] for _ in range(2))
    for lane in inlets:
        lane.put((STEP, None))
    TargetWorker(
        index=0,
        targets=1,
        replica=device(run=raising(error)),
        inlets=inlets,
        outlets=outlets,
        items=1,
    ).run()
    assert [got(lane, type(error)) for lane in outlets] == [error, error]


@ERRORS
def test_of_one_rank_whoever_waits_for_all_raises_it(error):
    others = threading.Event()

    def work(rank):
        if rank == 1:
            raise error
        others.wait(30)

    with pytest.raises(type(error)) as caught:
        on_every_rank(work, range(3))
    others.set()
    assert caught.value is error
