"""The ways to measure a case of `gpu_cases`: in graphs, in calls, in training steps, on the host.

Results are compared before anything is timed, and so are those of a captured graph, in memory that
was NaN before. Without a GPU, which is for tests, the host's clock and loops take its place.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from time import perf_counter, sleep
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from rung.core import trace
from rung.frontends.torch.tensors import cloned
from rung.tools import first_call, models
from rung.tools.gpu_cases import Built, Case, Run, traffic
from rung.tools.measure import counted

SETS, MOST_SETS, ROTATED = 2, 32, 240 << 20  # sets of arguments, which outgrow any cache together
SAMPLE, KEPT = 1e-3, 8 << 30  # seconds of one graph, and bytes of the results that it keeps
ROUNDS, GAP = 11, 0.02  # rounds of all contenders, and seconds of rest before each
HOST_CALLS, SLACK = 2000, 8e-6
NEW_TOKENS, PROMPT = 32, 8
OURS = ("rung", "rung-graphs")
GRAPHS = ("reduce-overhead", "rung-graphs")  # which capture by themselves
Row = dict[str, Any]
Args = Sequence[Any]
Thunk = Callable[[], Any]


# --- contenders

def contender(function: Run, name: str) -> Run:
    """`function` as it is, or compiled; `dynamo` is what Dynamo alone costs."""
    if name == "eager":
        return function
    if name == "dynamo":
        return torch.compile(function, backend=_nothing, dynamic=False)
    mode = "reduce-overhead" if name in GRAPHS else None
    backend = "rung" if name in OURS else "inductor"
    return torch.compile(function, backend=backend, mode=mode, dynamic=False)


def _nothing(gm: torch.fx.GraphModule, inputs: Args) -> Run:
    """A backend whose calls do nothing."""
    results: list[object] = []

    def run(*args: object) -> Args:
        if not results:
            results.extend(gm(*args))
        return results
    return run


def contenders(case: Case, against: Sequence[str]) -> tuple[str, ...]:
    """Those of a case, of which `against` may leave some out."""
    kept = {*against, *OURS, "dynamo"} | ({"reduce-overhead"} if "inductor" in against else set())
    return ("rung", *(p for p in case.peers if p in kept))


# --- the devices' clock

CUDA: Any = torch.cuda  # much of which has no types


def _place() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(run: Thunk) -> float:
    """The device's seconds of a call; the host's where there is no GPU."""
    if not torch.cuda.is_available():
        start = perf_counter()
        run()
        return perf_counter() - start
    start, end = (CUDA.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def captured(calls: Sequence[Thunk]) -> tuple[Thunk, Args]:
    """Several calls as one graph, and their results, each in memory of its own; without a GPU, what
    does the same."""
    if not torch.cuda.is_available():
        first = [call() for call in calls]
        return partial(_again, calls, first), first
    side = CUDA.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    return graph.replay, kept


def _again(calls: Sequence[Thunk], kept: Args) -> None:
    """Calls whose results go to the memory of earlier ones."""
    for call, old in zip(calls, kept, strict=True):
        for x, y in zip(tree_leaves(old), tree_leaves(call()), strict=True):
            x.copy_(y)


def rounds(runs: Mapping[str, tuple[Thunk, int]], quick: bool) -> dict[str, float]:
    """Median seconds of each run over its count of calls, in random order with rests between."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(3 if quick else ROUNDS):
        for name in random.sample(list(runs), len(runs)):
            run, count = runs[name]
            sleep(GAP)
            if torch.cuda.is_available():
                run()  # the timed one starts while it runs, not after the host has waited
            times[name].append(seconds(run) / count)
    return {name: median(found) for name, found in times.items()}


def copy_rate() -> float:
    """Bytes a second that a copy of 1 GiB reads and writes; of less where there is no GPU."""
    x = torch.empty(1 << (30 if torch.cuda.is_available() else 20), dtype=torch.uint8,
                    device=_place()).random_()
    y = torch.empty_like(x)
    spent = rounds({"copy": (partial(_all, [partial(y.copy_, x)] * 4), 4)}, False)["copy"]
    return 2 * x.nbytes / spent


def poison(results: object) -> None:
    """Leave NaN in the memory that results like these will be given next."""
    tensors = [x for x in tree_leaves(results) if isinstance(x, torch.Tensor) and x.numel()]
    kept = [_spoilt(torch.empty_like(x)) for x in tensors for _ in range(3)]
    size = 64 << 20 if torch.cuda.is_available() else 1 << 20
    kept += [torch.full((size,), 255, dtype=torch.uint8, device=x.device) for x in tensors[:1]]
    del kept


def _spoilt(x: torch.Tensor) -> torch.Tensor:
    return x.detach().fill_(torch.nan if x.is_floating_point() else 77)


# --- right first

def errors(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor], norm: float
           ) -> list[float]:
    """The norm of each result's error over that of the exact one; NaN is infinitely wrong."""
    def size(x: torch.Tensor) -> float:
        return float(torch.linalg.vector_norm(x.double(), norm)) if x.numel() else 0.0
    pairs = zip(found, exact, strict=True)
    relative = [size(x.double() - y.double()) / max(size(y), 1e-30) for x, y in pairs]
    return [e if e == e else float("inf") for e in relative]


def wrong(found: Sequence[float], eagers: Sequence[float], little: Sequence[float]) -> str:
    """Which result errs more than twice as much as eager's, and a little; "" if none does."""
    for n, (x, y, more) in enumerate(zip(found, eagers, little, strict=True)):
        if x > 2 * y + more:
            return f"result {n} is off by {x:.2e}, where eager is by {y:.2e}"
    return ""


def _little(x: torch.Tensor) -> float:
    return 4 * torch.finfo(x.dtype if x.is_floating_point() else torch.float32).eps


def exactly(args: Any, dtype: torch.dtype = torch.float64) -> Any:
    """Arguments, modules among them, in a wide type."""
    def wide(x: object) -> object:
        if isinstance(x, torch.nn.Module):
            return copy.deepcopy(x).to(dtype)
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            return x.detach().to(dtype).requires_grad_(x.requires_grad)
        return x
    return tree_map(wide, args)


def compared(case: Case, runs: Mapping[str, Run], args: Args
             ) -> tuple[Row, Callable[[object], str]]:
    """What is wrong with each contender's results, the seconds of its first call, what Rung made of
    it, and what judges other results of the same arguments."""
    train = case.how == "step"

    def outcome(run: Run, given: Args, call: Run = CALLS[case.how]) -> list[torch.Tensor]:
        made = tree_leaves(call(run, given))
        written = [x for x in given if isinstance(x, torch.Tensor) and x.is_floating_point()]
        return [x.detach() for x in (*made, *written)]
    eager = outcome(runs["eager"], _copies(args))
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        exact = (outcome(runs["eager"], exactly(args, torch.float32), partial(
            gradients, half=False)) if train else outcome(runs["eager"], exactly(args)))
    order = 2.0 if train else float("inf")
    eagers = errors(eager, exact, order)
    little = [_little(x.bfloat16() if train else x) for x in eager]

    def judged(results: object) -> str:
        found = tree_leaves(results)
        rows = slice(len(found))
        return wrong(errors(found, exact[rows], order), eagers[rows], little[rows])
    bad, first, counts = dict[str, str](), dict[str, float](), dict[str, int]()
    for name, run in runs.items():
        given = _copies(args)
        poison(eager)
        synchronize()
        start = perf_counter()
        with trace.listen() as events:
            results = outcome(run, given)
        synchronize()
        first[name] = perf_counter() - start
        counts |= counted(events) if name == "rung" else {}
        if name != "eager" and (said := judged(results)):
            bad[name] = said
        del results, given
    return {"wrong": bad, "first_call_seconds": first, **counts}, judged


def _copies(args: Args) -> Args:
    return tuple(y.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
                 for x, y in zip(args, cloned(args), strict=True))


def plain(run: Run, args: Args) -> Any:
    with torch.no_grad():
        return run(*args)


def backward(run: Run, args: Args) -> Any:
    """A result and the gradients of all that needs one, for the cotangent that comes last."""
    y = run(*args[:-1])
    wanted = [x for x in args[:-1] if x.requires_grad]
    return y.detach(), *torch.autograd.grad(y, wanted, args[-1])


def gradients(run: Run, args: Args, half: bool = True) -> Any:
    """A loss and the gradients of the model that is the first argument, as one vector."""
    with torch.autocast(_place(), torch.bfloat16, enabled=half):
        loss = run(*args)
    found = torch.autograd.grad(loss, [p for p in args[0].parameters() if p.requires_grad])
    return loss.detach(), torch.cat([g.float().flatten() for g in found])


CALLS = {"graph": plain, "calls": plain, "backward": backward, "step": gradients}


# --- the ways to measure

def sets_of(case: Case, quick: bool) -> list[Built]:
    """Functions and arguments, as many as outgrow the caches."""
    made = [case.build(quick, _place())]
    if case.how in ("graph", "backward"):
        more = -(-ROTATED // max(traffic(made[0][1], ()), 1))
        made += [case.build(quick, _place())
                 for _ in range(1, 2 if quick else min(max(SETS, more), MOST_SETS))]
    if case.how == "backward":
        for _, args in made:
            for x in args[:-1]:
                x.requires_grad_(x.is_floating_point())
    return made


def _next_step() -> None:
    """Tell Inductor's graphs that the results of the last step may go."""
    begin: Callable[[], None] = torch.compiler.cudagraph_mark_step_begin
    begin()


def _begun(step: Thunk, name: str) -> Thunk:
    """A step with what comes before it."""
    def run() -> object:
        if name == "reduce-overhead":
            _next_step()
        return step()
    return run


def in_graphs(case: Case, against: Sequence[str], quick: bool) -> Row:
    """Seconds of calls: captured, but for the modes that capture by themselves."""
    sets, call = sets_of(case, quick), CALLS[case.how]
    (function, args), names = sets[0], contenders(case, against)
    runs = {name: contender(function, name) for name in dict.fromkeys((*names, "eager"))}
    row, judged = compared(case, runs, args)
    size = sum(x.nbytes for x in tree_leaves(call(function, args)))
    timed = dict[str, tuple[Thunk, int]]()
    for name in names:
        thunks = [_begun(partial(call, runs[name], given), name) for _, given in sets]
        every = partial(_all, thunks)
        every()
        once, most = seconds(every), max(1, KEPT // max(size * len(sets), 1))
        thunks *= 1 if quick else max(1, min(8, most, round(SAMPLE / once)))
        timed[name] = partial(_all, thunks), len(thunks)
        if name in GRAPHS:
            continue
        replay, kept = captured(thunks)
        for x in tree_leaves(kept):
            _spoilt(x)
        replay()
        if said := judged(kept[0]):
            row["wrong"].setdefault(name, f"captured: {said}")
        timed[name] = partial(_replayed, replay, kept), len(thunks)
    return row | {"seconds": rounds(timed, quick), "bytes": traffic(args, ()) + size}


def _all(thunks: Sequence[Thunk]) -> None:
    for thunk in thunks:
        thunk()


def _replayed(replay: Thunk, kept: object) -> None:
    """A replay of a graph whose results are `kept` while it lives."""
    replay()


def in_calls(case: Case, against: Sequence[str], quick: bool) -> Row:
    """Seconds of forward calls of a model, or of its training steps, and the memory they take."""
    ((function, args),), names = sets_of(case, quick), contenders(case, against)
    runs = {name: contender(function, name) for name in dict.fromkeys((*names, "eager"))}
    row, _ = compared(case, runs, args)
    step = partial(_trained, _optimizer(args[0])) if case.how == "step" else plain
    timed, memory = dict[str, tuple[Thunk, int]](), dict[str, int]()
    for name in names:
        run = _begun(partial(step, runs[name], args), name)
        for _ in range(1 if quick else 4):
            run()
        memory[name] = _peak(run)
        count = 1 if quick else max(2, round(0.05 / max(seconds(run), 1e-5)))
        timed[name] = partial(_all, [run] * count), count
    return row | {"seconds": rounds(timed, quick), "peak_bytes": memory}


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-5, fused=True)


def _trained(optimizer: torch.optim.Optimizer, run: Run, args: Args) -> None:
    with torch.autocast(_place(), torch.bfloat16):
        loss = run(*args)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _peak(run: Thunk) -> int:
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated())


def on_the_host(case: Case, against: Sequence[str], quick: bool) -> Row:
    """The host's seconds of a call, the median of many, with few at a time under way."""
    ((function, args),), names = sets_of(case, quick), contenders(case, against)
    runs = {name: contender(function, name) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    with torch.no_grad():
        for _ in range(3 if quick else 2 * ROUNDS):
            for name in random.sample(names, len(names)):
                run = runs[name]
                run(*args)
                synchronize()
                for _ in range(10 if quick else HOST_CALLS // 2 // ROUNDS):
                    start = perf_counter()
                    run(*args)
                    times[name].append(perf_counter() - start)
                synchronize()
    found = {name: median(t) for name, t in times.items()}
    if "dynamo" in found:
        found["dynamo + 8 us"] = found["dynamo"] + SLACK
    return {"seconds": found}


def first_calls(case: Case, against: Sequence[str], quick: bool) -> Row:
    """Seconds of the first call in a new process with an empty cache."""
    names = [n for n in contenders(case, against) if n in ("rung", "inductor")]
    found = {name: first_call.measure(name, case.name, "quick" if quick else "cuda")
             for name in names}
    return {"seconds": {name: t["wall"] for name, t in found.items()}, "first_call": found}


def decoded(case: Case, against: Sequence[str], quick: bool) -> Row:
    """Seconds of greedy tokens over a static cache. The tokens of each contender must be eager's,
    but where eager's own error in the logits is as large as what decides."""
    (_, (model, sizes)), names = case.build(quick, _place()), contenders(case, against)
    decoder, wide = models.Decoder(model, sizes), copy.deepcopy(model).float()
    kept, logits = _tokens(decoder, model)
    exact = _tokens(models.Decoder(wide, sizes), wide, kept)[1]
    del wide
    top, off = exact.topk(2).values, (logits - exact).abs().amax(1)
    sure, eager = top[:, 0] - top[:, 1] > 2 * off, errors([logits], [exact], 2.0)
    bad, first, told = dict[str, str](), dict[str, float](), dict[str, int]()
    timed, counts = dict[str, tuple[Thunk, int]](), dict[str, int]()
    for name in names:
        run, start = contender(model, name), perf_counter()
        with trace.listen() as events:
            mine, found = _tokens(decoder, run, kept)
        first[name], same = perf_counter() - start, mine == kept
        counts |= counted(events) if name == "rung" else {}
        told[name] = int(same.sum())
        if said := wrong(errors([found], [exact], 2.0), eager, [_little(found.bfloat16())]):
            bad[name] = said
        elif not bool(same[sure].all()):
            bad[name] = f"token {int((~same & sure).nonzero()[0])} is another than eager's"
        timed[name] = partial(_tokens, decoder, run), NEW_TOKENS
    return {"seconds": rounds(timed, quick), "wrong": bad, "first_call_seconds": first,
            "tokens_equal": told, "tokens_sure": int(sure.sum()), **counts}


def _tokens(decoder: models.Decoder, run: Run, given: torch.Tensor | None = None
            ) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens after a prompt and their logits; `given` ones are fed instead. The prompt is read
    in eager."""
    decoder.forward = decoder.model
    last = decoder.start(torch.arange(PROMPT, device=_place())[None])
    decoder.forward, found, rows = run, list[torch.Tensor](), list[torch.Tensor]()
    for n in range(NEW_TOKENS):
        rows.append(last.float().clone())
        found.append(last.argmax())
        _next_step()
        last = decoder.step((found[-1] if given is None else given[n]).reshape(1, 1))
    return torch.stack(found), torch.stack(rows)


WAYS = {"graph": in_graphs, "backward": in_graphs, "calls": in_calls, "step": in_calls,
        "host": on_the_host, "first": first_calls, "decode": decoded}
