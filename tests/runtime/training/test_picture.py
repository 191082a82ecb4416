import json
import struct
import subprocess
import sys
import zlib

import pytest
from matplotlib.figure import Figure

from runtime.dflash.method import METHOD
from runtime.training.picture import draw_metrics, draw_run

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
    path = draw_metrics(rows, METHOD.plots, tmp_path / "new" / "run.png")
    size, _ = pixels(path)
    assert size == (880, 770)


def test_a_held_out_score_is_drawn_with_its_interval(tmp_path):
    def drawn(*scores):
        rows = [*ROWS, *({"step": 30, **score} for score in scores)]
        return pixels(draw_metrics(rows, METHOD.plots, tmp_path / "run.png"))[1]

    score = {"heldout_tau": 1.4, "heldout_low": 1.3, "heldout_high": 1.5}
    less = [{key: score[key] for key in score if key != left} for left in score]
    pictures = [drawn(), drawn(score), drawn({**score, "heldout_low": 1.2}), drawn(less[1])]
    assert len(set(pictures)) == 4
    assert drawn(less[1]) == drawn(less[2])


def test_every_series_is_drawn(tmp_path):
    def drawn(rows):
        return pixels(draw_metrics(rows, METHOD.plots, tmp_path / "run.png"))[1]

    whole = drawn(ROWS)
    for row, key in ((0, "loss"), (0, "tau_forced"), (2, "tau")):
        fewer = [dict(r) for r in ROWS]
        del fewer[row][key]
        assert drawn(fewer) != whole


@pytest.fixture
def plots(monkeypatch):
    """Both plots of the last picture that was saved."""
    found, real = [], Figure.savefig

    def savefig(figure, where, **options):
        found[:] = figure.axes
        real(figure, where, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return found


def lines(plot):
    """Label -> points, with what fixes how they are drawn."""
    return {
        line.get_label(): (line.get_xydata().tolist(), line.get_color(), line.get_linestyle())
        for line in plot.lines
    }


def test_loss_stands_above_and_both_taus_below(tmp_path, plots):
    rows = [*ROWS, {"step": 60, "loss": None, "tau_forced": 0.0, "tau": None}]
    assert draw_metrics(rows, METHOD.plots, str(tmp_path / "run.png")) == tmp_path / "run.png"
    above, below = plots
    assert [line[:2] for line in lines(above).values()] == [([[20, 4.2], [40, 3.1]], "tab:blue")]
    assert lines(below) == {
        "drafts checked against the data": (
            [[20, 1.1], [40, 1.3], [60, 0.0]],
            "tab:green",
            "-",
        ),
        "draft-and-verify on held-out prompts": ([[40, 1.35]], "tab:red", "None"),
    }
    assert above.get_ylabel() == "loss (weighted mean cross entropy)"
    assert below.get_ylabel() == "tau (tokens per target call)"
    assert below.get_xlabel() == "step"
    assert [text.get_text() for text in below.get_legend().get_texts()] == list(lines(below))
    assert above.get_shared_x_axes().joined(above, below)


def test_a_plot_without_taus_has_no_legend(tmp_path, plots):
    draw_metrics([{"step": 1, "loss": 2.0}], METHOD.plots, tmp_path / "run.png")
    assert plots[1].get_legend() is None
    assert lines(plots[1]) == {}


def test_what_was_measured_before_and_after_stands_at_the_ends_of_the_run(tmp_path, plots, capsys):
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, ROWS[:2])))
    draw_run(tmp_path, METHOD.plots)
    assert list(lines(plots[1])) == ["drafts checked against the data"]
    draw_run(tmp_path, METHOD.plots, {"tau": (1.25, 2.5)})
    assert lines(plots[1])["draft-and-verify on held-out prompts"][0] == [[0, 1.25], [40, 2.5]]
    (tmp_path / "metrics.jsonl").write_text("")
    draw_run(tmp_path, METHOD.plots, {"tau": (1.25, 2.5)})
    assert lines(plots[1])["draft-and-verify on held-out prompts"][0] == [[0, 1.25], [0, 2.5]]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["metrics.jsonl", "metrics.png"]
    assert capsys.readouterr().err == ""


def test_what_prevents_a_picture_is_a_line_and_no_error(tmp_path, capsys):
    (tmp_path / "metrics.png").mkdir()
    (tmp_path / "metrics.jsonl").write_text(json.dumps(ROWS[0]))
    draw_run(tmp_path, METHOD.plots)
    said = capsys.readouterr().err
    assert said.startswith("no picture of the run: ")
    assert f"{tmp_path}/metrics.png" in said
    assert said.count("\n") == 1


def test_needs_no_display_and_loads_matplotlib_late():
    code = "import sys, runtime.training.picture; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("command", ["evaluate", "generate", "export", "compare"])
def test_help_loads_no_torch(command):
    code = (
        "import sys\n"
        f"from runtime.{command} import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
