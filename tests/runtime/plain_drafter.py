"""A DFlash or DSpark drafter in plain torch, from what z-lab, vLLM and SGLang read.

It shares no code with the product: it reads the two files of a drafter folder, takes
``hidden_states[id + 1]`` of a transformers model, and drafts the first block after a prompt.
``wrong`` does one thing otherwise.
"""

import json
import math

import torch
from safetensors.torch import load_file

WRONG_WINDOW = (
    *("window one more", "window one less", "sliding both ways", "sliding as full", "all slide"),
)
WRONG = (
    *("causal", "draft positions", "context positions", "layer ids", "feature order"),
    *("short context", "long context", "mask id", "embedding scale", "slot", "rope theta"),
    *("rope scaling", "rope pairs", "eps", "feature fold", "head norms", "fused norm"),
    *("groups", "attention scale", "block in context"),
    *WRONG_WINDOW,
)
WRONG_HEADS = (
    *("no bias", "bias of the token before", "bias of the mask", "bias without a chain"),
    *("heads swapped", "bias twice", "confidence order", "confidence without bias"),
)
"""Of DSpark."""


def norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rope_table(config, wrong):
    """Inverse frequencies and the factor on cos and sin."""
    rope, hd = dict(config["rope_parameters"]), config["head_dim"]
    theta = rope["rope_theta"] * (10 if wrong == "rope theta" else 1)
    base = theta ** -(torch.arange(0, hd, 2).double() / hd)
    kind = "default" if wrong == "rope scaling" else rope["rope_type"]
    if kind == "default":
        return base, 1.0
    scaled, old = base / rope["factor"], rope.get("original_max_position_embeddings")
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        blend = ((old * base / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        return blend * base + (1 - blend) * scaled, 1.0
    assert kind == "yarn"
    ends = [
        hd * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (rope.get("beta_fast", 32), rope.get("beta_slow", 1))
    ]
    low, high = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), hd - 1)
    blend = 1 - ((torch.arange(hd // 2) - low) / (high - low)).clamp(0, 1)
    factor = (0.1 * math.log(rope["factor"]) + 1) * rope.get("attn_factor", 1.0)
    return blend * base + (1 - blend) * scaled, factor


def rotate(x, positions, table, wrong):
    frequencies, factor = table
    angles = positions[:, None].double() * frequencies
    cos, sin = (angles.cos() * factor).float(), (angles.sin() * factor).float()
    if wrong == "rope pairs":
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def first_block(folder, model, prompt, wrong="", feature_scale=None):
    """fp32 logits of slots 1 and after, ``[block_size - 1, V]``."""
    return drafted(folder, model, prompt, wrong, feature_scale)[0]


def in_turn(config, w, hidden, logits, before, wrong):
    """DSpark's: each draft adds to the logits of the next slot; and how sure each of them is.

    As the servers take them: slots 1 and after where ``sample_from_anchor`` is false at the top
    level, else all; the token before the first is the anchor's either way.
    """
    w1, w2 = w["markov_head.markov_w1.weight"], w["markov_head.markov_w2.weight"]
    assert w1.shape == w2.shape == (config["vocab_size"], config["markov_rank"])
    if wrong == "heads swapped":
        w1, w2 = w2, w1
    assert config["enable_confidence_head"] == ("confidence_head.proj.weight" in w)
    found, sure = [], []
    for k, slot in enumerate(logits):
        token = before[-1]
        if wrong == "bias of the token before":
            token = before[-2]
        if wrong == "bias of the mask":
            token = config["mask_token_id"]
        e = w1[token]
        bias = e @ w2.T * {"no bias": 0, "bias twice": 2}.get(wrong, 1)
        found.append(slot + bias)
        chosen = slot if wrong == "bias without a chain" else found[-1]
        before = [*before, int(chosen.argmax())]
        if config["enable_confidence_head"]:
            assert config["confidence_head_with_markov"]
            parts = (e, hidden[k]) if wrong == "confidence order" else (hidden[k], e)
            proj, bias = w["confidence_head.proj.weight"][0], w["confidence_head.proj.bias"][0]
            bias = 0 if wrong == "confidence without bias" else bias
            sure.append((torch.cat(parts) @ proj + bias).sigmoid())
    return torch.stack(found), torch.stack(sure) if sure else None


@torch.no_grad()
def drafted(folder, model, prompt, wrong="", feature_scale=None):
    """Those logits, and the confidence of each slot where there is a head for it, else None."""
    config = json.loads((folder / "config.json").read_text())
    w = {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
    dspark = config["architectures"] == ["Qwen3DSparkModel"]
    flash, eps, hd = config["dflash_config"], config["rms_norm_eps"], config["head_dim"]
    eps = 0.1 if wrong == "eps" else eps
    ids = torch.tensor([prompt])
    anchor = int(model(ids).logits[0, -1].argmax())
    seen = torch.tensor([[*prompt, anchor]]) if wrong == "long context" else ids
    states = model(seen, output_hidden_states=True).hidden_states
    layers = [layer + (wrong == "layer ids") for layer in flash["target_layer_ids"]]
    layers = layers[::-1] if wrong == "feature order" else layers
    context = torch.cat([states[layer + 1][0].float() for layer in layers], dim=-1)
    context = context[1:] if wrong == "short context" else context
    fc = w["fc.weight"]
    if wrong == "feature fold":
        fc = (fc.unflatten(1, (len(layers), -1)) * feature_scale[:, None]).flatten(1)
    F = context @ fc.T
    F = F if wrong == "fused norm" else norm(F, w["hidden_norm.weight"], eps)
    size, start = flash["block_size"], len(prompt)
    blank = 0 if wrong == "mask id" else flash["mask_token_id"]
    x = model.get_input_embeddings().weight[[anchor, *[blank] * (size - 1)]].float()
    x = x * flash["input_embedding_scale"] * (2.5 if wrong == "embedding scale" else 1)
    at = torch.arange(start, start + size) + int(wrong == "draft positions")
    moved = {"short context": 1, "context positions": -1}.get(wrong, 0)
    before = torch.arange(len(F)) + moved
    mask = torch.ones(size, len(F) + size, dtype=torch.bool)
    if wrong == "causal":
        mask[:, len(F) :].tril_()
    if wrong == "block in context":
        mask[:, len(F) :] = torch.eye(size, dtype=torch.bool)
    # A sliding layer: the last so many positions up to a row's own, which is causal in the block.
    back = at[:, None] - torch.cat((before, at))
    window = config["sliding_window"] or 0
    window += {"window one more": 1, "window one less": -1}.get(wrong, 0)
    near = (back < window) & (True if wrong == "sliding both ways" else back >= 0)
    table = rope_table(config, wrong)
    for i in range(config["num_hidden_layers"]):
        p = f"layers.{i}."
        h = norm(x, w[p + "input_layernorm.weight"], eps)

        def heads(name, rows, positions, p=p):
            y = (rows @ w[p + f"self_attn.{name}_proj.weight"].T).unflatten(1, (-1, hd))
            y = y.transpose(0, 1)
            if name == "v":
                return y
            gain = 1.0 if wrong == "head norms" else w[p + f"self_attn.{name}_norm.weight"]
            return rotate(norm(y, gain, eps), positions, table, wrong)

        rows, positions = torch.cat((F, h)), torch.cat((before, at))
        q, k, v = heads("q", h, at), heads("k", rows, positions), heads("v", rows, positions)
        group = len(q) // len(k)
        if wrong == "groups":
            k, v = k.repeat(group, 1, 1), v.repeat(group, 1, 1)
        else:
            k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = q @ k.transpose(1, 2) / (1 if wrong == "attention scale" else math.sqrt(hd))
        slides = window and (
            config["layer_types"][i] == "sliding_attention" or wrong == "all slide"
        )
        seen = mask & near if slides and wrong != "sliding as full" else mask
        out = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v
        x = x + out.transpose(0, 1).flatten(1) @ w[p + "self_attn.o_proj.weight"].T
        h = norm(x, w[p + "post_attention_layernorm.weight"], eps)
        gate, up = (h @ w[p + f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ w[p + "mlp.down_proj.weight"].T
    x = norm(x, w["norm.weight"], eps)
    from_anchor = dspark and config.get("sample_from_anchor", True)
    if wrong == "slot":
        x = x[:-1]
    elif not from_anchor:
        x = x[1:]
    logits = x @ model.get_output_embeddings().weight.float().T
    if not dspark:
        return logits, None
    # Both servers look for these at the top level, SGLang for the heads in a group as well.
    for key in ("block_size", "mask_token_id", "target_layer_ids"):
        assert config[key] == flash[key], key
    assert all(config[key] == value for key, value in config["dspark_config"].items())
    return in_turn(config, w, x, logits, [*prompt, anchor], wrong)
