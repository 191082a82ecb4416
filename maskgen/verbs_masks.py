"""Verbs about masks that are built: list, show, report, verify; and plan."""

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from maskgen.border import Command, after_result
from maskgen.listing import echo_json, text_table
from maskgen.options import DIFFERENCE_FOUND, Place, json_option, store_options, version_option
from maskgen.progress import show_progress

if TYPE_CHECKING:
    from cache import Finding
    from maskgen.verify import Difference


@click.command("list", cls=Command)
@store_options
@version_option
@json_option
def list_entries(place: Place, version: str | None, as_json: bool) -> None:
    """List the entries of a version.

    An entry that another maskgen wrote and this one cannot read is named with the reason.
    """
    from maskgen.errors import MaskSpecError
    from maskgen.summary import entry_summary, summary_table

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
    click.echo(summary_table(rows, built=False))
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
@click.option(
    "--write",
    "run_file",
    metavar="RUN_FILE",
    help="Write them into the mask entries of a run file, whose comments stay.",
)
@click.option(
    "--entry",
    "entries",
    multiple=True,
    metavar="NAME",
    help="With --write: which entry; may be given several times.",
    show_default="all that have a context, where they have the same",
)
@json_option
def plan(
    data: str,
    max_buckets: int,
    multiple: int,
    run_file: str | None,
    entries: tuple[str, ...],
    as_json: bool,
) -> None:
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
    if entries and run_file is None:
        raise click.UsageError("--entry says which entries --write changes: name a run file")
    rewriting = None
    if run_file is not None:
        from maskgen.context_writing import with_contexts

        rewriting = with_contexts(run_file, chosen.contexts, entries)
    rows = [
        [str(b.context), str(b.samples), str(b.tokens), str(b.padded_tokens), f"{b.share:.1%}"]
        for b in waste
    ]
    rows.append(["all", str(len(lengths)), str(tokens), str(padded), f"{share:.1%}"])

    def show() -> None:
        if as_json:
            buckets = [
                {**asdict(bucket), "padded_tokens": bucket.padded_tokens, "padding": bucket.share}
                for bucket in waste
            ]
            echo_json({"context": list(chosen.contexts), "buckets": buckets, "padding": share})
            return
        click.echo(text_table(["context", "samples", "tokens", "with padding", "padding"], rows))
        click.echo(f"context = {list(chosen.contexts)}")

    with after_result(show):
        if rewriting is not None:
            rewriting.write()
            for name, had in rewriting.entries.items():
                click.echo(f"{rewriting.path}: {name}, context was {had}", err=True)
            command = shlex.join(["python", "-m", "maskgen", "build", str(rewriting.path)])
            click.echo(f"next: {command}", err=True)


VERBS: tuple[click.Command, ...] = (list_entries, show, report, verify, plan)
