"""Verbs about versions and shipping: versions, use, diff, gc, pack, unpack, push, pull."""

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from maskgen.border import Command
from maskgen.listing import echo_json, human_bytes, text_table
from maskgen.options import (
    DIFFERENCE_FOUND,
    Place,
    json_option,
    store_options,
    version_option,
)

if TYPE_CHECKING:
    from cache import Shipment


@click.command(cls=Command)
@store_options
@json_option
@click.pass_context
def versions(ctx: click.Context, place: Place, as_json: bool) -> None:
    """List the versions of a cache.

    Of each the manifest alone is read; `verify` reads everything.
    """
    store = place.open()
    infos = store.versions()
    if as_json:
        echo_json([asdict(info) for info in infos])
    else:
        rows = [
            [
                info.id[:16],
                str(info.entries),
                human_bytes(info.bytes_on_disk),
                ", ".join(["current"] * info.is_current + ["damaged"] * bool(info.damage)),
            ]
            for info in infos
        ]
        click.echo(text_table(["version", "entries", "on disk", ""], rows))
    damage = [info.damage for info in infos if info.damage]
    for message in damage:
        click.echo(message, err=True)
    if damage:
        ctx.exit(DIFFERENCE_FOUND)


@click.command(cls=Command)
@click.argument("version")
@store_options
def use(version: str, place: Place) -> None:
    """Make VERSION, an id or its first digits, the current one."""
    store = place.open(writable=True)
    chosen = store.version(version).id
    store.use(chosen)
    click.echo(f"version {chosen[:16]} is current in {store.location}")


@click.command(cls=Command)
@click.argument("a")
@click.argument("b")
@store_options
@json_option
def diff(a: str, b: str, place: Place, as_json: bool) -> None:
    """List the entries that were added, removed or changed from version A to version B."""
    changes = asdict(place.open().diff(a, b))
    if as_json:
        echo_json(changes)
        return
    for what, names in changes.items():
        for name in names:
            click.echo(f"{what} {name}")
    if not any(changes.values()):
        click.echo("no difference")


@click.command(cls=Command)
@store_options
@click.option(
    "--keep",
    default=2,
    type=click.IntRange(min=1),
    help="Newest versions to keep; the current one and those under an hour old always stay.",
)
@json_option
def gc(place: Place, keep: int, as_json: bool) -> None:
    """Remove old versions with their certificates and artifacts, and what was left behind.

    Run files that share a cache have a version each: --keep as many as are in use, or build again.
    """
    report = place.open(writable=True).gc(keep=keep)
    for message in report.left:
        click.echo(message, err=True)
    if as_json:
        echo_json(asdict(report))
        return
    for name in (*report.removed, *report.swept):
        click.echo(f"removed {name}")
    count = len(report.removed)
    noun = "version" if count == 1 else "versions"
    click.echo(f"{count} {noun} removed, {human_bytes(report.freed_bytes)} freed")


@click.command(cls=Command)
@click.argument("file", type=click.Path(dir_okay=False))
@store_options
@version_option
def pack(file: str, place: Place, version: str | None) -> None:
    """Write a version to FILE, a zip that --cache reads in place."""
    import cache

    store = place.open()
    _echo_shipment("packed", cache.pack(store, file, place.version(store, version)), file)


@click.command(cls=Command)
@click.argument("file", type=click.Path(dir_okay=False))
@store_options
def unpack(file: str, place: Place) -> None:
    """Put the version in FILE, a packed zip, into the cache and make it current."""
    import cache

    target = place.cache
    _echo_shipment("unpacked", cache.unpack(file, target), target)


@click.command(cls=Command)
@click.argument("url")
@store_options
@version_option
def push(url: str, place: Place, version: str | None) -> None:
    """Copy a version to URL, only what is missing there, and make it current there."""
    import cache
    from cache.address import without_secrets

    store = place.open()
    shipment = cache.push(store, url, place.version(store, version))
    _echo_shipment("pushed", shipment, without_secrets(url))


@click.command(cls=Command)
@click.argument("url")
@store_options
@version_option
def pull(url: str, place: Place, version: str | None) -> None:
    """Copy a version from URL, only what is missing, verify it and make it current here."""
    import cache

    target = place.cache
    version = place.version(cache.open_store(url), version)
    _echo_shipment("pulled", cache.pull(url, target, version), target)


def _echo_shipment(done: str, shipment: "Shipment", target: str) -> None:
    click.echo(
        f"{done} version {shipment.version[:16]} to {target}: {shipment.copied} files, "
        f"{human_bytes(shipment.copied_bytes)}; {shipment.kept} were there"
    )


VERBS: tuple[click.Command, ...] = (versions, use, diff, gc, pack, unpack, push, pull)
