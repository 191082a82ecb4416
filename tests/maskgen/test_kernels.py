import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import maskgen
from maskgen import BackendUnavailableError, BlockTables, tables_into


def run(script, **environment):
    """Run a script beside this file in a process of its own; its lines of JSON."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script))],
        env=os.environ | {"PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_kernels_write_the_tables_of_the_cpu_builder():
    cases = run("interpreted_kernels.py", TRITON_INTERPRET="1")
    assert len(cases) == 15
    assert [case for case in cases if case["bad"]] == []
    # The cases are worth something only where all kinds of blocks occur.
    assert sum(case["full"] > 0 for case in cases) >= 5
    assert sum(case["partial"] > 0 for case in cases) >= 10


def test_the_kernels_compile_for_an_h200(tmp_path):
    compiled = run(
        "compiled_kernels.py", TRITON_CACHE_DIR=str(tmp_path), TRITON_DEFAULT_FP_FUSION="1"
    )
    assert [case["kernel"] for case in compiled] == ["_rows", "_rows", "_columns"]
    assert all(case["bytes"] > 1000 for case in compiled)


def test_without_triton_the_kernels_name_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "maskgen.kernels", raising=False)
    monkeypatch.delattr(maskgen, "kernels", raising=False)
    tables = BlockTables.empty(Q_LEN=16, KV_LEN=16, BLOCK_SIZE=16)
    spans = torch.zeros(1, 1, 1, 16, dtype=torch.int32)
    with pytest.raises(BackendUnavailableError, match=r"pip install 'triton>=3\.6'") as info:
        tables_into(tables, spans, spans, impl="triton")
    assert info.value.package == "triton"
