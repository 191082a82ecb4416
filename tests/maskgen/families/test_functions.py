"""The functions of the families: every argument arrives, by name and where it may by place."""

import pytest
import torch

import maskgen
from maskgen.errors import MaskSpecError
from maskgen.families import families
from tests.maskgen.families.cases import CASES

ONE_EACH = {case.family: case for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_function_makes_the_mask_of_its_family(case):
    found = getattr(maskgen, case.family)(case.Q_LEN, case.KV_LEN, **case.params)
    assert found.equals(families[case.family].intervals(case.Q_LEN, case.KV_LEN, **case.params))


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (lambda: maskgen.causal(4, 7, 3), ("causal", {"offset": 3})),
        (lambda: maskgen.sliding_window(4, 7, 3), ("sliding_window", {"window": 3})),
        (lambda: maskgen.sink_window(4, 7, 1, 2), ("sink_window", {"sinks": 1, "window": 2})),
        (lambda: maskgen.chunked(4, 7, 3), ("chunked", {"chunk": 3})),
        (lambda: maskgen.prefix_lm(4, 7, 3), ("prefix_lm", {"prefix": 3})),
        (
            lambda: maskgen.global_prefix_window(4, 7, 1, 2),
            ("global_prefix_window", {"global_tokens": 1, "radius": 2}),
        ),
        (
            lambda: maskgen.block_diffusion(4, 7, 3, variant="block_causal"),
            ("block_diffusion", {"diffusion_block_size": 3, "variant": "block_causal"}),
        ),
    ],
)
def test_arguments_by_their_place(found, wanted):
    name, params = wanted
    assert found().equals(families[name].intervals(4, 7, **params))


def test_the_sizes_of_a_canvas_come_before_those_of_its_kernel():
    wanted = families["natten"].intervals(15, 15, canvas=[3, 5], kernel=[1, 3])
    assert maskgen.natten(15, 15, [3, 5], [1, 3]).equals(wanted)


@pytest.mark.parametrize("case", ONE_EACH.values(), ids=str)
@pytest.mark.parametrize("door", ["function", "intervals", "spans", "mask_mod"])
def test_the_device_that_is_asked_for_is_taken(door, case):
    family = families[case.family]
    call = getattr(maskgen, case.family) if door == "function" else getattr(family, door)
    with pytest.raises(RuntimeError, match="nowhere"):
        call(case.Q_LEN, case.KV_LEN, **case.params, device="nowhere")


@pytest.mark.parametrize("case", ONE_EACH.values(), ids=str)
def test_spans_lie_on_the_device_that_is_asked_for(case):
    family = families[case.family]
    starts, ends = family.spans(case.Q_LEN, case.KV_LEN, **case.params, device="meta")
    assert starts.device.type == ends.device.type == "meta"
    spans = family.intervals(case.Q_LEN, case.KV_LEN, **case.params)
    assert spans.device.type == "cpu"


# Static values of other inner families, which an inner family refuses by name.
INNER = {
    "causal": {},
    "full": {},
    "sliding_window": {"window": 2, "inclusive": True},
    "sink_window": {"sinks": 1, "window": 2},
    "chunked": {"chunk": 2},
    "prefix_lm": {"prefix": 2},
}


@pytest.mark.parametrize("inner", INNER)
def test_one_document_is_the_inner_family(inner):
    wanted = families[inner].intervals(6, 6, **INNER[inner])
    given = {"inner": inner, **INNER[inner]}
    assert maskgen.document(6, 6, doc_offsets=[0, 6], **given).equals(wanted)
    assert maskgen.document(6, 6, doc_ids=[5] * 6, **given).equals(wanted)
    # Two documents are two such masks on the diagonal.
    whole = torch.zeros(6, 6, dtype=torch.bool)
    for start, end in ((0, 4), (4, 6)):
        n = end - start
        whole[start:end, start:end] = wanted.dense()[0, 0, :n, :n]
    found = maskgen.document(6, 6, doc_offsets=[0, 4, 6], **given)
    assert torch.equal(found.dense()[0, 0], whole)
    for name in ("window", "inclusive", "sinks", "chunk", "prefix"):
        if name in given:
            continue
        other = True if name == "inclusive" else 1
        with pytest.raises(MaskSpecError) as caught:
            maskgen.document(6, 6, doc_ids=[0] * 6, **given, **{name: other})
        rule = f"is no parameter of the inner family {inner!r}"
        assert str(caught.value) == f"{name} = {other}: {rule}"
