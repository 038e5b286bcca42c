"""Mappings: how Tile IR states a schedule, as text and as data.

    map relu_mm on cpu.avx512
      k: l3 *, seq 256
      j: l2 *, reg 2, simd 16
      i: l1 *, reg 14
      place a in l2 at k.l3 as panel(i 14)
      carry mm in y

Loops nest by level, and within a level in the order of the axis lines. A size counts steps of its
level; one `*` takes what is left. Thread levels run in lockstep and may stand anywhere in a line:
`j: seq *, thread 256, reg 4` gives neighbouring threads neighbouring elements.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from rung.core.errors import MappingError, ParseError
from rung.core.layout import Panel
from rung.core.op import Func


def refuse(reason: str) -> NoReturn:
    """Raise MappingError: the machine cannot run a mapping, for this reason."""
    raise MappingError(f"illegal: {reason}")


@dataclass(frozen=True)
class AxisLine:
    """`axis: level size, ...` outer to inner; size None is `*`."""

    axis: str
    splits: tuple[tuple[str, int | None], ...]

    def __str__(self) -> str:
        parts = (f"{level} {'*' if size is None else size}" for level, size in self.splits)
        return f"{self.axis}: {', '.join(parts)}"


@dataclass(frozen=True)
class Place:
    """Values computed (or moved) into `space` once per step of loop `axis.level`."""

    values: tuple[str, ...]
    space: str
    axis: str
    level: str
    panel: Panel | None = None
    pad: int = 0
    ring: int = 1
    mover: str = ""

    @property
    def loop(self) -> str:
        """The name of the loop that it stands at: AXIS.LEVEL."""
        return f"{self.axis}.{self.level}"

    def __str__(self) -> str:
        text = f"place {', '.join(self.values)} in {self.space} at {self.loop}"
        text += f" as {self.panel}" if self.panel else ""
        text += f" pad {self.pad}" if self.pad else ""
        text += f" ring {self.ring}" if self.ring > 1 else ""
        return text + (f" by {self.mover}" if self.mover else "")


@dataclass(frozen=True)
class Carry:
    """The fold's partial state waits in a buffer between outer steps of its reduced axis."""

    fold: str
    buffer: str

    def __str__(self) -> str:
        return f"carry {self.fold} in {self.buffer}"


@dataclass(frozen=True)
class Use:
    """The contraction runs on an atom: a matrix instruction or a library call."""

    contraction: str
    atom: str

    def __str__(self) -> str:
        return f"use {self.contraction} with {self.atom}"


@dataclass(frozen=True)
class Combine:
    """On which levels the parallel parts of a fold are collapsed, on chip."""

    fold: str
    levels: tuple[str, ...]

    def __str__(self) -> str:
        return f"combine {self.fold} by {', '.join(self.levels)}"


@dataclass(frozen=True)
class Roles:
    """Queues, or teams of threads, with tasks of their own: (name, how many, registers or 0).

    `load` brings the tiles of buffers, `math` computes, `store` sends tiles off (without it `math`
    does).
    """

    roles: tuple[tuple[str, int, int], ...]

    def __str__(self) -> str:
        return "roles " + ", ".join(f"{name} x{count}" + (f" regs {regs}" if regs else "")
                                    for name, count, regs in self.roles)


@dataclass(frozen=True)
class Overlap:
    """Iteration j + `distance` of `first` is issued before iteration j of `second`."""

    first: str
    second: str
    distance: int

    def __str__(self) -> str:
        return f"overlap {self.first} with {self.second} distance {self.distance}"


@dataclass(frozen=True)
class Order:
    """In which order blocks run: flat, persistent (raster in groups), or longest first."""

    kind: str
    group: int = 0

    def __str__(self) -> str:
        return f"order {self.kind}" + (f" raster {self.group}" if self.group else "")


@dataclass(frozen=True)
class Mapping:
    """One launch of one kernel on one machine."""

    kernel: str
    machine: str
    axes: tuple[AxisLine, ...] = ()
    places: tuple[Place, ...] = ()
    carries: tuple[Carry, ...] = ()
    uses: tuple[Use, ...] = ()
    combines: tuple[Combine, ...] = ()
    roles: tuple[Roles, ...] = ()
    overlaps: tuple[Overlap, ...] = ()
    orders: tuple[Order, ...] = ()

    def __str__(self) -> str:
        lines = (*self.axes, *self.places, *self.carries, *self.uses, *self.combines, *self.roles,
                 *self.overlaps, *self.orders)
        return "\n".join([f"map {self.kernel} on {self.machine}", *(f"  {x}" for x in lines)])

    def names(self) -> frozenset[str]:
        """Values that the mapping speaks of, which text must keep by name."""
        placed = {v for p in self.places for v in p.values}
        overlapped = {v for o in self.overlaps for v in (o.first, o.second)}
        folds = {c.fold for c in self.carries} | {c.fold for c in self.combines}
        return frozenset(placed | overlapped | folds | {u.contraction for u in self.uses})

    def implied(self, func: Func) -> bool:
        return False

    def renamed(self, names: dict[str, str]) -> Mapping:
        """With the kernel's axes and values under other names."""
        def new(name: str) -> str:
            return names.get(name, name)

        return Mapping(
            new(self.kernel), self.machine,
            tuple(replace(x, axis=new(x.axis)) for x in self.axes),
            tuple(replace(p, values=tuple(map(new, p.values)), axis=new(p.axis),
                          panel=p.panel and p.panel.renamed(names)) for p in self.places),
            tuple(Carry(new(c.fold), new(c.buffer)) for c in self.carries),
            tuple(replace(u, contraction=new(u.contraction)) for u in self.uses),
            tuple(replace(c, fold=new(c.fold)) for c in self.combines), self.roles,
            tuple(replace(o, first=new(o.first), second=new(o.second)) for o in self.overlaps),
            self.orders)

    def crew(self) -> dict[str, tuple[int, int]]:
        """The roles by name: how many, and the registers of a thread."""
        return {name: (count, regs) for line in self.roles for name, count, regs in line.roles}

    def axis(self, name: str) -> AxisLine | None:
        return next((x for x in self.axes if x.axis == name), None)

    def ahead(self, place: Place) -> int:
        """How many steps before its use a tile is asked for: as many as the ring has room for,
        unless `overlap` says fewer."""
        return next((o.distance for o in self.overlaps if o.first in place.values), place.ring - 1)

    def placed(self, value: str) -> Place | None:
        return next((p for p in self.places if value in p.values), None)


_NAME = r"[A-Za-z_]\w*"
_BLOCK = r"\s*\w+\s+\d+\s*"
_PLACE = re.compile(rf"place\s+({_NAME}(?:\s*,\s*{_NAME})*)\s+in\s+(\w+)\s+at\s+(\w+)\.(\w+)"
                    rf"(?:\s+as\s+panel\(({_BLOCK}(?:,{_BLOCK})*)\))?(?:\s+pad\s+(\d+))?"
                    rf"(?:\s+ring\s+(\d+))?(?:\s+by\s+([\w.]+))?")
_CARRY = re.compile(rf"carry\s+({_NAME})\s+in\s+({_NAME})")
_USE = re.compile(rf"use\s+({_NAME})\s+with\s+([\w.]+)")
_COMBINE = re.compile(rf"combine\s+({_NAME})\s+by\s+(\w+(?:\s*,\s*\w+)*)")
_ROLE = rf"({_NAME})\s+x(\d+)(?:\s+regs\s+(\d+))?"
_ROLES = re.compile(rf"roles\s+({_ROLE}(?:\s*,\s*{_ROLE})*)")
_OVERLAP = re.compile(rf"overlap\s+({_NAME})\s+with\s+({_NAME})\s+distance\s+(\d+)")
_ORDER = re.compile(r"order\s+(flat|lpt|persistent)(?:\s+raster\s+(\d+))?")
_AXIS = re.compile(rf"({_NAME})\s*:\s*(\w+\s+(?:\*|\d+)(?:\s*,\s*\w+\s+(?:\*|\d+))*)")
_HEAD = re.compile(rf"map\s+({_NAME})\s+on\s+([\w.-]+)")


def parse_mapping(text: str) -> Mapping:
    """The inverse of `str`. Raises ParseError with the line (from 1) that is not a statement."""
    lines = [(n, line.split("#")[0].strip()) for n, line in enumerate(text.splitlines(), 1)]
    lines = [(n, line) for n, line in lines if line]
    head = _HEAD.fullmatch(lines[0][1]) if lines else None
    if not head:
        raise ParseError("a mapping starts with `map KERNEL on MACHINE`", 1, 1)
    found: dict[str, list[Any]] = {key: [] for _, key, _ in _STATEMENTS}
    for number, line in lines[1:]:
        for pattern, key, build in _STATEMENTS:
            if match := pattern.fullmatch(line):
                found[key].append(build(match))
                break
        else:
            raise ParseError(f"not a statement of a mapping: {line!r}", number, 1)
    return Mapping(head[1], head[2], **{key: tuple(items) for key, items in found.items()})


def _axis_line(m: re.Match[str]) -> AxisLine:
    parts = (item.split() for item in m[2].split(","))
    return AxisLine(m[1], tuple((level, None if size == "*" else int(size))
                                for level, size in parts))


def _place(m: re.Match[str]) -> Place:
    values = tuple(v.strip() for v in m[1].split(","))
    blocks = [block.split() for block in (m[5] or "").split(",") if block]
    panel = Panel(tuple((axis, int(size)) for axis, size in blocks)) if blocks else None
    return Place(values, m[2], m[3], m[4], panel, int(m[6] or 0), int(m[7] or 1), m[8] or "")


_STATEMENTS: tuple[tuple[re.Pattern[str], str, Callable[[re.Match[str]], Any]], ...] = (
    (_PLACE, "places", _place),
    (_CARRY, "carries", lambda m: Carry(m[1], m[2])),
    (_USE, "uses", lambda m: Use(m[1], m[2])),
    (_COMBINE, "combines",
     lambda m: Combine(m[1], tuple(x.strip() for x in m[2].split(",")))),
    (_ROLES, "roles", lambda m: Roles(tuple((name, int(count), int(regs or 0))
                                            for name, count, regs in re.findall(_ROLE, m[1])))),
    (_OVERLAP, "overlaps", lambda m: Overlap(m[1], m[2], int(m[3]))),
    (_ORDER, "orders", lambda m: Order(m[1], int(m[2] or 0))),
    (_AXIS, "axes", _axis_line),
)
