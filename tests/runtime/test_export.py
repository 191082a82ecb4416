import json

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig

from runtime import export
from runtime.checkpoint import save_checkpoint
from runtime.drafter import Drafter
from runtime.errors import CheckpointError
from runtime.export import load_published, save_published, servable
from runtime.initialise import drafter_config, random_start
from tests.runtime.tiny_llama import tiny_target

LAYER_IDS = (1, 2, 3)
SCALE = torch.tensor([2.0, 0.5, 4.0])


@pytest.fixture(scope="module")
def network():
    return drafter_config(
        tiny_target(), num_layers=2, draft_block_size=4, target_layer_ids=LAYER_IDS
    )


def make_drafter(network, seed=3):
    generator = torch.Generator().manual_seed(seed)
    drafter = random_start(network, generator)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(0.1, 0.3, generator=generator)
    return drafter


def run(drafter, features, scale=None):
    x = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(1))
    F = drafter.fuse(features, scale)
    return drafter(
        x,
        F,
        torch.arange(7),
        torch.arange(7, 11)[None],
        lambda q, k, v: scaled_dot_product_attention(q, k, v, enable_gqa=True),
    )


def features():
    return torch.randn(1, 7, 96, generator=torch.Generator().manual_seed(2))


def test_published_drafter_computes_the_same(network, tmp_path):
    drafter = make_drafter(network).to(torch.bfloat16).float()
    folder = save_published(tmp_path / "out", network, drafter.state_dict(), feature_scale=SCALE)
    loaded = load_published(folder, dtype=torch.float32)
    # Powers of two fold without rounding, and the weights were bf16 values already.
    torch.testing.assert_close(run(loaded, features()), run(drafter, features(), SCALE))
    assert loaded.config == network
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


def test_folder_holds_what_servers_read(network, tmp_path):
    drafter = make_drafter(network)
    folder = save_published(tmp_path, network, drafter.state_dict())
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    weights = load_file(folder / "model.safetensors")
    assert set(weights) == set(drafter.state_dict())
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert not any("embed" in name or "lm_head" in name or "inv_freq" in name for name in weights)
    read = AutoConfig.from_pretrained(folder)
    assert (read.num_hidden_layers, read.head_dim, read.block_size) == (2, 8, 4)
    published = json.loads((folder / "config.json").read_text())
    assert published["dflash_config"]["target_layer_ids"] == list(LAYER_IDS)
    assert published["num_target_layers"] == 6


def test_loads_in_the_files_dtype_by_default(network, tmp_path):
    save_published(tmp_path, network, make_drafter(network).state_dict())
    loaded = load_published(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert loaded.inv_freq.dtype == torch.float32


def test_servable_folds_in_place(network):
    drafter = make_drafter(network)
    expected = run(drafter, features(), SCALE)
    assert servable(drafter, SCALE) is drafter
    torch.testing.assert_close(run(drafter, features()), expected)


def test_publishing_replaces_an_older_drafter(network, tmp_path):
    for seed in (1, 2):
        drafter = make_drafter(network, seed)
        save_published(tmp_path, network, drafter.state_dict())
    assert torch.equal(load_published(tmp_path).fc.weight, drafter.fc.weight.bfloat16())


def test_other_weights_are_not_published(network, tmp_path):
    weights = make_drafter(network).state_dict()
    weights["model.fc.weight"] = weights.pop("fc.weight")
    message = "must be the 25 tensors.* 2 differ, first fc.weight: expected .32, 96., found none"
    with pytest.raises(CheckpointError, match=message):
        save_published(tmp_path / "out", network, weights)
    assert not (tmp_path / "out").exists()


def test_missing_folder(tmp_path):
    (tmp_path / "file").touch()
    for name in ("none", "file"):
        with pytest.raises(CheckpointError, match=rf"no drafter in \S+/{name} .*runtime\.train$"):
            load_published(tmp_path / name)


def test_config_that_is_no_json(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json must be a drafter's config \(Expect"):
        load_published(tmp_path)


def test_config_that_is_no_object(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"must be a JSON object \(list\)"):
        load_published(tmp_path)


def test_torn_weights(network, tmp_path):
    save_published(tmp_path, network, make_drafter(network).state_dict())
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors must be a safetensors file"):
        load_published(tmp_path)


def test_weights_with_a_wrong_prefix(network, tmp_path):
    save_published(tmp_path, network, make_drafter(network).state_dict())
    path = tmp_path / "model.safetensors"
    save_file({f"model.{name}": tensor for name, tensor in load_file(path).items()}, path)
    with pytest.raises(CheckpointError, match=r"50 differ, first fc\.weight"):
        load_published(tmp_path)


@pytest.fixture
def run_file(tmp_path):
    # The checkpoint says all that an export needs: neither target nor data is opened.
    (tmp_path / "run.toml").write_text(f'[run]\nfolder = "{tmp_path}/run"\n')
    return tmp_path / "run.toml"


def save_step(root, network, step):
    drafter = make_drafter(network, seed=step)
    state = {f"master.{name}": tensor for name, tensor in drafter.state_dict().items()}
    state["exp_avg.fc.weight"] = torch.zeros(3)
    save_checkpoint(
        root / "run" / "checkpoints",
        state,
        step=step,
        fingerprint="f",
        drafter={**network.to_published(), "feature_scale": [2.0, 3.0, 4.0]},
        keep=5,
    )
    return drafter


def test_command_exports_a_checkpoint(run_file, network, tmp_path):
    drafters = {step: save_step(tmp_path, network, step) for step in (5, 10)}
    arguments = ["--config", str(run_file)]
    result = CliRunner().invoke(export.main, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    folder = tmp_path / "run" / "drafter"
    assert json.loads(result.output) == {"folder": str(folder), "step": 10}
    loaded = load_published(folder)
    assert isinstance(loaded, Drafter)
    assert torch.equal(loaded.norm.weight, drafters[10].norm.weight.bfloat16())
    # The features' scale has been folded in.
    assert not torch.equal(loaded.fc.weight, drafters[10].fc.weight.bfloat16())
    out = str(tmp_path / "early")
    result = CliRunner().invoke(export.main, [*arguments, "--step", "5", "--out", out])
    assert result.output == f"{out}: drafter of step 5\n"
    assert torch.equal(load_published(out).norm.weight, drafters[5].norm.weight.bfloat16())


def test_command_without_a_checkpoint(run_file, network, tmp_path):
    result = CliRunner().invoke(export.main, ["--config", str(run_file)])
    assert result.exit_code == 1
    advice = f"run: python -m runtime.train --config {run_file}"
    assert f"must hold a checkpoint, found none; {advice}\n" in result.stderr
    for step in (3, 5):
        save_step(tmp_path, network, step)
    result = CliRunner().invoke(export.main, ["--config", str(run_file), "--step", "7"])
    expected = "must hold a checkpoint of step 7, found 5, 3; choose one of them with --step\n"
    assert expected in result.stderr
