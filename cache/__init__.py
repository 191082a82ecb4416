"""Named integer arrays on disk: immutable versions, integrity, shipping between machines."""

from cache import errors
from cache.digest import canonical_json, sha256_hex
from cache.entry import Entry, EntryData
from cache.opening import open_store
from cache.receive import Shipment
from cache.ship import pack, pull, push, unpack
from cache.store import Store
from cache.sweep import GcReport
from cache.verify import Finding
from cache.version import ArrayInfo, Diff, EntryInfo, Version, VersionInfo

__all__ = [
    "ArrayInfo",
    "Diff",
    "Entry",
    "EntryData",
    "EntryInfo",
    "Finding",
    "GcReport",
    "Shipment",
    "Store",
    "Version",
    "VersionInfo",
    "canonical_json",
    "errors",
    "open_store",
    "pack",
    "pull",
    "push",
    "sha256_hex",
    "unpack",
]
