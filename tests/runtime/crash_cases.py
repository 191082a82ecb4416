"""What a run writes, as cases for ``tests.runtime.crash``: made, acted on, checked."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

from runtime.data.answer import Answer
from runtime.data.answer_store import AnswerStore
from runtime.data.dataset import Dataset, Sample, open_splits, write_dataset
from runtime.data.folder import check_writable, path_of, state_of
from runtime.dflash.folder.files import read_target_record
from runtime.dflash.folder.saved_drafter import load_published, save_published
from runtime.dflash.network.config import DrafterConfig
from runtime.errors import CheckpointError, DatasetError
from runtime.files import digests
from runtime.files.sealed import read_sealed, write_sealed
from runtime.packed.published import read_record, save_model
from runtime.target import gguf_copy
from runtime.target.files import TargetFiles
from runtime.target.model import Target
from runtime.training.checkpoint import (
    newest_good,
    own_checkpoints,
    remove_checkpoints,
    save_checkpoint,
)
from runtime.training.metrics import MetricsLog, read_metrics
from tests.runtime.tiny_llama import tiny_model, tiny_tokenizer

GOLDEN = Path(__file__).parent / "golden" / "format1"


class WrongError(Exception):
    """Something else than the old or the new is found, or something is lost."""


def expect(condition, what):
    if not condition:
        raise WrongError(what)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


class Data:
    """A data folder in which a dataset takes the place of another one, if any.

    Args:
        old: Length of its first sample; None where there is none.
        place: ``plain``, ``link`` or ``golden`` (of format 1).
        keys: Whether those who act at once write data of different keys.
    """

    def __init__(self, old, place="plain", *, keys=False):
        self.old, self.place, self.keys = old, place, keys

    def make(self, folder):
        data = folder / "data"
        if self.place == "golden":
            shutil.copytree(GOLDEN / "data", data)
            return
        if self.place == "link":
            (folder / "disk").mkdir()
            data.symlink_to("disk")
        if self.old is not None:
            self.write(data, self.old)
        if self.keys:
            # All begin before any of them writes.
            (folder / "seen").write_text(state_of(data))

    def act(self, folder, who):
        data, begun = folder / "data", folder / "seen"
        seen = begun.read_text() if begun.exists() else state_of(data)
        check_writable(data)
        self.write(data, 20 + who * self.keys, seen)

    def write(self, data, length, seen=None):
        features = torch.full((length, 2), float(length))
        sample = Sample(
            input_ids=torch.full((length,), length).int(),
            loss_mask=torch.ones(length).byte(),
            prompt_len=1,
            features=features,
        )
        meta = {
            "features": "stored",
            "context": 64,
            "layer_ids": [1],
            "feature_scale": [1.0],
            "target": {"name": "a", "digest": "0"},
            "key": f"k{length}",
            "split": {},
        }
        write_dataset(data, {"train": [sample], "heldout": [sample]}, meta, seen)

    def found(self, folder):
        """Length of the dataset that is there, which is whole; None where there is none."""
        try:
            train, heldout = open_splits(folder / "data")
        except DatasetError as error:
            expect("holds no prepared data" in str(error), str(error))
            return None
        length = train.lengths[0]
        if length > 9:
            self.expect_of(train, length)
            self.expect_of(heldout, length)
        return length

    def expect_of(self, split, length):
        sample = split.sample(0)
        expect(sample.input_ids.tolist() == [length] * length, "tokens of other data")
        expect(bool((sample.features == length).all()), "features of other data")

    def check(self, folder, codes):
        (folder / "seen").unlink(missing_ok=True)
        old = 5 if self.place == "golden" else self.old
        new = {20 + who * self.keys for who in range(len(codes))}
        written = {20 + who * self.keys for who, code in enumerate(codes) if code == 0}
        found = self.found(folder)
        expect(found in (written or {old, *new}), f"found {found}, written {written or old}")
        # The later ones were told of the first.
        expect(len(written) < 2, f"{written} were written, one was found")

    def check_done(self, folder):
        found = self.found(folder)
        expect(found == 20, f"found {found} after the second act")
        data = folder / "data"
        meta = Dataset.open(data, "train").meta
        named = [path_of(data, name, meta).name for name in meta["sha256"]]
        expect(names(data) == sorted(["meta.json", *named]), f"left: {names(data)}")
        expect(len(names(folder)) == 1 + (self.place == "link"), f"left: {names(folder)}")


class Save:
    """A checkpoint beside others, or in the place of one of the same step.

    Args:
        step: What is saved.
        damaged: A step that is there and damaged.
        golden: Whether one of format 1 is there, too.
    """

    def __init__(self, step, damaged=None):
        self.step, self.damaged = step, damaged

    def make(self, folder):
        shutil.copytree(GOLDEN / "checkpoints", folder / "checkpoints")
        for step in (20, *([self.damaged] if self.damaged else [])):
            self.save(folder, step, 1.0, keep=9)
        if self.damaged:
            os.truncate(self.place(folder, self.damaged) / "state.safetensors", 10)

    def place(self, folder, step):
        return folder / "checkpoints" / f"step-{step:08d}"

    def save(self, folder, step, value, keep):
        save_checkpoint(
            folder / "checkpoints",
            {"x": torch.full((3,), value)},
            step=step,
            fingerprint="a" * 64,
            published={"y": value},
            keep=keep,
        )

    def act(self, folder, who):
        self.save(folder, self.step, 2.0, keep=2)

    def good(self, folder):
        """Step -> value of every good checkpoint, and that of the step that a run goes on from."""
        found = own_checkpoints(
            folder / "checkpoints",
            lambda item: item.fingerprint == "a" * 64,
            lambda line: None,
            None,
        )
        good = {}
        for checkpoint in found:
            try:
                state = checkpoint.load()
            except CheckpointError:
                continue
            good[checkpoint.step] = float(state["x"][0]) if "x" in state else 0.0
            expect(checkpoint.published.get("y", 0.0) == good[checkpoint.step], "two halves")
        return good, newest_good(found, lambda item: (item.load(), item.step)[1], lambda line: None)

    def check(self, folder, codes):
        good, newest = self.good(folder)
        expect(len(good) >= 2, f"good ones left: {good}")
        expect(newest in ({self.step} if codes == [0] else {20, self.step}), f"newest {newest}")
        expect(good.get(20) in ((1.0, 2.0) if self.step == 20 else (1.0, None)), f"of 20: {good}")
        if codes == [0]:
            expect(good[self.step] == 2.0, f"of the step: {good}")

    def check_done(self, folder):
        good, newest = self.good(folder)
        expect((good[self.step], newest) == (2.0, self.step), f"{good}, newest {newest}")
        kept = sorted({20, self.step, *([10] if self.step == 20 else [])})
        left = {self.damaged} if self.damaged and self.damaged > self.step else set()
        wanted = [f"step-{step:08d}" for step in sorted({*kept, *left})]
        expect(names(folder / "checkpoints") == wanted, f"left: {names(folder / 'checkpoints')}")


class Fresh(Save):
    """All checkpoints are forgotten."""

    def __init__(self):
        super().__init__(30)

    def act(self, folder, who):
        remove_checkpoints(folder / "checkpoints")

    def check(self, folder, codes):
        _, newest = self.good(folder)
        expect(newest in ((None,) if codes == [0] else (20, None)), f"newest {newest}")

    def check_done(self, folder):
        expect(names(folder / "checkpoints") == [], f"left: {names(folder / 'checkpoints')}")


NETWORK = DrafterConfig(
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    vocab_size=9,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    draft_block_size=4,
    mask_token_id=8,
    target_layer_ids=(1,),
    num_target_layers=4,
    max_position_embeddings=64,
)


class Export:
    """A drafter takes the place of another one."""

    def make(self, folder):
        self.write(folder, 1)

    def act(self, folder, who):
        self.write(folder, 2 + who)

    def write(self, folder, value):
        from runtime.dflash.network.drafter import Drafter

        weights = {
            name: torch.full(tensor.shape, float(value))
            for name, tensor in Drafter(NETWORK, device="meta").state_dict().items()
        }
        target = {"name": str(value), "digest": "0"}
        save_published(folder / "drafter", NETWORK, weights, target=target)

    def found(self, folder):
        try:
            value = int(load_published(folder / "drafter").fc.weight[0, 0])
        except CheckpointError as error:
            expect("there is no drafter in" in str(error), str(error))
            return None
        name = read_target_record(folder / "drafter")["name"]
        expect(name == str(value), f"weights of {value} beside the record of {name}")
        return value

    def check(self, folder, codes):
        done = {2 + who for who, code in enumerate(codes) if code == 0}
        found = self.found(folder)
        # Killed between two renames there is none, rather than two halves.
        all_ = {2 + who for who in range(len(codes))}
        allowed = {1, None, *all_} if 9 in codes or not done else done
        expect(found in allowed, f"found {found}, allowed {allowed}")

    def check_done(self, folder):
        expect(self.found(folder) == 2, "not what was written last")
        wanted = ["config.json", "model.safetensors", "target.json"]
        expect(names(folder / "drafter") == wanted, f"left: {names(folder / 'drafter')}")


class Model:
    """A fine-tuned model takes the place of another one."""

    def make(self, folder):
        self.write(folder, 1)

    def act(self, folder, who):
        self.write(folder, 2 + who)

    def write(self, folder, value):
        target = Target(
            tiny_model(num_hidden_layers=1, hidden_size=8, intermediate_size=8),
            tiny_tokenizer(),
            name="tiny",
        )
        weights = {
            name: torch.full_like(weight, float(value))
            for name, weight in target.model.named_parameters()
        }
        save_model(folder / "model", target, weights, {"step": value})

    def found(self, folder):
        run = read_record(folder / "model")
        if run is None:
            return None
        weights = load_file(folder / "model" / "model.safetensors")
        expect(all((w == run["step"]).all() for w in weights.values()), "weights of another step")
        return run["step"]

    def check(self, folder, codes):
        done = {2 + who for who, code in enumerate(codes) if code == 0}
        found = self.found(folder)
        # Killed between two renames there is none, rather than two halves.
        allowed = {1, None, *(2 + who for who in range(len(codes)))}
        expect(found in (allowed if 9 in codes or not done else done), f"found {found}")
        expect(found is not None or not (folder / "model").exists(), "a part of a model")

    def check_done(self, folder):
        expect(self.found(folder) == 2, "not what was written last")
        # What a killed one leaves goes once it is old.
        left = [name for name in names(folder) if not name.startswith(".model.tmp-")]
        expect(left == ["model"], f"left: {left}")


class Answers:
    """Batches of answers are added to those that are there."""

    def torn(self, size):
        # What was on the disk before is not torn.
        return size - 20

    def store(self, folder):
        return AnswerStore(folder / "answers", "5" * 64, "float32", vocab_size=99_999)

    def make(self, folder):
        for prompt in (0, 1):
            self.add(folder, prompt)

    def add(self, folder, prompt):
        answer = Answer(token_ids=[prompt] * 40, ended=True)
        self.store(folder).add([[prompt]], [answer])

    def act(self, folder, who):
        for prompt in range(3):
            self.add(folder, 10 * (who + 1) + prompt)

    def expect_found(self, folder, prompts, among):
        found = self.store(folder).find([[prompt] for prompt in among], [99] * len(among))
        for row, answer in found.items():
            expect(answer.token_ids == [among[row]] * 40, "another answer")
        missing = set(prompts) - {among[row] for row in found}
        expect(not missing, f"lost: {missing}")

    def check(self, folder, codes):
        done = [
            10 * (who + 1) + prompt
            for who, code in enumerate(codes)
            if code == 0
            for prompt in range(3)
        ]
        self.expect_found(folder, [0, 1, *done], list(range(100)))

    def check_done(self, folder):
        self.expect_found(folder, [0, 1, 10, 11, 12], list(range(100)))


class Document:
    """A sealed document takes the place of another one, as ``run.json`` does."""

    def make(self, folder):
        write_sealed(folder / "run.json", {"format": 2, "x": 1})

    def act(self, folder, who):
        write_sealed(folder / "run.json", {"format": 2, "x": 2 + who})

    def found(self, folder):
        return read_sealed(folder / "run.json", 2, "")["x"]

    def check(self, folder, codes):
        done = {2 + who for who, code in enumerate(codes) if code == 0}
        allowed = done or {1, *(2 + who for who in range(len(codes)))}
        expect(self.found(folder) in allowed | ({2} if 9 in codes else set()), "another document")

    def check_done(self, folder):
        expect(self.found(folder) == 2, "another document")


class Metrics:
    """A resume drops the rows after its step."""

    def make(self, folder):
        rows = [f'{{"step": {step}, "loss": 1.0, "tau_forced": 1.0}}\n' for step in range(1, 9)]
        (folder / "metrics.jsonl").write_text("".join(rows))

    def act(self, folder, who):
        MetricsLog(folder / "metrics.jsonl", first_step=5, total_steps=9, shown={}).close()

    def steps(self, folder):
        return [row["step"] for row in read_metrics(folder / "metrics.jsonl")]

    def check(self, folder, codes):
        expect(self.steps(folder)[:5] == [1, 2, 3, 4, 5], f"rows {self.steps(folder)}")

    def check_done(self, folder):
        expect(self.steps(folder) == [1, 2, 3, 4, 5], f"rows {self.steps(folder)}")
        expect(len(names(folder)) <= 2, f"left: {names(folder)}")


class Unpack:
    """A GGUF target's copy is made."""

    def make(self, folder):
        (folder / "model.gguf").write_bytes(b"GGUF")

    def act(self, folder, who):
        # Where there is no room the target itself is used.
        self.copy(folder)

    def copy(self, folder):
        files = TargetFiles(folder=folder, gguf_file="model.gguf")

        def save_tokenizer(made):
            made.mkdir()
            (made / "tokenizer.json").write_text("{}")

        def save_model(made):
            (made / "config.json").write_text("{}")
            save_file({"x": torch.ones(5)}, made / "model.safetensors")

        outline = SimpleNamespace(tokenizer=SimpleNamespace(save_pretrained=save_tokenizer))
        model = SimpleNamespace(save_pretrained=save_model)
        with (
            mock.patch.object(gguf_copy, "read_outline", return_value=outline),
            mock.patch.object(gguf_copy, "read_model", return_value=model),
            mock.patch.object(gguf_copy, "plain_model", lambda found: found),
            mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder / "cache")}),
        ):
            found = gguf_copy.unpacked(files, "model.gguf")
        return None if found is files else found.folder

    def check(self, folder, codes):
        # What is found is made again, or whole.
        copy = self.copy(folder)
        expect(copy is not None, "no copy")
        wanted = ["config.json", "copy.sha256", "model.safetensors", "tokenizer.json"]
        expect(names(copy) == wanted, f"the copy has {names(copy)}")
        expect(load_file(copy / "model.safetensors")["x"].sum() == 5, "another file was taken")

    def check_done(self, folder):
        self.check(folder, [])
        targets = folder / "cache" / "flex-mask-compiler" / "targets"
        files = [path for path in targets.rglob("*") if path.is_file()]
        expect(len(files) == 4, f"leftovers: {files}")


class Digests:
    """The digest of a file is remembered."""

    def make(self, folder):
        (folder / "weights").write_bytes(b"w" * 1000)

    def digest(self, folder):
        with (
            mock.patch.object(digests, "SETTLED_S", 0.0),
            mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder / "cache")}),
        ):
            digests._known.clear()
            return digests.sha256_of_files([folder / "weights"])[0]

    def act(self, folder, who):
        self.digest(folder)

    def check(self, folder, codes):
        expect(self.digest(folder).startswith("04ffd92"), f"digest {self.digest(folder)}")

    def check_done(self, folder):
        self.check(folder, [])


CASES = {
    "data": Data(10),
    "first data": Data(None),
    "linked data": Data(10, "link"),
    "data of format 1": Data(10, "golden"),
    "data of other keys": Data(10, keys=True),
    "checkpoint": Save(30),
    "checkpoint beside a damaged one": Save(30, damaged=90),
    "checkpoint in another's place": Save(20),
    "fresh": Fresh(),
    "drafter": Export(),
    "model": Model(),
    "answers": Answers(),
    "run.json": Document(),
    "metrics": Metrics(),
    "unpacked copy": Unpack(),
    "digests": Digests(),
}
SHARED = (
    *("data", "first data", "linked data", "data of other keys", "drafter", "model", "answers"),
    *("unpacked copy", "digests", "run.json"),
)
"""What several processes may act on at once."""
