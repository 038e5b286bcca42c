"""Updates in place: no copy before a scatter, no write-back after it, where that is unobservable.

    c0 = kernel copy(cache)                            c1 = kernel scatter(pos, k, cache)
    c1 = kernel scatter(pos, k, c0) in place c0   ->          in place cache
    o = kernel attend(q, c1)                           o = kernel attend(q, c1)
    write cache <- c1

AOTAutograd hands over a cache as a copy, an update of the copy and a copy back: taken literally,
two copies of each cache per token. Runs after fusion. Proof: nothing reads the old value after the
update, no check can still fail, and the kernel reads an element only where it writes that element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rung.core import trace
from rung.core.cost import behind
from rung.core.op import Effect, Func, Op, Value, reads
from rung.core.rewrite import substitute
from rung.core.types import INDEX, axes_of, shape_of
from rung.loop.ir import Fold, Load, Store
from rung.program.ir import Call, Check, KernelCall, Module, Return, Write, states, strided
from rung.program.storage import RESHAPE, UPDATE, Aliases
from rung.program.views import source_of

Reason = str


def reinplace(module: Module) -> Module:
    """The module without copies and writes proved redundant; kernels may be added."""
    work = _Work({k.name: k for k in module.kernels})
    programs = tuple(work.program(p) for p in module.programs)
    used = {op.callee for p in programs for op in p.body.ops if isinstance(op, KernelCall)}
    return Module(programs, tuple(k for n, k in work.kernels.items() if n in used))


@dataclass
class _Work:
    kernels: dict[str, Func]

    def program(self, program: Func) -> Func:
        ops = checks_first(program.body.ops)
        for op in program.body.ops:
            if states(op):
                ops = self.without_copy(ops, op)
        for op in program.body.ops:
            if isinstance(op, Write):
                ops = self.without_write(ops, op)
        return program.with_ops(ops)

    def without_copy(self, ops: list[Op], call: Op) -> list[Op]:
        """`call` updates the original instead of its copy, if legal."""
        for state, copied in states(call).items():
            copy = next((op for op in ops if copied in op.results), None)
            source = self.source(copy)
            if source is None:
                continue
            at = next(n for n, op in enumerate(ops) if op.results == call.results)
            reason = _keeps_old(ops, at, source, state)
            if reason is None and source in ops[at].operands():
                reason = "the kernel reads the old value as well"
            trace.emit("declined" if reason else "fired", "reinplace", copied.name, reason or "")
            if reason is None:
                left = [op for op in ops if op is not copy]
                ops = substitute(left, {copied: source})
        return ops

    def source(self, copy: Op | None) -> Value | None:
        """The operand that an op copies verbatim; None for other ops."""
        if isinstance(copy, Call) and copy.memory == "copy":
            source: Value = copy.args[0][1]
            return source if source.type == copy.types[0] else None
        return source_of(copy, self.kernels)

    def without_write(self, ops: list[Op], write: Write) -> list[Op]:
        """Drop a redundant write; else make the kernel store in place."""
        at = next((n for n, op in enumerate(ops) if write.src in op.results), None)
        made = None if at is None else ops[at]
        aliases = Aliases(ops, (UPDATE,))
        if aliases.root(write.src) is write.dst:
            return [op for op in ops if not (isinstance(op, Write) and op.dst is write.dst)]
        if not isinstance(made, KernelCall) or at is None or write.src in states(made):
            return ops
        old = next((v for v in made.args if aliases.root(v) is write.dst), write.dst)
        reason = _keeps_old(ops, at, old, write.src) or self.tangled(made, write.src, old)
        trace.emit("declined" if reason else "fired", "reinplace", write.dst.name, reason or "")
        if reason is not None:
            return ops
        new = self.storing(made, write.src, old)
        return [new if op is made else op for op in ops
                if not (isinstance(op, Write) and op.dst is write.dst)]

    def tangled(self, call: KernelCall, new: Value, old: Value) -> Reason | None:
        """Why the kernel that makes `new` cannot run in place: it reads elements of `old` that
        another step would have overwritten."""
        if old not in call.args:
            return None
        if old in call.updates:
            return "another result is stored there"
        kernel = self.kernels[call.callee]
        param = kernel.params[call.args.index(old)]
        out = kernel.outs[call.results.index(new) - len(call.updates)]
        loads = [op for op in kernel.body.ops if isinstance(op, Load) and op.buf is param]
        stores = [op for op in kernel.body.ops if isinstance(op, Store) and op.buf is out]
        same = len(stores) == 1 and all(op.subs == stores[0].subs and not op.mask for op in loads)
        if not same:
            return "read and written at different indices"
        axes = set(stores[0].nest)
        for op in kernel.body.ops:
            if isinstance(op, Fold) and op.axis in axes:
                return "a fold reads what other steps write"
            if any(r for r in op.results if set(axes_of(r.type)) - axes):
                return "read again by the steps of another axis"
        return None

    def storing(self, call: KernelCall, new: Value, old: Value) -> KernelCall:
        """`call` with the output `new` stored into `old` in place."""
        kernel = self.kernels[call.callee]
        at = call.results.index(new)
        out = kernel.outs[at - len(call.updates)]
        is_read = old in call.args
        param = kernel.params[call.args.index(old)] if is_read else out
        into = replace(param, role="mutated", type=old.type)
        stores = [op for op in kernel.body.ops if isinstance(op, Store) and op.buf is out]
        last = [op for op in kernel.body.ops if op not in stores] + stores  # old values are read
        ops = substitute(last if is_read else kernel.body.ops, {param: into, out: into})
        name = f"{kernel.name}_to_{at}_{param.name}"
        params = (*(into if p is param else p for p in kernel.params),
                  *(() if is_read else (into,)))
        outs = tuple(o for o in kernel.outs if o is not out)
        self.kernels[name] = replace(kernel.with_ops(ops), name=name, params=params, outs=outs)
        count = len(call.updates)
        order = [*range(count), at, *(n for n in range(count, len(call.results)) if n != at)]
        return replace(call, callee=name, args=call.args if is_read else (*call.args, old),
                       updates=(*call.updates, old),
                       types=tuple(call.results[n].type for n in order),
                       results=tuple(call.results[n] for n in order))


def checks_first(ops: Sequence[Op]) -> list[Op]:
    """Checks, deduplicated, and the ops they depend on, moved to the front; not those that depend
    on an effect, or on a size that the program computes."""
    maker = {r: op for op in ops for r in op.results}
    computed = {r.name for r in maker if r.type is INDEX}
    early: dict[int, None] = {}
    seen: set[tuple[object, ...]] = set()
    drop: set[int] = set()
    for op in ops:
        if isinstance(op, Check):
            key = (op.value, op.lo, op.hi, op.error, op.message)
            cone = behind(op, maker)
            sizes = (op.lo, op.hi, *(n for x in cone for r in x.results for n in shape_of(r.type)))
            if key in seen:
                drop.add(id(op))
            elif computed.isdisjoint(s for n in sizes for s in n.symbols()) and all(
                    x.effect is Effect.PURE and not getattr(x, "updates", ()) for x in cone):
                early |= dict.fromkeys(map(id, (*cone, op)))
            seen.add(key)
        elif op.effect is not Effect.PURE:
            break  # what comes after an effect stays after it
    first = [op for op in ops if id(op) in early]
    return first + [op for op in ops if id(op) not in early and id(op) not in drop]


def _keeps_old(ops: list[Op], at: int, source: Value, new: Value) -> Reason | None:
    """Why op number `at` may not overwrite `source`; None if it may."""
    before = Aliases(ops[:at])
    home = before.root(source, (RESHAPE, UPDATE))
    written = any(isinstance(op, Write) and op.dst is home for op in ops)
    if home.role and not (home.role == "mutated" and written):
        return f"{home.name} is not to change"
    if home.role and any(isinstance(op, Return) and new in op.values for op in ops):
        return "the new value is also returned"
    shared = before.within((home,))
    if (shared - {source}) & reads(ops[at]):
        return f"the kernel reads a view of {source.name}"
    for op in ops[at + 1:]:
        read = reads(op)
        if home.role and (isinstance(op, Return) or (isinstance(op, Write) and op.dst is home)):
            read.discard(home)  # what returns an argument returns what is written to it
        if shared & read:
            return f"{source.name} is read later"
        if (strided(source) and source.type != new.type and new in read
                and not isinstance(op, Write)):
            return f"what is read later would lie as {source.name} does"
        if isinstance(op, Check) or (isinstance(op, Call) and op.effect is Effect.RAISES):
            return "a later check may fail"
    if home in before.links or not (home.role or any(home in op.results for op in ops)):
        return f"{home.name} may share memory"
    return None
