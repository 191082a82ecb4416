import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig

from runtime import export
from runtime.dflash.folder.files import read_target_record, same_target, target_record
from runtime.dflash.folder.saved_drafter import load_published, save_published, servable
from runtime.dflash.network.drafter import Drafter
from runtime.dflash.start.initialise import drafter_config, random_start
from runtime.errors import CheckpointError
from runtime.training.checkpoint import save_checkpoint
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


def test_a_folded_weight_is_rounded_once(network, tmp_path):
    weights = make_drafter(network).state_dict()
    scale = torch.tensor([3.0, 0.7, 1.9])
    folder = save_published(tmp_path, network, weights, feature_scale=scale)
    found = load_file(folder / "model.safetensors")["fc.weight"]
    each = scale.double().repeat_interleave(32)
    once = (weights["fc.weight"].double() / each).bfloat16()
    twice = (weights["fc.weight"].bfloat16().double() / each).bfloat16()
    assert torch.equal(found, once)
    assert (once != twice).float().mean() > 0.1


def test_folder_holds_what_servers_read(network, tmp_path):
    drafter = make_drafter(network)
    folder = save_published(tmp_path, network, drafter.state_dict())
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    weights = load_file(folder / "model.safetensors")
    assert set(weights) == set(drafter.state_dict())
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert not any("embed" in name or "lm_head" in name or "inv_freq" in name for name in weights)
    read = AutoConfig.from_pretrained(folder)
    assert (read.num_hidden_layers, read.head_dim, read.block_size) == (2, 16, 4)
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


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_of_a_training_that_broke_down_are_neither_written_nor_read(
    network, tmp_path, value
):
    weights = make_drafter(network).state_dict()
    folder = save_published(tmp_path, network, weights)
    weights["norm.weight"][3] = value
    with pytest.raises(CheckpointError, match=r"must be finite, and norm\.weight is not"):
        save_published(tmp_path / "out", network, weights)
    assert not (tmp_path / "out").exists()
    written = load_file(folder / "model.safetensors")
    written["norm.weight"][3] = value
    save_file(written, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors must be finite"):
        load_published(folder)


def test_missing_folder(tmp_path):
    (tmp_path / "file").touch()
    for name in ("none", "file"):
        with pytest.raises(CheckpointError, match=rf"no drafter in \S+/{name} .*name a folder"):
            load_published(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"must be a drafter's config \(Expect"),
        ("", r"must be a drafter's config \(Expect"),
        ("[" * 100_000, r"must be a drafter's config \(maximum recursion"),
        ("\udcff", r"must be a drafter's config \('utf-8' codec"),
        ("[]", r"must be a JSON object \(list\)"),
        ("null", r"must be a JSON object \(NoneType\)"),
        ("{}", r": must hold 'hidden_size'"),
        ('{"hidden_size": "32"}', r': hidden_size = "32": must be an integer'),
        ('{"head_dimm": 16}', r": head_dimm = 16: is no key that is known"),
    ],
)
def test_a_config_that_is_none_is_named(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text, errors="surrogateescape")
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}/config\.json ?{message}") as caught:
        load_published(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": "16"}, r'head_dim = "16": must be an integer'),
        ({"head_dim": 8}, "head_dim = 8: must be even, for RoPE, and at least 16"),
        ({"is_causal": True}, "is_causal = true: must be false or missing"),
        ({"hidden_act": "gelu"}, 'hidden_act = "gelu": must be "silu"'),
    ],
)
def test_what_a_config_says_is_checked_and_its_file_named(network, tmp_path, change, message):
    save_published(tmp_path, network, make_drafter(network).state_dict())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError, match=rf"^{path}: {message}"):
        load_published(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "mask_embedding.pt",
        "adapter_config.json",
        "adapter_model.safetensors",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "pytorch_model.bin",
        "hf_quant_config.json",
        "quantize_config.json",
        "lm_head.pt",
    ],
)
def test_a_file_that_would_change_the_network_is_named(network, tmp_path, name):
    save_published(tmp_path, network, make_drafter(network).state_dict())
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/{name} would change the drafter"):
        load_published(tmp_path)


def test_files_that_change_nothing(network, tmp_path):
    save_published(tmp_path, network, make_drafter(network).state_dict())
    for name in ("README.md", "dflash.py", "optimizer.pt", "training_args.bin", "tokenizer.json"):
        (tmp_path / name).touch()
    assert load_published(tmp_path).config == network


def test_weights_of_another_kind_of_number(network, tmp_path):
    save_published(tmp_path, network, make_drafter(network).state_dict())
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    weights["fc.weight"] = weights["fc.weight"].to(torch.float8_e4m3fn)
    save_file(weights, path)
    with pytest.raises(
        CheckpointError, match=r"must hold floats of 16 or 32 bits, found torch\.fl"
    ):
        load_published(tmp_path)


RECORD = {"name": "models/a", "digest": "ab" * 32, "template": {"enable_thinking": False}}


def test_the_target_lies_beside_the_drafter(network, tmp_path):
    weights = make_drafter(network).state_dict()
    save_published(tmp_path, network, weights, target=RECORD)
    assert json.loads((tmp_path / "target.json").read_text()).items() >= RECORD.items()
    assert read_target_record(tmp_path) == RECORD
    save_published(tmp_path, network, weights)
    assert read_target_record(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "digest", "same"),
    [("tiny", "ab" * 32, True), ("moved/tiny", "ab" * 32, True), ("tiny", "cd" * 32, False)],
)
def test_a_target_is_the_same_by_its_digest_whatever_its_name(tmp_path, name, digest, same):
    at_hand = tiny_target()
    at_hand.digest = "ab" * 32
    lines = []
    assert same_target(tmp_path, at_hand, lines.append) is None
    (tmp_path / "target.json").write_text(json.dumps({"name": name, "digest": digest}))
    assert same_target(tmp_path, at_hand, lines.append) is same
    assert len(lines) == (not same)
    assert all("'tiny' (cdcdcdcdcdcd), and this is 'tiny' (abababababab)" in x for x in lines)


def test_a_record_is_what_the_data_says():
    meta = {"target": {"name": "a", "digest": "d"}, "seed": 3}
    assert target_record(meta) == {"name": "a", "digest": "d"}
    template = {"choice": "default"}
    assert target_record({**meta, "template": template})["template"] == template


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "is damaged: it must be a JSON object, found list"),
        ("{", r"is damaged: it must be JSON \(Expect"),
        ('{"name": "a"}', "must be an object with a text 'digest' .None."),
        ('{"name": 3, "digest": "d"}', "must be an object with a text 'name' .3."),
    ],
)
def test_a_record_that_is_none_is_named(tmp_path, text, message):
    (tmp_path / "target.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/target\.json {message}"):
        read_target_record(tmp_path)


def test_a_record_of_before_the_digest_is_read(network, tmp_path):
    save_published(tmp_path, network, make_drafter(network).state_dict())
    (tmp_path / "target.json").write_text(json.dumps(RECORD, indent=2))
    assert read_target_record(tmp_path) == RECORD
    assert load_published(tmp_path).config == network


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_drafter_whose_files_were_changed_is_refused(network, tmp_path, name):
    save_published(tmp_path, network, make_drafter(network).state_dict(), target=RECORD)
    path = tmp_path / name
    data = bytearray(path.read_bytes())
    # The last digit of a size of the network, or the last weight.
    data[data.rindex(b"256") + 2 if name == "config.json" else -1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"{path} is not the file that target\.json names"):
        load_published(tmp_path)
    (tmp_path / "target.json").unlink()
    load_published(tmp_path)


def test_two_exports_at_once_leave_one_drafter(network, tmp_path):
    drafters = {seed: make_drafter(network, seed).state_dict() for seed in range(4)}

    def export_one(seed):
        save_published(
            tmp_path / "out", network, drafters[seed], target={**RECORD, "name": str(seed)}
        )

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(export_one, [0, 1, 2, 3] * 5))
    seed = int(read_target_record(tmp_path / "out")["name"])
    loaded = load_published(tmp_path / "out").fc.weight
    assert torch.equal(loaded, drafters[seed]["fc.weight"].bfloat16())
    names = ["config.json", "model.safetensors", "target.json"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names


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
        published={
            **network.to_published(),
            "feature_scale": [2.0, 3.0, 4.0],
            "target": RECORD,
        },
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
    assert read_target_record(folder) == RECORD
    # The features' scale has been folded in.
    assert not torch.equal(loaded.fc.weight, drafters[10].fc.weight.bfloat16())
    out = str(tmp_path / "early")
    result = CliRunner().invoke(export.main, [*arguments, "--step", "5", "--out", out])
    assert result.output == f"{out}: drafter of step 5\n"
    assert torch.equal(load_published(out).norm.weight, drafters[5].norm.weight.bfloat16())


def test_command_passes_over_what_is_damaged(run_file, network, tmp_path):
    drafters = {step: save_step(tmp_path, network, step) for step in (5, 10, 15)}
    root = tmp_path / "run" / "checkpoints"
    (root / "step-00000010" / "state.safetensors").write_bytes(b"")
    (root / "step-00000015" / "meta.json").write_text("{}")
    result = CliRunner().invoke(export.main, ["--config", str(run_file)])
    assert result.exit_code == 0, result.output
    assert "step-00000015/meta.json is damaged" in result.stderr
    assert "step-00000010/state.safetensors is damaged" in result.stderr
    found = load_published(tmp_path / "run" / "drafter").norm.weight
    assert torch.equal(found, drafters[5].norm.weight.bfloat16())
    (root / "step-00000005" / "state.safetensors").unlink()
    result = CliRunner().invoke(export.main, ["--config", str(run_file)])
    assert result.exit_code == 1
    assert f"{root} holds damaged checkpoints only; run: python -m runtime.train" in result.stderr


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
