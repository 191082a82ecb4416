"""Certificates of a version, a sidecar beside it: made once, taken over, no part of it."""

import errno
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cache import Store
from cache.atomic import replace_file, staging_folder
from cache.errors import StoreWriteError
from maskgen.certificate import Certificate, certify
from maskgen.entry import load_entry
from maskgen.mask_spec import MaskSpec
from maskgen.progress import OnItem

CERTIFICATE_FORMAT = 2
_FILE = "certificate.json"


def certify_version(
    store: Store,
    version: str,
    *,
    progress: OnItem | None = None,
    notice: Callable[[str], None] | None = None,
) -> list[Certificate]:
    """Check the entries of a version that have no certificate yet, and keep what was found.

    Certificates of the other versions are taken over for entries with an equal spec and equal
    arrays.

    Args:
        store: A writable cache.
        version: Version id.
        progress: Called after each entry.
        notice: Called where nothing may be written beside the cache, which is one in itself as a
            mount point is; None refuses that.

    Returns:
        One certificate an entry that was checked now; those taken over are left out.

    Raises:
        MaskSpecError: A formula cannot be evaluated here.
        DamagedEntryError: An entry is not what was published.
        StoreWriteError: The certificates cannot be written.
    """
    known: dict[tuple[str, str], dict[str, Any]] = {}
    for source in {version, *store.source.version_ids()}:
        # Only what was found right is taken over; anything else is checked again.
        right = (record for record in _records(store, source) if record.get("findings") == [])
        known |= {(record["spec"], record["sha256"]): record for record in right}
    infos = store.version(version).entries
    made: list[Certificate] = []
    kept: list[Mapping[str, Any]] = []
    for done, info in enumerate(infos.values(), start=1):
        spec = MaskSpec.from_json(info.name, info.spec)
        # A family of the user's own may have another formula today, and the same arrays.
        record = None if spec.own_family else known.get((spec.digest, info.sha256))
        if record is None:
            made.append(certify(load_entry(store, info.name, version)))
            record = asdict(made[-1])
        kept.append({**record, "name": info.name})
        if progress is not None:
            progress(info.name, done, len(infos))
    if made:
        try:
            _write_certificates(store, version, kept)
        except StoreWriteError as error:
            if notice is None or error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            notice(f"{error}; the certificates are not kept")
    return made


def certificate_file(store: Store, version: str) -> Path:
    """Return where the certificates of a version are written."""
    return store.sidecar_dir(version) / _FILE


def is_refuted(store: Store, version: str) -> bool:
    """Report whether an entry of a version was found to differ from its formula."""
    try:
        return any(record.get("findings") for record in _records(store, version))
    except StoreWriteError:
        # A URL has no sidecars.
        return False


def _records(store: Store, version: str) -> list[dict[str, Any]]:
    try:
        content = json.loads(store.find_sidecar(version, _FILE).read_bytes())
    except (OSError, ValueError):
        # A sidecar is a record for people and may be made again at any time.
        return []
    if not isinstance(content, dict) or content.get("format") != CERTIFICATE_FORMAT:
        return []
    records = content.get("entries")
    if not isinstance(records, list):
        return []
    return [
        record
        for record in records
        if isinstance(record, dict)
        and isinstance(record.get("spec"), str)
        and isinstance(record.get("sha256"), str)
    ]


def _write_certificates(store: Store, version: str, records: list[Mapping[str, Any]]) -> None:
    path = certificate_file(store, version)
    content = {"format": CERTIFICATE_FORMAT, "version": version, "entries": records}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with staging_folder(path) as staging:
            replace_file(path, json.dumps(content, indent=1).encode(), staging)
    except OSError as error:
        raise StoreWriteError.caused_by(str(path), error) from error
