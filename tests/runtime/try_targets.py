"""How far targets of many architectures go: ``python -m tests.runtime.try_targets [NAME ...]``.

Each is a model of random weights, hidden size 64, made with its own config class, that goes through
prepare, train, evaluate and generate as a user's would. Prints the table of docs/targets.md.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from click.testing import CliRunner

from maskgen.cli import main as maskgen
from runtime.data.dataset import Dataset
from runtime.dflash.decoding.speculate import greedy
from runtime.evaluate import main as evaluate
from runtime.generate import main as generate
from runtime.prepare import main as prepare
from runtime.target.model import Target
from runtime.train import main as train
from tests.runtime.tiny_text import byte_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.content }}|{% endfor %}"
VOCAB = 264
WINDOW = 8
ANSWER = 24
RUN_FILE = """
[run]
folder = "{root}/run"
devices = "cpu"
threads = 1
[target]
model = "{root}/target"
num_features = 2
[data]
prompts = ["{root}/prompts.jsonl"]
folder = "{root}/data"
heldout = 3
max_new_tokens = 24
min_answer_tokens = 4
min_distinct_4grams = 0.0
[masks]
cache = "{root}/masks.zarr"
BLOCK_SIZE = 16
[[masks.entry]]
name = "dflash"
family = "dflash"
kind = "layouts"
context = 48
anchors = 4
draft_block_size = 4
draws = 2
[drafter]
num_layers = 1
init = "{init}"
[train]
steps = 2
global_batch = 2
[evaluate]
prompts = 3
max_new_tokens = 24
"""
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
SLIDING = ["sliding_attention", "sliding_attention", "full_attention"] * 2
MLA = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
HYBRID = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def rope(kind: str, **values: Any) -> dict[str, Any]:
    """A config's ``rope_parameters``."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Llama, llama3 RoPE": ("Llama", LLAMA3),
    "Llama, linear RoPE": ("Llama", rope("linear", factor=2.0)),
    "Llama, dynamic RoPE": ("Llama", rope("dynamic", factor=2.0)),
    "Llama, yarn": (
        "Llama",
        rope("yarn", factor=4.0, original_max_position_embeddings=64),
    ),
    "Qwen2": ("Qwen2", {}),
    "Qwen3": ("Qwen3", {"head_dim": 16}),
    "Qwen3-MoE": ("Qwen3Moe", {"head_dim": 16, "num_experts": 4, **MOE}),
    "Qwen3-Next": ("Qwen3Next", {**HYBRID, "num_experts": 4, **MOE}),
    "Qwen3.5": ("Qwen3_5", HYBRID),
    "Mistral, window 8": ("Mistral", {"sliding_window": WINDOW}),
    "Mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "SmolLM3": ("SmolLM3", {}),
    "Granite": ("Granite", {"logits_scaling": 2.0, "residual_multiplier": 0.5}),
    "Gemma": ("Gemma", {"head_dim": 16}),
    "Gemma 2": ("Gemma2", {"head_dim": 16, "layer_types": SLIDING, "sliding_window": WINDOW}),
    "Gemma 3": ("Gemma3", {"head_dim": 16, "layer_types": SLIDING, "sliding_window": WINDOW}),
    "Gemma 4": (
        "Gemma4",
        {
            "head_dim": 16,
            "global_head_dim": 16,
            "layer_types": SLIDING,
            "sliding_window": WINDOW,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB,
            "num_kv_shared_layers": 0,
        },
    ),
    "Gemma 3n": (
        "Gemma3n",
        {
            "head_dim": 16,
            "layer_types": SLIDING,
            "sliding_window": WINDOW,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB,
            "num_kv_shared_layers": 0,
            "intermediate_size": [96] * 6,
            "activation_sparsity_pattern": [0.0] * 6,
            "laurel_rank": 8,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": SLIDING,
            "sliding_window": WINDOW,
        },
    ),
    "Phi-3": ("Phi3", {}),
    "Phi-3, longrope": (
        "Phi3",
        {
            **rope("longrope", short_factor=[1.0] * 8, long_factor=[2.0] * 8),
            "original_max_position_embeddings": 128,
        },
    ),
    "Phi": ("Phi", {}),
    "GPT-NeoX": ("GPTNeoX", {}),
    "GPT-2": ("GPT2", {"n_embd": 64, "n_layer": 6, "n_head": 4, "n_positions": 256}),
    "GPT-J": (
        "GPTJ",
        {"n_embd": 64, "n_layer": 6, "n_head": 4, "n_positions": 256, "rotary_dim": 8},
    ),
    "OPT": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "OPT, projected embedding": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 32}),
    "Bloom": ("Bloom", {"n_layer": 6, "n_head": 4}),
    "MPT": ("Mpt", {"d_model": 64, "n_layers": 6, "n_heads": 4, "max_seq_len": 256}),
    "Falcon": ("Falcon", {"new_decoder_architecture": False}),
    "Falcon, ALiBi": ("Falcon", {"alibi": True}),
    "StableLM": ("StableLm", {}),
    "StarCoder2": ("Starcoder2", {"sliding_window": WINDOW}),
    "GLM-4": ("Glm4", {"head_dim": 16}),
    "Cohere": ("Cohere", {}),
    "Cohere2": ("Cohere2", {"layer_types": SLIDING, "sliding_window": WINDOW}),
    "OLMo2": ("Olmo2", {}),
    "OLMo3": ("Olmo3", {"layer_types": SLIDING, "sliding_window": WINDOW}),
    "DeepSeek-V3": (
        "DeepseekV3",
        {
            **MLA,
            **MOE,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "num_nextn_predict_layers": 0,
        },
    ),
    "Nemotron": ("Nemotron", {"head_dim": 16}),
    "EXAONE 4": ("Exaone4", {"layer_types": SLIDING, "sliding_window": WINDOW}),
    "LFM2": ("Lfm2", {"layer_types": ["conv", "conv", "full_attention"] * 2, "block_ff_dim": 96}),
    "Mamba": ("Mamba", {"state_size": 4}),
    "Mamba 2": ("Mamba2", {"state_size": 4, "num_heads": 8, "head_dim": 16, "n_groups": 1}),
    "RWKV": ("Rwkv", {"attention_hidden_size": 64}),
    "BERT as a decoder": ("Bert", {"is_decoder": True}),
    "BART's decoder": ("Bart", {"d_model": 64, "decoder_layers": 6}),
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How far a target went."""

    name: str
    init: str = "-"
    """``target``, or ``random`` where that was refused and this works."""
    answers_equal: bool | None = None
    """Whether batched answers are those of single decoding."""
    drafted_equal: bool | None = None
    """Whether drafted text is the target's own."""
    line: str = ""
    """The last refusal."""

    @property
    def row(self) -> str:
        """A line of the table."""
        marks = {None: "-", True: "yes", False: "NO"}
        cells = (self.name, self.init, marks[self.answers_equal], marks[self.drafted_equal])
        return f"| {' | '.join(cells)} | {self.line} |"


def build(name: str) -> Any:
    """A model of random weights."""
    prefix, options = CASES[name]
    stem = f"{prefix}Text" if hasattr(transformers, f"{prefix}TextConfig") else prefix
    config = getattr(transformers, f"{stem}Config")(**{**SIZES, **options})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1 and "norm" in key:
                parameter.uniform_(0.5, 1.5)
    return model


def try_target(name: str, root: Path, make: Callable[[str], Any] = build) -> Outcome:
    """Send one architecture through all commands.

    Args:
        name: In ``CASES``.
        root: An empty folder.
        make: Returns the model of a name.
    """
    make(name).save_pretrained(root / "target")
    byte_tokenizer(TEMPLATE).save_pretrained(root / "target")
    prompts = [{"prompt": f"{'more ' * (i % 4)}{i}"} for i in range(12)]
    (root / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    lines = []
    for init in ("target", "random"):
        (root / "run.toml").write_text(RUN_FILE.format(root=root, init=init))
        line = refusal(prepare, "--config", str(root / "run.toml"))
        if line is None:
            break
        lines.append(line)
    else:
        return Outcome(name=name, line=lines[-1].replace(f"{root}/", ""))
    run = ["--config", str(root / "run.toml")]
    steps = [
        (maskgen, ["build", run[1]]),
        (train, run),
        (evaluate, run),
        (generate, ["--target", str(root / "target"), "--drafter", str(root / "run/drafter")]),
    ]
    steps[-1][1].extend(["--prompt", "some more", "--max-new-tokens", "16"])
    for command, options in steps:
        line = refusal(command, *options)
        if line is not None:
            return Outcome(name=name, init=init, line=f"{command.name}: {line}")
    result = json.loads((root / "run/evaluate.json").read_text())
    return Outcome(
        name=name,
        init=init,
        answers_equal=answers_equal(root),
        drafted_equal=not result["trained"]["mismatches"] + result["untrained"]["mismatches"],
        line=lines[-1].partition(": ")[0] if lines else "",
    )


def answers_equal(root: Path) -> bool:
    """Whether held-out answers, made in one batch, are what decoding each prompt alone gives."""
    target, dataset = Target.load(root / "target"), Dataset.open(root / "data", "heldout")
    for i in range(len(dataset)):
        sample = dataset.sample(i)
        ids = [int(token) for token in sample.input_ids]
        alone = greedy(target, ids[: sample.prompt_len], ANSWER).tokens
        if list(alone)[: len(ids) - sample.prompt_len] != ids[sample.prompt_len :]:
            return False
    return True


def refusal(command: Any, *options: str) -> str | None:
    """The line that a command ends with where it fails."""
    result = CliRunner().invoke(command, options)
    if result.exit_code == 0:
        return None
    if not isinstance(result.exception, SystemExit):
        return f"TRACEBACK {type(result.exception).__name__}: {result.exception}"[:300]
    return str(result.stderr.strip().splitlines()[-1]).removeprefix("Error: ")


if __name__ == "__main__":
    print("| target | init | batched answers | drafted text | refused |\n|---|---|---|---|---|")
    for case in sys.argv[1:] or CASES:
        with tempfile.TemporaryDirectory() as folder:
            print(try_target(case, Path(folder)).row, flush=True)
