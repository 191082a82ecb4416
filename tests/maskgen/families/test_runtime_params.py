"""What a batch says is checked as it was given, at every door, before it is cast to int32."""

from dataclasses import replace
from importlib import import_module
from itertools import product

import numpy as np
import pytest
import torch

import maskgen
from maskgen import RowIntervals
from maskgen.errors import MaskSpecError
from maskgen.families import families, spans_into
from maskgen.spec import read_specs
from tests.maskgen.families.cases import CASES
from tests.maskgen.families.formulas import FORMULAS

GIVEN = {
    (case.family, name): case
    for case in CASES
    for name in families[case.family].runtime_params
    if case.params.get(name) is not None
}


def through(door, case, params):
    """Hand the parameters in at one of the public doors."""
    family, Q, KV = families[case.family], case.Q_LEN, case.KV_LEN
    if door == "function":
        getattr(maskgen, case.family)(Q, KV, **params)
    elif door == "chosen_mask_mod":
        # More spans than any threshold, so that the formula is chosen.
        spans = torch.zeros(1, 1, 32, Q, dtype=torch.int32)
        family.chosen_mask_mod(RowIntervals(spans, spans, KV), **params)
    elif door == "spans_into":
        buffers = torch.zeros(2, 3, 1, 64, Q, dtype=torch.int32)
        spans_into(buffers[0], buffers[1], family, KV_LEN=KV, **params)
    elif door == "run file":
        entry = {"name": "x", "family": case.family, "Q_LEN": Q, "KV_LEN": KV, **params}
        read_specs({"masks": {"entry": [entry]}})
    else:
        getattr(family, door)(Q, KV, **params)


DOORS = (
    "function",
    "intervals",
    "spans",
    "mask_mod",
    "chosen_mask_mod",
    "spans_into",
    "run file",
)


def changed(value, put):
    """The nested list with its last item replaced."""
    if isinstance(value, list):
        return [*value[:-1], changed(value[-1], put)]
    return put(value)


OF_LISTS = {
    "2**32 more": lambda v: changed(v, lambda x: x + 2**32),
    "from 2**31": lambda v: changed(v, lambda x: 2**31 + 5),
    "wraps to -1": lambda v: changed(v, lambda x: 2**32 - 1),
    "past uint64": lambda v: changed(v, lambda x: 2**70),
    "far below": lambda v: changed(v, lambda x: -(2**32) + x),
    "a float": lambda v: changed(v, float),
    "a bool": lambda v: changed(v, bool),
    "a string": lambda v: changed(v, str),
    "none": lambda v: changed(v, lambda x: None),
    "ragged": lambda v: [v, [v, v]],
    "a rank more": lambda v: [[v]],
    "empty": lambda v: [],
}
AS_ARRAYS = {
    "int64 tensor": lambda v: torch.tensor(v, dtype=torch.int64) + 2**32,
    "uint64 array": lambda v: np.where(np.array(v) >= 0, 2**63, 0).astype(np.uint64),
    "uint32 tensor": lambda v: torch.full_like(torch.tensor(v), 2**32 - 1).to(torch.uint32),
    "int64 array": lambda v: np.array(v, dtype=np.int64) - 2**32,
    "float tensor": lambda v: torch.tensor(v, dtype=torch.float64),
    "bool array": lambda v: np.array(v, dtype=np.bool_),
    "list of tensors": lambda v: changed(v, lambda x: torch.tensor(x + 2**32)),
    "meta tensor": lambda v: torch.tensor(v, dtype=torch.int64).to("meta"),
    # Of these no value need be read, and the shape is wrong all the same.
    "int32 tensor, a rank more": lambda v: torch.tensor([[v]], dtype=torch.int32),
    "int32 tensor, empty": lambda v: torch.zeros(0, dtype=torch.int32),
}


@pytest.mark.parametrize("wrong", [*OF_LISTS, *AS_ARRAYS])
@pytest.mark.parametrize("door", DOORS)
def test_what_int32_does_not_hold_is_refused(door, wrong):
    if door == "run file" and wrong in AS_ARRAYS:
        wrong = "far below"
    for (_, name), case in GIVEN.items():
        value = (OF_LISTS | AS_ARRAYS)[wrong](case.params[name])
        with pytest.raises(MaskSpecError) as caught:
            through(door, case, {**case.params, name: value})
        assert caught.value.field.endswith(name), (case.family, name)


def test_a_wide_tensor_is_not_read_back_from_a_device():
    ids = torch.zeros(4, dtype=torch.int64, device="meta")
    with pytest.raises(MaskSpecError, match="where the host may not read it"):
        families["document"].spans(4, 4, doc_ids=ids)
    starts, _ = families["document"].spans(4, 4, doc_ids=ids.int())
    assert starts.device.type == "meta"


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.uint64, np.int64, np.uint32])
@pytest.mark.parametrize("door", ["intervals", "spans"])
def test_what_fits_is_taken_in_any_dtype(door, dtype):
    for (_, name), case in GIVEN.items():
        signed = min(np.array(case.params[name]).flat) < 0
        if signed and dtype in (torch.uint64, np.uint32):
            continue
        as_torch = isinstance(dtype, torch.dtype)
        make = torch.tensor if as_torch else np.array
        value = make(case.params[name], dtype=dtype)
        if not as_torch:
            value.setflags(write=False)
        family, Q, KV = families[case.family], case.Q_LEN, case.KV_LEN
        wanted, found = (
            getattr(family, door)(Q, KV, **{**case.params, name: given})
            for given in (case.params[name], value)
        )
        if door == "intervals":
            wanted, found = ((mask.starts, mask.ends) for mask in (wanted, found))
        assert torch.equal(torch.stack(wanted), torch.stack(found)), (case.family, name)


def test_checked_values_are_int32_with_their_batch_and_share_nothing():
    ids = torch.tensor([3, 3, -1], dtype=torch.int32)
    checked = families["document"].check(3, 3, {"doc_ids": ids})["doc_ids"]
    assert checked.dtype == torch.int32
    assert checked.tolist() == [[3, 3, -1]]
    ids.zero_()
    assert checked.tolist() == [[3, 3, -1]]


@pytest.mark.parametrize("name", [name for name, family in families.items() if family.runtime])
def test_negative_values_other_than_padding_are_refused(name):
    for given in families[name].runtime:
        # An unused anchor may be anything.
        if given.name != "anchors":
            assert given.minimum in (-1, 0)
            with pytest.raises(MaskSpecError, match="at least") as caught:
                given.check([given.minimum - 1])
            assert caught.value.field == given.name
        assert given.minimum >= -(2**30)
        assert given.maximum <= (2**31 - 1 if given.name == "doc_ids" else 2**30)


EXTREME = [
    ("document", 4, 4, {"doc_ids": [2**31 - 1, 2**31 - 1, 2**31 - 2, -1]}),
    ("document", 3, 5, {"doc_ids": [0, 1, 1, 1, 1], "inner": "prefix_lm", "prefix": 5}),
    (
        "document",
        4,
        4,
        {"doc_ids": [0, 1, 1, 1], "inner": "prefix_lm", "doc_prefix_lens": [2**30, 2**30]},
    ),
    ("document", 4, 4, {"doc_ids": [0, 1, 1, 1], "inner": "sliding_window", "window": 2**30}),
    ("document", 4, 4, {"doc_ids": [0, 1, 1, 1], "inner": "chunked", "chunk": 2**30}),
    ("sink_window", 4, 4, {"sinks": 2**30, "window": 2**30, "offset": 3}),
    ("sliding_window", 4, 4, {"window": 2**30, "inclusive": True, "offset": -3}),
    ("global_prefix_window", 4, 4, {"global_tokens": 0, "radius": 2**30}),
    ("block_diffusion", 4, 4, {"diffusion_block_size": 2**30}),
    ("block_diffusion", 4, 4, {"diffusion_block_size": 2**30, "variant": "block_causal"}),
    (
        "dflash",
        4,
        8,
        {
            "draft_block_size": 2,
            "anchors": [3, -(2**30)],
            "n_valid": [1],
            "layer": "sliding",
            "window": 2**30,
            "doc_ids": [2**31 - 1] * 4,
        },
    ),
    ("eagle3_ttt", 3, 9, {"variant": "speculators", "window": 2**30, "doc_ids": [5, 5, -1]}),
    *(
        (
            "p_eagle",
            4,
            4,
            {"num_depths": 2, "anchors": [0, 2**30 - 1, top, 7], "depths": [0, 0, 1, -1], **more},
        )
        for top in (0, 2**30 - 1)
        for more in ({}, {"window": 1}, {"window": 2**30}, {"window": 2**30 - 1})
    ),
]


@pytest.mark.parametrize(("name", "Q", "KV", "params"), EXTREME)
def test_no_sum_of_extreme_values_overflows(name, Q, KV, params):
    family = families[name]
    wanted = [[FORMULAS[name](q, kv, Q, KV, 0, **params) for kv in range(KV)] for q in range(Q)]
    assert family.intervals(Q, KV, **params).dense()[0, 0].tolist() == wanted
    mask_mod = family.mask_mod(Q, KV, **family.check(Q, KV, params))
    q, kv = torch.meshgrid(
        torch.arange(Q, dtype=torch.int32), torch.arange(KV, dtype=torch.int32), indexing="ij"
    )
    zero = torch.zeros_like(q)
    assert mask_mod(zero, zero, q, kv).tolist() == wanted


def test_offsets_that_are_doubled_stay_in_range():
    # Two rows a token: the door that checks no relation between values must not wrap either.
    params = {"diffusion_block_size": 2, "variant": "packed", "doc_offsets": [0, 2**30]}
    with pytest.raises(MaskSpecError, match="at most 536870912"):
        families["block_diffusion"].spans(4, 4, **params)


def test_a_static_integer_is_no_float_or_bool_in_disguise():
    for value in (torch.tensor(1.5), torch.tensor(1.0), torch.tensor(True), np.float64(1), "1"):
        with pytest.raises(MaskSpecError, match="must be an integer"):
            maskgen.causal(4, 4, offset=value)
    assert maskgen.causal(4, 4, offset=np.int64(1)).equals(maskgen.causal(4, 4, offset=1))


@pytest.mark.parametrize("case", {case.family: case for case in CASES}.values(), ids=str)
def test_lengths_of_numpy_count_as_integers_do(case):
    family, lengths = families[case.family], (case.Q_LEN, case.KV_LEN)
    # In eight bits any difference or product of these wraps.
    small = [np.uint8(length) for length in lengths]
    assert [int(length) for length in small] == list(lengths), "the case is small"
    assert family.intervals(*small, **case.params).equals(family.intervals(*lengths, **case.params))
    for found, wanted in zip(
        family.spans(*small, **case.params), family.spans(*lengths, **case.params), strict=True
    ):
        assert torch.equal(found, wanted)
    static = {name: case.params[name] for name in case.params if (case.family, name) not in GIVEN}
    for found, wanted in zip(
        family.bounds(*small, **static), family.bounds(*lengths, **static), strict=True
    ):
        assert found.equals(wanted)


def test_a_context_of_less_than_nothing_does_not_wrap():
    with pytest.raises(MaskSpecError, match="must be more than Q_LEN = 8"):
        maskgen.dflash(np.uint16(8), np.uint16(4), draft_block_size=4, anchors=[1, 50000])


def test_a_spec_keeps_what_was_written():
    entry = {"name": "x", "family": "document", "Q_LEN": 4, "doc_ids": [0, 0, 1, -1]}
    (spec,) = read_specs({"masks": {"entry": [entry]}})
    assert spec.params["doc_ids"] == [0, 0, 1, -1]
    assert isinstance(import_module("json").dumps(spec.to_json()), str)


@pytest.mark.parametrize(
    "door", ["spans", "mask_mod", "intervals", "chosen_mask_mod", "spans_into"]
)
@pytest.mark.parametrize("case", {case.family: case for case in CASES}.values(), ids=str)
def test_a_static_parameter_is_checked_at_every_door(door, case):
    # 2**32 + 1 added to an int32 tensor would be 1.
    for param, far in product(families[case.family].params, (2**32 + 1, -(2**32) + 1)):
        wrong = {"int": far, "ints": [far], "bool": far, "str": far}[param.type]
        with pytest.raises(MaskSpecError) as caught:
            through(door, case, {**case.params, param.name: wrong})
        assert caught.value.field == param.name
    with pytest.raises(MaskSpecError, match="is no parameter of family"):
        through(door, case, {**case.params, "windw": 3})


@pytest.mark.parametrize("door", ["spans", "mask_mod", "intervals", "spans_into"])
@pytest.mark.parametrize("length", [2**32 + 8, 0, 8.0, True])
def test_a_length_is_checked_at_every_door(door, length):
    case = next(case for case in CASES if case.family == "causal")
    with pytest.raises(MaskSpecError, match="KV_LEN"):
        through(door, replace(case, KV_LEN=length), case.params)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int64, torch.float32])
def test_buffers_of_spans_are_int32(dtype):
    starts = torch.zeros(1, 1, 1, 8, dtype=torch.int32)
    for buffers in ((starts.to(dtype), starts), (starts, starts.to(dtype))):
        with pytest.raises(MaskSpecError, match="both must be int32"):
            spans_into(*buffers, "causal", KV_LEN=2**17)
