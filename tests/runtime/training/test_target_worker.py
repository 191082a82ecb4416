import threading
from functools import partial

import numpy as np
import pytest
import torch

from runtime.errors import WorkerError
from runtime.target.frozen import FrozenTarget
from runtime.training.metrics import read_metrics
from runtime.training.target_worker import RemoteTarget
from tests.runtime.tiny_run import (
    HIDDEN,
    LAYERS,
    VOCAB,
    build_masks,
    first_drafter,
    frozen_target,
    losses,
    make_config,
    make_data,
    make_trainer,
)

LENGTHS = [14, 16, 11, 30, 27, 9, 32, 20, 12, 15, 31]


def features_of(table, input_ids):
    return table[input_ids].cumsum(dim=1)


def table(device="cpu"):
    generator = torch.Generator().manual_seed(9)
    return torch.randn(VOCAB, HIDDEN * len(LAYERS), generator=generator).to(device)


def prepared(tmp_path, name, **sections):
    """Token ids only: features come online."""
    folder = tmp_path / name
    folder.mkdir()
    config = make_config(folder, **sections)
    make_data(folder / "data", LENGTHS, stored=False)
    build_masks(config)
    return config


def train(config, targets, features=features_of):
    """Train with features from ``targets`` threads, or in the step when there are none."""
    apart = [RemoteTarget(torch.device("cpu"), partial(features, table())) for _ in range(targets)]
    whole = frozen_target()
    parts = FrozenTarget(
        embed_weight=whole.embed_weight,
        head_weight=whole.head_weight,
        feature_scale=whole.feature_scale,
        features=None if targets else partial(features, table()),
        remote_dtype=torch.float32 if targets else None,
    )
    trainer = make_trainer(config, target=parts, remote_targets=apart)
    try:
        trainer.prepare()
        trainer.start_from(weights=first_drafter().state_dict())
        result = trainer.run()
        return result, trainer.weights()
    finally:
        trainer.teardown()


@pytest.fixture(autouse=True)
def quiet(capsys):
    yield
    capsys.readouterr()


@pytest.mark.parametrize(
    ("devices", "targets"), [("cpu", 1), ("cpu", 2), ("cpu,cpu", 1), ("cpu,cpu", 3)]
)
def test_features_from_other_threads_give_the_bits_of_those_in_the_step(tmp_path, devices, targets):
    run = {"devices": devices}
    _, alone = train(prepared(tmp_path, "alone", run=run, train={"steps": 20}), 0)
    result, apart = train(prepared(tmp_path, "apart", run=run, train={"steps": 20}), targets)
    for name, weight in alone.items():
        assert torch.equal(weight, apart[name]), name
    assert result.summary.startswith("after freeze: 0 compiles, 0 FX traces")
    served = [line for name, line in result.rates.items() if name.startswith("target-")]
    assert len(served) == targets
    assert all("samples/s, waited" in line for line in served)


def test_each_target_serves_its_share(tmp_path):
    config = prepared(tmp_path, "share", run={"devices": "cpu,cpu"}, train={"steps": 9})
    count = {}

    def counted(weights, input_ids):
        name = threading.current_thread().name
        count[name] = count.get(name, 0) + 1
        return features_of(weights, input_ids)

    train(config, 3, counted)
    served = {name: n for name, n in count.items() if name.startswith("target-")}
    assert sorted(served.values()) == [6, 6, 6]


def test_a_target_that_fails_ends_the_run_with_its_error(tmp_path):
    config = prepared(tmp_path, "fail", run={"devices": "cpu,cpu"}, train={"steps": 50})

    def broken(weights, input_ids):
        if threading.current_thread().name.startswith("target-1"):
            raise ValueError("features are gone")
        return features_of(weights, input_ids)

    with pytest.raises(WorkerError, match="features are gone") as caught:
        train(config, 2, broken)
    assert isinstance(caught.value.__cause__, ValueError)
    ours = ("worker-", "feeder-", "target-")
    assert not [t for t in threading.enumerate() if t.name.startswith(ours)]


@pytest.mark.gpu
@pytest.mark.parametrize("gpus", range(1, torch.cuda.device_count() + 1))
def test_on_gpus_peer_copies_give_the_losses_of_one_device(tmp_path, gpus):
    """The last GPU holds the target; with one GPU both threads share it."""
    drafters, apart = torch.device("cuda", 0), torch.device("cuda", gpus - 1)
    found = []
    for name, targets in (("alone", 0), ("apart", 1)):
        config = prepared(
            tmp_path, name, contexts=(128,), anchors=32, masks={"BLOCK_SIZE": 128},
            run={"devices": "cuda:0"}, target={"dtype": "float32"},
            train={"steps": 20, "anchors": "data"},
        )  # fmt: skip
        whole = frozen_target(drafters)
        parts = FrozenTarget(
            embed_weight=whole.embed_weight,
            head_weight=whole.head_weight,
            feature_scale=whole.feature_scale,
            features=None if targets else partial(features_of, table(drafters)),
            remote_dtype=torch.float32 if targets else None,
        )
        remote = [RemoteTarget(apart, partial(features_of, table(apart)))] if targets else []
        trainer = make_trainer(config, target=parts, remote_targets=remote)
        trainer.prepare()
        trainer.start_from(weights=first_drafter().state_dict())
        result = trainer.run()
        assert result.summary.endswith("20 steps (20 graph replays)")
        found.append(losses(read_metrics(trainer.folder / "metrics.jsonl")))
        trainer.teardown()
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)
