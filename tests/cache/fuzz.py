"""Mutated caches, drawn from a seed: each must load right or be refused by a CacheError.

The mutations are those of an attacker as much as of a bad disk: checksums, digests and the id
are made to fit again wherever that is possible.
"""

import collections
import dataclasses
import json
import random
import stat
import struct
import zipfile
from pathlib import Path

import google_crc32c

import cache
from cache.digest import sha256_hex
from cache.format import root_document, version_document
from tests.cache.damage import outcome_of, outcome_of_source
from tests.cache.samples import DictSource, entries, files_of, published, truth_of

HOSTILE = (
    "-1", "0", "1", "2147483648", "4294967296", "1099511627776", "999999999999999999",
    "9999999999999999999999", "1" * 5000, "1.5", "1e3", "NaN", "-Infinity", "null", "true", "[]",
    "{}", '""', '"../../etc/passwd"', '"a/../b"', '"/abs"', '"."', '"\\u0000"', '"spans"',
    '"\\ud800"', "[" * 40 + "]" * 40, '{"a":' * 40 + "1" + "}" * 40, '[1,1,1,4294967296]', "[-1]",
    "[]", "[1.0]", '"' + "f" * 64 + '"', '"' + "F" * 64 + '"',
)  # fmt: skip


@dataclasses.dataclass
class Fuzzed:
    rows: dict
    bad: list
    total: int


def run(scratch: Path, count: int, seed: int) -> Fuzzed:
    """Try ``count`` mutated caches."""
    scratch.mkdir()
    store = published(scratch / "m.zarr", entries(3))
    cache.pack(store, scratch / "m.zip")
    case = _Case(
        files=files_of(store),
        version=store.current,
        truth=truth_of(store),
        packed=(scratch / "m.zip").read_bytes(),
        scratch=scratch / "fuzzed.zip",
    )
    rng = random.Random(seed)
    fuzzed = Fuzzed({}, [], count)
    mutations = (raw_bytes, chunk_with_checksum, blosc_header, manifest_with_id, zip_bytes,
                 zip_members)  # fmt: skip
    for index in range(count):
        mutation = mutations[index % len(mutations)]
        outcome = mutation(case, rng)
        kind = outcome.split()[0]
        # A manifest that was signed anew is another version, which nobody has published.
        kind = "right" if kind == "another" and mutation is manifest_with_id else kind
        fuzzed.rows.setdefault(mutation.__name__, collections.Counter())[kind] += 1
        if kind not in ("right", "refused"):
            fuzzed.bad.append(f"fuzz {mutation.__name__} {index} of seed {seed}: {outcome}")
    return fuzzed


@dataclasses.dataclass
class _Case:
    files: dict
    version: str
    truth: dict
    packed: bytes
    scratch: Path

    def outcome(self, files):
        return outcome_of_source(DictSource(files), self.truth)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Bytes changed, cut out, put in, doubled or moved, a few times."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        position = rng.randrange(len(changed) + 1)
        length = rng.choice((1, 1, 2, 4, 16, 64))
        kind = rng.randrange(5)
        if kind == 0 and position < len(changed):
            changed[position] = rng.randrange(256)
        elif kind == 1:
            del changed[position : position + length]
        elif kind == 2:
            changed[position:position] = rng.randbytes(length)
        elif kind == 3:
            changed[position:position] = changed[position : position + length]
        else:
            piece = rng.choice((b"\0", b"\xff", b"\x7f\xff\xff\xff", b"\x80\0\0\0")) * length
            changed[position : position + len(piece)] = piece
    return bytes(changed)


def raw_bytes(case, rng):
    files = dict(case.files)
    key = rng.choice(sorted(files))
    if rng.random() < 0.05:
        del files[key]
    else:
        files[key] = mutated(files[key], rng)
    return case.outcome(files)


def _with_checksum(frame: bytes) -> bytes:
    return frame + google_crc32c.value(frame).to_bytes(4, "little")


def _a_chunk(case, rng):
    return rng.choice([key for key in sorted(case.files) if "/c/" in key])


def chunk_with_checksum(case, rng):
    """A changed Blosc frame under a CRC-32C that fits."""
    key = _a_chunk(case, rng)
    frame = case.files[key][:-4]
    head = 16 if rng.random() < 0.7 else 0
    return case.outcome(
        case.files | {key: _with_checksum(frame[:head] + mutated(frame[head:], rng))}
    )


def blosc_header(case, rng):
    """A header that claims other sizes, under a CRC-32C that fits."""
    key = _a_chunk(case, rng)
    frame = bytearray(case.files[key][:-4])
    for _ in range(rng.choice((1, 1, 2))):
        if rng.random() < 0.3:
            frame[rng.randrange(4)] = rng.randrange(256)
        else:
            place = 4 * rng.randrange(1, min(8, len(frame) // 4))
            value = rng.choice(
                (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 1_900_000_000, rng.randrange(2**32))
            )
            struct.pack_into("<I", frame, place, value)
    return case.outcome(case.files | {key: _with_checksum(bytes(frame))})


def _places(value, path=()):
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from _places(value[key], (*path, key))
    elif isinstance(value, list):
        for position in range(len(value)):
            yield from _places(value[position], (*path, position))


def manifest_with_id(case, rng):
    """A changed manifest under the id that it hashes to, made current."""
    document = json.loads(case.files[f"{case.version}/zarr.json"])
    manifest = document["attributes"]["manifest"]
    marker = "\N{SNOWMAN}"
    for _ in range(rng.choice((1, 1, 2))):
        places = list(_places(manifest))[1:]
        *path, last = rng.choice(places)
        node = manifest
        for step in path:
            node = node[step]
        kind = rng.randrange(4)
        if kind == 0 and isinstance(node, dict):
            node[rng.choice(("", "../x", "a" * 500, "zzz"))] = node.pop(last)
        elif kind == 1:
            del node[last]
        elif kind == 2 and type(node[last]) is int:
            node[last] += rng.choice((-1, 1, 2**31, 2**40, -(2**62)))
        else:
            node[last] = marker
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    text = text.replace(json.dumps(marker), rng.choice(HOSTILE))
    if rng.random() < 0.1:
        text = mutated(text.encode(), rng).decode("latin-1")
    data = text.encode("latin-1")
    new = sha256_hex(data)
    files = {key.replace(case.version, new): value for key, value in case.files.items()}
    files[f"{new}/zarr.json"] = version_document(data)
    files["zarr.json"] = root_document(new)
    # What nobody published has no truth; it must hold together or be refused.
    return outcome_of_source(DictSource(files), case.truth if new == case.version else {})


def zip_bytes(case, rng):
    case.scratch.write_bytes(mutated(case.packed, rng))
    return outcome_of(case.scratch, case.truth)


def zip_members(case, rng):
    """A well-formed zip with members of another name, kind, size or number."""
    names = ("../zarr.json", "/zarr.json", "zarr.json", "a/../zarr.json", "C:\\zarr.json",
             f"{case.version}/spans/c/00", f"{case.version}/spans/c/99999", "extra",
             f"{case.version}/tables/c/1", "dir/", "\0zarr.json")  # fmt: skip
    kinds = (stat.S_IFREG, stat.S_IFLNK, stat.S_IFIFO, stat.S_IFDIR, 0)
    with zipfile.ZipFile(case.scratch, "w") as archive:
        items = list(case.files.items())
        if rng.random() < 0.3:
            del items[rng.randrange(len(items))]
        for key, data in items:
            info = zipfile.ZipInfo(key)
            if rng.random() < 0.1:
                info.external_attr = rng.choice(kinds) << 16
            if rng.random() < 0.1:
                info.compress_type = rng.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2))
            archive.writestr(info, mutated(data, rng) if rng.random() < 0.1 else data)
        if rng.random() < 0.5:
            name = rng.choice(names)
            if name not in archive.namelist():
                info = zipfile.ZipInfo(name)
                info.external_attr = rng.choice(kinds) << 16
                archive.writestr(info, rng.choice((b"", b"/etc/passwd", items[0][1])))
    return outcome_of(case.scratch, case.truth)
