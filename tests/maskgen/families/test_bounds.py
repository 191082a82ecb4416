"""must lies within the mask of every batch, the mask within may; and how near they are."""

import hashlib
from itertools import combinations_with_replacement, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maskgen.families import families
from maskgen.families.dflash import SLIDING_RULES
from maskgen.families.document import INNER
from tests.maskgen.families.cases import sampled_elements, tree_parents

SIZES = st.integers(1, 24)


def assert_between(name, Q, KV, static, runtime):
    family = families[name]
    must, may = family.bounds(Q, KV, **static)
    mask = family.intervals(Q, KV, **static, **runtime).dense()
    assert not (must.dense() & ~mask).any()
    assert not (mask & ~may.dense()).any()


@st.composite
def packed_ids(draw, T):
    """Documents side by side, some of them padding, in any order of ids."""
    lens = draw(st.lists(st.integers(1, T), min_size=1, max_size=T))
    order = draw(st.permutations(range(len(lens))))
    ids = [
        i if draw(st.booleans()) or i else -1
        for i, n in zip(order, lens, strict=True)
        for _ in range(n)
    ]
    runs = ids[:T] + [-1] * (T - len(ids))
    seen, last = {-1}, None
    for position, value in enumerate(runs):
        if value != last and value in seen:
            runs[position] = -1
        seen.add(value)
        last = value if runs[position] == value else last
    return runs


@st.composite
def offsets(draw, T):
    """Cumulative offsets of at most four documents, padded by repeating the last."""
    marks = sorted(draw(st.sets(st.integers(1, T), min_size=1, max_size=4)))
    return [0, *marks] + [marks[-1]] * draw(st.integers(0, 2))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_lengths_and_prefixes(data):
    Q, KV = data.draw(SIZES), data.draw(SIZES)
    length = data.draw(st.integers(1, KV))
    assert_between("full", Q, KV, {}, {"lengths": [length]})
    assert_between("prefix_lm", Q, KV, {}, {"prefix_lens": [length]})
    assert_between("prefix_lm", Q, KV, {"prefix": length}, {})


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_documents(data):
    Q, KV = data.draw(SIZES), data.draw(SIZES)
    T = max(Q, KV)
    where = data.draw(
        st.sampled_from(
            [
                {"doc_offsets": data.draw(offsets(T))},
                {"doc_ids": data.draw(packed_ids(T))},
            ]
        )
    )
    size = data.draw(st.integers(1, 9))
    inner = data.draw(st.sampled_from(sorted(INNER)))
    names = [param.name for param in INNER[inner].params]
    static = {
        name: value
        for name, value in (
            ("window", size),
            ("sinks", size // 2),
            ("chunk", size),
            ("prefix", min(size, KV)),
        )
        if name in names
    }
    assert_between("document", Q, KV, {"inner": inner, **static}, where)
    if inner == "prefix_lm":
        lens = data.draw(st.lists(st.integers(0, KV), min_size=T, max_size=T))
        runtime = {**where, "doc_prefix_lens": lens}
        assert_between("document", Q, KV, {"inner": inner}, runtime)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_shared_prefix_and_packed_diffusion(data):
    T = data.draw(SIZES)
    bounds = data.draw(offsets(T))
    D = len(bounds) - 1
    prefix = [0]
    for d in range(1, D):
        prefix.append(data.draw(st.sampled_from([d] + [p for p in range(d) if prefix[p] == p])))
    runtime = {"doc_offsets": bounds, "prefix_docs": prefix}
    assert_between("shared_prefix", T, T, {}, runtime)
    static = {"diffusion_block_size": data.draw(st.integers(1, 6)), "variant": "packed"}
    assert_between("block_diffusion", 2 * T, 2 * T, static, {"doc_offsets": bounds})


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_dflash(data):
    N, slots, S = (data.draw(st.integers(1, top)) for top in (4, 5, 12))
    layer = data.draw(st.sampled_from(["full", "sliding"]))
    static = {
        "draft_block_size": slots,
        "layer": layer,
        "in_block": data.draw(st.sampled_from(["default", "causal"])),
        "convention": data.draw(st.sampled_from(sorted(SLIDING_RULES))),
    }
    if layer == "sliding":
        static["window"] = data.draw(st.integers(1, 14))
    position = st.integers(0, S - 1)
    runtime = {
        "anchors": sorted(data.draw(st.lists(position, min_size=N, max_size=N))),
        "n_valid": [data.draw(st.integers(0, N))],
    }
    if data.draw(st.booleans()):
        runtime["doc_ids"] = data.draw(packed_ids(S))
    assert_between("dflash", N * slots, S + N * slots, static, runtime)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_eagle3(data):
    L, t = data.draw(SIZES), data.draw(st.integers(0, 4))
    KV = L * (1 + t)
    assert_between("eagle3_ttt", L, KV, {}, {"lengths": [data.draw(st.integers(1, L))]})
    static = {"variant": "speculators"}
    if data.draw(st.booleans()):
        static["window"] = data.draw(st.integers(1, L))
    assert_between("eagle3_ttt", L, KV, static, {"doc_ids": data.draw(packed_ids(L))})
    assert_between("eagle3_ttt", L, KV, {"variant": "modelopt"}, {})


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 4), st.booleans())
def test_p_eagle_and_tree(seed, L, depths, windowed):
    anchors, levels = sampled_elements(L, depths, 0.6, seed, padded_to=L * depths)
    T = L * depths
    static = {"num_depths": depths} | ({"window": 3} if windowed else {})
    ids = [0 if a < L // 2 else 1 for a in anchors]
    runtime = {"anchors": anchors, "depths": levels, "doc_ids": ids}
    assert_between("p_eagle", T, T, static, runtime)
    assert_between("tree", L, L + 5, {}, {"parents": tree_parents(L, seed)})


def union_and_intersection(name, Q, KV, static, batches):
    masks = [families[name].intervals(Q, KV, **static, **batch).dense() for batch in batches]
    stacked = torch.stack(masks)
    return stacked.all(0), stacked.any(0)


@pytest.mark.parametrize("convention", sorted(SLIDING_RULES))
@pytest.mark.parametrize("window", [None, 2, 4])
def test_dflash_bounds_are_exact(convention, window):
    S, N, slots = 5, 2, 3
    Q, KV = N * slots, S + N * slots
    static = {"draft_block_size": slots, "convention": convention}
    if window is not None:
        static |= {"layer": "sliding", "window": window}
    batches = [
        {"anchors": list(anchors), "n_valid": [n]}
        for anchors, n in product(combinations_with_replacement(range(S), N), range(N + 1))
    ]
    least, most = union_and_intersection("dflash", Q, KV, static, batches)
    must, may = families["dflash"].bounds(Q, KV, **static)
    assert torch.equal(must.dense(), least)
    assert torch.equal(may.dense(), most)


@pytest.mark.parametrize(
    ("inner", "static"),
    [
        ("causal", {}),
        ("full", {}),
        ("sliding_window", {"window": 2}),
        ("sink_window", {"sinks": 1, "window": 2}),
        ("chunked", {"chunk": 2}),
        ("prefix_lm", {"prefix": 2}),
    ],
)
def test_document_bounds_are_exact(inner, static):
    T = 6
    batches = [
        {"doc_ids": [0, *torch.tensor(steps).cumsum(0).tolist()]}
        for steps in product((0, 1), repeat=T - 1)
    ]
    batches.append({"doc_ids": [-1] * T})
    least, most = union_and_intersection("document", T, T, {"inner": inner, **static}, batches)
    must, may = families["document"].bounds(T, T, inner=inner, **static)
    assert torch.equal(must.dense(), least)
    assert torch.equal(may.dense(), most)


def test_a_family_without_runtime_parameters_is_its_own_bounds():
    must, may = families["causal"].bounds(4, 6, offset=2)
    assert must.equals(may)
    assert must.equals(families["causal"].intervals(4, 6, offset=2))


def digest_of(number):
    """A digest whose first digits, which draws are keyed by, differ from number to number."""
    return hashlib.sha256(str(number).encode()).hexdigest()


def test_the_batches_that_a_digest_draws_pad_within_a_row():
    """A certificate tries what they hold: documents, and padding before and behind them."""
    rows = [
        row
        for digest in range(8)
        for row in families["document"].draw(digest_of(digest), 4, 32, 32, inner="causal")[
            "doc_ids"
        ]
    ]
    real = [(row >= 0).nonzero().flatten().tolist() for row in rows]
    assert any(len(row.unique()) > 2 for row in rows)
    assert any(
        -1 in row[where[0] : where[-1]] for row, where in zip(rows, real, strict=True) if where
    )
    assert any(where[0] > 0 for where in real if where)
    assert any(where[-1] < 31 for where in real if where)


def drawn_values(name, Q, KV, static, given):
    """All values that 60 digests draw of one batch parameter, padding left out."""
    found = set()
    for digest in range(60):
        values = families[name].draw(digest_of(digest), 3, Q, KV, **static)[given]
        found |= set(values.flatten().tolist())
    return found


@pytest.mark.parametrize(
    ("name", "Q", "KV", "static", "given", "wanted"),
    [
        ("full", 2, 4, {}, "lengths", {1, 2, 3, 4}),
        ("prefix_lm", 2, 3, {}, "prefix_lens", {0, 1, 2, 3}),
        ("dflash", 4, 7, {"draft_block_size": 2}, "n_valid", {0, 1, 2}),
        ("dflash", 4, 7, {"draft_block_size": 2}, "anchors", {0, 1, 2}),
        ("dflash", 4, 7, {"draft_block_size": 2}, "doc_ids", {-1, 0, 1, 2}),
        ("eagle3_ttt", 3, 6, {}, "lengths", {1, 2, 3}),
        ("document", 4, 4, {"inner": "causal"}, "doc_ids", {-1, 0, 1, 2, 3}),
        ("document", 2, 3, {"inner": "prefix_lm"}, "doc_prefix_lens", {0, 1, 2, 3}),
        ("shared_prefix", 4, 4, {}, "doc_offsets", {0, 1, 2, 3, 4}),
        ("shared_prefix", 4, 4, {}, "prefix_docs", {0, 1, 2, 3, 4, 5}),
        (
            "block_diffusion",
            6,
            6,
            {"diffusion_block_size": 2, "variant": "packed"},
            "doc_offsets",
            {0, 1, 2, 3},
        ),
        ("tree", 3, 5, {}, "parents", {-1, 0, 1}),
    ],
)
def test_what_a_digest_draws_reaches_every_value(name, Q, KV, static, given, wanted):
    """Else a certificate would never try the shortest or the longest sample."""
    assert drawn_values(name, Q, KV, static, given) == wanted
