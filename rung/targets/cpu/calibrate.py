"""What this CPU reaches with the threads that there are: measured once, kept in the cache.

Each figure is the least time of several short runs, rounded to two digits, so that prices do not
follow noise. The kernels are those of `calibrate.c`; library calls run through the front end's
library. Without permission, a compiler or the library, the table of the CPU's family stands in.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from functools import cache, partial
from hashlib import sha256
from itertools import cycle
from pathlib import Path
from time import perf_counter

from rung.core import store, trace
from rung.core.config import Settings
from rung.core.errors import TargetCompileError
from rung.core.machine import Atom, Machine, Reach
from rung.core.types import BF16, F32, I8, DType
from rung.targets import libraries
from rung.targets.cpu import build
from rung.targets.cpu.figures import FIXED, Figures, cache_bytes, fact, of_family, read
from rung.targets.cpu.groups import CpuPrelude
from rung.targets.cpu.machine import features
from rung.tile.match import group_of

SOURCE = Path(__file__).with_name("calibrate.c")
LAST = "figures.json"  # the entry with what was measured last
RUNS = 4  # of which the shortest counts, or more
SPEND = 4e-3  # seconds that all runs of one kind take at least, while they are not too many
STEPS = 1 << 14  # of chains
CHAINS = 12
MOST = 6e-3  # seconds of a library's product that are not worth a larger one
ROWS, WIDTH = 128, 1024  # of a library's product
TOGETHER = 6  # times what one core reads from DRAM that all do, where that cannot be measured
GAP = 2e-5  # seconds of work between forks
FASTEST = {F32: 1.0, BF16: 32.0, I8: 64.0}  # times the f32 peak, of matrix units


def figures(machine: Machine, threads: int) -> Figures:
    """What this CPU reaches as a machine with the instructions of `machine`."""
    family = of_family(machine.name, features())
    torch = sys.modules.get("torch")
    if torch is None or Settings.from_environment().calibrate is False:
        return family
    return _figures(machine, threads, key(machine, threads, torch.__version__))


def key(machine: Machine, threads: int, version: str) -> str:
    """The name of an entry: one for each CPU, number of threads, and torch."""
    on = (fact("model name"), fact("stepping"), sorted(features()), os.cpu_count(), threads,
          len(os.sched_getaffinity(0)), version, Settings.from_environment().asleep, machine.name,
          [x.name for x in machine.atoms], SOURCE.read_text())
    return f"figures-{sha256(repr(on).encode()).hexdigest()[:16]}.json"


@cache
def _figures(machine: Machine, threads: int, name: str) -> Figures:
    return kept(name) or measure(machine, threads, name)


def kept(name: str) -> Figures | None:
    """What was measured before; None if nothing was, or it is damaged."""
    entry = store.find(build.KIND, name)
    try:
        return read(json.loads(entry.content)) if entry else None
    except (ValueError, TypeError, KeyError):
        return None


def measure(machine: Machine, threads: int, name: str) -> Figures:
    """Measure, and keep what was found. Where nothing can be compiled, as in an image that has a
    warm cache, what its programs were compiled with."""
    started = perf_counter()
    try:
        found = _Measuring(machine, threads).figures()
    except (TargetCompileError, OSError) as error:
        trace.emit("declined", "calibrate", machine.name, str(error))
        return kept(LAST) or of_family(machine.name, features())
    content = json.dumps(found.data()).encode()
    with suppress(OSError):
        for entry in (name, LAST):
            store.write(build.KIND, entry, content)
    trace.emit("fired", "calibrate", machine.name, f"{perf_counter() - started:.2f} s")
    return found


def again(machine: Machine, threads: int) -> Figures:
    """Measure anew, whatever the cache has."""
    name = key(machine, threads, sys.modules["torch"].__version__)
    _figures.cache_clear()
    return measure(machine, threads, name)


# --- the source

def source(machine: Machine) -> str:
    """The kernels for a machine; accumulators have names, since compilers keep arrays in memory."""
    prelude = CpuPrelude()
    fma = prelude.call("fma", F32, machine.lanes, ["$0", "$1", "$2"]).partition("(")[0]
    chains = [_chains("chains", lambda n: f"c{n} = {fma}(a, b, c{n});"),
              *(_chains(f"chains_{x.name}", partial(_step, x)) for x in narrow(machine))]
    text = SOURCE.read_text()
    for name, of in (("CHAINS", "\n".join(chains)), ("FMA", fma), ("TILE", _tile(machine, fma)),
                     ("LANES", str(machine.lanes))):
        text = text.replace(f"${name}", of)
    return f"{prelude.text()}\n{text}"


def narrow(machine: Machine) -> list[Atom]:
    """The atoms of narrow types, one for each rate."""
    return [x for x in machine.atoms if x.rate in ("bf16", "i8") and not x.excess]


def _step(atom: Atom, n: int) -> str:
    return atom.text.replace("(c)", f"(c{n})")


def _chains(name: str, step: Callable[[int], str]) -> str:
    """A function of chains that do not wait for each other."""
    c = [f"c{n}" for n in range(CHAINS)]
    starts = ", ".join(f"{x} = *(const V *)(x + {n})" for n, x in enumerate(c))
    return (f"float {name}(const float *x, long steps) {{\n"
            "  const W a = *(const V *)x, b = *(const V *)(x + $LANES);\n"
            f"  W {starts};\n  for (long n = 0; n < steps; n++) {{\n    "
            + "\n    ".join(map(step, range(CHAINS)))
            + f"\n  }}\n  return ({' + '.join(c)})[0];\n}}\n")


def tile_rows(machine: Machine) -> int:
    """Rows of a register tile of two vectors, as candidates have them."""
    return 14 if machine.registers > 16 else 6


def _tile(machine: Machine, fma: str) -> str:
    """The body of `tile`: k steps of a register tile, whose rows lie k apart."""
    c = [f"c{r}_{v}" for r in range(tile_rows(machine)) for v in (0, 1)]
    steps = "\n".join(f"      {{ const W a = x[{r} * k + i] - (W){{0}}; "
                      f"c{r}_0 = {fma}(a, b0, c{r}_0); c{r}_1 = {fma}(a, b1, c{r}_1); }}"
                      for r in range(tile_rows(machine)))
    return (f"    W {', '.join(f'{x} = {{0}}' for x in c)};\n"
            "    for (long i = 0; i < k; i++) {\n"
            "      const V *v = (const V *)(w + 2 * $LANES * i);\n"
            f"      const W b0 = v[0], b1 = v[1];\n{steps}\n    }}\n"
            f"    total += ({' + '.join(c)})[0];")


# --- measuring

def least(run: Callable[[], object], spend: float = SPEND) -> float:
    """The seconds of the shortest of several runs: more where they are short, and fewer where
    others keep the cores busy."""
    times = [seconds(run)]
    while (sum(times) < spend and len(times) < 8 * RUNS) or (
            sum(times) < 8 * spend and len(times) < RUNS):
        times.append(seconds(run))
    return min(times)


def seconds(run: Callable[[], object]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


def within(low: float, x: float, high: float) -> float:
    """What is measured while others keep the cores busy is still possible, if not right."""
    return min(high, max(low, x))


def ordered(spaces: Iterable[tuple[int, float, float]]) -> list[tuple[int, float, float]]:
    """Memories of which none is slower than one that is farther away."""
    found, far = list[tuple[int, float, float]](), (0.0, 0.0)
    for count, one, most in reversed(list(spaces)):
        far = max(one, far[0]), max(most, far[1]) if most else 0.0
        found.append((count, *far))
    return found[::-1]


def rounded(x: float) -> float:
    """Two digits."""
    return float(f"{x:.2g}")


class _Measuring:
    """Measures with one library of kernels and one block of memory. While others keep cores busy,
    what all threads reach is taken from one of them."""

    def __init__(self, machine: Machine, threads: int):
        self.machine, self.threads, self.fixed = machine, threads, FIXED[machine.name]
        self.free = min(1.0, len(os.sched_getaffinity(0)) / threads)  # cores to a thread, at most
        self.bytes = [cache_bytes(n + 1, self.fixed.spaces[n][0]) for n in range(3)]
        self.memory = libraries.memory((128 if self.bytes[2] > 32 << 20 else 64) << 20)
        self.at = self.memory.data_ptr()
        self.c = ctypes.CDLL(str(build.build([source(machine)], machine)))

    def run(self, name: str, *args: int, starts: Iterable[int] = (0,)) -> Callable[[], object]:
        """Calls of a kernel on the block of memory, from one start after the other."""
        function, parts = self.c[name], cycle(starts)
        function.restype = ctypes.c_float
        given = [ctypes.c_long(x) for x in args]
        return lambda: function(ctypes.c_void_p(self.at + next(parts)), *given)

    def figures(self) -> Figures:
        once = least(self.run("chains", STEPS)) / STEPS / CHAINS  # seconds of a vector operation
        f32, waits = 2 * self.machine.lanes / once, least(self.run("chain", STEPS)) / STEPS
        scale, quiet = self._scale(once)
        spaces = ordered(self._spaces(quiet))
        count, single = (self.threads, nullcontext()) if quiet else (1, libraries.one_thread())
        with single:
            stream = spaces[-1][2 if quiet else 1]
            reach = dict(self._reach(f32 * count * (scale if quiet else 1.0), stream))
        return Figures(
            rounded(f32), rounded(scale), dict(self._faster(once)),
            rounded(within(2.0, waits / once, 16.0)), self._load(once),
            tuple((n, rounded(a), rounded(b)) for n, a, b in spaces),
            rounded(self._fork(once) if quiet else self.fixed.fork / self.free), reach)

    def _scale(self, once: float) -> tuple[float, bool]:
        """What a core keeps of its rate while all compute, and whether they are ours alone."""
        if self.threads == 1:
            return 1.0, True
        run = self.run("chains_all", 4 * STEPS, self.threads)
        times = sorted(seconds(run) for _ in range(2 * RUNS))
        scale = once * 4 * STEPS * CHAINS / times[0]
        quiet = times[RUNS] < 1.3 * times[0] and scale > 0.4 * self.free
        return within(0.4 * self.free, scale, 1.0) if quiet else self.free, quiet

    def _faster(self, once: float) -> Iterator[tuple[str, float]]:
        for atom in narrow(self.machine):
            seconds = least(self.run(f"chains_{atom.name}", STEPS)) / STEPS / CHAINS
            yield atom.rate, rounded(once / seconds * group_of(atom))

    def _load(self, once: float) -> float:
        """What a broadcast costs beside multiply-adds, by a whole register tile."""
        rows, k = tile_rows(self.machine), 128
        step = least(self.run("tile", k, 64)) / k / 64 / once
        return rounded(within(0.2, (step - 2 * rows - 2.0) / (rows + 2 * 1.4), 0.7))

    def _spaces(self, quiet: bool) -> Iterator[tuple[int, float, float]]:
        """Each memory with the rates at which one core and all read: half of a cache, and parts of
        DRAM one after the other."""
        for level, size in enumerate((*self.bytes, 1 << 40)):
            count = min(size // 2, len(self.memory) // 8) if level < 3 else len(self.memory) // 4
            starts = [0] if level < 3 else range(0, 4 * count, count)
            times = max(1, (1 << 22) // count)
            one = count * times / least(self.run("reads", count // 4, times, starts=starts))
            cores = self.threads * self.free
            most = one * (0 if level < 2 else cores if level < 3 else min(cores, TOGETHER))
            if level > 1 and quiet:
                most = within(one, count * times / least(self.run(
                    "reads_all", count // 4, times, self.threads, starts=starts)),
                    one * self.threads)
            yield size, one, most

    def _fork(self, once: float) -> float:
        """Seconds of a fork whose threads have waited for a while; some, where there is one."""
        if self.threads == 1:
            return self.fixed.fork
        steps, times = max(1, int(GAP / once / CHAINS)), 8
        alone, forked = (least(self.run("forks", steps, times, n)) / times
                         for n in (1, self.threads))
        return within(1e-6, forked - alone, 1e-4 / self.free)

    def _reach(self, peak: float, stream: float) -> Iterator[tuple[str, Reach]]:
        """Of each product of a library."""
        for name, dtype in ((libraries.MATMUL, F32), (libraries.MATMUL, BF16),
                            (libraries.BYTES, I8), (libraries.LINEAR, F32)):
            found = self.fixed.reach[f"{name} {dtype}"]
            with suppress(RuntimeError, AttributeError):  # this torch has no such product
                found = self._of_library(name, dtype, peak, stream)
            yield f"{name} {dtype}", found

    def _of_library(self, name: str, dtype: DType, peak: float, stream: float) -> Reach:
        def product(m: int, n: int, k: int) -> Callable[[], object]:
            return libraries.trial(name, dtype, self.memory, m, n, k)

        product(32, 8, 8)()
        tiny = least(product(32, 8, 8), SPEND / 8)
        width, spent = WIDTH // 4, 0.0
        while width <= WIDTH:
            run = product(ROWS, width, width)
            run()
            spent = _without(tiny, least(run))
            if spent > MOST / 16:
                break
            width *= 2
        width = min(width, WIDTH)
        rate, streamed = 2.0 * ROWS * width * width / spent, 0.9
        if dtype is not I8:
            rows = _without(tiny, least(product(1, 2 * WIDTH, 2 * WIDTH)))
            streamed = dtype.bytes * 4.0 * WIDTH * WIDTH / rows / stream
        lowest = 0.2 if dtype is F32 else 0.01
        found = (within(lowest, rate / peak, FASTEST[dtype]), within(0.1, streamed, 1.0),
                 within(0, tiny, 5e-5 / self.free))
        return Reach(*map(rounded, found))


def _without(call: float, seconds: float) -> float:
    """What the work of a call takes."""
    return seconds - min(call, seconds / 2)
