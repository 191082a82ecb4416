"""Runs that begin from the folder of a published drafter."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from maskgen.cli import main as maskgen
from runtime.config import parse_config
from runtime.data.dataset import Dataset
from runtime.dflash.folder.saved_drafter import load_published, save_published
from runtime.dflash.method import METHOD
from runtime.dflash.network.config import DrafterConfig
from runtime.dflash.settings import DFlashConfig
from runtime.dflash.start.beginning import check_run, find_beginning
from runtime.dflash.start.initialise import from_published, random_start
from runtime.dflash.step.buckets import run_specs, sliding_specs
from runtime.errors import ConfigError
from runtime.evaluate import main as evaluate
from runtime.prepare import main as prepare
from runtime.shaping import shaping_settings
from runtime.target.model import Target
from runtime.train import main as train
from runtime.training.checkpoint import find_checkpoints
from runtime.training.metrics import read_metrics
from tests.runtime.test_train import RUN_FILE
from tests.runtime.tiny_text import byte_target

LAYER_IDS = (4, 0, 2)
"""No rule would spread them so."""
RUN = (
    RUN_FILE.replace("num_features = 2\n", "")
    .replace("num_layers = 2", 'init = "{root}/published"')
    .replace("steps = 6", "steps = 6\nlr = 1e-4")
)


def published_config(target, **changes):
    """Of no shape that the target has, but for what must be its."""
    settings = {
        "hidden_size": target.hidden_size,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e4,
        "vocab_size": target.vocab_size,
        "draft_block_size": 4,
        "mask_token_id": 7,
        "target_layer_ids": LAYER_IDS,
        "num_target_layers": target.num_layers,
        "max_position_embeddings": 512,
        **changes,
    }
    return DrafterConfig(**settings)


def publish(folder, config, seed=2):
    """As another trainer does, without target.json; norms that are no ones."""
    weights = random_start(config, torch.Generator().manual_seed(seed)).state_dict()
    for name, weight in weights.items():
        weight += 0.2 * torch.randn(
            weight.shape, generator=torch.Generator().manual_seed(len(name))
        )
    return save_published(folder, config, weights)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("beginning")
    target = byte_target()
    for name, made in (("target", target), ("other", byte_target(seed=1))):
        made.model.save_pretrained(folder / name)
        made.tokenizer.save_pretrained(folder / name)
    prompts = [{"prompt": f"tell me {'more ' * (i % 4)}{i}"} for i in range(16)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    (folder / "run.toml").write_text(RUN.format(root=folder))
    publish(folder / "published", published_config(target))
    call(prepare, folder)
    call(maskgen, folder, "build", str(folder / "run.toml"), config=False)
    return folder


@pytest.fixture(scope="module")
def trained(root):
    return call(train, root)


def call(command, root, *options, config=True, code=0):
    where = ["--config", str(root / "run.toml")] if config else []
    result = CliRunner().invoke(command, [*where, *options])
    assert result.exit_code == code, result.output
    return result


def setting(*pairs):
    return [part for pair in pairs for part in ("--set", pair)]


def test_the_first_step_drafts_what_the_published_drafter_drafts(root):
    """A run divides the features by their scale, and a published drafter takes them raw."""
    target = Target.load(root / "target", device="cpu", dtype=torch.float32)
    data = Dataset.open(root / "data", "train")
    assert data.layer_ids == LAYER_IDS
    scale = torch.tensor(data.feature_scale)
    assert min(abs(value - 1) for value in data.feature_scale) > 0.05
    published = load_published(root / "published", dtype=torch.float32)
    began = from_published(published, published.config, torch.Generator().manual_seed(1), scale)
    ids = data.sample(0).input_ids[None].long()
    features = target.features(ids, LAYER_IDS)
    anchors = torch.tensor([[3, 9]])
    positions = (anchors[..., None] + torch.arange(4)).flatten(1)

    def logits(drafter, scale):
        x = drafter.block_inputs(ids.gather(1, anchors), target.embed_weight)
        F = drafter.fuse(features, scale)
        hidden = drafter(x, F, torch.arange(ids.shape[1]), positions, attend)
        return hidden @ target.head_weight.T

    def attend(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    wanted = logits(published, None)
    assert wanted.std() > 0.1
    torch.testing.assert_close(logits(began, scale), wanted, rtol=1e-4, atol=1e-5)
    assert began.fc.weight.dtype == torch.float32
    assert all(parameter.requires_grad for parameter in began.parameters())


def test_the_folder_fixes_the_network_and_the_run_says_where_it_began(root, trained):
    assert json.loads((root / "data" / "meta.json").read_text())["layer_ids"] == list(LAYER_IDS)
    assert re.search(rf"^began from +{root}/published$", trained.stdout, re.MULTILINE)
    ours, theirs = (
        json.loads((root / folder / "config.json").read_text())
        for folder in ("run/drafter", "published")
    )
    assert ours == theirs
    before = load_file(root / "published" / "model.safetensors")
    after = load_file(root / "run" / "drafter" / "model.safetensors")
    assert before.keys() == after.keys()
    # Six small steps away from it.
    far = {name: (after[name].float() - before[name].float()).abs().max() for name in before}
    assert max(far.values()) < 0.02
    assert min(far[name] for name in far if before[name].dim() == 2) > 0
    record = json.loads((root / "run" / "drafter" / "target.json").read_text())
    assert record["began_from"]["folder"] == str(root / "published")
    kept = json.loads((root / "run" / "run.json").read_text())["began_from"]
    assert kept["files"]["model.safetensors"] == record["began_from"]["sha256"]
    assert kept["config"] == theirs


def test_untrained_means_the_drafter_that_a_run_began_from(root, trained):
    scores = json.loads(call(evaluate, root, "--json").stdout)
    folder = json.loads(call(evaluate, root, "--drafter", str(root / "published"), "--json").stdout)
    assert scores["untrained"]["kept"] == folder["trained"]["kept"]
    assert scores["trained"]["kept"]


@pytest.fixture
def copied(root, trained, tmp_path):
    """A copy of the run at step 3, and of the drafter that it began from."""
    shutil.copytree(root / "run", tmp_path / "run")
    shutil.copytree(root / "published", tmp_path / "published")
    text = RUN.format(root=root).replace(f"{root}/run", f"{tmp_path}/run")
    text = text.replace(f"{root}/published", f"{tmp_path}/published")
    (tmp_path / "run.toml").write_text(text)
    call(train, tmp_path, "--fresh")
    newest, _ = find_checkpoints(tmp_path / "run" / "checkpoints")
    wanted = newest.load()
    shutil.rmtree(newest.folder)
    return tmp_path, wanted


def test_a_run_goes_on_once_the_folder_is_gone(copied):
    folder, wanted = copied
    shutil.rmtree(folder / "published")
    again = call(train, folder)
    assert "resuming from step 3 of 6" in again.stderr
    found = find_checkpoints(folder / "run" / "checkpoints")[0].load()
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items())
    assert "began from" in again.stdout
    scored = call(evaluate, folder)
    assert "published is gone: comparing with a random one" in scored.stderr
    refused = call(train, folder, "--fresh", code=2)
    assert f"drafter.init = '{folder}/published': must be 'target' or 'random', or a folder" in (
        refused.output
    )
    # It may still go on, since what is refused deletes nothing.
    assert find_checkpoints(folder / "run" / "checkpoints")


def test_a_run_whose_beginning_was_changed_is_refused(copied):
    folder, _ = copied
    path = folder / "published" / "model.safetensors"
    weights = load_file(path)
    weights["norm.weight"] = weights["norm.weight"] * 2
    save_file(weights, path, {"format": "pt"})
    refused = call(train, folder, code=1)
    assert "checkpoints of another run; changed: began_from.model.safetensors " in refused.output
    refused = call(train, folder, *setting("drafter.init=random", "target.num_features=3"), code=1)
    assert 'drafter.init "' in refused.output


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({}, ["drafter.num_layers=2"], r"drafter.num_layers = 2: must be 3, as the drafter in"),
        ({}, ["target.num_features=2"], r"target.num_features = 2: must be 3, as the drafter in"),
        (
            {"draft_block_size": 8},
            [],
            "masks.entry.draft_block_size = 4: must be 8, as the drafter in",
        ),
        (
            {"embedding_scale": 2.0},
            ["drafter.embedding=rows"],
            "drafter.embedding = 'rows': must be 'module', as the drafter in",
        ),
        ({"hidden_size": 48}, [], "whose hidden size is 32; this one is for a target of 48"),
        ({"vocab_size": 100}, [], "whose vocabulary is 264; this one is for a target of 100"),
        (
            {"num_target_layers": 9},
            [],
            "whose number of layers is 6; this one is for a target of 9",
        ),
        (
            {"layers": ("full", "sliding", "full"), "sliding_window": 8},
            ['drafter.layers=["sliding","full","full"]'],
            "drafter.layers = ['sliding', 'full', 'full']: must be ['full', 'sliding', 'full'], "
            "as the drafter in",
        ),
        (
            {"layers": ("full", "sliding", "full"), "sliding_window": 8},
            ["drafter.sliding_window=9"],
            "drafter.sliding_window = 9: must be 8, as the drafter in",
        ),
        (
            {},
            ['drafter.layers=["sliding","full","full"]'],
            "must be ['full', 'full', 'full'], as the drafter in",
        ),
        (
            {"markov_rank": 4},
            ["drafter.markov_rank=8"],
            "drafter.markov_rank = 8: must be 4, as the drafter in",
        ),
    ],
)
@pytest.mark.parametrize("command", [prepare, train])
def test_a_drafter_of_another_network_or_target_is_refused(
    root, tmp_path, command, changes, settings, message
):
    target = byte_target()
    publish(tmp_path / "published", published_config(target, **changes))
    options = setting(f"drafter.init={tmp_path}/published", f"run.folder={tmp_path}/run", *settings)
    if command is prepare:
        options += setting(f"data.folder={tmp_path}/data")
    assert message in call(command, root, *options, code=2).output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["published"]


@pytest.mark.parametrize("harm", [float("nan"), float("inf"), None])
def test_weights_that_cannot_be_trained_on_are_refused_before_answering(
    root, tmp_path, monkeypatch, harm
):
    folder = publish(tmp_path / "published", published_config(byte_target()))
    weights = load_file(folder / "model.safetensors")
    if harm is None:
        del weights["norm.weight"]
    else:
        weights["norm.weight"][1] = harm
    save_file(weights, folder / "model.safetensors")
    monkeypatch.setattr(Target, "load", None)
    options = setting(f"drafter.init={folder}", f"data.folder={tmp_path}/data")
    said = call(prepare, root, *options, code=1).stderr
    assert "norm.weight" in said
    assert f"{folder}/model.safetensors" in said
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("rank", [0, 4])
def test_a_run_may_add_a_markov_head_and_goes_on_with_one_that_is_there(root, tmp_path, rank):
    """A head that is added is nothing at first, so a run of no length is the folder."""
    folder = publish(tmp_path / "published", published_config(byte_target(), markov_rank=rank))
    added = ["drafter.markov_rank=4"] if not rank else []
    options = [f"drafter.init={folder}", f"run.folder={tmp_path}/run", "train.lr=1e-30", *added]
    call(train, root, *setting(*options))
    before, after = (
        load_published(where, dtype=torch.float32) for where in (folder, tmp_path / "run/drafter")
    )
    assert after.config == replace(before.config, markov_rank=4)
    found, wanted = after.state_dict(), before.state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    w2 = found["markov_head.markov_w2.weight"]
    assert (w2.abs().max() < 1e-20) == (rank == 0)


def test_a_run_may_add_a_confidence_head_and_keeps_one_that_is_there(tmp_path):
    for confident in (False, True):
        given = {"markov_rank": 4, "confidence_head": confident, "sample_from_anchor": True}
        wanted = published_config(byte_target(), **given)
        folder = publish(tmp_path / str(confident), wanted)
        for asked in (False, True):
            raw = {"drafter": {"init": str(folder), "markov_rank": 4, "confidence": asked}}
            config = parse_config({**raw, "train": {"distill": "l1"}}, DFlashConfig)
            network = check_run(find_beginning(config), config, {})
            assert network == replace(wanted, confidence_head=confident or asked)


def test_a_published_dspark_drafter_is_trained_on_as_it_drafts(root, tmp_path):
    """From its anchor, with the frozen copies of the target's weights that its trainer adds."""
    config = published_config(byte_target(), markov_rank=4, sample_from_anchor=True)
    folder = publish(tmp_path / "published", config)
    before = load_published(folder, dtype=torch.float32)
    weights = load_file(folder / "model.safetensors")
    for name in ("embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.randn(config.vocab_size, config.hidden_size).bfloat16()
    save_file(weights, folder / "model.safetensors")
    published = json.loads((folder / "config.json").read_text())
    published.pop("sample_from_anchor")
    (folder / "config.json").write_text(json.dumps(published))
    options = setting(f"drafter.init={folder}", f"run.folder={tmp_path}/run", "train.lr=1e-30")
    call(train, root, *options)
    after = load_published(tmp_path / "run/drafter", dtype=torch.float32)
    assert after.config == before.config == config
    found = after.state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in before.state_dict().items())
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(rows[0]["accuracy"]) == 4
    result = json.loads(call(evaluate, root, *options, "--json").stdout)
    assert result["exact"]
    assert (result["draft_block_size"], len(result["trained"]["acceptance"])) == (4, 4)
    assert len(result["trained"]["kept"]) == 5
    shorter = publish(tmp_path / "shorter", replace(config, sample_from_anchor=False))
    scored = call(evaluate, root, *options, "--drafter", str(shorter), "--json")
    assert "published drafts 4 tokens at once: comparing with a random one" in scored.stderr
    assert len(json.loads(scored.stdout)["trained"]["kept"]) == 4


def test_a_head_of_the_folder_is_trained_over_seen_tokens(root, tmp_path):
    folder = publish(tmp_path / "published", published_config(byte_target(), markov_rank=4))
    options = [f"drafter.init={folder}", f"run.folder={tmp_path}/run", "train.softmax=seen"]
    assert "over the tokens of the training data" in call(train, root, *setting(*options)).output


def test_what_the_run_file_says_as_the_folder_does_is_taken(root, tmp_path):
    same = setting("drafter.num_layers=3", "target.num_features=3", f"run.folder={tmp_path}/run")
    assert "(up to date)" in call(prepare, root, *same).stdout
    call(train, root, *same)


@pytest.mark.parametrize("name", ["", "targte", "no/such/folder"])
def test_a_folder_that_is_not_there_is_refused(root, name):
    for command in (prepare, train):
        refused = call(command, root, *setting(f"drafter.init={name}"), code=2)
        assert "must be 'target' or 'random', or a folder with config.json and" in refused.output


def test_a_run_does_not_take_the_place_of_what_it_begins_from(root, trained):
    before = (root / "run/drafter/model.safetensors").read_bytes()
    for command in (prepare, train):
        refused = call(command, root, *setting(f"drafter.init={root}/run/drafter"), code=2)
        assert "is where this run exports its own drafter; set another run.folder" in (
            refused.output
        )
    assert (root / "run/drafter/model.safetensors").read_bytes() == before


@pytest.mark.parametrize("distill", ["none", "l1"])
def test_a_confidence_head_that_learns_nothing_is_named(root, tmp_path, distill):
    network = published_config(byte_target(), markov_rank=4, confidence_head=True)
    folder = publish(tmp_path / "published", network)
    where = (f"data.folder={tmp_path}/data", f"run.folder={tmp_path}/run")
    options = setting(f"drafter.init={folder}", f"train.distill={distill}", *where)
    call(prepare, root, *options)
    named = (
        "confidence head learns nothing without train.distill" in call(train, root, *options).stderr
    )
    assert named == (distill == "none")
    before, after = (
        load_file(where / "model.safetensors") for where in (folder, tmp_path / "run/drafter")
    )
    name = "confidence_head.proj.weight"
    assert torch.equal(before[name], after[name]) == named


def test_a_folder_that_another_network_hides_in_is_refused_by_name(root, tmp_path):
    folder = publish(tmp_path / "published", published_config(byte_target()))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "sample_from_anchor": True}))
    refused = call(prepare, root, *setting(f"drafter.init={folder}"), code=1)
    assert "sample_from_anchor = true" in refused.output


def test_data_of_other_layers_are_refused_with_the_command_that_makes_them(root, tmp_path):
    folder = publish(
        tmp_path / "published", published_config(byte_target(), target_layer_ids=(1, 2, 3))
    )
    options = setting(f"drafter.init={folder}", f"run.folder={tmp_path}/run")
    refused = call(train, root, *options, code=1)
    assert f"features of layers [4, 0, 2], and the drafter in {folder} reads [1, 2, 3]; " in (
        refused.output
    )
    assert "python -m runtime.prepare" in refused.output


def test_data_with_the_layers_of_the_rule_serve_a_drafter_that_reads_them(root, tmp_path):
    data = [f"data.folder={tmp_path}/data", f"run.folder={tmp_path}/run"]
    call(prepare, root, *setting("drafter.init=target", "target.num_features=3", *data))
    folder = publish(
        tmp_path / "published", published_config(byte_target(), target_layer_ids=(1, 2, 3))
    )
    again = call(prepare, root, *setting(f"drafter.init={folder}", *data))
    assert "(up to date)" in again.stdout


def test_another_target_of_equal_sizes_is_named(root, trained, tmp_path):
    options = setting(
        f"drafter.init={root}/run/drafter",
        f"target.model={root}/other",
        f"data.folder={tmp_path}/data",
        f"run.folder={tmp_path}/run",
    )
    warning = f"warning: the drafter in {root}/run/drafter was trained for target"
    assert warning in call(prepare, root, *options).stderr
    assert warning in call(train, root, *options).stderr
    assert json.loads((tmp_path / "run/drafter/target.json").read_text())["began_from"]


def sliding_config(folder, **drafter):
    """Of a run that begins from a folder, with masks for layers of window 6."""
    entry = {"family": "dflash", "context": [32], "anchors": 8, "draft_block_size": 4}
    slides = {"layer": "sliding", "window": 6, "drawn_as": "dflash"}
    entries = [
        {"name": "dflash", "kind": "layouts", **entry},
        {"name": "dflash-sliding", "kind": "layouts", **entry, **slides},
    ]
    masks = {"BLOCK_SIZE": 16, "entry": entries}
    raw = {"drafter": {"init": str(folder), **drafter}, "masks": masks}
    return parse_config(raw, DFlashConfig)


SLIDES = {"layers": ("sliding", "sliding", "full"), "sliding_window": 6}


@pytest.mark.parametrize("said", [(), ("layers",), ("sliding_window",), tuple(SLIDES)])
def test_what_a_run_leaves_out_of_its_sliding_layers_follows_the_folder(tmp_path, said):
    wanted = published_config(byte_target(), **SLIDES)
    folder = publish(tmp_path / "published", wanted)
    config = sliding_config(folder, **{key: SLIDES[key] for key in said})
    assert [spec.params["window"] for spec in sliding_specs(config).values()] == [6]
    assert check_run(find_beginning(config), config, run_specs(config)) == wanted
    assert METHOD.closing_lines(config)["layers"] == "sliding sliding full, window 6"


def test_masks_that_a_folders_window_needs_are_named_with_it(tmp_path):
    slides = {"layers": ("full", "full", "sliding"), "sliding_window": 5}
    folder = publish(tmp_path / "published", published_config(byte_target(), **slides))
    with pytest.raises(ConfigError) as caught:
        sliding_specs(sliding_config(folder))
    assert str(caught.value).startswith("drafter.layers = ['full', 'full', 'sliding']: needs ")
    assert f"window = 5 (of the drafter in {folder}), drawn_as = 'dflash'; " in str(caught.value)
    assert str(caught.value).endswith("window must be 5, and is 6")


def test_a_window_of_full_layers_and_the_usual_one_shape_a_run_no_more_than_none(tmp_path):
    """As in the records of runs that began from a folder before it fixed the window."""
    folder = publish(tmp_path / "published", published_config(byte_target()))
    left_out, usual = (sliding_config(folder, **more) for more in ({}, {"sliding_window": 2048}))
    assert left_out.drafter.sliding_window != usual.drafter.sliding_window
    for config in (left_out, usual):
        shaping = shaping_settings(config.as_dict(), DFlashConfig)["drafter"]
        assert "sliding_window" not in shaping
        assert sliding_specs(config) == {}


@pytest.mark.parametrize(("name", "kept"), [("config.json", 0), ("model.safetensors", 1000)])
@pytest.mark.parametrize("ours", [True, False])
def test_a_damaged_folder_is_to_be_had_again_and_not_exported_from_this_run(
    root, trained, tmp_path, name, kept, ours
):
    """It may be of another run, or of another trainer."""
    folder = shutil.copytree(root / ("run/drafter" if ours else "published"), tmp_path / "cut")
    (folder / name).write_bytes((folder / name).read_bytes()[:kept])
    options = setting(f"drafter.init={folder}", f"run.folder={tmp_path}/run")
    said = " ".join(call(train, root, *options, code=1).output.split())
    advice = "copy or fetch the folder again, or export it again from the run that it came from"
    assert f"{folder}/{name} " in said
    assert f"{advice} (python -m runtime.export --config ITS_RUN_FILE)" in said
    assert f"runtime.export --config {root}" not in said


@pytest.mark.parametrize("rank", [0, 5])
@pytest.mark.parametrize("confident", [False, True])
@pytest.mark.parametrize("said", [False, True])
def test_the_closing_table_names_the_heads_of_the_folder_and_of_the_run(
    tmp_path, rank, confident, said
):
    """Whichever of them asks for a head."""
    heads = {"markov_rank": rank, "confidence_head": confident and rank > 0}
    folder = publish(tmp_path / "published", published_config(byte_target(), **heads))
    asked = {"drafter": {"init": str(folder), "markov_rank": 5, "confidence": True}}
    taught = {**asked, "train": {"distill": "kl"}}
    config = parse_config(taught if said else {"drafter": {"init": str(folder)}}, DFlashConfig)
    lines = METHOD.closing_lines(config)
    assert lines.get("Markov head") == ("rank 5" if said or rank else None)
    if said:
        assert lines["confidence head"] == "learns the overlap"
    else:
        kept = heads["confidence_head"]
        assert lines.get("confidence head") == ("learns nothing" if kept else None)


def test_the_closing_table_names_heads_of_no_folder():
    raw = {"drafter": {"markov_rank": 7, "confidence": True}, "train": {"distill": "l1"}}
    assert METHOD.closing_lines(parse_config({}, DFlashConfig)) == {"anchors": "layouts"}
    assert METHOD.closing_lines(parse_config(raw, DFlashConfig)) == {
        "anchors": "layouts",
        "distillation": "l1, share 0.9",
        "Markov head": "rank 7",
        "confidence head": "learns the overlap",
    }
