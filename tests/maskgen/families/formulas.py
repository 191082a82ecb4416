"""Each family's formula for one cell, in plain Python integers: the oracle of the family tests.

Written from the sources that each function names, not from the package: one cell at a time, lists
in place of tensors, nothing shared with the code under test.
"""


def full(q, kv, Q, KV, b, lengths=None):
    # LLaDA: padded keys are hidden.
    return lengths is None or kv < lengths[b]


def causal(q, kv, Q, KV, b, offset=0):
    return q + offset >= kv


def sliding_window(q, kv, Q, KV, b, window, inclusive=False, offset=0):
    # Hugging Face: q - kv < W. attention-gym generate_sliding_window: q - kv <= W.
    distance = q + offset - kv
    return distance >= 0 and (distance <= window if inclusive else distance < window)


def sink_window(q, kv, Q, KV, b, sinks, window, offset=0):
    # StreamingLLM: the first tokens, and the recent ones.
    return kv <= q + offset and (kv < sinks or kv > q + offset - window)


def chunked(q, kv, Q, KV, b, chunk, offset=0):
    # transformers chunked_overlay and the causal mask.
    return kv <= q + offset and kv // chunk == (q + offset) // chunk


def prefix_lm(q, kv, Q, KV, b, prefix=None, prefix_lens=None, offset=0):
    # attention-gym generate_prefix_lm_mask.
    P = prefix if prefix_lens is None else prefix_lens[b]
    return kv < P or q + offset >= kv


def ids_of(offsets, T):
    """Document of each position from cumulative offsets, -1 past the last."""
    ids = [-1] * T
    for d in range(len(offsets) - 1):
        for position in range(offsets[d], offsets[d + 1]):
            ids[position] = d
    return ids


def row_of(table, b):
    """Batch row b of a nested list, or the one row that all share."""
    if isinstance(table[0], list):
        return table[b] if len(table) > 1 else table[0]
    return table


INNER = {
    "causal": causal,
    "full": full,
    "sliding_window": sliding_window,
    "sink_window": sink_window,
    "chunked": chunked,
    "prefix_lm": prefix_lm,
}


def document(
    q,
    kv,
    Q,
    KV,
    b,
    doc_ids=None,
    doc_offsets=None,
    inner="causal",
    doc_prefix_lens=None,
    **inner_params,
):
    # torchtitan: ids equal, and the inner mask_mod on positions within the document.
    ids = row_of(doc_ids, b) if doc_ids else ids_of(row_of(doc_offsets, b), max(Q, KV))
    if ids[q] != ids[kv] or ids[q] < 0:
        return False
    start = ids.index(ids[q])
    if doc_prefix_lens is not None:
        order = [i for i in dict.fromkeys(ids) if i >= 0]
        inner_params = {"prefix": row_of(doc_prefix_lens, b)[order.index(ids[q])]}
    return INNER[inner](q - start, kv - start, Q, KV, 0, **inner_params)


def shared_prefix(q, kv, Q, KV, b, doc_offsets, prefix_docs):
    # attention-gym generate_shared_prefix_mask_mod.
    ids = ids_of(row_of(doc_offsets, b), max(Q, KV))
    if ids[q] < 0 or ids[kv] < 0:
        return False
    prefix = row_of(prefix_docs, b)[ids[q]]
    return (ids[q] == ids[kv] and q >= kv) or (ids[kv] == prefix and prefix != ids[q])


def global_prefix_window(q, kv, Q, KV, b, global_tokens, radius):
    # Longformer section 3.1; attention-gym generate_global_sliding_window.
    return abs(q - kv) <= radius or q < global_tokens or kv < global_tokens


def block_diffusion(q, kv, Q, KV, b, diffusion_block_size, variant="training", doc_offsets=None):
    # block_diff_mask in kuleshov-group/bd3lms models/dit.py; SDAR: the same for each document.
    size = diffusion_block_size
    if variant == "block_causal":
        return q // size >= kv // size
    start, n = 0, Q // 2
    if variant == "packed":
        offsets = row_of(doc_offsets, b)
        ids = ids_of([2 * offset for offset in offsets], Q)
        if ids[q] != ids[kv] or ids[q] < 0:
            return False
        start, n = 2 * offsets[ids[q]], offsets[ids[q] + 1] - offsets[ids[q]]
    x0_q, x0_kv = q - start >= n, kv - start >= n
    block_q, block_kv = (q - start) % n // size, (kv - start) % n // size
    block_diagonal = block_q == block_kv and x0_q == x0_kv
    offset_block_causal = block_q > block_kv and x0_kv and not x0_q
    block_causal = block_q >= block_kv and x0_kv and x0_q
    return block_diagonal or offset_block_causal or block_causal


def dflash(
    q,
    kv,
    Q,
    KV,
    b,
    draft_block_size,
    anchors,
    n_valid=None,
    doc_ids=None,
    layer="full",
    in_block="default",
    window=None,
    convention="specforge",
):
    # SpecForge create_dflash_block_mask, with NeMo's padded block that sees itself.
    B, W, S = draft_block_size, window, KV - Q
    j, off = q // B, q % B
    anchor = row_of(anchors, b)[j]
    keep = n_valid is None or j < n_valid[b if len(n_valid) > 1 else 0]
    if kv < S:
        if not keep or kv >= anchor:
            return False
        if doc_ids is not None:
            ids = row_of(doc_ids, b)
            if ids[kv] != ids[anchor] or ids[kv] < 0:
                return False
        if layer == "full":
            return True
        if convention.startswith("speculators"):
            return kv >= anchor - W
        if convention == "nemo":
            return (anchor + off) - kv < W
        if convention == "modelopt":
            return kv > anchor + off - W
        return kv >= anchor + off - (W - 1)
    if (kv - S) // B != j:
        return False
    koff = (kv - S) % B
    causal_in_block = layer == "sliding" and convention in (
        "specforge",
        "speculators",
        "sglang",
        "vllm",
    )
    if in_block != "default":
        causal_in_block = in_block == "causal"
    if causal_in_block and koff > off:
        return False
    if layer == "sliding" and convention in ("sglang", "vllm"):
        # window_left = sliding_window - 1 over positions anchor + slot.
        return (anchor + off) - (anchor + koff) <= W - 1
    return True


def eagle3_ttt(q, kv, Q, KV, b, variant="specforge", lengths=None, doc_ids=None, window=None):
    L, t = Q, KV // Q - 1
    if variant == "specforge":
        n = (L if lengths is None else lengths[b if len(lengths) > 1 else 0]) - t
        causal_part = q >= kv and q < n and kv < n
        suffix = kv >= L and kv % L < n and (kv - q) % L == 0
        return causal_part or suffix
    if variant == "speculators":
        first = kv < L and q >= kv and (window is None or kv > q - window)
        if doc_ids is not None and kv < L:
            ids = row_of(doc_ids, b)
            first = first and ids[q] == ids[kv] and ids[kv] != -1
        return first or (kv % L == q and kv >= L)
    diagonals = (kv == q + i * L - (t - i) and kv >= i * L for i in range(1, t + 1))
    return kv <= q - t or any(diagonals)


def p_eagle(q, kv, Q, KV, b, num_depths, anchors, depths, doc_ids=None, window=None):
    a, d = row_of(anchors, b), row_of(depths, b)
    doc = row_of(doc_ids, b) if doc_ids else [0] * Q
    if d[q] < 0 or d[kv] < 0 or doc[q] != doc[kv] or doc[q] == -1:
        return False
    near = window is None or a[kv] > a[q] + d[q] - window
    return (d[kv] == 0 and a[q] >= a[kv] and near) or (a[q] == a[kv] and d[q] >= d[kv])


def tree(q, kv, Q, KV, b, parents, max_depth=None):
    P, up = KV - Q, row_of(parents, b)
    ancestors, node = {q}, q
    while up[node] >= 0:
        node = up[node]
        ancestors.add(node)
    return kv < P or kv - P in ancestors


def natten(q, kv, Q, KV, b, canvas, kernel):
    # attention-gym generate_natten: the window's middle is clamped to the canvas.
    W = canvas[-1]
    inside = True
    for at, to, size, cells in zip(
        (q // W, q % W)[-len(canvas) :],
        (kv // W, kv % W)[-len(canvas) :],
        kernel,
        canvas,
        strict=True,
    ):
        middle = min(max(at, size // 2), cells - 1 - size // 2)
        inside = inside and abs(middle - to) <= size // 2
    return inside


FORMULAS = {
    "full": full,
    "causal": causal,
    "sliding_window": sliding_window,
    "sink_window": sink_window,
    "chunked": chunked,
    "prefix_lm": prefix_lm,
    "document": document,
    "shared_prefix": shared_prefix,
    "global_prefix_window": global_prefix_window,
    "block_diffusion": block_diffusion,
    "dflash": dflash,
    "eagle3_ttt": eagle3_ttt,
    "p_eagle": p_eagle,
    "tree": tree,
    "natten": natten,
}
