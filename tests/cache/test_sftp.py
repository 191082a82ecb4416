"""push and pull against an SFTP server on loopback."""

import pytest

import cache
from cache.errors import DamagedEntryError, ShippingError, StoreNotFoundError
from tests.cache.samples import entries, files_of, published, truth_of
from tests.cache.sftp import SftpServer


@pytest.fixture
def url(tmp_path):
    server = SftpServer()
    yield f"sftp://someone:secret@127.0.0.1:{server.port}{tmp_path}/far/m.zarr"
    server.close()


def test_sftp_round_trip(url, tmp_path):
    store = published(tmp_path / "near" / "m.zarr")
    sent = cache.push(store, url)
    assert (sent.copied, sent.kept) == (6, 0)
    assert files_of(cache.open_store(tmp_path / "far" / "m.zarr")) == files_of(store)
    assert cache.push(store, url).kept == 6
    store.publish(entries(4, scale=7))
    assert cache.push(store, url).kept == 0
    far = cache.open_store(url)
    assert far.current == store.current
    assert {line.id for line in far.versions()} == {line.id for line in store.versions()}
    assert truth_of(far) == truth_of(store)
    assert far.verify() == []
    cache.pull(url, tmp_path / "again.zarr")
    assert cache.open_store(tmp_path / "again.zarr").verify() == []


def test_sftp_damage_is_refused_and_repaired_by_a_push(url, tmp_path):
    store = published(tmp_path / "near" / "m.zarr")
    cache.push(store, url)
    chunk = tmp_path / "far" / "m.zarr" / store.current / "spans" / "c" / "0"
    chunk.write_bytes(chunk.read_bytes()[:-1])
    with pytest.raises(DamagedEntryError, match=r"spans/c/0"):
        cache.pull(url, tmp_path / "again.zarr")
    assert cache.push(store, url).copied == 1
    assert cache.open_store(url).verify() == []


def test_sftp_without_a_cache_or_the_right_is_typed(url, tmp_path):
    with pytest.raises(StoreNotFoundError, match="there is no cache at sftp://"):
        cache.open_store(url)
    (tmp_path / "far").write_bytes(b"no folder")
    with pytest.raises(ShippingError, match=r"cannot write sftp://someone:\*\*\*@127") as caught:
        cache.push(published(tmp_path / "near" / "m.zarr"), url)
    assert "secret" not in str(caught.value)
