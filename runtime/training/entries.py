"""The mask entries of a run: asked for in its run file, found in the cache."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from cache import Store
from cache.advice import how_to_build
from maskgen.earlier_defaults import as_earlier, earlier_defaults
from maskgen.entry import MaskEntry, load_entry
from maskgen.errors import MaskSpecError
from maskgen.holdings import entries_by_spec, find_version
from maskgen.mask_spec import MaskSpec
from maskgen.spec import read_specs
from runtime.config import Config
from runtime.errors import BucketMissingError, ConfigError


def named_specs(
    config: Config, name: str, length_of: Callable[[MaskSpec], int]
) -> dict[int, MaskSpec]:
    """The entries of a name as ``[masks]`` asks for them, by the length of their bucket, ascending.

    Args:
        config: The run file.
        name: ``dflash`` for ``dflash/ctx128`` and ``dflash/ctx256``.
        length_of: Tokens of a row of the bucket that an entry is for.

    Raises:
        ConfigError: No entry has that name, or two have one length.
        MaskSpecError: ``[masks]`` is wrong.
    """
    listed = read_specs({"masks": config.masks})
    ours = [spec for spec in listed if spec.name.rpartition("/")[0] == name]
    if not ours:
        names = ", ".join(sorted({spec.name.rpartition("/")[0] for spec in listed})) or "none"
        raise ConfigError("train.masks", name, f"must name an entry of [masks]; it has {names}")
    by_length = {length_of(spec): spec for spec in ours}
    if len(by_length) < len(ours):
        raise ConfigError("train.masks", name, "must have one entry for each context")
    return dict(sorted(by_length.items()))


def load_buckets(
    store: Store,
    specs: Mapping[int, MaskSpec],
    beside: Mapping[str, Mapping[int, MaskSpec]],
    config: str,
) -> tuple[dict[int, MaskEntry], dict[str, dict[int, MaskEntry]]]:
    """Load the entries of a run's buckets, all from one version of the cache.

    The current version is looked at first, then the others, the newest first: another run file that
    shares the cache may have built since.

    Args:
        store: The cache.
        specs: Bucket length -> what the run file asks for.
        beside: Further masks of these buckets by name.
        config: Path of the run file, named in errors.

    Raises:
        BucketMissingError: No version has these entries; says what builds them.
    """
    more = {
        name: {length: by_length[length] for length in specs} for name, by_length in beside.items()
    }
    asked = [spec for by_length in (specs, *more.values()) for spec in by_length.values()]
    found = find_version(store, [spec.digest for spec in asked])
    if found is None:
        raise BucketMissingError(_what_is_missing(store, asked, config))
    version, infos = found

    def loaded(by_length: Mapping[int, MaskSpec]) -> dict[int, MaskEntry]:
        return {
            length: load_entry(store, infos[spec.digest].name, version.id)
            for length, spec in by_length.items()
        }

    try:
        return loaded(specs), {name: loaded(by_length) for name, by_length in more.items()}
    except MaskSpecError as error:
        raise BucketMissingError(
            f"version {version.id[:12]} of {store.location} cannot be read ({error}); "
            f"{how_to_build(store.location)}"
        ) from error


def lines_of_before(specs: Iterable[MaskSpec]) -> str:
    """What to write into a run file for masks of an earlier release's defaults.

    Args:
        specs: As the run file asks for them; those without other defaults before are passed over.

    Returns:
        An advice, such as ``to go on with ..., write ...``; empty where there is nothing to write.
    """
    # A TOML list of integers is spelled as Python spells it.
    lines = [
        f"{spec.name}: " + ", ".join(f"{key} = {value}" for key, value in earlier.items())
        for spec in specs
        if (earlier := earlier_defaults(spec))
    ]
    if not lines:
        return ""
    return (
        "to go on with masks that were built before these defaults changed, write a "
        f"[[masks.entry]] for each context, with these lines ({'; '.join(lines)})"
    )


def _what_is_missing(store: Store, specs: Sequence[MaskSpec], config: str) -> str:
    """The first mask that the current version lacks, and how it differs from one of its name."""
    current = store.version()
    built = entries_by_spec(current)
    spec = next(spec for spec in specs if spec.digest not in built)
    info = current.entries.get(spec.name)
    build = how_to_build(store.location)
    if info is None:
        return (
            f"the run needs mask {spec.name!r}, and no version in {store.location} holds it with "
            f"the run's others; {build}"
        )
    what = f"mask {spec.name!r} in version {current.id[:12]} of {store.location}"
    try:
        differs = _what_differs(spec, MaskSpec.from_json(spec.name, info.spec))
    except MaskSpecError as error:
        return f"{what} cannot be read ({error}); {build}"
    before = lines_of_before(spec for spec in specs if as_earlier(spec).digest in built)
    if before:
        build = f"{before}; for new ones, {build}"
    return f"{what} is another one than {config} asks for: {differs}; {build}"


def _what_differs(asked: MaskSpec, found: MaskSpec) -> str:
    """Lines such as ``draws: asked 8, found 4``."""
    ours, theirs = ({**spec.to_json(), **spec.params} for spec in (asked, found))
    return "; ".join(
        f"{key}: asked {ours.get(key)}, found {theirs.get(key)}"
        for key in {**ours, **theirs}
        if key != "params" and ours.get(key) != theirs.get(key)
    )
