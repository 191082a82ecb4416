import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask
from transformers import LlamaForCausalLM

import maskgen
from runtime.errors import ConfigError, NoSamplesError
from runtime.ranks.devices import Placement
from runtime.static.graph import CaptureError
from runtime.static.optimizer import AdamWSettings
from tests.runtime.tiny_llama import tiny_model, tiny_tokenizer

sys.path.append(str(Path(__file__).parents[2] / "examples"))

import finetune_packed
import packed_attention
import packed_rows

CPU = Placement((torch.device("cpu"),), torch.float32, 1)
LENGTHS = (32, 64)
LIMIT = 6
ROWS = {
    32: [[5, 9, 2], [32]],  # a tail, and none
    64: [[2, 30, 3, 11], [1, 1, 60]],  # documents of one token predict nothing
}
SETTINGS = AdamWSettings(
    lr=1e-2,
    min_lr_ratio=1.0,
    warmup_steps=0,
    total_steps=100,
    betas=(0.9, 0.95),
    weight_decay=0.0,
    clip=0.0,
)


def save_model(folder, **options):
    tiny_model(**options).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def documents_of(sizes, seed=7):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 23, (size,), generator=generator).tolist() for size in sizes]


def rows_of(length):
    return [
        packed_rows.make_row(documents_of(sizes, seed), length, LIMIT)
        for seed, sizes in enumerate(ROWS[length])
    ]


def make_tuner(folder, masks, placement=CPU, lengths=LENGTHS, settings=SETTINGS):
    target = packed_attention.load_model(folder, placement.devices[0])
    entries = finetune_packed.load_masks(str(masks), lengths)
    blanks = {length: [packed_rows.make_row([], length, LIMIT)] * 2 for length in lengths}
    return finetune_packed.FineTuner(target.model, entries, blanks, placement, settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def masks(tmp_path_factory):
    return tmp_path_factory.mktemp("masks") / "packed.zarr"


@pytest.fixture
def tuner(folder, masks):
    return make_tuner(folder, masks)


def loss_alone(model, ids):
    """The plain model on one document: sum of cross entropies, and number of predictions."""
    tokens = torch.tensor([ids])
    logits = model(tokens).logits[0, :-1].float()
    return functional.cross_entropy(logits, tokens[0, 1:], reduction="sum"), len(ids) - 1


@pytest.mark.parametrize("length", LENGTHS)
def test_loss_and_gradients_of_packed_rows_are_those_of_the_documents_alone(tuner, folder, length):
    plain = LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager")
    singles = [
        loss_alone(plain, ids)
        for seed, sizes in enumerate(ROWS[length])
        for ids in documents_of(sizes, seed)
    ]
    expected = sum(loss for loss, _ in singles)
    expected.backward()
    bucket = tuner.buckets[length]
    bucket.fill(rows_of(length))
    sums = bucket.loss()
    tuner.exchange.backward(sums[0])
    torch.testing.assert_close(sums[0], expected, rtol=1e-5, atol=0)
    assert sums[1].item() == sum(count for _, count in singles)
    grads = dict(plain.named_parameters())
    for place in tuner.optimizer.places:
        grad = tuner.optimizer.grads[place.start : place.stop].view(place.shape)
        torch.testing.assert_close(grad, grads[place.name].grad, rtol=1e-4, atol=1e-4)


def test_the_mask_is_that_of_a_formula_and_positions_restart(tuner):
    bucket = tuner.buckets[32]
    bucket.fill(rows_of(32))
    seen = {}
    handle = bucket.model.model.layers[0].register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.update(kwargs), with_kwargs=True
    )
    bucket.loss()
    handle.remove()
    doc_ids = torch.tensor([[0] * 5 + [1] * 9 + [2] * 2 + [3] * 16, [0] * 32])
    q, kv = torch.arange(32)[:, None], torch.arange(32)
    expected = (doc_ids[:, :, None] == doc_ids[:, None]) & (q >= kv)
    assert torch.equal(seen["attention_mask"], expected[:, None])
    wanted = [*range(5), *range(9), *range(2), *range(16)]
    assert seen["position_ids"].tolist() == [wanted, [*range(32)]]


def test_a_block_mask_passes_through_transformers_to_the_compiled_attention(tuner, monkeypatch):
    bucket = tuner.buckets[64]
    bucket.fill(rows_of(64))
    expected = bucket.loss()

    def block_mask():
        maskgen.tables_into(bucket.tables, bucket.starts, bucket.ends)
        return bucket.block_mask

    def attend(query, key, value, *, block_mask, scale, enable_gqa):
        assert isinstance(block_mask, BlockMask)
        b, q, kv = torch.arange(2), torch.arange(64), torch.arange(64)
        dense = block_mask.mask_mod(b[:, None, None], b * 0, q[:, None], kv)
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=dense[:, None], scale=scale, enable_gqa=enable_gqa
        )

    monkeypatch.setattr(bucket, "mask", block_mask)
    monkeypatch.setattr(packed_attention, "compiled_flex", attend)
    torch.testing.assert_close(bucket.loss(), expected)
    assert bucket.tables.counts().partial == 2


def test_warming_up_changes_no_weight_and_leaves_no_trace(tuner):
    before = tuner.optimizer.master.clone()
    tuner.prepare()
    assert torch.equal(tuner.optimizer.master, before)
    assert tuner.read_totals() == [0, 0, 0]
    assert tuner.begun.item() == tuner.optimizer.steps.item() == 0
    for bucket in tuner.buckets.values():
        first, second = bucket.free.get(), bucket.free.get()
        assert first is not second


def test_a_batch_may_be_smaller_than_the_step(tuner):
    tuner.prepare()
    first, second = rows_of(64)
    for batch in ([first], [second]):
        tuner.run("evaluate", batch)
    apart = tuner.read_totals()
    tuner.run("evaluate", [first, second])
    assert tuner.read_totals() == pytest.approx(apart, rel=1e-5)
    mean = tuner.evaluate([first, *rows_of(32), second])
    loss, predictions, _ = apart
    tuner.run("evaluate", rows_of(32))
    more, others, _ = tuner.read_totals()
    assert mean == pytest.approx((loss + more) / (predictions + others), rel=1e-5)


def test_a_warm_up_that_fails_names_the_step(tuner, monkeypatch):
    monkeypatch.setattr(tuner.buckets[64], "model", lambda *_args, **_options: None)
    with pytest.raises(CaptureError, match="cannot warm up train rows of 64: 'NoneType'"):
        tuner.prepare()


@pytest.mark.parametrize("tied", [False, True])
def test_a_run_lowers_the_loss_and_ends_with_the_summary(tmp_path, masks, tied):
    model = save_model(tmp_path / "model", tie_word_embeddings=tied)
    text = tmp_path / "text.jsonl"
    words = [f"w{3 + index % 20}" for index in range(60)]
    prompts = [" ".join(words[start : start + 3 + start % 17]) for start in range(40)]
    text.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    given = f"--model {model} --text {text} --masks {masks} --lengths 32,64 --device cpu"
    options = [*given.split(), "--threads", "1", "--steps", "20", "--lr", "0.01"]
    result = CliRunner().invoke(finetune_packed.main, options, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    *_, row, last = result.output.splitlines()
    before, after, speed = map(float, re.findall(r"[\d.]+", row.replace(",", "")))
    assert after < 0.7 * before
    assert speed > 0
    expected = "0 compiles, 0 FX traces, 0 host mask builds, 20 steps (eager)"
    assert last == f"after freeze: {expected}"
    refused = CliRunner().invoke(finetune_packed.main, [*options, "--max-documents", "3"])
    assert refused.exit_code == 2
    assert re.search(
        r"--max-documents = 3: a row of 32 tokens .* with \d+ documents", refused.output
    )


def test_more_documents_than_a_row_may_have_are_refused():
    packed_rows.make_row([[1]] * LIMIT, 32, LIMIT)
    wanted = "--max-documents = 6: a row of 32 tokens was packed with 7 documents"
    with pytest.raises(ConfigError, match=wanted):
        packed_rows.make_row([[1]] * (LIMIT + 1), 32, LIMIT)


def test_a_row_says_where_each_document_and_the_tail_start():
    row = packed_rows.make_row([[7, 8, 9], [4, 5]], 8, 4)
    assert row["input_ids"].tolist() == [7, 8, 9, 4, 5, 0, 0, 0]
    assert row["doc_offsets"].tolist() == [0, 3, 5, 8, 8, 8]
    assert row["used"].item() == 5
    full = packed_rows.make_row([[7, 8, 9], [4, 5, 6, 7, 8]], 8, 2)
    assert full["doc_offsets"].tolist() == [0, 3, 8, 8]
    for made in (row, full):
        maskgen.families["document"].check(8, 8, {"doc_offsets": made["doc_offsets"]})


def test_packing_keeps_every_token_in_order():
    documents = documents_of([3, 20, 8, 8, 30, 9, 8, 50, 8, 2, 64, 5])
    rows = packed_rows.pack(documents, LENGTHS, LIMIT)
    kept = {32: [], 64: []}
    for row in rows:
        kept[len(row["input_ids"])] += row["input_ids"][: row["used"]].tolist()
    small = [token for ids in documents if len(ids) <= 8 for token in ids]
    large = [token for ids in documents if len(ids) > 8 for token in ids]
    assert kept == {32: small, 64: large}
    with pytest.raises(NoSamplesError, match="must fill two rows or more"):
        packed_rows.pack(documents[:1], LENGTHS, LIMIT)


def test_prompts_and_paragraphs_are_documents(tmp_path):
    jsonl, text = tmp_path / "a.jsonl", tmp_path / "b.txt"
    jsonl.write_text('{"prompt": "w3 w4"}\n{"messages": [{"role": "user", "content": "w5"}]}\n')
    text.write_text("w3 w4\nw5\n\nw6 w7 w8 w9 w10\n")
    read = packed_rows.read_documents
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    assert list(read(str(jsonl), tokenizer, 9)) == [[3, 4]]
    assert list(read(str(text), tokenizer, 3)) == [[3, 4, 5], [6, 7, 8], [9, 10]]


@pytest.mark.parametrize("name", ["sliding_window", "softcap", "s_aux"])
def test_attention_that_the_mask_does_not_describe_is_refused(name):
    states = torch.zeros(1, 2, 8, 4)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    with pytest.raises(ConfigError, match=f"--model = 'Identity': must attend without {name}"):
        packed_attention.packed_attention(
            torch.nn.Identity(), states, states, states, mask, **{name: 4}
        )


def test_a_window_of_the_whole_row_is_no_window():
    states = torch.zeros(1, 2, 8, 4)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    out, weights = packed_attention.packed_attention(
        torch.nn.Identity(), states, states, states, mask, sliding_window=8, scaling=0.5
    )
    assert out.shape == (1, 8, 2, 4)
    assert weights is None


@pytest.mark.gpu
def test_captured_steps_equal_eager_ones(tmp_path, masks):
    # FlexAttention takes heads of 16 and more on a GPU.
    model = save_model(tmp_path / "model", hidden_size=64, intermediate_size=96)
    lengths = (128, 256)
    batches = [
        [packed_rows.make_row(documents_of(sizes, seed), length, LIMIT) for sizes in pair]
        for seed, (length, pair) in enumerate(
            [
                (128, ([20, 60, 9], [128])),
                (256, ([200, 3], [50, 50, 50, 50])),
                (128, ([5, 5, 5, 5, 5], [100, 20])),
                (256, ([256], [255])),
            ]
            * 3
        )
    ]

    def train(placement, *, capture):
        tuner = make_tuner(model, masks, placement, lengths, replace(SETTINGS, lr=1e-3))
        tuner.prepare(capture=capture)
        losses = []
        for batch in batches:
            tuner.run("train", batch)
            losses.append(tuner.read_totals())
        losses.append([tuner.evaluate(batches[0]), tuner.begun.item(), 0])
        replays = sum(step.replays for step in tuner.steps.values())
        weights = tuner.optimizer.master.cpu()
        tuner.close()
        return torch.tensor(losses), weights, replays

    gpu = Placement((torch.device("cuda", 0),), torch.float32, 1)
    captured, weights, replays = train(gpu, capture=True)
    eager, eager_weights, no_replays = train(gpu, capture=False)
    exact, _, _ = train(CPU, capture=True)
    assert (replays, no_replays) == (len(batches) + 1, 0)
    torch.testing.assert_close(captured, eager, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(weights, eager_weights, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(captured, exact, rtol=2e-3, atol=1e-3)
