"""What a family accepts has the mask of its formula: careless random batches, cell by cell.

The batches are drawn without regard to the rules, then most are refused; that is the point. An
input that a check lets through must give the same mask by spans, by mask_mod and by the formula.
"""

import random

import pytest
import torch

from maskgen import RowIntervals
from maskgen.errors import MaskSpecError
from maskgen.families import families
from maskgen.families.dflash import SLIDING_RULES
from tests.maskgen.families.formulas import FORMULAS
from tests.maskgen.families.test_formulas import batch_size


def some(draw, n, low, high):
    return [draw.randint(low, high) for _ in range(n)]


def runs(draw, T):
    """Ids side by side as a rule, and not always."""
    ids, last = [], 0
    for _ in range(T):
        last = draw.choice([last, last, last, draw.randint(-1, 3)])
        ids.append(last)
    return ids


def rising(draw, n, high):
    values = sorted(some(draw, n, 0, high))
    return [0, *values[1:]] if draw.random() < 0.8 else values


def rows_of(draw, make):
    """One row for all, a batch of one, or a batch of two."""
    return draw.choice([make, lambda: [make()], lambda: [make(), make()]])()


def full(draw):
    KV = draw.randint(1, 6)
    return draw.randint(1, 6), KV, {"lengths": some(draw, draw.randint(1, 2), 0, KV + 1)}


def prefix_lm(draw):
    Q, KV = draw.randint(1, 6), draw.randint(1, 6)
    lens = some(draw, draw.randint(1, 2), -1, KV + 1)
    return Q, KV, {"prefix_lens": lens, "offset": draw.randint(-Q, KV)}


def document(draw):
    Q, KV = draw.randint(1, 8), draw.randint(1, 8)
    T = max(Q, KV)
    inner = draw.choice(["causal", "full", "sliding_window", "sink_window", "chunked", "prefix_lm"])
    own = {
        "sliding_window": {"window": draw.randint(1, 3), "inclusive": draw.random() < 0.5},
        "sink_window": {"sinks": draw.randint(0, 2), "window": draw.randint(1, 3)},
        "chunked": {"chunk": draw.randint(1, 3)},
        "prefix_lm": {"prefix": draw.randint(0, KV)},
    }.get(inner, {})
    where = {"doc_ids": rows_of(draw, lambda: runs(draw, T))}
    if draw.random() < 0.4:
        bounds = draw.randint(2, 4)
        where = {"doc_offsets": rows_of(draw, lambda: rising(draw, bounds, T))}
    if inner == "prefix_lm" and draw.random() < 0.7:
        D = draw.randint(1, 5)
        own = {"doc_prefix_lens": rows_of(draw, lambda: some(draw, D, 0, 9))}
    return Q, KV, {"inner": inner, **where, **own}


def shared_prefix(draw):
    Q, KV, D = draw.randint(1, 7), draw.randint(1, 7), draw.randint(1, 3)
    offsets = rows_of(draw, lambda: rising(draw, D + 1, max(Q, KV)))
    prefix = rows_of(draw, lambda: [draw.randint(0, d) for d in range(D)])
    return Q, KV, {"doc_offsets": offsets, "prefix_docs": prefix}


def block_diffusion(draw):
    T, bounds = 2 * draw.randint(1, 4), draw.randint(2, 4)
    offsets = rows_of(draw, lambda: rising(draw, bounds, T // 2))
    size = draw.randint(1, 3)
    return T, T, {"variant": "packed", "diffusion_block_size": size, "doc_offsets": offsets}


def dflash(draw):
    N, slots, S = draw.randint(1, 3), draw.randint(1, 4), draw.randint(1, 7)

    def anchors():
        values = some(draw, N, 0, S - 1)
        values = sorted(values) if draw.random() < 0.9 else values
        # An unused one may be anything.
        return [*values[:-1], draw.choice([values[-1], -3, S + 4])]

    params = {
        "draft_block_size": slots,
        "anchors": rows_of(draw, anchors),
        "in_block": draw.choice(["default", "bidirectional", "causal"]),
    }
    if draw.random() < 0.7:
        params["n_valid"] = some(draw, draw.randint(1, 2), 0, N)
    if draw.random() < 0.5:
        params["doc_ids"] = rows_of(draw, lambda: runs(draw, S))
    if draw.random() < 0.7:
        convention = draw.choice(sorted(SLIDING_RULES))
        params |= {"layer": "sliding", "window": draw.randint(1, 6), "convention": convention}
    return N * slots, S + N * slots, params


def eagle3_ttt(draw):
    L, steps = draw.randint(1, 5), draw.randint(1, 4)
    params = {"lengths": some(draw, draw.randint(1, 2), 0, L + 1)}
    if draw.random() < 0.6:
        params = {"variant": "speculators", "doc_ids": rows_of(draw, lambda: runs(draw, L))}
        params |= {"window": draw.randint(1, 4)} if draw.random() < 0.5 else {}
    return L, L * steps, params


def p_eagle(draw):
    depths = draw.randint(1, 4)
    roots = sorted(draw.sample(range(6), draw.randint(1, 4)))
    elements = [(0, root) for root in roots]
    for depth in range(1, depths):
        # Any of them, those left out at the depth before too.
        elements += [(depth, root) for root in roots if draw.random() < 0.5]
    if draw.random() < 0.1:
        at = draw.randrange(len(elements))
        elements.insert(at, draw.choice([elements[at], (0, 9), (1, 9)]))
    padding = draw.randint(0, 3)
    elements += [(-1, draw.choice([0, 3, -7]))] * padding
    params = {
        "num_depths": depths,
        "anchors": [anchor for _, anchor in elements],
        "depths": [depth for depth, _ in elements],
    }
    if draw.random() < 0.8:
        of_anchor = dict(zip(range(-7, 10), runs(draw, 17), strict=True))

        def docs():
            ids = [of_anchor[anchor] for _, anchor in elements]
            if draw.random() < 0.4:
                ids[draw.randrange(len(ids))] = draw.randint(-1, 3)
            return ids

        params["doc_ids"] = rows_of(draw, docs)
    if draw.random() < 0.5:
        params["window"] = draw.randint(1, 6)
    return len(elements), len(elements), params


def tree(draw):
    N = draw.randint(1, 7)
    make = lambda: [draw.randint(max(-1, node - 2), node - 1) for node in range(N)]  # noqa: E731
    depth = {"max_depth": draw.randint(1, N)} if draw.random() < 0.3 else {}
    return N, N + draw.randint(0, 3), {"parents": rows_of(draw, make), **depth}


CARELESS = {
    made.__name__: made
    for made in (
        full,
        prefix_lm,
        document,
        shared_prefix,
        block_diffusion,
        dflash,
        eagle3_ttt,
        p_eagle,
        tree,
    )
}


@pytest.mark.parametrize("name", CARELESS)
def test_an_accepted_batch_has_the_mask_of_the_formula(name):
    family, formula = families[name], FORMULAS[name]
    draw, accepted, refused = random.Random(f"careless {name}"), 0, 0
    for _ in range(400):
        Q, KV, params = CARELESS[name](draw)
        try:
            checked = family.check(Q, KV, params)
        except MaskSpecError:
            refused += 1
            continue
        accepted += 1
        B = batch_size(name, params)
        wanted = torch.tensor(
            [
                [[bool(formula(q, kv, Q, KV, b, **params)) for kv in range(KV)] for q in range(Q)]
                for b in range(B)
            ]
        )
        spans = RowIntervals(*family.spans(Q, KV, **checked), KV).dense()[:, 0]
        assert torch.equal(spans.expand(B, -1, -1), wanted), (Q, KV, params)
        b, q, kv = torch.meshgrid(torch.arange(B), torch.arange(Q), torch.arange(KV), indexing="ij")
        found = family.mask_mod(Q, KV, **checked)(b, torch.zeros_like(b), q, kv)
        assert torch.equal(found, wanted), (Q, KV, params)
    assert accepted > 80
    assert refused > 10


def test_every_family_of_a_batch_is_tried():
    assert set(CARELESS) == {name for name, family in families.items() if family.runtime}
