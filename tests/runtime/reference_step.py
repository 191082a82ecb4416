"""DFlash training in plain fp64: one sample and one anchor at a time, nothing padded.

Written from docs/families.md, DESIGN.md and the DFlash paper (arXiv 2602.06036), not from the
runtime: no buckets, no flat tensors, no chunks, no collectives. Autograd of torch gives the
gradients. A block is computed by itself, over the context before its anchor, since nothing else
may reach it; a block without weight is not computed at all.
"""

import math
from collections import Counter

import torch


class Reference:
    """A drafter, its optimizer and the sums of a step.

    Args:
        weights: First weights by their published names.
        embed: ``[V, H]``.
        head: ``[V, H]``.
        feature_scale: One number for each fused layer.
        network: Sizes: ``heads``, ``kv_heads``, ``head_dim``, ``layers``, ``block``, ``mask_id``,
            ``theta``, ``eps``, ``embedding_scale``, and ``windows``, which may be left out: of each
            layer the keys that a row sees, itself counted, or None where it is a full one.
        train: ``lr``, ``min_lr_ratio``, ``warmup``, ``steps``, ``betas``, ``weight_decay``,
            ``clip``, ``gamma``; ``dpace_alpha`` where the loss is D-PACE, else None;
            ``distill``, kind and share, where features end with the target's last hidden state;
            and ``tokens``, where the loss is over these alone.
    """

    def __init__(self, weights, *, embed, head, feature_scale, network, train):
        self.weights = {
            name: weight.detach().double().clone().requires_grad_()
            for name, weight in weights.items()
        }
        self.embed, self.head = embed.double(), head.double()
        self.feature_scale = [float(scale) for scale in feature_scale]
        self.network, self.train = network, train
        self.drafts = network["block"] - 1 + bool(network.get("from_anchor"))
        self.moments = {
            name: (torch.zeros_like(weight), torch.zeros_like(weight))
            for name, weight in self.weights.items()
        }
        self.begun = self.taken = 0
        self.lr = self.grad_norm = 0.0

    def step(self, samples):
        """Train on a global batch of ``(input_ids, supervised, features, anchors)``.

        Input ids and supervised are lists over the sample's own tokens, features ``[S, K*H]``,
        anchors the drawn positions, some of which may carry no weight or lie past the sample.

        Returns:
            The sums of the step by the names of the log.
        """
        sums = Counter()
        losses = []
        for input_ids, supervised, features, anchors in samples:
            last = None
            if self.train.get("distill"):
                features, last = features.double().split(
                    [features.shape[1] - self.head.shape[1], self.head.shape[1]], dim=1
                )
            memory = self.memory(self.fused(features))
            for anchor in anchors:
                sums["anchors"] += 1
                labels = self.labels(input_ids, supervised, anchor)
                if not labels:
                    continue
                sums["anchors_kept"] += 1
                hidden = self.hidden(memory, input_ids[anchor], anchor)
                logits = self.with_markov_head(hidden @ self.head.T, input_ids, anchor)
                if self.train.get("tokens"):
                    others = torch.ones(len(self.head), dtype=torch.bool)
                    others[self.train["tokens"]] = False
                    logits = logits.masked_fill(others, -math.inf)
                # The target read the text up to the token before the one that it predicts.
                taught = {
                    slot: (self.head @ last[anchor + slot - 1]).softmax(0)
                    for slot in (labels if last is not None else ())
                }
                losses += self.count(sums, logits, labels, taught)
                if "confidence_head.proj.bias" in self.weights:
                    losses += self.confidence(
                        sums, hidden, logits, labels, taught, input_ids, anchor
                    )
        loss = sum(losses) if losses else None
        self.update(loss, sums["weight"])
        return sums

    def labels(self, input_ids, supervised, anchor):
        """Slot -> the token that it should draft; empty where the anchor does not count."""
        last = len(input_ids) - 1
        if anchor + 1 > last or not supervised[anchor] or not supervised[anchor + 1]:
            return {}
        return {
            slot: input_ids[anchor + slot]
            for slot in range(1, self.drafts + 1)
            if anchor + slot <= last and supervised[anchor + slot]
        }

    def count(self, sums, logits, labels, taught):
        """Add a block's sums; gives its weighted losses."""
        gamma, alpha = self.train["gamma"], self.train["dpace_alpha"]
        losses, right = [], {}
        entropy = {
            slot: logits[slot].logsumexp(0) - logits[slot][label] for slot, label in labels.items()
        }
        learned = self.dpace(entropy, alpha) if alpha else {}
        for slot, label in labels.items():
            weight = 1.0 if alpha or not gamma else math.exp(-(slot - 1) / gamma)
            loss = entropy[slot]
            if slot in taught:
                kind, share = self.train["distill"]
                p, q = taught[slot], logits[slot].softmax(0)
                loss = (1 - share) * loss + share * self.distance(kind, p, q)
                sums["overlap"] += torch.minimum(p, q).sum().item()
            losses.append(learned.get(slot, weight) * loss)
            right[slot] = int(logits[slot].argmax()) == label
            sums["loss"] += weight * entropy[slot].item()
            sums["weight"] += weight
            sums["tokens"] += 1
            sums[f"count_{slot}"] += 1
            sums[f"correct_{slot}"] += right[slot]
        if len(labels) == self.drafts:
            sums["blocks"] += 1
            sums["accepted"] += 1
            for slot in sorted(right):
                if not right[slot]:
                    break
                sums["accepted"] += 1
        return losses

    def distance(self, kind, p, q):
        """Of the target's distribution p and the drafter's q, both ``[V]``."""
        l1, kl = (p - q).abs().sum(), (p * (p / q).log()).sum()
        if kind == "lk":
            far = math.exp(-3 * (1 - l1.item() / 2))
            return far * kl + (1 - far) * l1 / 2
        return {"l1": l1, "kl": kl}[kind]

    def dpace(self, entropy, alpha):
        """Slot -> its weight: the lengths, from it on, up to which all slots are right."""
        chance = {slot: (1 - alpha) * math.exp(-e.item()) + alpha for slot, e in entropy.items()}
        return {
            slot: sum(
                math.prod(chance[before] for before in chance if before <= last)
                for last in chance
                if last >= slot
            )
            for slot in chance
        }

    # The network

    def fused(self, features):
        """Features ``[S, K*H]`` of the target into the context ``[S, H]`` of every layer."""
        parts = features.double().chunk(len(self.feature_scale), dim=1)
        scaled = [part / scale for part, scale in zip(parts, self.feature_scale, strict=True)]
        return self.norm(torch.cat(scaled, dim=1) @ self.weights["fc.weight"].T, "hidden_norm")

    def memory(self, context):
        """Keys and values ``[S, kv_heads, d]`` of the whole context, in every layer."""
        positions = range(len(context))
        return [
            self.key_value(f"layers.{layer}.self_attn.", context, positions)
            for layer in range(self.network["layers"])
        ]

    def confidence(self, sums, hidden, logits, labels, taught, input_ids, anchor):
        """What the confidence head adds to the loss: cross entropy with the overlap of now."""
        proj, bias = (self.weights[f"confidence_head.proj.{name}"] for name in ("weight", "bias"))
        gamma, losses = self.train["gamma"], []
        for slot in labels:
            before = self.weights["markov_head.markov_w1.weight"][input_ids[anchor + slot - 1]]
            sure = torch.sigmoid(proj[0] @ torch.cat((hidden[slot], before)) + bias[0])
            q = logits[slot].softmax(0).detach()
            common = torch.minimum(taught[slot], q).sum()
            weight = 1.0
            if gamma and not self.train["dpace_alpha"]:
                weight = math.exp(-(slot - 1) / gamma)
            entropy = -common * sure.log() - (1 - common) * (1 - sure).log()
            losses.append(weight * entropy)
            sums["confidence"] += weight * entropy.item()
        return losses

    def draft(self, memory, token, anchor):
        """Logits ``[block, V]`` of one block, without those of a Markov head."""
        return self.hidden(memory, token, anchor) @ self.head.T

    def hidden(self, memory, token, anchor):
        """What the head reads of one block, ``[block, H]``."""
        tokens = [token] + [self.network["mask_id"]] * (self.network["block"] - 1)
        x = self.embed[tokens] * self.network["embedding_scale"]
        for layer, (keys, values) in enumerate(memory):
            # The context strictly before the anchor; its own state is not known when drafting.
            window = self.network["windows"][layer] if "windows" in self.network else None
            keys, values = keys[:anchor], values[:anchor]
            x = self.decoder_layer(f"layers.{layer}.", x, keys, values, anchor, window)
        x = self.norm(x, "norm")
        # Where a slot drafts the token after its own, each stands one place further.
        return torch.cat((x[:1], x)) if self.network.get("from_anchor") else x

    def with_markov_head(self, logits, input_ids, anchor):
        """Slot by slot: the true token before it adds to its logits (DSpark, arXiv 2607.05147)."""
        if "markov_head.markov_w1.weight" not in self.weights:
            return logits
        first, second = (self.weights[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
        rows = [logits[0]]
        for slot in range(1, len(logits)):
            before = anchor + slot - 1
            known = before < len(input_ids)
            rows.append(logits[slot] + second @ first[input_ids[before]] if known else logits[slot])
        return torch.stack(rows)

    def decode(self, memory, token, anchor):
        """Drafts of a block, slot 0 the known token: each follows from the one before it."""
        logits = self.draft(memory, token, anchor)
        text = {anchor: token}
        for slot in range(1, len(logits)):
            ids = [text.get(at, 0) for at in range(anchor + slot)]
            text[anchor + slot] = int(self.with_markov_head(logits, ids, anchor)[slot].argmax())
        return list(text.values())

    def decoder_layer(self, at, x, keys, values, anchor, window):
        normed = self.norm(x, f"{at}input_layernorm")
        positions = [anchor + slot for slot in range(len(x))]
        # Every slot sees the whole block, in both directions; in a sliding layer the last
        # so many positions up to its own.
        own = self.key_value(f"{at}self_attn.", normed, positions)
        keys, values = torch.cat((keys, own[0])), torch.cat((values, own[1]))
        queries = self.norm(self.heads(f"{at}self_attn.q_proj", normed), f"{at}self_attn.q_norm")
        queries = self.turned(queries, positions)
        ranges = [slice(None)] * len(queries)
        if window is not None:
            ranges = [slice(max(0, p + 1 - window), p + 1) for p in positions]
        seen = torch.stack(
            [
                self.attend(query, keys[near], values[near])
                for query, near in zip(queries, ranges, strict=True)
            ]
        )
        x = x + seen @ self.weights[f"{at}self_attn.o_proj.weight"].T
        return x + self.mlp(f"{at}mlp.", self.norm(x, f"{at}post_attention_layernorm"))

    def key_value(self, at, rows, positions):
        keys = self.norm(self.heads(f"{at}k_proj", rows), f"{at}k_norm")
        return self.turned(keys, positions), self.heads(f"{at}v_proj", rows)

    def heads(self, name, rows):
        wide = rows @ self.weights[f"{name}.weight"].T
        return wide.view(len(rows), -1, self.network["head_dim"])

    def attend(self, query, keys, values):
        """One row ``[heads, d]`` over ``[T, kv_heads, d]``; consecutive heads share a key head."""
        group = self.network["heads"] // self.network["kv_heads"]
        found = []
        for head, q in enumerate(query):
            scores = keys[:, head // group] @ q / math.sqrt(self.network["head_dim"])
            found.append(scores.softmax(0) @ values[:, head // group])
        return torch.cat(found)

    def mlp(self, at, x):
        gate = x @ self.weights[f"{at}gate_proj.weight"].T
        up = x @ self.weights[f"{at}up_proj.weight"].T
        return (gate / (1 + torch.exp(-gate)) * up) @ self.weights[f"{at}down_proj.weight"].T

    def norm(self, x, name):
        mean = (x * x).mean(-1, keepdim=True)
        return x / torch.sqrt(mean + self.network["eps"]) * self.weights[f"{name}.weight"]

    def turned(self, x, positions):
        """RoPE on ``[T, heads, d]``: the pair (i, i + d/2) turns by position * theta^(-2i/d)."""
        d = self.network["head_dim"]
        speed = self.network["theta"] ** (-2 * torch.arange(d // 2).double() / d)
        angle = torch.tensor(list(positions)).double()[:, None, None] * speed
        a, b = x[..., : d // 2], x[..., d // 2 :]
        return torch.cat(
            (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1
        )

    # The optimizer

    def update(self, loss, weight):
        """AdamW on the global weighted mean, with clip, warm-up, cosine and bias correction."""
        t, number = self.train, self.begun
        self.begun += 1
        done = (number - t["warmup"]) / max(1, t["steps"] - t["warmup"])
        cosine = (1 + math.cos(math.pi * min(max(done, 0), 1))) / 2
        falling = t["min_lr_ratio"] + (1 - t["min_lr_ratio"]) * cosine
        self.lr = t["lr"] * min((number + 1) / max(1, t["warmup"]), falling)
        if loss is None:
            self.grad_norm = 0.0
            return
        names = list(self.weights)
        grads = torch.autograd.grad(loss / weight, [self.weights[name] for name in names])
        self.grad_norm = math.sqrt(sum((grad * grad).sum().item() for grad in grads))
        clip = min(1.0, t["clip"] / (self.grad_norm + 1e-6)) if t["clip"] else 1.0
        self.taken += 1
        first, second = t["betas"]
        for name, grad in zip(names, grads, strict=True):
            old, (mean, square) = self.weights[name].detach(), self.moments[name]
            mean = first * mean + (1 - first) * grad * clip
            square = second * square + (1 - second) * (grad * clip) ** 2
            self.moments[name] = mean, square
            corrected = mean / (1 - first**self.taken)
            spread = (square / (1 - second**self.taken)).sqrt() + 1e-8
            decay = t["weight_decay"] if old.dim() > 1 else 0.0
            new = old - self.lr * decay * old - self.lr * corrected / spread
            self.weights[name] = new.requires_grad_()
