"""What feeds the drafter is said in the run, in its checkpoints and in the exported config."""

import json

import pytest
import torch
from torch import nn

from maskgen.cli import main as maskgen
from runtime.dflash.folder.embedding import fed_scale, module_scale, serving_note
from runtime.dflash.start.initialise import drafter_config, random_start
from runtime.errors import ConfigError
from runtime.evaluate import main as evaluate
from runtime.export import main as export
from runtime.prepare import main as prepare
from runtime.train import main as train
from runtime.training.checkpoint import find_checkpoints
from runtime.training.metrics import read_metrics
from tests.runtime.test_train import RUN_FILE, call
from tests.runtime.tiny_gemma import gemma_target
from tests.runtime.tiny_llama import HIDDEN, tiny_target
from tests.runtime.tiny_text import byte_tokenizer


def network(target, **options):
    return drafter_config(
        target, num_layers=2, draft_block_size=4, target_layer_ids=(1, 2, 3), **options
    )


class Module(nn.Embedding):
    """Makes something of the rows."""

    def __init__(self, weight, make):
        super().__init__(*weight.shape)
        self.weight = nn.Parameter(weight)
        self.make = make

    def forward(self, ids):
        return self.make(super().forward(ids))


def remade(make, dtype=torch.float32):
    target = tiny_target()
    module = Module(target.embed_weight.data.clone(), make)
    target.model.set_input_embeddings(module)
    target.model.to(dtype)
    return target


def test_most_modules_return_their_rows():
    assert module_scale(tiny_target()) == 1.0
    assert network(tiny_target()).embedding_scale == 1.0
    target = tiny_target()
    target.model.to(torch.bfloat16)
    assert module_scale(target) == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gemmas_module_is_fed_bit_for_bit(dtype):
    """Its constant is rounded to the weight's dtype, as 5.657 to 5.65625."""
    target = gemma_target()
    target.model.to(dtype)
    config = network(target)
    assert config.embedding_scale == torch.tensor(HIDDEN**0.5).to(dtype).item()
    drafter = random_start(config, torch.Generator())
    mask = config.mask_token_id
    block = torch.tensor([[5, mask, mask, mask, 9, mask, mask, mask]])
    made = target.model.get_input_embeddings()(block)
    fed = drafter.block_inputs(torch.tensor([[5, 9]]), target.embed_weight)
    assert torch.equal(fed, made)


@pytest.mark.parametrize("factor", [0.25, 3.0, 39.191835, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_constant_is_found(factor, dtype):
    rounded = torch.tensor(factor, dtype=dtype)
    assert module_scale(remade(lambda rows: rows * rounded, dtype)) == rounded.item()


@pytest.mark.parametrize(
    "make",
    [
        lambda rows: rows + 0.01,
        lambda rows: rows * torch.linspace(1, 1.1, HIDDEN),
        lambda rows: rows * torch.linspace(1, 1.0005, HIDDEN),
        lambda rows: -rows,
        lambda rows: rows * 0,
        lambda rows: nn.functional.rms_norm(rows, (HIDDEN,)),
        lambda rows: torch.cat((rows, rows), dim=-1),
        lambda rows: rows * torch.nan,
    ],
)
def test_a_module_that_does_more_is_refused(make):
    target = remade(make)
    assert module_scale(target) is None
    with pytest.raises(
        ConfigError, match=r"drafter.embedding = 'module': must be 'rows' for 'tiny"
    ):
        network(target)
    assert network(target, embedding="rows").embedding_scale == 1.0


def test_notes_say_where_a_server_differs():
    plain, gemma = tiny_target(), gemma_target()
    assert serving_note(network(plain), plain) is None
    assert fed_scale(gemma, "rows") == 1.0
    module = serving_note(network(gemma))
    assert module == serving_note(network(gemma), gemma)
    assert "times 5.65685" in module
    assert "vLLM 0.33 feeds bare rows" in module
    rows = network(gemma, embedding="rows")
    assert "SGLang feeds them times 5.65685" in serving_note(rows, gemma)
    assert serving_note(rows) is None


def test_notes_are_said_whole():
    gemma = gemma_target()
    assert serving_note(network(gemma)) == (
        "note: the drafter is fed the target's embedding times 5.65685, as z-lab's reference and "
        'SGLang feed it; vLLM 0.33 feeds bare rows, for which drafter.embedding = "rows" trains'
    )
    assert serving_note(network(gemma, embedding="rows"), gemma) == (
        "note: the drafter is fed bare rows of the target's embedding, as vLLM 0.33 and z-lab's "
        "reference feed it; SGLang feeds them times 5.65685, for which drafter.embedding = "
        '"module" trains'
    )
    # A module that does more than multiply has no number to name.
    odd = remade(lambda rows: rows + 0.01)
    assert serving_note(network(odd, embedding="rows"), odd) is None


def test_a_module_is_asked_without_gradients_and_only_where_its_output_is_wanted(monkeypatch):
    target = remade(lambda rows: rows * (1.0 if not torch.is_grad_enabled() else 2.0))
    assert module_scale(target) == 1.0
    assert fed_scale(remade(lambda rows: rows * 3), "module") == 3.0
    monkeypatch.setattr("runtime.dflash.folder.embedding.module_scale", None)
    assert fed_scale(target, "rows") == 1.0


@pytest.mark.parametrize(("dtype", "eps"), [(torch.float32, 2**-23), (torch.bfloat16, 2**-7)])
def test_what_rounds_like_the_dtype_is_a_constant_and_what_is_off_by_more_is_not(dtype, eps):
    def made(off):
        def make(rows):
            signs = torch.ones(HIDDEN)
            signs[::2] = 1 + off
            return (rows.float() * 2 * signs).to(rows.dtype)

        return module_scale(remade(make, dtype))

    assert made(eps) == 2.0
    assert made(16 * eps) is None


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma")
    tokenizer = byte_tokenizer()
    target = gemma_target(tokenizer, len(tokenizer) + 2, initializer_range=0.3)
    target.model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    prompts = [{"prompt": f"tell me {'more ' * (i % 4)}{i}"} for i in range(16)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    text = RUN_FILE.format(root=folder).replace("num_layers = 2", 'num_layers = 2\ninit = "random"')
    (folder / "run.toml").write_text(text)
    call(prepare, folder)
    call(maskgen, folder, "build", f"{folder}/run.toml", config=False)
    return folder


def test_prepare_refuses_before_it_answers(root, monkeypatch):
    monkeypatch.setattr("runtime.dflash.folder.embedding.module_scale", lambda target: None)
    new = ["--set", f"data.folder={root}/new"]
    refused = call(prepare, root, *new, code=2)
    assert "drafter.embedding = 'module': must be 'rows' for" in refused.stderr
    assert not (root / "new").exists()
    call(prepare, root, *new, "--set", "drafter.embedding=rows")


def said(folder):
    return json.loads((folder / "config.json").read_text())["dflash_config"][
        "input_embedding_scale"
    ]


def test_the_run_and_all_that_it_writes_agree(root):
    trained = call(train, root)
    assert trained.stderr.count("note: the drafter is fed the target's embedding times 5.656") == 1
    exact = torch.tensor(HIDDEN**0.5).item()
    assert said(root / "run" / "drafter") == exact
    (newest, *_) = find_checkpoints(root / "run" / "checkpoints")
    assert newest.published["dflash_config"]["input_embedding_scale"] == exact
    exported = call(export, root, "--out", f"{root}/out")
    assert exported.stderr.count("note: ") == 1
    assert said(root / "out") == exact
    meta = json.loads((root / "data" / "meta.json").read_text())
    for folder in (root / "out", root / "run" / "drafter"):
        record = json.loads((folder / "target.json").read_text())
        assert {key: record[key] for key in ("name", "digest")} == meta["target"]
    result = json.loads(call(evaluate, root, "--json").stdout)
    assert (result["exact"], result["same_target"]) == (True, True)
    rows = ["--set", "drafter.embedding=rows"]
    changed = call(train, root, *rows, code=1)
    assert 'drafter.embedding "module" -> "rows"' in changed.stderr
    other = call(train, root, *rows, "--set", f"run.folder={root}/rows")
    assert "SGLang feeds them times 5.65" in other.stderr
    assert said(root / "rows" / "drafter") == 1.0
    first = [read_metrics(root / name / "metrics.jsonl")[0]["loss"] for name in ("run", "rows")]
    assert first[0] != first[1]
