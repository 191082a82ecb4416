"""A document with its own digest: one bit changed anywhere is seen, a later format named."""

import hashlib
import json

import pytest

from runtime.errors import LaterFormatError
from runtime.files.sealed import DamagedError, json_digest, read_sealed, seal, write_sealed

DOCUMENT = {
    "format": 2,
    "scale": [0.1, 1e-07, 3e22, -0.0],
    "text": 'snow\N{SNOWMAN}\n"\\',
    "deep": {"b": [None, True, {"a": 1}], "": 12345678901234567890},
}


@pytest.fixture
def path(tmp_path):
    write_sealed(tmp_path / "x.json", DOCUMENT)
    return tmp_path / "x.json"


def read(path):
    return read_sealed(path, 2, "do as I say")


def test_a_document_comes_back(path):
    assert read(path) == DOCUMENT
    assert [item.name for item in path.parent.iterdir()] == ["x.json"]


def test_the_digest_is_that_of_the_canonical_text_of_the_rest(path):
    document = json.loads(path.read_text())
    found = document.pop("document_sha256")
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    assert found == hashlib.sha256(text.encode()).hexdigest() == json_digest(DOCUMENT)


def test_every_bit_is_seen_or_says_the_same(path):
    data = path.read_bytes()
    same = 0
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        said = ""
        try:
            found = read(path)
        except (DamagedError, LaterFormatError) as error:
            said = str(error)
        same += not said
        assert said.startswith(f"{path} is ") or found == DOCUMENT
    # As the e of 1e-07, which may be a capital.
    assert same < 8


@pytest.mark.parametrize("size", [0, 1, 20, -2, -20])
def test_a_cut_document_is_damaged(path, size):
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DamagedError, match=rf"^{path} is damaged: it must be JSON"):
        read(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.pop("document_sha256"),
        lambda document: document.update(format=1),
        lambda document: document.pop("format"),
        lambda document: document.update(document_sha256=None),
        lambda document: document.update(document_sha256=json_digest({})),
        lambda document: document.update(more=1),
        lambda document: document.update(scale=[0.1]),
        lambda document: document.update(scale=float("nan")),
    ],
)
def test_a_document_that_was_changed_is_damaged(path, change):
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(DamagedError, match=rf"^{path} is damaged: the SHA-256 of what it says"):
        read(path)


@pytest.mark.parametrize("text", ["[]", "7", "null", '"a"'])
def test_what_is_no_object_is_damaged(path, text):
    path.write_text(text)
    with pytest.raises(DamagedError, match="must be a JSON object, found "):
        read(path)


@pytest.mark.parametrize("document", [{"a": 1}, {"format": 1, "a": 1}])
def test_a_document_of_before_has_no_digest(path, document):
    path.write_text(json.dumps(document))
    assert read(path) == document


@pytest.mark.parametrize("sealed", [True, False])
def test_a_later_format_is_named_sealed_or_not(path, sealed):
    document = {**DOCUMENT, "format": 3}
    path.write_bytes(seal(document) if sealed else json.dumps(document).encode())
    with pytest.raises(LaterFormatError, match=rf"^{path} is of format 3, .* or do as I say$"):
        read(path)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_json_has_no_word_for_is_not_written(path, number):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_sealed(path, {"format": 2, "x": [number]})
    assert read(path) == DOCUMENT


@pytest.mark.parametrize(
    ("version", "shown"),
    [
        (0, "0"),
        (-1, "-1"),
        (True, "True"),
        (2.0, "2.0"),
        ("2", "'2'"),
        (None, "None"),
        ([2], r"\[2\]"),
        ("x" * 99, "'" + "x" * 39),
    ],
)
@pytest.mark.parametrize("sealed", [True, False])
def test_a_format_that_is_none_is_damage(path, version, shown, sealed):
    document = {**DOCUMENT, "format": version}
    path.write_bytes(seal(document) if sealed else json.dumps(document).encode())
    said = rf"^{path} is damaged: its format must be 1 to 2, found {shown}$"
    with pytest.raises(DamagedError, match=said):
        read(path)


def test_every_format_up_to_the_latest_is_read(path):
    for version in (1, 2, 3, 7):
        document = {**DOCUMENT, "format": version}
        path.write_bytes(seal(document))
        assert read_sealed(path, 7, "") == document
        assert read_sealed(path, version, "") == document
        if version > 1:
            with pytest.raises(LaterFormatError, match=rf"reads formats up to {version - 1}: use"):
                read_sealed(path, version - 1, "")


@pytest.mark.parametrize(
    ("text", "kind"), [("[]", "list"), ("7", "int"), ("null", "NoneType"), ('"a"', "str")]
)
def test_what_stands_in_a_documents_place_is_named(path, text, kind):
    path.write_text(text)
    said = rf"^{path} is damaged: it must be a JSON object, found {kind}$"
    with pytest.raises(DamagedError, match=said):
        read(path)


def test_both_digests_are_named(path):
    document = json.loads(path.read_text())
    document["scale"] = []
    path.write_text(json.dumps(document))
    found = document.pop("document_sha256")
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    expected = hashlib.sha256(text.encode()).hexdigest()
    with pytest.raises(DamagedError) as caught:
        read(path)
    assert f"says is {expected[:12]}..., and its document_sha256 is {found[:12]}..." in str(
        caught.value
    )


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a":' * 100_000, b"\xff", b'{"a": \xe9}'])
def test_what_no_decoder_takes_is_damage(path, content):
    path.write_bytes(content)
    with pytest.raises(DamagedError, match=rf"^{path} is damaged: it must be JSON \("):
        read(path)


@pytest.mark.parametrize("said", ['"none"', '""', "null", "0"])
def test_what_has_no_digest_is_damaged_whatever_it_says_of_itself(path, said):
    path.write_text(f'{{"format": 2, "x": Infinity, "document_sha256": {said}}}')
    with pytest.raises(DamagedError, match="the SHA-256 of what it says is none"):
        read(path)


def test_equal_values_have_one_digest_and_a_digest_needs_finite_numbers():
    assert json_digest({"b": 1, "a": [2, "\u2603"]}) == json_digest({"a": [2, "\u2603"], "b": 1})
    for value in (float("nan"), float("inf"), [{"a": -float("inf")}]):
        with pytest.raises(ValueError, match="JSON compliant"):
            json_digest(value)


def test_a_digest_that_the_document_brought_is_replaced(path):
    write_sealed(path, {**DOCUMENT, "document_sha256": "0" * 64})
    with pytest.raises(DamagedError):
        read(path)
    write_sealed(path, {"format": 2, 1: "a", "t": (1, 2)})
    assert read(path) == {"format": 2, "1": "a", "t": [1, 2]}


def test_a_disk_that_refuses_leaves_the_document_as_it_was(path, monkeypatch):
    before = path.read_bytes()

    def refuse(*_arguments, **_options):
        raise OSError(28, "No space left on device")

    for name in ("os.fsync", "os.replace"):
        with monkeypatch.context() as patch:
            patch.setattr(name, refuse)
            with pytest.raises(OSError, match="No space left"):
                write_sealed(path, {"format": 2})
        assert path.read_bytes() == before
        assert [item.name for item in path.parent.iterdir()] == ["x.json"]


def test_a_file_that_is_not_there_is_no_damage(tmp_path):
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none.json")
