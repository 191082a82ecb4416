import struct
import subprocess
import sys
import zlib

import pytest

from runtime.training.picture import draw_metrics

ROWS = [
    {"step": 20, "loss": 4.2, "tau_forced": 1.1, "lr": 1e-3},
    {"step": 40, "loss": 3.1, "tau_forced": 1.3},
    {"step": 40, "tau": 1.35},
]


def pixels(path):
    """Width, height and the decompressed rows of a PNG."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    size = struct.unpack(">II", data[16:24])
    at, packed = 8, b""
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            packed += data[at + 8 : at + 8 + length]
        at += 12 + length
    return size, zlib.decompress(packed)


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1], [{"step": 1}], []])
def test_writes_a_png(tmp_path, rows):
    path = draw_metrics(rows, tmp_path / "new" / "run.png")
    size, _ = pixels(path)
    assert size == (880, 770)


def test_every_series_is_drawn(tmp_path):
    def drawn(rows):
        return pixels(draw_metrics(rows, tmp_path / "run.png"))[1]

    whole = drawn(ROWS)
    for row, key in ((0, "loss"), (0, "tau_forced"), (2, "tau")):
        fewer = [dict(r) for r in ROWS]
        del fewer[row][key]
        assert drawn(fewer) != whole


def test_needs_no_display_and_loads_matplotlib_late():
    code = "import sys, runtime.training.picture; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("command", ["evaluate", "generate", "export"])
def test_help_loads_no_torch(command):
    code = (
        "import sys\n"
        f"from runtime.{command} import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
