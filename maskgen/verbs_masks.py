"""Verbs about masks: build, list, show, report, verify, plan."""

import errno
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from maskgen.border import Command, after_result
from maskgen.listing import echo_json, human_bytes, optional, text_table
from maskgen.options import DIFFERENCE_FOUND, Place, json_option, store_options, version_option
from maskgen.progress import show_progress

if TYPE_CHECKING:
    from cache import Finding, Store
    from cache.errors import StoreWriteError
    from maskgen.certificate import Certificate
    from maskgen.summary import EntrySummary
    from maskgen.verify import Difference

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
            click.echo(_rows_table(report.rows, built=True))
            _echo_certificates(certificates)

    with after_result(show):
        if not failed and not read_only:
            store.use(report.version)
    if not as_json:
        state = "is current in" if report.version == store.current else "is not made current in"
        click.echo(f"version {report.version[:16]} {state} {store.location}")
    if failed:
        ctx.exit(DIFFERENCE_FOUND)


@click.command("list", cls=Command)
@store_options
@version_option
@json_option
def list_entries(place: Place, version: str | None, as_json: bool) -> None:
    """List the entries of a version.

    An entry that another maskgen wrote and this one cannot read is named with the reason.
    """
    from maskgen.errors import MaskSpecError
    from maskgen.summary import entry_summary

    store = place.open()
    chosen = store.version(place.version(store, version))
    rows, entries = [], []
    for info in chosen.entries.values():
        try:
            row = entry_summary(info)
        except MaskSpecError as error:
            entries.append({"name": info.name, "sha256": info.sha256, "unreadable": str(error)})
            click.echo(f"note: {error}", err=True)
            continue
        rows.append(row)
        entries.append({**asdict(row), "sha256": info.sha256})
    if as_json:
        echo_json({"version": chosen.id, "entries": entries})
        return
    click.echo(_rows_table(rows, built=False))
    click.echo(f"version {chosen.id[:16]}")


@click.command(cls=Command)
@click.argument("name")
@store_options
@version_option
@click.option("--png", type=click.Path(dir_okay=False), help="Write a picture to this file.")
@click.option("--text/--no-text", default=True, help="Draw the blocks in the terminal.")
@click.option("--layout", default=0, help="Which layout or batch row to draw.")
@click.option("--head", default=0, help="Which head to draw.")
@json_option
def show(
    name: str,
    place: Place,
    version: str | None,
    png: str | None,
    text: bool,
    layout: int,
    head: int,
    as_json: bool,
) -> None:
    """Show the entry NAME: its spec, its counts, and a picture of its blocks."""
    from maskgen.entry import parse_entry
    from maskgen.picture import entry_kinds, save_picture, text_picture

    store = place.open()
    entry = parse_entry(store.load(name, place.version(store, version)))
    kinds = entry_kinds(entry, batch=layout, head=head)
    spec = entry.spec
    if as_json:
        known = {"name": name, "version": entry.version, "sha256": entry.sha256}
        echo_json({**known, "spec": spec.to_json(), "attrs": dict(entry.attrs)})
    else:
        click.echo(f"{name}: {spec.kind} {spec.family}, revision {spec.revision}")
        click.echo(f"Q_LEN {spec.Q_LEN}, KV_LEN {spec.KV_LEN}, BLOCK_SIZE {spec.BLOCK_SIZE}")
        for title, facts in (("parameters", spec.params), ("counts", entry.attrs)):
            click.echo(f"{title}: " + ", ".join(f"{key} {value}" for key, value in facts.items()))
        if text:
            click.echo(text_picture(kinds))
    if png is not None:
        save_picture(png, entry, kinds)
        if not as_json:
            click.echo(f"wrote {png}")


@click.command(cls=Command)
@click.argument("file", type=click.Path(dir_okay=False))
@store_options
@version_option
@click.option("--heads", default=32, type=click.IntRange(min=1), help="Query heads of a layer.")
@click.option("--head-dim", default=128, type=click.IntRange(min=1), help="Size of a head.")
def report(
    file: str,
    place: Place,
    version: str | None,
    heads: int,
    head_dim: int,
) -> None:
    """Write an HTML page about a version to FILE: pictures, blocks, waste, FLOPs."""
    from maskgen.report import html_report, save_report

    store = place.open()
    version = place.version(store, version)
    with show_progress("report") as progress:
        page = html_report(store, version, heads=heads, head_dim=head_dim, progress=progress)
    save_report(file, page)
    click.echo(f"wrote {file}")


@click.command(cls=Command)
@store_options
@version_option
@click.option("--deep", is_flag=True, help="Also build every entry again and compare.")
@click.option(
    "--run-functions",
    is_flag=True,
    help="With --deep: import and run the module:function entries. Only for a cache you trust.",
)
@json_option
@click.pass_context
def verify(
    ctx: click.Context,
    place: Place,
    version: str | None,
    deep: bool,
    run_functions: bool,
    as_json: bool,
) -> None:
    """Check every digest of a version; exit 3 with what differs.

    What stands in the cache and is no part of it is noted: it is never read. With --deep, an entry
    that cannot be built again here is no difference: it is named and counted as not compared.
    """
    store = place.open()
    chosen = store.version(place.version(store, version))
    found: list[Finding | Difference] = [*store.verify(chosen.id)]
    not_compared: list[Difference] = []
    if deep:
        from maskgen.verify import verify_deep

        with show_progress("verify") as progress:
            differences = verify_deep(
                store, chosen.id, run_functions=run_functions, progress=progress
            )
        found += [difference for difference in differences if difference.compared]
        not_compared = [difference for difference in differences if not difference.compared]
    strangers = store.strangers()
    if as_json:
        digests = {name: info.sha256 for name, info in chosen.entries.items()}
        known = {"version": chosen.id, "entries": digests}
        findings = [asdict(finding) for finding in found]
        skipped = [asdict(difference) for difference in not_compared]
        lists = {"findings": findings, "not_compared": skipped, "strangers": strangers}
        echo_json({**known, **lists})
    else:
        for path in strangers:
            click.echo(f"Note: {path} is no part of the cache and is not read", err=True)
        for finding in [*found, *not_compared]:
            click.echo(finding.message)
        plural = "" if len(found) == 1 else "s"
        outcome = f"{len(found)} difference{plural}" if found else "no difference"
        if not_compared:
            outcome += f", {len(not_compared)} not compared"
        how = "digests, formulas and rebuilt entries" if deep else "digests"
        click.echo(f"version {chosen.id[:16]}, {len(chosen.entries)} entries, {how}: {outcome}")
    if found:
        ctx.exit(DIFFERENCE_FOUND)


@click.command(cls=Command)
@click.argument("data", type=click.Path())
@click.option("--max-buckets", default=4, type=click.IntRange(min=1), help="Most buckets to use.")
@click.option(
    "--multiple",
    default=128,
    type=click.IntRange(min=1),
    help="Bucket lengths are multiples of it.",
)
@json_option
def plan(data: str, max_buckets: int, multiple: int, as_json: bool) -> None:
    """Choose the bucket lengths that pad the samples of DATA least.

    DATA is a folder of runtime.prepare, or a text file with a length on each line, or a length and
    a count.
    """
    from maskgen.buckets import plan_buckets
    from maskgen.lengths import read_lengths

    lengths = read_lengths(data)
    chosen = plan_buckets(lengths, max_buckets, multiple)
    waste = chosen.waste(lengths)
    tokens, padded = sum(b.tokens for b in waste), sum(b.padded_tokens for b in waste)
    share = 1 - tokens / padded
    if as_json:
        buckets = [
            {**asdict(bucket), "padded_tokens": bucket.padded_tokens, "padding": bucket.share}
            for bucket in waste
        ]
        echo_json({"context": list(chosen.contexts), "buckets": buckets, "padding": share})
        return
    rows = [
        [str(b.context), str(b.samples), str(b.tokens), str(b.padded_tokens), f"{b.share:.1%}"]
        for b in waste
    ]
    rows.append(["all", str(len(lengths)), str(tokens), str(padded), f"{share:.1%}"])
    click.echo(text_table(["context", "samples", "tokens", "with padding", "padding"], rows))
    click.echo(f"context = {list(chosen.contexts)}")


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


def _rows_table(rows: "Sequence[EntrySummary]", *, built: bool) -> str:
    titles = ["name", "kind", "Q_LEN", "KV_LEN", "BLOCK_SIZE"]
    titles += ["full", "partial", "empty", "sparsity", "bytes"]
    cells = [
        [
            row.name,
            row.kind,
            str(row.Q_LEN),
            str(row.KV_LEN),
            "x".join(map(str, row.BLOCK_SIZE)),
            optional(row.full),
            optional(row.partial),
            optional(row.empty),
            optional(row.sparsity, "{:.1f}%"),
            human_bytes(row.bytes),
        ]
        for row in rows
    ]
    if built:
        titles.append("build ms")
        for row, line in zip(rows, cells, strict=True):
            line.append("copied" if row.reused else f"{row.build_ms:.1f}")
    table = text_table(titles, cells)
    counted = [row for row in rows if row.sparsity is not None]
    if counted and not any(row.full or row.empty for row in counted):
        table += "\nsparsity 0.0%: at lengths of so few blocks each one is needed in part; longer "
        table += "masks have blocks to skip"
    return table


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


VERBS: tuple[click.Command, ...] = (build, list_entries, show, report, verify, plan)
