import hashlib
import json
import os

import pytest

from runtime.files import digests
from runtime.files.digests import sha256_of_files, user_cache


@pytest.fixture
def reads(monkeypatch, tmp_path):
    """Digests that were begun, by what was known before; a cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "SETTLED_S", 0.0)
    monkeypatch.setattr(digests, "_known", {})
    begun = []
    real = hashlib.sha256

    def counted(*args, **options):
        if not args:
            begun.append(1)
        return real(*args, **options)

    monkeypatch.setattr(hashlib, "sha256", counted)
    return begun


def another_process(monkeypatch):
    monkeypatch.setattr(digests, "_known", {})


def plain(data):
    return hashlib.sha256(data).hexdigest()


def test_a_file_is_read_whole_once_and_then_remembered(tmp_path, reads, monkeypatch):
    data = bytes(range(256)) * 4000
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.write_bytes(data + path.name.encode())
    expected = [plain(path.read_bytes()) for path in paths]
    assert sha256_of_files(paths) == expected
    assert len(reads) == 2
    another_process(monkeypatch)
    assert sha256_of_files([*paths[::-1], paths[0]]) == [*expected[::-1], expected[0]]
    (tmp_path / "link").symlink_to(paths[0])
    assert sha256_of_files([tmp_path / "link"]) == expected[:1]
    assert len(reads) == 2


def test_a_path_need_be_no_utf_8(tmp_path, reads, monkeypatch):
    path = tmp_path / os.fsdecode(b"caf\xe9")
    path.write_bytes(b"x")
    assert sha256_of_files([path]) == [plain(b"x")]
    another_process(monkeypatch)
    assert sha256_of_files([path]) == [plain(b"x")]
    assert len(reads) == 1


def test_a_change_of_one_byte_is_seen_whatever_the_times_say(tmp_path, reads, monkeypatch):
    path = tmp_path / "weights"
    path.write_bytes(bytes(5 << 20))
    first, stat = sha256_of_files([path]), path.stat()
    with path.open("r+b") as stream:
        stream.seek(2_500_000)
        stream.write(b"\1")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    another_process(monkeypatch)
    assert sha256_of_files([path]) == [plain(path.read_bytes())] != first


def test_a_file_that_was_just_written_is_read_again(tmp_path, reads, monkeypatch):
    monkeypatch.setattr(digests, "SETTLED_S", 1000.0)
    (tmp_path / "a").write_bytes(b"a")
    assert sha256_of_files([tmp_path / "a"]) == sha256_of_files([tmp_path / "a"])
    assert len(reads) == 2
    assert not user_cache().exists()


def flip_a_digit(text):
    record = json.loads(text)
    digit = "0" if record["sha256"][5] != "0" else "1"
    record["sha256"] = record["sha256"][:5] + digit + record["sha256"][6:]
    return json.dumps(record)


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_digit,
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: '{"sha256": 5}',
        lambda text: "[" * 100_000,
        lambda text: "\udcff",
    ],
)
def test_a_damaged_memory_costs_time_only(tmp_path, reads, monkeypatch, damage):
    path = tmp_path / "weights"
    path.write_bytes(b"w" * 1000)
    expected = sha256_of_files([path])
    (memory,) = (user_cache() / "digests").iterdir()
    memory.write_text(damage(memory.read_text()), errors="surrogateescape")
    another_process(monkeypatch)
    assert sha256_of_files([path]) == expected == [plain(path.read_bytes())]
    assert len(reads) == 2
    another_process(monkeypatch)
    sha256_of_files([path])
    assert len(reads) == 2


def test_a_memory_that_cannot_be_written_costs_time_only(tmp_path, reads):
    (tmp_path / "cache").write_text("in the way")
    (tmp_path / "a").write_bytes(b"a")
    assert sha256_of_files([tmp_path / "a"]) == [plain(b"a")]


def test_a_long_read_is_shown(tmp_path, reads, monkeypatch, capsys):
    monkeypatch.setattr(digests, "SHOWN_FROM", 100)
    (tmp_path / "a").write_bytes(bytes(1000))
    sha256_of_files([tmp_path / "a"])
    assert "reading the target's files: 100 %" in capsys.readouterr().err
