"""Whatever defaults and modes the calling thread has, the same bits come out."""

import ast
import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cache
import maskgen
from maskgen.build import build
from maskgen.certificate import certify
from maskgen.entry import load_entry
from maskgen.families import families
from maskgen.picture import entry_kinds
from maskgen.spec import read_specs
from maskgen.verify import verify_deep
from runtime.dflash.decoding.speculate import DraftSession, greedy
from runtime.dflash.folder.saved_drafter import load_published, save_published
from runtime.dflash.start.initialise import random_start
from runtime.static.optimizer import AdamWSettings, FlatAdamW
from runtime.target.model import Target
from runtime.training.metrics import read_metrics
from tests.maskgen.families.cases import CASES
from tests.runtime.tiny_llama import save_target
from tests.runtime.tiny_run import (
    build_masks,
    drafter_config,
    first_drafter,
    frozen_target,
    make_config,
    make_data,
    make_trainer,
)

ROOT = Path(__file__).parents[1]


@contextlib.contextmanager
def default_device():
    # No tensor on meta has values: reading one, or mixing it with one of the CPU, raises.
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


STATES = {
    "device": default_device,
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "deterministic": deterministic,
}


def spans_of(mask):
    return {"starts": mask.starts, "ends": mask.ends}


def of_families():
    """Spans, formulas, draws and bounds of every family."""
    made = {}
    for number, case in enumerate(CASES):
        family, Q, KV = families[case.family], case.Q_LEN, case.KV_LEN
        mask = family.intervals(Q, KV, **case.params)
        mask_mod = family.mask_mod(Q, KV, **family.check(Q, KV, case.params))
        again = maskgen.from_mask_mod(mask_mod, mask.B, None, Q_LEN=Q, KV_LEN=KV, device="cpu")
        static = {param.name: case.params.get(param.name) for param in family.params}
        static = {name: value for name, value in static.items() if value is not None}
        must, may = family.bounds(Q, KV, **static)
        drawn = family.draw("5" * 64, 2, Q, KV, **static)
        for what, found in (("mask", mask), ("mod", again), ("must", must), ("may", may)):
            made |= {f"{number} {what} {key}": value for key, value in spans_of(found).items()}
        made |= {f"{number} drawn {key}": value for key, value in drawn.items()}
    return made


def of_algebra():
    a, b = maskgen.causal(40, 50, offset=10), ~maskgen.sliding_window(40, 50, window=7, offset=10)
    both = maskgen.RowIntervals.concat([(a & b).crop(q=(3, 30)), b.crop(q=(2, 9))], "q")
    mask = (both | both.shift(q=2, kv=-3)).pad_to(Q_LEN=48, KV_LEN=64)
    tables = maskgen.compile_mask(mask, (16, 32))
    size = {"Q_LEN": 48, "KV_LEN": 64, "BLOCK_SIZE": (16, 32)}
    again = maskgen.BlockTables.unpack(tables.pack(), **size)
    block_mask = maskgen.to_block_mask(tables, mask)
    static = maskgen.BlockTables.empty(**size)
    maskgen.tables_into(static, mask.starts, mask.ends)
    return {
        **spans_of(mask),
        **{f"unpacked {name}": table for name, table in again.as_dict().items()},
        **{f"static {name}": table for name, table in static.as_dict().items()},
        "dense": mask.dense(),
        "counts": mask.row_counts(),
        "kinds": tables.block_kinds(),
        "torch": block_mask.to_dense(),
    }


def of_a_cache(folder):
    """Build, load, check, draw and compare entries of every kind."""
    config = make_config(folder)
    store = cache.open_store(folder / "more.zarr", writable=True)
    build(read_specs({"masks": config.masks}), store)
    assert verify_deep(store) == []
    made = {}
    for name in store.version().entries:
        entry = load_entry(store, name)
        assert certify(entry).findings == ()
        made[f"{name} kinds"] = torch.from_numpy(entry_kinds(entry))
        if entry.kind != "parametric":
            made |= {f"{name} {key}": value for key, value in spans_of(entry.spans).items()}
            made |= {f"{name} {key}": value for key, value in entry.tables.as_dict().items()}
        made |= {f"{name} {key}": value for key, value in entry.params.items()}
    return made


def of_a_drafter(folder):
    """First weights, an optimizer step, and a drafter written and read again."""
    drafter = first_drafter()
    settings = AdamWSettings(
        lr=1e-3,
        min_lr_ratio=0.0,
        warmup_steps=1,
        total_steps=4,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        clip=1.0,
    )
    cpu = torch.device("cpu")
    optimizer = FlatAdamW(drafter, settings, device=cpu, dtype=torch.float32, num_sums=1)
    made = {f"first {name}": weight.clone() for name, weight in drafter.state_dict().items()}
    optimizer.grads.fill_(0.5)
    one = torch.ones((), dtype=torch.float32, device="cpu")
    optimizer.step(one, one)
    made |= {f"state {name}": tensor for name, tensor in optimizer.state().items()}
    config, scale = drafter_config(), torch.tensor([1.0, 2.0], dtype=torch.float32, device="cpu")
    save_published(folder / "drafter", config, drafter.state_dict(), feature_scale=scale)
    made |= load_published(folder / "drafter").state_dict()
    return made


def of_a_run(folder):
    """A session and steps of training, over data that lie there."""
    config = make_config(folder)
    trainer = make_trainer(config, target=TARGET)
    try:
        trainer.prepare()
        trainer.start_from(weights=first_drafter().state_dict(), state=None)
        trainer.run(0)
        made = dict(trainer.weights())
    finally:
        trainer.teardown()
    for row in read_metrics(folder / "run" / "metrics.jsonl"):
        numbers = [row["loss"], row["grad_norm"], row["tau_forced"], *row["accuracy"]]
        made[f"step {row['step']}"] = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    return made


def of_a_target(folder):
    """A target loaded from its folder: features, logits, a cached call, answers and drafts."""
    target = Target.load(folder / "target", device="cpu", dtype=torch.float32)
    prompt = [3, 4, 5, 6, 7]
    ids = torch.tensor([prompt], dtype=torch.int64, device="cpu")
    cached, features = target.extend(ids, target.new_cache(), layer_ids=[0, 2])
    sizes = {"hidden_size": 32, "vocab_size": 24, "mask_token_id": 23, "num_target_layers": 6}
    config = replace(drafter_config(), **sizes)
    session = DraftSession(target, random_start(config, torch.Generator("cpu").manual_seed(3)))
    made = {
        "features": target.features(ids, [1, 3]),
        "logits": target.logits(ids),
        "cached": cached,
        "cached features": features,
        "first block": session.first_block(prompt),
    }
    answers = {"greedy": greedy(target, prompt, 9), "drafted": session.generate(prompt, 9)}
    for name, decoded in answers.items():
        made[name] = torch.tensor(decoded.tokens, dtype=torch.int64, device="cpu")
    return made


TARGET = frozen_target()
WORK = {
    "families": lambda folder: of_families(),
    "algebra": lambda folder: of_algebra(),
    "cache": of_a_cache,
    "drafter": of_a_drafter,
    "run": of_a_run,
    "target": of_a_target,
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What comes out where the caller has no wishes."""
    made = {}
    for name, work in WORK.items():
        folder = tmp_path_factory.mktemp(name)
        lay_data(folder, name)
        made[name] = work(folder)
    return made


def lay_data(folder, work):
    if work == "run":
        make_data(folder / "data", [16, 12, 31, 20, 9, 14])
        build_masks(make_config(folder))
    if work == "target":
        save_target(folder / "target")


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("state", STATES)
def test_the_same_bits_in_any_state(plain, tmp_path, state, work):
    lay_data(tmp_path, work)
    with STATES[state]():
        found = WORK[work](tmp_path)
    wanted = plain[work]
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].device == value.device, name
        assert torch.equal(found[name], value), name


MAKERS = {"as_tensor", "asarray", "arange", "Generator", "randint", "randperm", "frombuffer"}
OF_DEFAULT_DTYPE = {"tensor", "zeros", "ones", "empty", "full", "rand", "randn", "linspace", "eye"}


@pytest.mark.parametrize("package", ["maskgen", "runtime"])
def test_every_tensor_names_its_device_and_its_dtype(package):
    """What no state above reaches: calls that make a tensor say where, and of what."""
    calls = 0
    for file in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            maker, owner = node.func.attr, node.func.value
            if not isinstance(owner, ast.Name) or owner.id != "torch":
                continue
            needed = {"device"} if maker in MAKERS | OF_DEFAULT_DTYPE else set()
            needed |= {"dtype"} if maker in OF_DEFAULT_DTYPE else set()
            given = {keyword.arg for keyword in node.keywords}
            calls += bool(needed)
            where = f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
            assert needed <= given, f"{where} must name {sorted(needed - given)}"
    assert calls > 10
