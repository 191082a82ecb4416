import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import cache
from runtime.errors import ArtifactError
from runtime.static.artifacts import ArtifactFile, Toolchain, WarmUp, toolchain_of
from tests.runtime.tiny_run import build_masks, make_config

ROOT = Path(__file__).parents[3]
CPU = toolchain_of([torch.device("cpu")])

# Only matrix products, so that Inductor compiles (its Python wrapper) without a C++ compiler.
ON_THE_CPU = """
def load(x, w):
    return x @ w
x, w = torch.ones(4, 8), torch.ones(8, 8, requires_grad=True)
torch.compile(load, fullgraph=True, dynamic=False)(x, w).backward(torch.ones(4, 8))
assert w.grad.unique().tolist() == [4.0]
"""

ON_A_GPU = """
from tests.runtime.static.test_gpu import prepared
from tests.runtime.tiny_run import make_trainer
trainer = make_trainer(prepared(Path(work), "run", "cuda:0"))
trainer.prepare()
trainer.teardown()
"""

PROCESS = """
import json, sys, time
from pathlib import Path
import torch
import cache
from runtime.static.artifacts import ArtifactFile, toolchain_of
from runtime.static.torch_internals import compile_cache_counts
doing, folder, work, device = sys.argv[1:]
store = cache.open_store(folder + "/masks.zarr", writable=True)
file = ArtifactFile(store, "ab" * 32, toolchain_of([torch.device(device)]))
counted = file.load() if doing == "load" else None
began = time.perf_counter()
{work}
seconds = time.perf_counter() - began
counted = counted or file.save()
hits, misses = compile_cache_counts()
print(json.dumps(dict(size=counted.size, artifacts=counted.artifacts, hits=hits, misses=misses,
                      seconds=seconds)))
"""


def artifact_file(folder, toolchain=CPU):
    """Artifacts need of a cache no more than where it stands and a version's id."""
    store = cache.open_store(str(folder / "masks.zarr"), writable=True)
    return ArtifactFile(store, "ab" * 32, toolchain)


def warm_up(folder, **options):
    """What a command that warms nothing up reports."""
    said = []
    store = cache.open_store(str(folder / "masks.zarr"), writable=True)
    WarmUp(store, "ab" * 32, [torch.device("cpu")], report=said.append, **options).finish()
    return said


def in_a_fresh_process(doing, tmp_path, work, device):
    """Compile with empty local caches, and save or load artifacts; what the process counted."""
    folder = tmp_path / doing
    folder.mkdir()
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    script = PROCESS.replace("{work}", work)
    done = subprocess.run(
        [sys.executable, "-c", script, doing, str(tmp_path), str(folder), device],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check_that_a_second_process_reuses(tmp_path, work, device):
    saved = in_a_fresh_process("save", tmp_path, work, device)
    assert saved["misses"] > 0
    assert saved["artifacts"] > 0
    loaded = in_a_fresh_process("load", tmp_path, work, device)
    print(f"warm-up: {saved['seconds']:.1f} s cold, {loaded['seconds']:.1f} s with artifacts")
    assert (loaded["size"], loaded["artifacts"]) == (saved["size"], saved["artifacts"])
    assert loaded["hits"] > 0
    assert loaded["misses"] == 0


def test_a_second_process_reuses_what_the_first_compiled(tmp_path):
    check_that_a_second_process_reuses(tmp_path, ON_THE_CPU, "cpu")


@pytest.mark.gpu
def test_a_second_process_reuses_a_gpus_warm_up(tmp_path):
    check_that_a_second_process_reuses(tmp_path, ON_A_GPU, "cuda:0")


@pytest.fixture
def compiled(monkeypatch):
    """Artifacts of torch's own format; content that no cache of this process looks at."""
    payload = b"not for torch"

    info = SimpleNamespace(artifacts={"inductor": ["k1", "k2"], "aot_autograd": ["k3"]})

    def load(found):
        return info if found == payload else None

    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (payload, info))
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", load)
    return payload


def test_what_is_saved_is_loaded(tmp_path, compiled):
    saved = artifact_file(tmp_path).save()
    assert (saved.size, saved.artifacts) == (len(compiled), 3)
    assert saved.path.parent == tmp_path / "sidecars" / ("ab" * 32)
    assert CPU.torch in saved.path.name
    assert CPU.triton in saved.path.name
    assert [path.name for path in saved.path.parent.iterdir()] == [CPU.file_name]
    header, _, rest = saved.path.read_bytes().partition(b"\n")
    assert json.loads(header)["arch"] == "cpu"
    assert rest == compiled
    assert artifact_file(tmp_path).load() == saved


def test_saving_again_replaces(tmp_path, compiled):
    file = artifact_file(tmp_path)
    file.save()
    file.path.write_bytes(b"old")
    file.save()
    assert file.load().artifacts == 3


@pytest.fixture
def torch_of(monkeypatch):
    """Stand-in for a process: what it compiles; payloads name their artifacts."""

    def info_of(payload):
        return SimpleNamespace(artifacts={"inductor": payload.decode().split()})

    def compiles(names):
        made = names.encode()
        monkeypatch.setattr(
            torch.compiler, "save_cache_artifacts", lambda: (made, info_of(made)) if made else None
        )

    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", info_of)
    return compiles


def run_once(folder, torch_of, compiled, *, trust):
    """One command with --save-artifacts; the artifacts that a later one finds."""
    torch_of(compiled)
    warm_up(folder, save=True, trust=trust)
    parts = artifact_file(folder)._payloads()
    names = [name for part in parts for name in part.decode().split()]
    counted = artifact_file(folder).load()
    assert (counted.artifacts, counted.size) == (len(set(names)), sum(map(len, parts)))
    return sorted(set(names)), len(parts)


def test_what_was_loaded_stays_when_a_smaller_run_saves(tmp_path, torch_of):
    assert run_once(tmp_path, torch_of, "a b c", trust=False) == (["a", "b", "c"], 1)
    # It needs less, then something else, then more of both, then nothing.
    assert run_once(tmp_path, torch_of, "b", trust=True) == (["a", "b", "c"], 1)
    assert run_once(tmp_path, torch_of, "b d", trust=True) == (["a", "b", "c", "d"], 2)
    assert run_once(tmp_path, torch_of, "d e", trust=True) == (["a", "b", "c", "d", "e"], 2)
    assert run_once(tmp_path, torch_of, "", trust=True) == (["a", "b", "c", "d", "e"], 2)
    assert run_once(tmp_path, torch_of, "e d c b a f", trust=True) == (list("abcdef"), 1)
    # What is not trusted is not read, and so not kept.
    assert run_once(tmp_path, torch_of, "g", trust=False) == (["g"], 1)


def test_without_a_file_the_error_tells_what_is_there(tmp_path, compiled):
    artifact_file(tmp_path).save()
    other = Toolchain("2.11.0", "3.6.0", "sm_90")
    wanted = (
        r"no warm-up artifacts for torch 2\.11\.0, triton 3\.6\.0, sm_90 .*"
        rf"found: warm-up_torch-{CPU.torch.replace('+', '.')}.*--save-artifacts"
    )
    with pytest.raises(ArtifactError, match=wanted):
        artifact_file(tmp_path, other).load()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("torch", "2.11.0", r"made by torch 2\.11\.0, triton .*, and this is torch"),
        ("triton", "3.6.0", r"made by .*triton 3\.6\.0, cpu, and this is"),
        ("arch", "sm_80", "made by .*sm_80, and this is .*, cpu"),
        ("format", 3, "its format is 3, and this program reads 2"),
        ("parts", [12], "damaged: its parts must make 13 bytes"),
        ("parts", [-1, 14], "damaged: its parts must make 13 bytes"),
        ("parts", "x", "damaged: its first line must be a JSON header"),
        ("bytes", 3, "damaged: it must hold 3 bytes"),
        ("sha256", "0" * 64, r"SHA-256 000000000000\.\.\., found 13 of"),
    ],
)
def test_another_toolchain_or_content_is_refused(tmp_path, compiled, field, value, message):
    file = artifact_file(tmp_path)
    path = file.save().path
    header, _, rest = path.read_bytes().partition(b"\n")
    changed = json.loads(header) | {field: value}
    path.write_bytes(json.dumps(changed).encode() + b"\n" + rest)
    with pytest.raises(ArtifactError, match=rf"refused: .*{message}"):
        file.load()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: b"[]" + data,
        lambda data: b"[]\n",
        lambda data: b"\xff" * 9000,
    ],
)
def test_damaged_bytes_are_refused_before_torch_sees_them(tmp_path, compiled, monkeypatch, damage):
    file = artifact_file(tmp_path)
    path = file.save().path
    path.write_bytes(damage(path.read_bytes()))
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", None)
    with pytest.raises(ArtifactError, match=r"refused: it is damaged.*--save-artifacts"):
        file.load()


def test_what_torch_cannot_read_is_refused(tmp_path, compiled, monkeypatch):
    file = artifact_file(tmp_path)
    file.save()
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda payload: None)
    with pytest.raises(ArtifactError, match="cannot read what is in it"):
        file.load()


def test_when_nothing_was_compiled_nothing_is_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: None)
    said = warm_up(tmp_path, save=True, trust=False)
    assert said == ["saved no warm-up artifacts: nothing was compiled"]
    assert not (tmp_path / "sidecars").exists()


def test_a_command_tells_what_it_loads_and_saves(tmp_path, compiled):
    (saved,) = warm_up(tmp_path, save=True, trust=False)
    assert saved.startswith("saved 3 warm-up artifacts, 13 bytes, ")
    loaded, reused = warm_up(tmp_path, save=False, trust=True)
    assert loaded.startswith("loaded 3 warm-up artifacts, 13 bytes, ")
    assert "graphs reused" in reused


def test_artifacts_are_code_and_are_not_loaded_unless_trusted(tmp_path, compiled, monkeypatch):
    artifact_file(tmp_path).save()
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", None)
    assert warm_up(tmp_path, save=False, trust=False) == []


@pytest.fixture
def published(tmp_path):
    config = make_config(tmp_path)
    build_masks(config)
    return cache.open_store(config.cache)


def test_a_zip_cannot_take_artifacts(tmp_path, published):
    cache.pack(published, tmp_path / "masks.zip")
    store = cache.open_store(tmp_path / "masks.zip")
    file = ArtifactFile(store, store.current, CPU)
    with pytest.raises(ArtifactError, match=r"cannot be saved beside .*masks\.zip.*in a folder"):
        file.check_writable()


def test_a_url_has_no_artifacts(published):
    cache.push(published, "memory://artifacts/masks.zarr")
    store = cache.open_store("memory://artifacts/masks.zarr")
    with pytest.raises(ArtifactError, match="no folder beside it; pull it first"):
        ArtifactFile(store, store.current, CPU)


def test_a_folder_that_cannot_be_written_is_told_before_the_warm_up(tmp_path):
    (tmp_path / "sidecars").write_text("a file where a folder must be")
    with pytest.raises(ArtifactError, match=r"cannot be saved beside .*leave --save-artifacts out"):
        warm_up(tmp_path, save=True, trust=False)


def test_the_architecture_is_that_of_all_devices(monkeypatch):
    capabilities = {0: (9, 0), 1: (8, 0), 2: (9, 0)}
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: capabilities[device.index]
    )
    devices = [torch.device("cuda", index) for index in capabilities]
    assert toolchain_of(devices[:1]).arch == "sm_90"
    assert toolchain_of(devices).arch == "sm_80+sm_90"


def test_a_toolchain_names_its_file_and_itself():
    toolchain = Toolchain("2.11.0+cu130", "3.6.0", "sm_80+sm_90")
    assert toolchain.file_name == "warm-up_torch-2.11.0+cu130_triton-3.6.0_sm_80+sm_90.artifacts"
    assert str(toolchain) == "torch 2.11.0+cu130, triton 3.6.0, sm_80+sm_90"


@pytest.mark.parametrize("version", ["3.7.1", None])
def test_the_toolchain_in_use_is_that_of_what_is_installed(monkeypatch, version):
    def installed(name):
        assert name == "triton"
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    found = toolchain_of([torch.device("cpu"), torch.device("cpu")])
    assert found == Toolchain(torch.__version__, version or "none", "cpu")


def test_the_first_line_says_what_the_rest_is(tmp_path, torch_of):
    torch_of("a b c")
    artifact_file(tmp_path).save()
    file = artifact_file(tmp_path)
    file.load()
    torch_of("b dd")
    counted = file.save()
    header, _, rest = file.path.read_bytes().partition(b"\n")
    assert rest == b"a b cb dd"
    assert json.loads(header) == {
        "format": 2,
        "torch": CPU.torch,
        "triton": CPU.triton,
        "arch": "cpu",
        "artifacts": 4,
        "bytes": 9,
        "parts": [5, 4],
        "sha256": hashlib.sha256(rest).hexdigest(),
    }
    assert (counted.path, counted.size, counted.artifacts) == (file.path, 9, 4)
    assert str(counted) == f"4 warm-up artifacts, 9 bytes, {file.path}"
    assert str(replace(counted, size=1234567)).startswith("4 warm-up artifacts, 1,234,567 bytes, ")


def test_artifacts_of_one_key_and_another_kind_are_two(tmp_path, monkeypatch):
    info = SimpleNamespace(artifacts={"inductor": ["k"], "aot_autograd": ["k"]})
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"x", info))
    assert artifact_file(tmp_path).save().artifacts == 2


def test_parts_are_handed_to_torch_one_by_one_in_their_order(tmp_path, torch_of, monkeypatch):
    for names in ("a b", "c d", "e f"):
        run_once(tmp_path, torch_of, names, trust=names != "a b")
    given, load = [], torch.compiler.load_cache_artifacts
    monkeypatch.setattr(
        torch.compiler, "load_cache_artifacts", lambda part: given.append(part) or load(part)
    )
    artifact_file(tmp_path).load()
    assert given == [b"a b", b"c d", b"e f"]


def test_a_torch_that_stumbles_over_a_part_is_quoted(tmp_path, compiled, monkeypatch):
    file = artifact_file(tmp_path)
    file.save()

    def stumble(payload):
        raise RuntimeError("unknown pickle")

    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", stumble)
    with pytest.raises(ArtifactError) as caught:
        file.load()
    assert str(caught.value) == (
        f"the warm-up artifacts {file.path} are refused: torch {torch.__version__} cannot load it: "
        "unknown pickle; train with --save-artifacts to replace them, or leave --trust-artifacts "
        "out, and what is missing is compiled"
    )


def test_a_damaged_file_is_told_by_both_digests(tmp_path, compiled):
    file = artifact_file(tmp_path)
    path = file.save().path
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    was, now = (hashlib.sha256(text).hexdigest()[:12] for text in (compiled, b"not for torc!"))
    wanted = f"it must hold 13 bytes of SHA-256 {was}..., found 13 of {now}...;"
    with pytest.raises(ArtifactError, match=re.escape(wanted)):
        file.load()


def test_where_nothing_is_the_folder_and_the_way_are_named(tmp_path):
    file = artifact_file(tmp_path)
    with pytest.raises(ArtifactError) as caught:
        file.load()
    assert str(caught.value) == (
        f"there are no warm-up artifacts for {CPU} in {file.path.parent} (found: none); train once "
        "with --save-artifacts on such a machine, or leave --trust-artifacts out, and what is "
        "missing is compiled"
    )
    file.path.mkdir(parents=True)
    with pytest.raises(ArtifactError, match=r"refused: it cannot be read \(.*Is a directory"):
        file.load()


def test_all_that_is_there_for_other_machines_is_named_in_order(tmp_path, compiled):
    for arch in ("sm_90", "sm_80"):
        artifact_file(tmp_path, Toolchain("2.11.0", "3.6.0", arch)).save()
    (artifact_file(tmp_path).path.parent / "attest.json").touch()
    names = [f"warm-up_torch-2.11.0_triton-3.6.0_{arch}.artifacts" for arch in ("sm_80", "sm_90")]
    with pytest.raises(ArtifactError, match=re.escape(f"(found: {', '.join(names)});")):
        artifact_file(tmp_path).load()


def test_a_disk_that_refuses_the_artifacts_leaves_the_old_ones(tmp_path, compiled, monkeypatch):
    file = artifact_file(tmp_path)
    file.save()
    before = file.path.read_bytes()

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("runtime.static.artifacts.write_file", refuse)
    with pytest.raises(ArtifactError, match=r"artifacts cannot be saved: .*No space left"):
        file.save()
    assert file.path.read_bytes() == before
    assert list(file.path.parent.iterdir()) == [file.path]


def test_trying_to_write_leaves_nothing(tmp_path):
    file = artifact_file(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    file.check_writable()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(("save", "trust"), [(False, False), (True, False), (False, True)])
def test_a_folder_is_tried_only_to_save_and_read_only_on_trust(
    tmp_path, compiled, monkeypatch, save, trust
):
    artifact_file(tmp_path).save()
    done = []
    for name in ("check_writable", "load", "save"):
        real = getattr(ArtifactFile, name)
        monkeypatch.setattr(
            ArtifactFile, name, lambda file, name=name, real=real: done.append(name) or real(file)
        )
    warm_up(tmp_path, save=save, trust=trust)
    assert done == ["check_writable", "save"] * save + ["load"] * trust


def test_both_counts_of_a_warm_up_are_said(tmp_path, compiled, monkeypatch):
    monkeypatch.setattr("runtime.static.artifacts.compile_cache_counts", lambda: (41, 7))
    artifact_file(tmp_path).save()
    loaded, reused, saved = warm_up(tmp_path, save=True, trust=True)
    path = artifact_file(tmp_path).path
    assert loaded == f"loaded 3 warm-up artifacts, 13 bytes, {path}"
    assert reused == "compiled code: 41 graphs reused, 7 compiled anew"
    assert saved == f"saved 3 warm-up artifacts, 13 bytes, {path}"


def test_code_that_is_compiled_again_does_not_replace_what_was_loaded(tmp_path, torch_of):
    run_once(tmp_path, torch_of, "a b", trust=False)
    run_once(tmp_path, torch_of, "b  a", trust=True)
    assert artifact_file(tmp_path)._payloads() == [b"a b"]


def test_a_file_of_hundreds_of_runs_is_read(tmp_path, torch_of):
    torch_of("a")
    path = artifact_file(tmp_path).save().path
    names = [f"n{number:0200d}" for number in range(700)]
    whole = "".join(names).encode()
    header = json.loads(path.read_bytes().partition(b"\n")[0]) | {
        "bytes": len(whole),
        "parts": [len(name) for name in names],
        "sha256": hashlib.sha256(whole).hexdigest(),
    }
    path.write_bytes(json.dumps(header).encode() + b"\n" + whole)
    assert artifact_file(tmp_path).load().artifacts == 700
