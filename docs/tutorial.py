# %% [markdown]
# # Down the ladder
#
# This follows one small function from Python to the C that runs, one rung at a time. All output below is real: the text is
# `docs/tutorial.py`, a Python file whose cells are run by the tests; `docs/tutorial.md` is what they printed.
#
# The function is a layer with a bias and an activation. Compiled, it gives what it gives in eager.

# %%
import torch


def layer(x, w, b):
    return torch.relu(x @ w + b)


x, w, b = torch.randn(64, 128), torch.randn(128, 96), torch.randn(96)
fast = torch.compile(layer, backend="rung")
torch.testing.assert_close(fast(x, w, b), layer(x, w, b))

# %% [markdown]
# From here on we look at what happened. `rung show` prints every rung of a function; here its parts are called from Python, for a
# named machine, so that the output is the same everywhere.

# %%
from rung.tools.given import Given
from rung.tools.show import Request, show

given = Given("layer", layer, (x, w, b))


def see(rung, target="cpu.avx512"):
    print(show(given, Request(rung=rung, target=target)))


# %% [markdown]
# ## ATen
#
# Dynamo reads the bytecode of the function and finds tensor operations; AOTAutograd turns them into ATen operators without mutation.
# That graph is all that Rung gets. Each operator remembers the line that it came from.

# %%
see("torch")

# %% [markdown]
# ## Program
#
# The same, in Rung's one container: a `Func` of `Op`s over `Value`s. Here an op is a call of an operator, and what matters is what
# calls do beside computing: which memory a result shares, what is written in place, in which order effects happen.

# %%
see("program")

# %% [markdown]
# ## Tensor IR
#
# Names give way to meanings. `mm` is a contraction: multiply, add, over the axis that the result lacks. The bias was broadcast by
# torch without a word; here it is an `index`, a map from places in the result to places in the source. There are few ops on this
# rung (map, reduce, contract, index and some others), so passes have few cases.

# %%
see("tensor")

# %% [markdown]
# ## Loop IR
#
# First every op becomes a kernel of its own. A kernel is in SSA over *named axes*: there is no loop to be seen, each value's axes say
# in which loops it would be computed.

# %%
from rung.core import trace
from rung.tools.capture import capture
from rung.tools.show import history_of, target_of

graph, = capture(given).graphs
request = Request(target="cpu.avx512")
with trace.listen():
    history = history_of(graph, target_of([graph], request), request)
steps = {step.ran.name: step for step in history.steps}
print(steps["to_loop"].after)

# %% [markdown]
# Then fusion decides what a kernel is. Each step is looked at for legality, is priced on the machine's table, and is done where the
# price falls; the trace has what was decided.

# %%
for event in steps["fuse"].events:
    if event.kind in ("fired", "declined"):
        print(f"{event.kind}: {event.subject}, {event.detail}")
print()
print(steps["fuse"].after)

# %% [markdown]
# At the end of the rung the kernel has its final names: after the functions that you called, and with axes in the order of the
# result.

# %%
see("loop")

# %% [markdown]
# ## Tile IR
#
# The kernel does not change. It gets a *mapping*: for each axis the levels on which it runs, outermost first. `core` is a parallel
# loop, `l2`, `l1` and `seq` are loops, `reg` copies in registers, `simd` the lanes of a vector; `*` is as many as it takes.

# %%
see("tile")

# %% [markdown]
# A mapping stands for a loop nest. It is data too, and prints:

# %%
see("nest")

# %% [markdown]
# Where does it come from? A few dozen candidates are priced in closed form; the cheapest legal one is taken. These were the
# cheapest:

# %%
final = [event for step in history.steps[-8:] for event in step.events]
for text in dict.fromkeys(e.detail for e in final if (e.kind, e.place) == ("priced", "choose")):
    print(text.replace("\n", "\n  "))

# %% [markdown]
# You may know better, or want to try. A file of mappings goes with `--mapping` to every command, and with
# `options={"mappings": ...}` to `torch.compile`; what the machine cannot do is refused with the reason.

# %%
import tempfile

with tempfile.NamedTemporaryFile("w", suffix=".map") as file:
    file.write("map mm_relu on cpu.avx512\n  i: core *, reg 4\n  j: l1 *, reg 2, simd 16\n  k: seq *\n")
    file.flush()
    print(show(given, Request(rung="nest", target="cpu.avx512", mapping=file.name)))

# %% [markdown]
# ## Kernel IR
#
# Loops, memory, vectors. A value over unrolled axes (`over iu8<8`) stands for so many registers.

# %%
see("kernel")

# %% [markdown]
# ## Source
#
# The C of one kernel is long where it is unrolled, so this is the toy machine's: the same kernel for a machine with a scratchpad, a
# DMA engine and a matrix unit, that exists in this repository alone. `rung show --rung source` prints the C.

# %%
see("source", "toy")

# %% [markdown]
# ## The host
#
# What is left of the function is a list of steps and where each value lies.

# %%
from rung.program import memory
from rung.runtime.stretches import native

module = history.at("kernel")
print(memory.plan(module.main, native(module)))

# %% [markdown]
# ## Training
#
# With gradients there are two graphs. The forward one returns, beside the result, what the backward one needs; that is chosen so
# that little has to be kept. Both go down the same ladder.

# %%
train = Given("layer", layer, (x, w.requires_grad_(), b.requires_grad_()))
for graph in capture(train, train=True).graphs:
    print(graph.imported.func, "\n")

# %% [markdown]
# ## A softmax
#
# A softmax is three passes over a row: its maximum, the sum of the exponentials, and the quotient. As Loop IR all of it is one
# kernel with two folds.

# %%
rows = Given("rows", lambda t: torch.softmax(t, -1), (torch.randn(256, 1000),))
print(show(rows, Request(rung="loop", target="cpu.avx512")))

# %% [markdown]
# For a row that does not fit the nearest memory the two folds become one, the online softmax: whenever the maximum rises, the sum so
# far is scaled.

# %%
rows = Given("rows", lambda t: torch.softmax(t, -1), (torch.randn(4, 1 << 20),))
print(show(rows, Request(rung="loop", target="cpu.avx512")))

# %% [markdown]
# ## And back
#
# `rung explain model.py:build --html report.html` writes all of this as one page, where a click on any line lights what it came from
# and what it became. The links are the origins of values: which nodes of the ATen graph each value computes, on every rung.

# %%
from rung.core import origins

graph, = capture(given).graphs
with origins.followed():
    kernel, = history_of(graph, target_of([graph], request), request).at("loop").kernels
for op in kernel.body.ops:
    for value in op.results:
        print(value.name, "computes", ", ".join(o.target for o in origins.of(value)))
