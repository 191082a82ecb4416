"""A drafter folder by itself: what may lie in it, whose it is, and how its files are replaced."""

import errno
import hashlib
import json
import os
import re
from pathlib import Path

import pytest

from runtime.dflash.folder.files import (
    check_files,
    is_of,
    read_network,
    read_target_record,
    replace_files,
    same_target,
    target_record,
)
from runtime.errors import CheckpointError, LaterFormatError
from runtime.files.sealed import seal
from tests.runtime.dflash.test_drafter import make_config
from tests.runtime.tiny_llama import tiny_target

RUN = {"fingerprint": "f" * 64, "step": 40}
RECORD = {"name": "models/a", "digest": "ab" * 32, "run": RUN}
CONFIG = json.dumps(make_config().to_published()).encode()


def write(folder, record=RECORD, weights=b"weights", config=CONFIG):
    replace_files(
        folder,
        {
            "model.safetensors": lambda path: path.write_bytes(weights),
            "config.json": lambda path: path.write_bytes(config),
        },
        record,
    )
    return folder


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def rewrite(folder, **changes):
    path = folder / "target.json"
    document = json.loads(path.read_text())
    del document["document_sha256"]
    path.write_bytes(seal({**document, **changes}))


def test_a_record_has_the_digests_of_the_files_that_came_with_it(tmp_path):
    folder = write(tmp_path)
    assert names(folder) == ["config.json", "model.safetensors", "target.json"]
    document = json.loads((folder / "target.json").read_text())
    del document["document_sha256"]
    assert document == {
        "format": 2,
        **RECORD,
        "files": {
            "model.safetensors": hashlib.sha256(b"weights").hexdigest(),
            "config.json": hashlib.sha256(CONFIG).hexdigest(),
        },
    }
    # What shaped the drafter is asked for apart from whose it is.
    assert read_target_record(str(folder)) == {"name": "models/a", "digest": "ab" * 32}
    check_files(folder)


def test_files_of_others_stay_and_those_of_an_older_drafter_go(tmp_path):
    write(tmp_path)
    (tmp_path / "README.md").write_text("mine")
    left = tmp_path / ".config.json.tmp-killed"
    left.mkdir()
    (left / "config.json").write_text("half")
    write(tmp_path, record=None, weights=b"newer")
    assert names(tmp_path) == ["README.md", "config.json", "model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == b"newer"
    assert read_target_record(tmp_path) is None
    check_files(tmp_path)


def test_the_config_goes_first_and_comes_last(tmp_path, monkeypatch):
    """Killed at any moment, a folder with a config has the files that belong to it."""
    write(tmp_path)
    moves, replace = [], os.replace

    def recorded(source, target):
        if target.parent == tmp_path:
            moves.append((target.name, names(tmp_path)))
        return replace(source, target)

    monkeypatch.setattr(os, "replace", lambda source, target: recorded(source, Path(target)))
    write(tmp_path, weights=b"newer")
    assert moves[-1][0] == "config.json"
    assert {name for name, _ in moves[:-1]} == {"model.safetensors", "target.json"}
    for _, there in moves:
        assert "config.json" not in there
    assert "target.json" not in moves[0][1]


def test_a_writer_that_fails_leaves_the_old_drafter_and_names_its_file(tmp_path):
    write(tmp_path)

    def refuse(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left") as caught:
        replace_files(tmp_path, {"model.safetensors": refuse}, None)
    assert caught.value.filename == f"{tmp_path}/model.safetensors"
    assert names(tmp_path) == ["config.json", "model.safetensors", "target.json"]
    assert is_of(tmp_path, RUN)


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("mask_embedding.pt", "a row of its own for the mask token"),
        ("adapter_config.json", "an adapter over other weights"),
        ("model.safetensors.index.json", "weights in several files; save them as one"),
        ("hf_quant_config.json", "quantised weights"),
        ("quantize_config.json", "quantised weights"),
        *((f"other.{kind}", "more weights") for kind in ("safetensors", "bin", "pt", "pth")),
        *((f"other.{kind}", "more weights") for kind in ("ckpt", "gguf", "npz")),
    ],
)
def test_a_file_that_would_change_the_drafter_is_named_with_what_it_is(tmp_path, name, meaning):
    write(tmp_path)
    assert read_network(tmp_path) == make_config()
    for other in (name, "a.txt", "zz.txt"):
        (tmp_path / other).touch()
    wanted = re.escape(f"{tmp_path}/{name} would change the drafter ({meaning}): a drafter here is")
    with pytest.raises(CheckpointError, match=f"^{wanted}"):
        read_network(tmp_path)


def test_of_several_such_files_the_first_name_is_told(tmp_path):
    write(tmp_path)
    for name in ("z.pt", "b.bin", "c.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}/b\.bin would change"):
        read_network(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        *("training_args.bin", "training_state.pt", "optimizer.pt", "optimizer.bin"),
        *("scheduler.pt", "rng_state.pth", "rng_state_0.pth", "model.py", "generation_config.json"),
    ],
)
def test_what_a_trainer_leaves_behind_is_no_part_of_the_drafter(tmp_path, name):
    write(tmp_path)
    (tmp_path / name).touch()
    assert read_network(tmp_path) == make_config()


def test_a_folder_without_a_drafter_is_named(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        read_network(tmp_path)
    assert str(caught.value) == (
        f"there is no drafter in {tmp_path} (no config.json); name a folder of a published "
        "drafter, such as runtime.train and runtime.export write"
    )
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json must be a drafter's config \(.*direc"):
        read_network(tmp_path)


def test_a_template_is_in_the_record_only_where_the_data_have_one():
    target = {"name": "a", "digest": "d"}
    assert target_record({"target": target, "template": None}) == {**target, "template": None}
    assert target_record({"target": target, "seed": 3}) == target


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_that_was_changed_is_named_with_both_digests(tmp_path, name):
    write(tmp_path)
    was = hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()[:12]
    now = hashlib.sha256(b"changed").hexdigest()[:12]
    (tmp_path / name).write_bytes(b"changed")
    assert not is_of(tmp_path, RUN)
    with pytest.raises(CheckpointError) as caught:
        check_files(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}/{name} is not the file that target.json names: its SHA-256 must be {was}..., "
        f"found {now}...; copy or fetch the folder again, or export it again from the run that "
        "it came from (python -m runtime.export --config ITS_RUN_FILE), or remove "
        "target.json if the change is wanted"
    )
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}/{name} cannot be read \(No such"):
        check_files(tmp_path)


@pytest.mark.parametrize(
    ("run", "same"),
    [
        (RUN, True),
        ({**RUN, "step": 41}, False),
        ({**RUN, "fingerprint": "e" * 64}, False),
        ({"step": 40}, False),
    ],
)
def test_a_drafter_is_of_a_run_at_a_step(tmp_path, run, same):
    assert not is_of(tmp_path, run)
    write(tmp_path)
    assert is_of(tmp_path, run) is same


def test_a_drafter_without_a_run_in_its_record_is_of_none(tmp_path):
    write(tmp_path, record=None)
    assert is_of(tmp_path, RUN) is False
    write(tmp_path, record={"name": "a", "digest": "b"})
    assert is_of(tmp_path, RUN) is False
    (tmp_path / "target.json").write_text("{")
    assert is_of(tmp_path, RUN) is False


def test_a_record_of_a_later_release_is_not_passed_over(tmp_path):
    write(tmp_path)
    rewrite(tmp_path, format=3)
    for look in (check_files, read_target_record, lambda folder: is_of(folder, RUN)):
        with pytest.raises(LaterFormatError, match=r"is of format 3, .*export the drafter again$"):
            look(tmp_path)


@pytest.mark.parametrize("key", ["name", "digest"])
def test_a_record_says_name_and_digest_in_text(tmp_path, key):
    write(tmp_path)
    for value in (None, 3):
        rewrite(tmp_path, **{key: value})
        wanted = rf"^{tmp_path}/target\.json must be an object with a text '{key}' \({value}\);"
        with pytest.raises(CheckpointError, match=wanted):
            read_target_record(tmp_path)


def test_a_record_that_cannot_be_read_is_no_missing_one(tmp_path):
    (tmp_path / "target.json").mkdir()
    with pytest.raises(CheckpointError, match=r"target\.json cannot be read \(Is a directory\);"):
        read_target_record(tmp_path)
    (tmp_path / "file").touch()
    assert read_target_record(tmp_path / "file") is None


def test_another_target_is_warned_of_with_both_names_and_digests(tmp_path):
    write(tmp_path)
    target, said = tiny_target(), []
    target.digest = "cd" * 32
    assert same_target(tmp_path, target, said.append) is False
    assert said == [
        f"warning: the drafter in {tmp_path} was trained for target 'models/a' (abababababab), and "
        f"this is {target.name!r} (cdcdcdcdcdcd); it may draft far worse"
    ]
    target.digest = "ab" * 32
    assert same_target(tmp_path, target, said.append) is True
    assert len(said) == 1
