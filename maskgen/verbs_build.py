"""The verb that builds masks."""

import errno
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from maskgen.border import Command, after_result
from maskgen.listing import echo_json
from maskgen.options import DIFFERENCE_FOUND, Place, json_option, store_options
from maskgen.progress import show_progress

if TYPE_CHECKING:
    from cache import Store
    from cache.errors import StoreWriteError
    from maskgen.certificate import Certificate

_READ_ONLY = (None, errno.EROFS, errno.EACCES, errno.EPERM)
"""Error numbers of a write that no room on the disk would help; None where none was tried."""


@click.command(cls=Command)
@click.argument("config", type=click.Path(), required=False)
@store_options
@click.option(
    "--certify/--no-certify",
    default=True,
    help="Compare new entries with their formulas before the version becomes current.",
)
@json_option
@click.pass_context
def build(
    ctx: click.Context, config: str | None, place: Place, certify: bool, as_json: bool
) -> None:
    """Build the masks of a run file into the cache: make what is missing, copy the rest, publish.

    CONFIG is the same as --config CONFIG.
    """
    from cache.errors import StoreWriteError
    from maskgen.build import build as build_masks
    from maskgen.holdings import already_built
    from maskgen.spec import read_specs
    from maskgen.summary import summary_table
    from maskgen.version_certificates import certify_version

    place = place.naming(config)
    specs = read_specs(place.document)
    read_only = False
    try:
        store = place.open(writable=True)
        with show_progress("build") as progress:
            report = build_masks(
                specs, store, progress=progress, make_current=False, notice=_echo_notice
            )
    except StoreWriteError as error:
        if error.errno not in _READ_ONLY:
            raise
        store = _opened(place, error)
        report = already_built(specs, store, error)
        read_only = True
        click.echo(
            f"{store.location} is read-only and holds every mask of {place.run_file}", err=True
        )
        evaluated = ", ".join(spec.name for spec in specs if spec.is_code)
        if evaluated:
            click.echo(f"functions were not evaluated again: {evaluated}", err=True)
    certificates: list[Certificate] = []
    if certify and not read_only:
        with show_progress("certify") as progress:
            certificates = certify_version(
                store, report.version, progress=progress, notice=_echo_notice
            )
    failed = [certificate for certificate in certificates if certificate.findings]

    def show() -> None:
        if as_json:
            entries = [asdict(row) for row in report.rows]
            made = [asdict(certificate) for certificate in certificates]
            echo_json({"version": report.version, "entries": entries, "certificates": made})
        else:
            click.echo(summary_table(report.rows, built=True))
            _echo_certificates(certificates)

    with after_result(show):
        if not failed and not read_only:
            store.use(report.version)
    if not as_json:
        state = "is current in" if report.version == store.current else "is not made current in"
        click.echo(f"version {report.version[:16]} {state} {store.location}")
    if failed:
        ctx.exit(DIFFERENCE_FOUND)


def _opened(place: Place, refusal: "StoreWriteError") -> "Store":
    """Open for reading what cannot be written; where no cache is, the refusal says so."""
    from cache.errors import StoreNotFoundError, StoreWriteError

    try:
        return place.open()
    except StoreNotFoundError as error:
        message = f"{refusal}; no cache is there yet"
        raise StoreWriteError(refusal.file, message, refusal.errno) from error


def _echo_notice(message: str) -> None:
    click.echo(f"Warning: {message}", err=True)


def _echo_certificates(certificates: "Sequence[Certificate]") -> None:
    if not certificates:
        return
    cells = sum(certificate.compared_cells for certificate in certificates)
    total_ms = sum(certificate.compare_ms for certificate in certificates)
    click.echo(
        f"certificate: {len(certificates)} new entries, {cells} cells compared with their formulas "
        f"in {total_ms:.0f} ms (not part of build ms)"
    )
    for certificate in certificates:
        if certificate.rows_without_key:
            first = ", ".join(map(str, certificate.first_rows_without_key))
            click.echo(
                f"  {certificate.name}: {certificate.rows_without_key} rows see no key, "
                f"first (b, h, q): {first}"
            )
        for finding in certificate.findings:
            click.echo(f"  {certificate.name}: WRONG, {finding}")


VERBS: tuple[click.Command, ...] = (build,)
