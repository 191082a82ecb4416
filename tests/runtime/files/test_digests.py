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


@pytest.mark.parametrize("size", [999, 1000])
def test_reads_are_shown_from_the_limit_on(tmp_path, reads, monkeypatch, capsys, size):
    monkeypatch.setattr(digests, "SHOWN_FROM", 1000)
    (tmp_path / "a").write_bytes(bytes(size))
    sha256_of_files([tmp_path / "a"])
    assert bool(capsys.readouterr().err) == (size == 1000)


def test_what_is_shown_is_what_is_left_to_read(tmp_path, reads, monkeypatch, capsys):
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_bytes(path.name.encode() * 500)
    sha256_of_files(paths[:1])
    monkeypatch.setattr(digests, "SHOWN_FROM", 1000)
    monkeypatch.setattr(digests, "PART", 100)
    monkeypatch.setattr("maskgen.progress.LINE_INTERVAL_S", 0)
    assert sha256_of_files(paths) == [plain(path.read_bytes()) for path in paths]
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" (")[0] for line in lines] == [
        f"reading the target's files: {share} %" for share in range(10, 101, 10)
    ]
    assert len(reads) == 3


def test_known_and_unknown_files_come_back_in_the_order_asked(tmp_path, reads):
    paths = [tmp_path / name for name in "abcd"]
    for path in paths:
        path.write_bytes(path.name.encode())
    sha256_of_files([paths[2], paths[0]])
    order = [3, 2, 1, 0, 3]
    expected = [plain(paths[i].name.encode()) for i in order]
    assert sha256_of_files([paths[i] for i in order]) == expected
    assert sha256_of_files([]) == []


def test_a_file_that_is_written_while_it_is_read_is_not_remembered(tmp_path, reads, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(b"a" * 1000)
    advance = digests.Progress.advance

    def write_on(progress, steps):
        if path.stat().st_size == 1000:
            path.write_bytes(b"a" * 999 + b"b" + b"c")
        advance(progress, steps)

    monkeypatch.setattr(digests, "SHOWN_FROM", 0)
    with monkeypatch.context() as patch:
        patch.setattr(digests.Progress, "advance", write_on)
        sha256_of_files([path])
    assert not user_cache().exists()
    assert sha256_of_files([path]) == [plain(path.read_bytes())]


def test_a_file_is_remembered_from_two_seconds_after_its_last_change(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "_known", {})
    path = tmp_path / "a"
    path.write_bytes(b"a")
    # The time of the content can be set back, that of the inode cannot.
    os.utime(path, (0, 0))
    changed = path.stat().st_ctime_ns
    for age, is_remembered in ((1_999_999_999, False), (2_000_000_000, True)):
        monkeypatch.setattr("time.time_ns", lambda age=age: changed + age)
        assert sha256_of_files([path]) == [plain(b"a")]
        assert user_cache().exists() == is_remembered


def test_a_record_is_of_one_state_of_one_file(tmp_path, reads, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(b"a")
    (tmp_path / "link").symlink_to(path)
    sha256_of_files([tmp_path / "link"])
    (memory,) = (user_cache() / "digests").iterdir()
    assert memory.name == f"{plain(os.fsencode(str(path.resolve())))[:32]}.json"
    stat = path.stat()
    state = [str(path.resolve()), stat.st_dev, stat.st_ino, 1, stat.st_mtime_ns, stat.st_ctime_ns]
    record = json.loads(memory.read_bytes())
    check = plain(json.dumps([state, plain(b"a")], separators=(",", ":")).encode())
    assert record == {"file": state, "sha256": plain(b"a"), "check": check}
    # Whichever of them differs, the file is read again.
    for index in range(len(state)):
        other = [*state]
        other[index] = f"{other[index]}x" if index == 0 else other[index] + 1
        record = {"file": other, "sha256": "0" * 64}
        record["check"] = plain(json.dumps([other, "0" * 64]).encode())
        memory.write_text(json.dumps(record))
        another_process(monkeypatch)
        assert sha256_of_files([path]) == [plain(b"a")]


def test_another_file_in_its_place_of_the_same_size_and_time_is_read(tmp_path, reads):
    first, second = tmp_path / "a", tmp_path / "b"
    for path in (first, second):
        path.write_bytes(path.name.encode())
        os.utime(path, (5, 5))
    assert sha256_of_files([first]) == [plain(b"a")]
    second.replace(first)
    assert sha256_of_files([first]) == [plain(b"b")]


def test_one_file_read_now_is_not_taken_from_memory(tmp_path, reads, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(b"a")
    sha256_of_files([path])
    (memory,) = (user_cache() / "digests").iterdir()
    monkeypatch.setattr(digests, "_known", {digests.file_state(path): "0" * 64})
    assert sha256_of_files([path]) == ["0" * 64], "known"
    assert digests.sha256_of_file(path) == plain(b"a")
    memory.unlink()
    path.write_bytes(b"b" * 100_000)
    assert digests.sha256_of_file(path) == plain(b"b" * 100_000)
    assert not memory.exists()


def test_what_is_not_there_is_an_error(tmp_path, reads):
    (tmp_path / "a").write_bytes(b"a")
    with pytest.raises(FileNotFoundError):
        sha256_of_files([tmp_path / "a", tmp_path / "b"])
    for refused in (digests.sha256_of_file, digests.file_state):
        with pytest.raises(FileNotFoundError):
            refused(tmp_path / "b")
    with pytest.raises(IsADirectoryError):
        sha256_of_files([tmp_path])


@pytest.mark.parametrize("base", [None, ""])
def test_the_cache_folder_of_a_user_who_set_none(tmp_path, monkeypatch, base):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if base is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", base)
    assert user_cache() == tmp_path / ".cache" / "flex-mask-compiler"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert str(user_cache()) == "/elsewhere/flex-mask-compiler"
