"""The share of the damage drill that every test run does; ``make drill`` does all of it."""

import collections

import pytest

import cache
from tests.cache import acts, crash, drill, fuzz
from tests.cache.damage import Drill, outcome_of_source, seeded
from tests.cache.samples import DictSource, files_of, published, truth_of


def test_no_damage_is_silent(tmp_path):
    done = drill.damage_rows(tmp_path, flips_a_file=3, seed=1)
    assert done.bad == []
    counts = {row: sum(outcomes.values()) for row, outcomes in done.rows.items()}
    assert counts["one bit flipped"] == 51
    assert counts["two chunks swapped"] == 45
    refused = done.rows["one bit flipped"]["refused"]
    assert refused == counts["one bit flipped"]
    assert set(done.rows) == {
        "one bit flipped",
        "file cut or padded",
        "file or folder deleted",
        "two chunks swapped",
        "two documents swapped",
        "stale or foreign metadata",
        "chunk of another place or version",
        "link, pipe or folder in a file's place",
        "zip: one bit flipped",
        "zip: cut or padded",
    }


@pytest.mark.parametrize("seed", [11, 12])
def test_mutated_caches_load_right_or_are_refused(tmp_path, seed):
    fuzzed = fuzz.run(tmp_path / "fuzz", 600, seed)
    assert fuzzed.bad == []
    assert len(fuzzed.rows) == 6
    assert all(outcomes["refused"] > 0 for outcomes in fuzzed.rows.values())


def test_the_drill_notices_wrong_values_and_untyped_errors(tmp_path):
    """A drill that cannot fail would prove nothing."""
    store = published(tmp_path / "m.zarr")
    truth = truth_of(store)
    source = DictSource(files_of(store))
    assert outcome_of_source(source, truth) == "right"
    truth[store.current]["causal/q8"] = truth[store.current]["causal/q4"]
    assert outcome_of_source(source, truth) == "SILENT causal/q8"
    del truth[store.current]["causal/q4"]
    assert outcome_of_source(source, truth) == "SILENT other entries"
    source.read = lambda _key, _limit: 1 // 0
    assert outcome_of_source(source, truth).startswith("CRASH ZeroDivisionError")
    done = Drill(tmp_path / "m.zarr", truth)
    done.flip_bits(1, seeded(0))
    assert len(done.bad) == 5
    done.bad.clear()
    done.count("row", "SILENT causal/q8", "what")
    assert done.bad == ["row: what: SILENT causal/q8"]


@pytest.mark.parametrize("case", crash.QUICK, ids=lambda case: f"{case[0]}: {','.join(case[1])}")
def test_acts_on_a_store_that_are_cut_off_or_meet_leave_it_good(case):
    outcomes, bad = crash.run(*case)
    assert bad == []
    assert set(outcomes) <= {"right", "refused"}
    assert outcomes["right"] > 0


def test_the_drill_notices_what_is_lost_or_left(tmp_path):
    made, folder = tmp_path / "made", tmp_path / "full1"
    made.mkdir()
    acts.template(made)
    acts.copy(made, folder)
    store = cache.open_store(acts.near(folder))
    current, old = store.current, (folder / "old").read_text()
    assert acts.check(folder, [current]) == ""
    assert acts.check(folder, ["0" * 64]) == f"SILENT gone: {{'{'0' * 64}'}}"
    damaged = (folder / "damaged").read_text()
    assert acts.check(folder, [damaged]).startswith("SILENT damaged")
    assert acts.check_swept(folder) == ""
    (folder / "near" / "stray").mkdir()
    assert acts.check_swept(folder).startswith("SILENT leftover {'stray'}")
    (acts.near(folder) / old).rename(folder / "aside")
    assert acts.check(folder, []) == ""
    (acts.near(folder) / current).rename(folder / "aside2")
    assert acts.check(folder, []).startswith("SILENT damaged")
    (acts.near(folder) / "zarr.json").unlink()
    assert acts.check(folder, []) == "SILENT lost"


def test_the_table_has_a_line_a_row():
    rows = {"a kind": (collections.Counter(refused=3, right=1), 0.25)}
    assert drill.table(rows).splitlines()[1].split() == [
        "a",
        "kind",
        "4",
        "3",
        "1",
        "0",
        "0",
        "0.2",
    ]
