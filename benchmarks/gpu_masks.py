"""The mask compiler on a CUDA GPU: checks first, then times. Under 4 minutes on an H200.

    python -m benchmarks.gpu_masks --out benchmarks/results.csv
    python -m benchmarks.gpu_masks --parts from_mask_mod attention --families natten tree
    python -m benchmarks.gpu_masks --device cpu --small      # what needs no GPU, in seconds

Times are medians of CUDA events; ratios are taken inside one run. Exits 1 where a check fails.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import maskgen
import maskgen.mask_mod as mask_mod_file
from benchmarks.bench_masks import doc_ids
from benchmarks.results import Results
from maskgen import TABLE_FIELDS, BlockTables, RowIntervals


@dataclass(frozen=True)
class Case:
    """A family at one size."""

    family: str
    Q_LEN: int
    KV_LEN: int
    params: dict[str, Any] = field(default_factory=dict)

    def spans(self) -> RowIntervals:
        """Canonical spans, made on the CPU."""
        return maskgen.families[self.family].intervals(self.Q_LEN, self.KV_LEN, **self.params)

    def analytic(self, device: str) -> Any:
        """The family's formula as a mask_mod on the device."""
        return maskgen.families[self.family].mask_mod(
            self.Q_LEN, self.KV_LEN, device=device, **self.params
        )


def draw_anchors(B: int, N: int, context: int, seed: int = 0) -> Tensor:
    """Sorted anchors, int32 ``[B, N]``."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(B, context, generator=generator).argsort(1)[:, :N]
    return drawn.sort(1).values.int()


def dflash(B: int, N: int, size: int, context: int) -> Case:
    """DFlash's mask for N draft blocks over a context."""
    params = {"draft_block_size": size, "anchors": draw_anchors(B, N, context)}
    return Case("dflash", N * size, context + N * size, params)


def every_family(L: int) -> list[Case]:
    """Each family at about L query rows; natten on a line and on a canvas."""
    eighth = L // 8
    depths = torch.arange(8, dtype=torch.int32).repeat_interleave(eighth)
    anchors = torch.arange(eighth, dtype=torch.int32).repeat(8)
    nodes = torch.arange(eighth, dtype=torch.int32)
    wide = 2 ** (math.log2(L) // 2)
    offsets = list(range(0, L + 1, eighth))
    return [
        dflash(1, L // 16, 16, 3 * eighth),
        Case("causal", L, L),
        Case("document", L, L, {"doc_ids": doc_ids(L, 8)}),
        Case("sliding_window", L, L, {"window": eighth}),
        Case("full", L, L),
        Case("prefix_lm", L, L, {"prefix": eighth}),
        Case("chunked", L, L, {"chunk": 2 * eighth}),
        Case("sink_window", L, L, {"sinks": 4, "window": eighth}),
        Case("block_diffusion", L, L, {"diffusion_block_size": 32}),
        Case("shared_prefix", L, L, {"doc_offsets": offsets, "prefix_docs": [0] * 4 + [4] * 4}),
        Case("global_prefix_window", L, L, {"global_tokens": 64, "radius": eighth // 2}),
        Case("eagle3_ttt", 2 * eighth, 16 * eighth),
        Case("p_eagle", L, L, {"num_depths": 8, "anchors": anchors, "depths": depths}),
        Case("natten", L, L, {"canvas": [L], "kernel": [eighth + 1]}),
        Case("natten", L, L, {"canvas": [int(L // wide), int(wide)], "kernel": [7, 7]}),
        Case(
            "tree",
            eighth,
            L,
            {"parents": torch.where(nodes % 8 == 0, -1, nodes - 1), "max_depth": 8},
        ),
    ]


def check_case(case: Case, BLOCK_SIZE: int | tuple[int, int], device: str) -> None:
    """Kernels, CPU builder and create_block_mask must agree."""
    spans = case.spans()
    ours = maskgen.compile_mask(spans, BLOCK_SIZE)
    on_device = spans.to(device)
    size = {"B": spans.B, "H": spans.H, "Q_LEN": spans.Q_LEN, "KV_LEN": spans.KV_LEN}
    found = BlockTables.empty(**size, BLOCK_SIZE=BLOCK_SIZE, device=device)
    for table in found.as_dict().values():
        table.fill_(-7)
    maskgen.tables_into(found, on_device.starts, on_device.ends)
    torchs = create_block_mask(
        case.analytic(device), spans.B, None, case.Q_LEN, case.KV_LEN, device, BLOCK_SIZE
    )
    for name in TABLE_FIELDS:
        mine, kernels, theirs = getattr(ours, name), getattr(found, name), getattr(torchs, name)
        if not torch.equal(kernels.cpu(), mine):
            raise SystemExit(f"{case.family} {BLOCK_SIZE}: {name} of the kernels differs")
        if name.endswith("indices"):
            counts = getattr(torchs, name.replace("indices", "num_blocks"))
            live = torch.arange(theirs.shape[-1], device=device) < counts[..., None]
            theirs = torch.where(live, theirs, 0)
        if not torch.equal(theirs.cpu(), mine):
            raise SystemExit(f"{case.family} {BLOCK_SIZE}: {name} of create_block_mask differs")


def check_all(results: Results, L: int, device: str) -> None:
    """Every family, some block sizes, ragged lengths, batches."""
    checks = 0
    for case in every_family(L):
        for BLOCK_SIZE in (128, (256, 128), (64, 32)):
            check_case(case, BLOCK_SIZE, device)
            checks += 1
    for case in (
        Case("causal", 1000, 777),
        Case("sliding_window", 300, 1300, {"window": 200, "offset": 1000}),
        dflash(4, 32, 8, 500),
        dflash(3, 100, 16, 1000),
    ):
        for BLOCK_SIZE in (16, 128, (48, 112), (1024, 16), (16, 1024)):
            check_case(case, BLOCK_SIZE, device)
            checks += 1
    results.add("kernels, CPU builder, create_block_mask", "equal tables", checks, "cases")


def graph_of(call: Callable[[], None], copies: int) -> torch.cuda.CUDAGraph:
    """The call, some times over, captured after a warm-up that compiles it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(copies):
            call()
    return graph


def event_us(call: Callable[[], Any], repeats: int) -> float:
    """Median time of a call on the GPU, in microseconds."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def in_graph_us(call: Callable[[], None]) -> float:
    """What the call takes inside a captured step: one of 20 copies in a graph."""
    return event_us(graph_of(call, 20).replay, 50) / 20


def check_replay(results: Results, device: str) -> None:
    """A graph captured over static buffers must follow anchors that change under it."""
    B, N, size, context = 4, 64, 16, 1024
    Q_LEN, KV_LEN = N * size, context + N * size
    anchors = draw_anchors(B, N, context).to(device)
    starts, ends = torch.zeros(2, B, 1, 2, Q_LEN, dtype=torch.int32, device=device)
    tables = BlockTables.empty(B=B, Q_LEN=Q_LEN, KV_LEN=KV_LEN, device=device)

    def step() -> None:
        maskgen.spans_into(
            starts, ends, "dflash", KV_LEN=KV_LEN, draft_block_size=size, anchors=anchors
        )
        maskgen.tables_into(tables, starts, ends)

    replay = graph_of(step, 1).replay if device == "cuda" else step
    for seed in range(1, 6):
        anchors.copy_(draw_anchors(B, N, context, seed))
        replay()
        spans = maskgen.dflash(Q_LEN, KV_LEN, draft_block_size=size, anchors=anchors.cpu())
        wanted = maskgen.compile_mask(spans, 128)
        for name in TABLE_FIELDS:
            if not torch.equal(getattr(tables, name).cpu(), getattr(wanted, name)):
                raise SystemExit(f"replay with anchors {seed}: {name} differs")
    results.add("dflash 64x16 at context 1024, B 4", "replays with new anchors", 5, "equal")


def time_tables(results: Results, small: bool) -> None:
    """Spans to all eight tables inside a graph, and create_block_mask beside it."""
    scale = 8 if small else 1
    long = (1 << 17) // scale
    cases = {
        "dflash 512x16, context 3072, B 1": dflash(1, 512 // scale, 16, 3072 // scale),
        "dflash 512x16, context 3072, B 4": dflash(4, 512 // scale, 16, 3072 // scale),
        f"causal {long}": Case("causal", long, long),
        "document 32 in 32768": Case(
            "document", 32768 // scale, 32768 // scale, {"doc_ids": doc_ids(32768 // scale, 32)}
        ),
    }
    for name, case in cases.items():
        spans = case.spans().to("cuda")
        tables = BlockTables.empty(B=spans.B, Q_LEN=spans.Q_LEN, KV_LEN=spans.KV_LEN, device="cuda")

        def ours(s: RowIntervals = spans, t: BlockTables = tables) -> None:
            maskgen.tables_into(t, s.starts, s.ends)

        us = in_graph_us(ours)
        results.add(name, "spans -> eight tables, in graph", us, "us")
        if case.family == "dflash":
            anchors = case.params["anchors"].cuda()
            given = {"KV_LEN": case.KV_LEN, "draft_block_size": 16, "anchors": anchors}
            buffers = spans.starts.clone(), spans.ends.clone()

            def both(given: Any = given, buffers: Any = buffers, t: Any = tables) -> None:
                maskgen.spans_into(*buffers, "dflash", **given)
                maskgen.tables_into(t, *buffers)

            results.add(name, "anchors -> spans, tables, in graph", in_graph_us(both), "us")
            mask_mod = case.analytic("cuda")

            def theirs(m: Any = mask_mod, c: Case = case, B: int = spans.B) -> None:
                create_block_mask(m, B, None, c.Q_LEN, c.KV_LEN, "cuda")

            theirs_us = event_us(theirs, 10)
            results.add(name, "create_block_mask, eager", theirs_us, "us", theirs_us / us)


def time_from_mask_mod(results: Results, device: str, length: int) -> None:
    """Reading the spans of packed documents off their mask_mod, and where the time goes."""
    ids = doc_ids(length, 32).to(device)
    case = f"document 32 in {length} x {length}"

    def read() -> RowIntervals:
        return maskgen.from_mask_mod(
            lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv),
            Q_LEN=length,
            KV_LEN=length,
            device=device,
        )

    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    for call in ("first call", "second call"):
        start = time.perf_counter()
        # Reading one span back waits for the device.
        int((spans := read()).ends[0, 0, 0, -1])
        results.add(case, f"from_mask_mod, {call}", time.perf_counter() - start, "s")
    if device == "cuda":
        added = (torch.cuda.max_memory_allocated() - before) / 2**20
        results.add(case, "from_mask_mod, added peak", added, "MiB")
    if not spans.to("cpu").equals(maskgen.document(length, length, doc_ids=ids.cpu())):
        raise SystemExit("from_mask_mod differs from the family")
    for part, seconds in split(read, ("_evaluate", "_tile_spans"), device).items():
        results.add(case, f"from_mask_mod, {part}, each tile waited for", seconds, "s")


def split(call: Callable[[], Any], parts: Sequence[str], device: str) -> dict[str, float]:
    """Seconds of a call of maskgen.mask_mod spent in some of its functions, the device in step."""
    seconds = dict.fromkeys(parts, 0.0)
    originals = {part: getattr(mask_mod_file, part) for part in parts}

    def timed(part: str) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            start = time.perf_counter()
            found = originals[part](*args)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds[part] += time.perf_counter() - start
            return found

        return run

    for part in parts:
        setattr(mask_mod_file, part, timed(part))
    try:
        call()
    finally:
        for part, original in originals.items():
            setattr(mask_mod_file, part, original)
    return seconds


def time_attention(results: Results, L: int, deadline: float, names: Sequence[str] | None) -> None:
    """Compiled attention, forward and backward: the spans' mask_mod against the family's own."""
    cases = every_family(L)
    if names is not None:
        cases = [case for name in names for case in cases if case.family == name]
    # One function for all: spans of equal shapes share its compiled kernels.
    torch._dynamo.config.recompile_limit = 256
    attention = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    skipped = []
    for case in cases:
        if time.perf_counter() < deadline:
            attention_case(results, case, attention)
        else:
            skipped.append(case.family)
    if skipped:
        print(f"out of time, attention not run for: {', '.join(skipped)}")


def attention_case(results: Results, case: Case, attention: Callable[..., Tensor]) -> None:
    """One family's attention through both mask_mods; outputs and gradients are compared."""
    spans = case.spans()
    tables = maskgen.compile_mask(spans, 128)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, n, 128, device="cuda", dtype=torch.bfloat16, generator=generator)
        for heads, n in ((32, case.Q_LEN), (8, case.KV_LEN), (8, case.KV_LEN))
    )
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    grad = torch.randn_like(q)
    mask_mods = {"analytic": case.analytic("cuda"), "spans": None}
    us, outputs = {}, {}
    for name, mask_mod in mask_mods.items():
        block_mask = maskgen.to_block_mask(tables, spans, "cuda", mask_mod)

        def step(block_mask: Any = block_mask) -> tuple[Tensor, ...]:
            out = attention(*inputs, block_mask=block_mask, enable_gqa=True)
            return (out.detach(), *torch.autograd.grad(out, inputs, grad))

        outputs[name] = step()
        us[name] = event_us(step, 20)
    equal = all(map(torch.equal, outputs["spans"], outputs["analytic"]))
    family = maskgen.families[case.family]
    taken = family.chosen_mask_mod(spans, "cuda", **case.params)
    chosen = "spans" if taken is None else "analytic"
    label = f"{case.family} K {spans.K}, chosen {chosen}, {'' if equal else 'NOT '}bit-equal"
    results.add(label, "flex fwd+bwd, analytic", us["analytic"] / 1e3, "ms")
    ratio = us["spans"] / us["analytic"]
    results.add(label, "flex fwd+bwd, spans", us["spans"] / 1e3, "ms", ratio)


PARTS = ("checks", "from_mask_mod", "tables", "attention")


def main() -> None:
    """Run all parts that the device can."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", help="CSV file to append to")
    parser.add_argument("--small", action="store_true", help="small sizes")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to run")
    parser.add_argument(
        "--families",
        nargs="+",
        choices=tuple(maskgen.families),
        help="attention of these families only, in this order",
    )
    parser.add_argument("--seconds", type=float, default=210.0, help="start no attention after")
    options = parser.parse_args()
    deadline = time.perf_counter() + options.seconds
    results = Results(f"masks-{options.device}", options.out, options.device)
    small, parts = options.small, options.parts
    if "checks" in parts:
        check_all(results, 512 if small else 2048, options.device)
        check_replay(results, options.device)
    if "from_mask_mod" in parts:
        time_from_mask_mod(results, options.device, 2048 if small else 32768)
    if "tables" in parts and options.device == "cuda":
        time_tables(results, small)
    if "attention" in parts and options.device == "cuda":
        time_attention(results, 1024 if small else 8192, deadline, options.families)


if __name__ == "__main__":
    main()
