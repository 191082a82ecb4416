"""Data that are spoilt or of no origin, read at their edges; refusals word by word."""

import hashlib
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.data.dataset import (
    LOOKS,
    Dataset,
    Sample,
    open_splits,
    read_samples,
    write_dataset,
)
from runtime.data.folder import read_meta
from runtime.errors import DatasetError
from runtime.files.sealed import seal
from tests.runtime.data.test_dataset import META, H, K, file_of, make
from tests.runtime.data.test_dataset import folder as folder


def in_place_of(folder, name, content):
    """Another file under the name, which ``meta.json`` names as its own."""
    meta = read_meta(folder)
    meta["sha256"][name] = hashlib.sha256(content).hexdigest()
    (folder / "meta.json").write_bytes(seal(meta))
    file_of(folder, name).write_bytes(content)
    return file_of(folder, name)


@pytest.mark.parametrize("name", ["train.safetensors", "train.features.safetensors"])
@pytest.mark.parametrize("content", [b"", b"no tensors", b"\x08" + bytes(7) + b"{}{}{}{}"])
def test_a_file_that_is_no_tensors_though_its_digest_is_right(folder, name, content):
    path = in_place_of(folder, name, content)
    with pytest.raises(DatasetError) as caught:
        Dataset.open(folder, "train")
    said = str(caught.value)
    assert said.startswith(f"{path} cannot be read (")
    assert said.endswith("; run: python -m runtime.prepare --config FILE")
    assert Dataset.open(folder, "heldout").lengths == [6]


@pytest.mark.parametrize("rows", [17, 19])
def test_features_must_be_a_row_for_each_token(folder, rows):
    path = folder / "other"
    save_file({"features": torch.zeros(rows, K * H, dtype=torch.bfloat16)}, path)
    content = path.read_bytes()
    path.unlink()
    path = in_place_of(folder, "train.features.safetensors", content)
    with pytest.raises(DatasetError, match=rf"^{path} must hold 18 rows, .* found {rows}; run: "):
        Dataset.open(folder, "train")


def test_the_last_sample_is_whole_and_no_sample_shares_anothers_tokens(folder):
    dataset, expected = Dataset.open(folder, "train"), make([5, 9, 4])
    for i in (2, 0, 1):
        found = dataset.sample(i)
        assert found.features.shape == (len(expected[i].input_ids), K * H)
        assert found.input_ids.tolist() == expected[i].input_ids.tolist()


def test_prompts_of_different_lengths_and_other_dtypes_come_back(tmp_path):
    samples = [
        Sample(
            input_ids=torch.arange(length) + 7,
            loss_mask=torch.arange(length) >= prompt,
            prompt_len=prompt,
        )
        for length, prompt in ((4, 1), (6, 5), (3, 2))
    ]
    meta = {**META, "features": "online"}
    write_dataset(tmp_path / "data", {"train": samples, "heldout": samples[1:]}, meta)
    train, heldout = open_splits(tmp_path / "data")
    assert (train.split, heldout.split) == ("train", "heldout")
    for dataset, expected in ((train, samples), (heldout, samples[1:])):
        assert len(dataset) == len(expected)
        for i, sample in enumerate(expected):
            found = dataset.sample(i)
            assert found.input_ids.tolist() == sample.input_ids.tolist()
            assert found.loss_mask.tolist() == sample.loss_mask.int().tolist()
            assert (found.input_ids.dtype, found.loss_mask.dtype) == (torch.int32, torch.uint8)
            assert found.prompt_len == sample.prompt_len
            assert (found.identity, found.file, found.index) == ("", 0, 0)


def test_where_one_sample_is_of_unknown_origin_none_is_kept(tmp_path):
    known = [replace(s, identity=f"{i:064x}", index=i + 5) for i, s in enumerate(make([5, 9]))]
    write_dataset(tmp_path / "a", {"train": known, "heldout": make([4])}, META)
    train, heldout = open_splits(tmp_path / "a")
    assert [train.sample(i).index for i in range(2)] == [5, 6]
    assert heldout.sample(0).identity == ""
    mixed = [known[0], *make([4])]
    write_dataset(tmp_path / "b", {"train": mixed, "heldout": []}, META)
    assert Dataset.open(tmp_path / "b", "train").sample(0).identity == ""


def test_origins_are_stored_as_documented(tmp_path):
    identity = bytes(range(200, 232)).hex()
    (sample,) = make([5])
    known = [replace(sample, identity=identity, file=3, index=2**40)]
    write_dataset(tmp_path / "a", {"train": known, "heldout": []}, META)
    arrays = load_file(file_of(tmp_path / "a", "train.safetensors"))
    stored = {name: arrays[name] for name in ("identities", "files", "indices")}
    assert {name: (a.dtype, a.tolist()) for name, a in stored.items()} == {
        "identities": (torch.uint8, [list(range(200, 232))]),
        "files": (torch.int32, [3]),
        "indices": (torch.int64, [2**40]),
    }
    (found,) = read_samples(tmp_path / "a")
    assert (found.identity, found.file, found.index) == (identity, 3, 2**40)


def test_features_that_are_not_to_be_stored_are_not(tmp_path):
    meta = {**META, "features": "online"}
    write_dataset(tmp_path / "data", {"train": make([5]), "heldout": make([4])}, meta)
    assert not list((tmp_path / "data").glob("*features*"))
    assert not Dataset.open(tmp_path / "data", "train").has_features


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_one_sample_without_features_is_refused(tmp_path, split):
    splits = {"train": make([5, 6]), "heldout": make([4, 7])}
    splits[split][1] = replace(splits[split][1], features=None)
    with pytest.raises(DatasetError, match="every sample must have features"):
        write_dataset(tmp_path / "data", splits, META)


def test_a_sample_that_is_not_there_is_named_with_its_place(folder):
    for split, count in (("train", 3), ("heldout", 1)):
        with pytest.raises(IndexError) as caught:
            Dataset.open(folder, split).sample(7)
        assert str(caught.value) == f"sample 7 of {count} in {folder} ({split})"


def test_another_target_is_named_with_both_digests_and_what_helps(folder):
    dataset = Dataset.open(folder, "heldout")
    with pytest.raises(DatasetError) as caught:
        dataset.check_target("e" * 64, (1, 3))
    assert str(caught.value) == (
        f"{folder} was prepared with target 'tiny' (dddddddddddd), the run's target is "
        "eeeeeeeeeeee; run: python -m runtime.prepare --config FILE"
    )
    dataset.check_target("d" * 64, [1, 3])
    for layer_ids in ((3, 1), (1,), (1, 3, 4)):
        with pytest.raises(DatasetError) as caught:
            dataset.check_target("d" * 64, layer_ids)
        assert str(caught.value) == (
            f"{folder} holds features of layers [1, 3], the run asks for {list(layer_ids)}; "
            "run: python -m runtime.prepare --config FILE"
        )


def test_a_folder_is_looked_at_again_only_where_it_changed(folder, monkeypatch):
    looks = []

    def look(path):
        looks.append(path)
        return "the same"

    monkeypatch.setattr("runtime.data.dataset.state_of", look)
    (folder / "meta.json").write_text("")
    with pytest.raises(DatasetError, match="is damaged"):
        Dataset.open(folder, "train")
    assert looks == [folder] * 2
    states = iter(range(100))
    monkeypatch.setattr("runtime.data.dataset.state_of", lambda _: next(states))
    with pytest.raises(DatasetError, match=rf"^{folder} does not stay as it is; see which proc"):
        Dataset.open(folder, "train")
    assert next(states) == 2 * LOOKS == 10
