import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from runtime.data.dataset import Dataset, Sample, read_samples, write_dataset
from runtime.data.folder import check_replaceable, path_of, read_meta
from runtime.errors import DatasetError
from runtime.files.sealed import seal

K, H = 2, 8
META = {
    "features": "stored",
    "context": 64,
    "layer_ids": [1, 3],
    "feature_scale": [0.5, 2.0],
    "target": {"name": "tiny", "digest": "d" * 64},
}


def file_of(folder, name):
    """Where a file of the dataset lies."""
    return path_of(folder, name, read_meta(folder))


def make(lengths, seed=0, features=True):
    generator = torch.Generator().manual_seed(seed)
    return [
        Sample(
            input_ids=torch.randint(50, (length,), generator=generator).int(),
            loss_mask=(torch.arange(length) >= 3).byte(),
            prompt_len=3,
            features=torch.randn(length, K * H, generator=generator) if features else None,
        )
        for length in lengths
    ]


@pytest.fixture
def folder(tmp_path):
    write_dataset(tmp_path / "data", {"train": make([5, 9, 4]), "heldout": make([6], 1)}, META)
    return tmp_path / "data"


def test_samples_come_back(folder):
    dataset = Dataset.open(folder, "train")
    assert len(dataset) == 3
    assert dataset.lengths == [5, 9, 4]
    assert dataset.has_features
    for i, expected in enumerate(make([5, 9, 4])):
        found = dataset.sample(i)
        assert found.input_ids.dtype == torch.int32
        assert found.loss_mask.dtype == torch.uint8
        assert found.features.dtype == torch.bfloat16
        assert torch.equal(found.input_ids, expected.input_ids)
        assert torch.equal(found.loss_mask, expected.loss_mask)
        assert torch.equal(found.features, expected.features.bfloat16())
        assert found.prompt_len == 3
    assert Dataset.open(folder, "heldout").lengths == [6]


def test_meta(folder):
    dataset = Dataset.open(folder, "train")
    assert dataset.layer_ids == (1, 3)
    assert dataset.feature_scale == (0.5, 2.0)
    assert dataset.meta["format"] == 2


def test_files_are_as_documented(folder):
    arrays = load_file(file_of(folder, "train.safetensors"))
    shapes = {name: (tuple(array.shape), array.dtype) for name, array in arrays.items()}
    assert shapes == {
        "input_ids": ((18,), torch.int32),
        "loss_mask": ((18,), torch.uint8),
        "prompt_lens": ((3,), torch.int32),
        "offsets": ((4,), torch.int64),
    }
    assert arrays["offsets"].tolist() == [0, 5, 14, 18]
    with safe_open(file_of(folder, "train.features.safetensors"), "pt") as stored:
        assert stored.get_slice("features").get_shape() == [18, K * H]


def test_samples_of_all_splits_come_back_in_order(tmp_path):
    plain = make([5, 9, 4, 7])
    known = [
        replace(sample, identity=f"{i:064x}", file=i // 2, index=i)
        for i, sample in enumerate(plain)
    ]
    write_dataset(tmp_path / "a", {"train": known[1::2], "heldout": known[::2]}, META)
    found = read_samples(tmp_path / "a")
    assert [(s.identity, s.file, s.index) for s in found] == [
        (s.identity, s.file, s.index) for s in known
    ]
    for sample, expected in zip(found, known, strict=True):
        assert torch.equal(sample.input_ids, expected.input_ids)
        assert torch.equal(sample.features, expected.features.bfloat16())
    # Another division of what came back is what a division of the samples themselves is.
    for name, samples in (("b", found), ("c", known)):
        write_dataset(tmp_path / name, {"train": samples[:3], "heldout": samples[3:]}, META)
    for path in (tmp_path / "b").iterdir():
        assert path.read_bytes() == (tmp_path / "c" / path.name).read_bytes()


def test_features_may_be_left_out(tmp_path):
    splits = {"train": make([5], features=False), "heldout": []}
    write_dataset(tmp_path / "data", splits, {**META, "features": "online"})
    dataset = Dataset.open(tmp_path / "data", "train")
    assert not dataset.has_features
    assert dataset.sample(0).features is None
    assert len(Dataset.open(tmp_path / "data", "heldout")) == 0
    assert not list((tmp_path / "data").glob("*.features.*"))


def test_empty_split_with_stored_features(tmp_path):
    write_dataset(tmp_path / "data", {"train": make([5]), "heldout": []}, META)
    assert len(Dataset.open(tmp_path / "data", "heldout")) == 0


def test_threads_read_alike(folder):
    dataset = Dataset.open(folder, "train")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: dataset.sample(i % 3).features.sum().item(), range(60)))
    assert found == [dataset.sample(i % 3).features.sum().item() for i in range(60)]


@pytest.mark.parametrize("i", [-1, 3])
def test_sample_out_of_range(folder, i):
    with pytest.raises(IndexError, match=f"sample {i} of 3"):
        Dataset.open(folder, "train").sample(i)


def test_rewriting_replaces_the_folder_whole(folder):
    write_dataset(folder, {"train": make([7]), "heldout": []}, META)
    assert Dataset.open(folder, "train").lengths == [7]
    assert not list(folder.glob("heldout.features.*"))
    assert len(list(folder.iterdir())) == 4
    assert [path.name for path in folder.parent.iterdir()] == ["data"]


def test_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(DatasetError, match="must be empty or hold prepared data"):
        write_dataset(tmp_path, {"train": make([5]), "heldout": []}, META)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize(
    "names", [["meta.json"], ["meta.json", "thesis.txt"], ["train.safetensors"]]
)
def test_folder_that_is_not_just_a_dataset_is_left_alone(tmp_path, names):
    for name in names:
        (tmp_path / name).write_text("precious")
    with pytest.raises(DatasetError, match="must be empty or hold prepared data"):
        check_replaceable(tmp_path)


def test_file_in_place_of_the_folder_is_left_alone(tmp_path):
    (tmp_path / "data").write_text("precious")
    with pytest.raises(DatasetError, match="must be empty or hold prepared data"):
        check_replaceable(tmp_path / "data")


def test_replaceable_folders(folder, tmp_path):
    file_of(folder, "train.features.safetensors").unlink()
    (folder / "meta.json").write_text("{torn")
    (tmp_path / "empty").mkdir()
    for name in ("data", "empty", "none"):
        check_replaceable(tmp_path / name)


def test_missing_features_are_refused(tmp_path):
    splits = {"train": make([5], features=False), "heldout": []}
    with pytest.raises(DatasetError, match="every sample must have features"):
        write_dataset(tmp_path / "data", splits, META)
    assert not (tmp_path / "data").exists()


def test_no_such_folder(tmp_path):
    with pytest.raises(DatasetError, match=r"holds no prepared data .*runtime\.prepare"):
        Dataset.open(tmp_path, "train")


def test_no_such_split(folder):
    with pytest.raises(DatasetError, match="train, heldout, found 'test'"):
        Dataset.open(folder, "test")


@pytest.mark.parametrize(
    ("key", "value", "wrong"),
    [
        *((key, None, f"has no '{key}'") for key in (*META, "sha256")),
        ("target", {"name": "a"}, "target has no 'digest'"),
        ("target", {"name": "a", "digest": 7}, "target.digest is 7, not like '0'"),
        ("layer_ids", "13", "layer_ids is '13', not like "),
        ("layer_ids", [1, "3"], r"layer_ids\[1\] is '3'"),
        ("feature_scale", [0.5, True], r"feature_scale\[1\] is True"),
        ("feature_scale", [0.5], "has not a number for each of layer_ids"),
        ("stored_layer_ids", [3, 1, 6], "stored_layer_ids do not begin with layer_ids"),
        ("stored_layer_ids", [1], "stored_layer_ids do not begin with layer_ids"),
        ("context", 6.5, "context is 6.5"),
        ("counts", [], r"counts is \[\], not like {}"),
        ("template", {"keywords": {}}, "template has no 'chat_template'"),
    ],
)
def test_meta_of_another_shape_is_refused(folder, key, value, wrong):
    meta = read_meta(folder)
    meta[key] = value
    if value is None:
        del meta[key]
    # One of format 1 has no digest.
    for text in (seal(meta), json.dumps({**meta, "format": 1}).encode()):
        (folder / "meta.json").write_bytes(text)
        with pytest.raises(DatasetError, match=rf"meta\.json must be as it was .*: .*{wrong}"):
            Dataset.open(folder, "train")


def test_torn_meta(folder):
    (folder / "meta.json").write_text('{"format": 1')
    with pytest.raises(DatasetError, match=r"meta\.json is damaged: it must be JSON"):
        Dataset.open(folder, "train")


@pytest.mark.parametrize("damage", ["cut", "flip", "missing"])
def test_damaged_tokens_are_refused(folder, damage):
    path = file_of(folder, "train.safetensors")
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[:-1])
    else:
        content[-20] ^= 1
        path.write_bytes(content)
    with pytest.raises(DatasetError, match=r"train\.\w+\.safetensors (cannot|is not the)"):
        Dataset.open(folder, "train")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("cut", "is not the file that meta.json names"),
        ("flip", "is not the file that meta.json names"),
        ("missing", "cannot be read"),
    ],
)
def test_damaged_features_are_refused(folder, damage, message):
    path = file_of(folder, "train.features.safetensors")
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[:-1])
    else:
        content[-20] ^= 1
        path.write_bytes(content)
    with pytest.raises(DatasetError, match=rf"train\.features\.\w+\.safetensors {message}"):
        Dataset.open(folder, "train")
    assert len(Dataset.open(folder, "heldout")) == 1


def test_every_file_has_its_digest(folder):
    named = read_meta(folder)["sha256"]
    assert len(named) == len(list(folder.glob("*.safetensors"))) == 4
    for name, digest in named.items():
        assert hashlib.sha256(file_of(folder, name).read_bytes()).hexdigest() == digest


def test_features_without_a_digest_are_refused(folder):
    meta = read_meta(folder)
    del meta["sha256"]["train.features.safetensors"]
    (folder / "meta.json").write_bytes(seal(meta))
    with pytest.raises(DatasetError, match=r"must name train\.features\.safetensors by SHA-256"):
        Dataset.open(folder, "train")


def test_target_of_the_data(folder):
    dataset = Dataset.open(folder, "train")
    dataset.check_target("d" * 64, (1, 3))
    with pytest.raises(DatasetError, match=r"prepared with target 'tiny' \(dddd.*eeee"):
        dataset.check_target("e" * 64, (1, 3))
    with pytest.raises(DatasetError, match=r"layers \[1, 3\], the run asks for \[1, 4\]"):
        dataset.check_target("d" * 64, (1, 4))
