"""Families of the user's own, named in a run file: built, loaded, verified, refused if changed."""

import re
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import cache
from maskgen.build import build, layout_params
from maskgen.cli import main
from maskgen.entry import load_entry
from maskgen.errors import MaskSpecError, StaleMaskError
from maskgen.mask_spec import MaskSpec
from maskgen.report import html_report
from maskgen.spec import read_specs
from maskgen.verify import verify_deep
from maskgen.version_certificates import certify_version

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
FIRST_KEYS = """
import torch
from maskgen.families import Family, Layouts, Param, RuntimeParam
from maskgen.families.spans import rows, stack_spans

def spans(Q_LEN, KV_LEN, device, *, keys):
    row = rows(Q_LEN, device)
    return stack_spans([(0, keys[:, None].expand(-1, Q_LEN))], Q_LEN, KV_LEN, row)

def mask_mod(Q_LEN, KV_LEN, device, *, keys):
    batched = int(keys.shape[0] > 1)
    return lambda b, h, q_idx, kv_idx: kv_idx < keys[b * batched]

def bounds(Q_LEN, KV_LEN):
    family = first_keys()
    least, most = ([size] for size in (1, KV_LEN))
    return family.intervals(Q_LEN, KV_LEN, keys=least), family.intervals(Q_LEN, KV_LEN, keys=most)

def drawn(Q_LEN, KV_LEN, key, *, draws):
    return {"keys": torch.tensor([(byte % KV_LEN) + 1 for byte in key[:draws]], dtype=torch.int32)}

def first_keys():
    return Family(
        name="first_keys", revision=3, formula="kv < keys[b]", source="this test",
        runtime=(RuntimeParam("keys", "B", "keys that each row sees", minimum=1),),
        bounds_fn=bounds,
        draw_fn=lambda draw, Q_LEN, KV_LEN: {"keys": 1 + draw.below(KV_LEN)},
        span_fn=spans, mask_mod_fn=mask_mod, max_k_fn=lambda Q_LEN, KV_LEN: 1,
        layouts=Layouts(
            draws=("keys",),
            params=(Param("draws", "int", "how many", default=4, minimum=1),),
            draw_fn=drawn,
            count_fn=lambda draws: draws,
        ),
    )
"""
_numbers = count()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module that nobody has imported yet, and returns its name."""

    def written(text):
        name = f"own_masks_{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text(text)
        return name

    monkeypatch.syspath_prepend(tmp_path)
    return written


def entry_of(family, **more):
    return {"name": "own", "family": family, "Q_LEN": 40, "KV_LEN": 50, "BLOCK_SIZE": 16, **more}


def specs_of(*entries):
    return read_specs({"masks": {"entry": list(entries)}})


def blocks_of(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


def python(folder, *arguments):
    """Run Python in a process of its own, in a folder."""
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={"PYTHONPATH": root, "PATH": "/usr/bin:/bin", "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_example_of_the_page_is_built_by_its_run_file(tmp_path):
    (code,) = [block for block in blocks_of("python") if "def band" in block]
    (run_file,) = blocks_of("toml")
    (tmp_path / "my_masks.py").write_text(code)
    (tmp_path / "run.toml").write_text(run_file)
    ran = python(tmp_path, "-m", "maskgen", "build", "run.toml")
    assert ran.returncode == 0, ran.stderr
    assert "band/q1024-kv1024" in ran.stdout
    store = cache.open_store(tmp_path / "build" / "masks.zarr")
    entry = load_entry(store, "band/q1024-kv1024")
    q, kv = torch.arange(1024)[:, None], torch.arange(1024)
    assert torch.equal(entry.spans.dense()[0, 0], (q - kv).abs() <= 64)


def test_its_layouts_may_be_another_entrys(module):
    family = f"{module(FIRST_KEYS)}:first_keys"
    first = entry_of(family, kind="layouts", draws=3)
    second = {**first, "name": "again", "drawn_as": first["name"], "BLOCK_SIZE": 32}
    drawn = [layout_params(spec)["keys"].tolist() for spec in specs_of(first, second)]
    assert drawn[0] == drawn[1]


def test_a_family_with_layouts_is_built_certified_loaded_and_verified(tmp_path, module):
    family = f"{module(FIRST_KEYS)}:first_keys"
    (spec,) = specs_of(entry_of(family, kind="layouts", draws=3))
    assert (spec.family, spec.revision, spec.num_layouts) == (family, 3, 3)
    assert (spec.is_function, spec.family_params) == (False, {})
    assert MaskSpec.from_json(spec.name, spec.to_json()) == spec
    store = cache.open_store(tmp_path / "m.zarr", writable=True)
    version = build([spec], store).version
    (certificate,) = certify_version(store, version)
    assert certificate.findings == ()
    assert certificate.compared.endswith(f"with the formula of {family}")
    # Its formula may be another one today, so it is compared each time.
    assert [again.spec for again in certify_version(store, version)] == [spec.digest]
    entry = load_entry(store, "own/q40-kv50")
    keys = [byte % 50 + 1 for byte in bytes.fromhex(spec.digest)[:3]]
    assert entry.params["keys"].tolist() == keys
    assert (entry.num_layouts, entry.bucket.K) == (3, 1)
    for layout, width in enumerate(keys):
        wanted = (torch.arange(50) < width).expand(40, 50)
        assert torch.equal(entry.spans.dense()[layout, 0], wanted)
    assert [d.compared for d in verify_deep(store)] == [False]
    assert verify_deep(store, run_functions=True) == []
    assert "own/q40-kv50" in html_report(store, heads=1, head_dim=1)


def test_a_changed_module_is_refused_until_it_is_built_again(tmp_path, module):
    name = module(FIRST_KEYS)
    specs = specs_of(entry_of(f"{name}:first_keys", keys=[7]))
    store = cache.open_store(tmp_path / "m.zarr", writable=True)
    build(specs, store)
    assert load_entry(store, "own/q40-kv50").attrs["cells"] == 7 * 40
    (tmp_path / f"{name}.py").write_text(FIRST_KEYS.replace("kv_idx < keys", "kv_idx <= keys"))
    with pytest.raises(StaleMaskError, match=f"from {name}:first_keys, and that module has chan"):
        load_entry(store, "own/q40-kv50")
    (tmp_path / f"{name}.py").unlink()
    assert load_entry(store, "own/q40-kv50").attrs["cells"] == 7 * 40


VERBS_OF_A_CACHE = """
import sys
from click.testing import CliRunner
from maskgen.cli import main

def run(*arguments):
    return CliRunner().invoke(main, [*arguments, "--cache", "m.zarr"])

assert run("list").exit_code == 0
refused = run("show", "data/q64-kv64")
assert refused.exit_code == 2 and "give the command its --config" in refused.stderr, refused
deep = run("verify", "--deep")
assert deep.exit_code == 0 and "no difference, 2 not compared" in deep.stdout, deep
assert "own_masks" not in sys.modules
page = run("report", "page.html", "--config", "run.toml")
assert page.exit_code == 0 and "own_masks" in sys.modules, page
deep = run("verify", "--deep", "--run-functions")
assert deep.exit_code == 0 and deep.stdout.endswith(": no difference\\n"), deep
"""


def test_a_cache_names_what_only_a_run_file_may_import(tmp_path):
    (tmp_path / "own_masks.py").write_text(FIRST_KEYS)
    (tmp_path / "run.toml").write_text(
        '[masks]\ncache = "m.zarr"\n[[masks.entry]]\nname = "own"\nQ_LEN = 64\n'
        'family = "own_masks:first_keys"\nkind = "layouts"\n'
        '[[masks.entry]]\nname = "data"\nfamily = "own_masks:first_keys"\nQ_LEN = 64\n'
        'kind = "parametric"\n'
    )
    built = python(tmp_path, "-m", "maskgen", "build", "run.toml")
    assert built.returncode == 0, built.stderr
    ran = python(tmp_path, "-c", VERBS_OF_A_CACHE)
    assert ran.returncode == 0, ran.stderr
    # In this process the module is nowhere, and what was built is taken.
    shown = CliRunner().invoke(main, ["show", "own/q64-kv64", "--cache", str(tmp_path / "m.zarr")])
    assert shown.exit_code == 0
    assert "layouts own_masks:first_keys" in shown.stdout
    assert load_entry(cache.open_store(tmp_path / "m.zarr"), "own/q64-kv64").num_layouts == 4


@pytest.mark.parametrize(
    ("text", "function", "message"),
    [
        ("", "nothing", "must be importable .*has no attribute 'nothing'"),
        ("band = 3", "band", "must be a function that returns a Family"),
        ("def band(): return 3", "band", "must return a maskgen.families.Family, .* returned int"),
        ("def band(): 1 / 0", "band", "must return a Family, but raised ZeroDivisionError"),
        ("def band(x): pass", "band", "but raised TypeError"),
        ("1 / 0", "band", "must be importable .ZeroDivisionError"),
        ("raise SystemExit(0)", "band", r"must be importable .SystemExit\(0\), .*\.py:1\)"),
        ("def band(): raise SystemExit", "band", "must return a Family, but raised SystemExit"),
        ("import nowhere_at_all", "band", "must be importable .No module named 'nowhere_at_all'"),
        ("def band(", "band", "must be importable .SyntaxError"),
    ],
)
def test_what_is_no_family_is_refused_with_the_entry_named(module, text, function, message):
    name = module(text)
    with pytest.raises(MaskSpecError, match=message) as caught:
        specs_of(entry_of(f"{name}:{function}"))
    assert caught.value.field == "masks.entry 'own': family"
    assert caught.value.value == f"{name}:{function}"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:band", "must be importable .No module named 'no_such_module'"),
        ("no module:band", "must read package.module:function"),
        (":band", "must read package.module:function"),
    ],
)
def test_a_module_that_is_not_there_is_refused(name, message):
    with pytest.raises(MaskSpecError, match=message):
        specs_of(entry_of(name))


def test_a_refusal_is_one_line_of_the_command(tmp_path, module):
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        f'[masks]\n[[masks.entry]]\nname = "own"\nfamily = "{module("x = 1")}:band"\nQ_LEN = 64\n'
    )
    ran = CliRunner().invoke(main, ["build", str(run_file), "--cache", str(tmp_path / "m.zarr")])
    assert ran.exit_code == 2
    assert ran.stderr.count("\n") == 1
    assert "has no attribute 'band'" in ran.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("raise SystemExit(0)", "SystemExit: 0 ({at}) ended it before it was done"),
        ("raise GeneratorExit", "GeneratorExit ({at}) ended it before it was done"),
        ("keys[0, 0, 0]", "IndexError: too many indices for tensor of dimension 1 ({at}), in code"),
        ("{}['keys']", "KeyError: 'keys' ({at}), in code that the run file names"),
    ],
)
def test_a_fault_of_a_family_is_told_with_its_line(tmp_path, module, line, said):
    start = "def spans(Q_LEN, KV_LEN, device, *, keys):\n"
    text = FIRST_KEYS.replace(start, f"{start}    {line}\n")
    name = module(text)
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        f'[masks]\n[[masks.entry]]\nname = "own"\nfamily = "{name}:first_keys"\nQ_LEN = 64\n'
        "keys = [7]\n"
    )
    ran = CliRunner().invoke(main, ["build", str(run_file), "--cache", str(tmp_path / "m.zarr")])
    number = text[: text.index(line)].count("\n") + 1
    assert ran.exit_code == 1
    last = ran.stderr.splitlines()[-1]
    assert last.startswith("Error: " + said.format(at=f"{tmp_path}/{name}.py:{number}"))
    assert "this program" not in last


@pytest.mark.parametrize(
    ("text", "other", "message"),
    [
        ('{"keys": torch', '{"kyes": torch', "= ..kyes..: must be keys"),
        ("key[:draws]", "key[:2]", r"must be drawn as int32 \[4, ...\]"),
        ("torch.int32)}", "torch.int64)}", r"must be drawn as int32 \[4, ...\]"),
    ],
)
def test_layouts_that_are_not_as_declared_are_refused(tmp_path, module, text, other, message):
    name = module(FIRST_KEYS.replace(text, other))
    specs = specs_of(entry_of(f"{name}:first_keys", kind="layouts"))
    with pytest.raises(MaskSpecError, match=message):
        build(specs, cache.open_store(tmp_path / "m.zarr", writable=True))
