"""Charts as SVG, drawn by Vega-Lite where `vl-convert-python` is installed (the extra `page`).

The specifications are data; colours are those of the page's style sheet, so that one drawing serves
light and dark. Every mark has a text, and leads to the kernel or the storage that it stands for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from rung.core.cost import known
from rung.program.memory import Plan
from rung.tools.explain import size
from rung.tools.page.kernels import Point, Roof

Spec = dict[str, object]
CONFIG: Spec = {
    "background": None, "font": "inherit", "view": {"stroke": None},
    "axis": {"labelColor": "var(--dim)", "titleColor": "var(--dim)", "gridColor": "var(--line)",
             "domainColor": "var(--line)", "tickColor": "var(--line)", "titleFontWeight": 400,
             "labelFontSize": 11, "titleFontSize": 11},
    "legend": {"labelColor": "var(--ink)", "titleColor": "var(--dim)", "orient": "top",
               "title": None, "labelFontSize": 11}}


def drawn(spec: Spec) -> str:
    """The SVG of a specification; "" without the library."""
    try:
        import vl_convert
    except ImportError:
        return ""
    svg: str = vl_convert.vegalite_to_svg(json.dumps({"config": CONFIG, **spec}))
    svg = re.sub(r'xlink:href="[^"#]*#', 'href="#', svg)
    return re.sub(r'<svg [^>]*?width="(\d+)[^"]*" height="(\d+)[^"]*"', r'<svg role="img" '
                  r'class="chart" width="\1" height="\2"', svg, count=1)


def roofline(points: Sequence[Point], roofs: Sequence[Roof], anchor: str) -> str:
    """Operations a second over operations a byte, both logarithmic, under the machine's roofs; a
    kernel's point leads to the `anchor` with its name."""
    if not points:
        return ""
    low = min(0.05, *(p.intensity for p in points)) / 1.5
    ridges = [r.operations / r.bytes * 4 for r in roofs]
    high = max(*ridges, *(p.intensity for p in points)) * 1.5
    at = [low * (high / low) ** (n / 60) for n in range(61)]
    lines = [{"x": x, "y": min(r.operations, x * r.bytes) / 1e9, "kind": r.name}
             for r in roofs for x in at]
    rows = [{"x": p.intensity, "y": p.rate / 1e9, "kernel": p.name,
             "when": "after fusion" if p.fused else "before", "href": f"#{anchor}{p.name}"
             if p.fused else "#kernels", "text": f"{p.name}: {p.seconds * 1e6:.2f} us, "
             f"{p.intensity:.2f} operations a byte"} for p in sorted(points, key=lambda p: p.fused)]
    x = {"field": "x", "type": "quantitative", "scale": {"type": "log", "domain": [low, high]},
         "title": "operations a byte", "axis": {"format": "~g", "tickCount": 5, "grid": False}}
    y = {"field": "y", "type": "quantitative", "scale": {"type": "log"},
         "title": "billion operations a second", "axis": {"format": "~g", "tickCount": 5,
                                                           "grid": False}}
    colour = {"field": "when", "scale": {"domain": ["before", "after fusion"], "range": [
        "var(--quiet)", "var(--accent)"]}}
    return drawn({"width": 620, "height": 280, "layer": [
        {"data": {"values": lines}, "mark": {"type": "line", "color": "var(--dim)",
                                             "strokeWidth": 1.2},
         "encoding": {"x": x, "y": y, "strokeDash": {"field": "kind", "legend": {
             "symbolStrokeColor": "var(--dim)"}}}},
        {"data": {"values": rows}, "mark": {"type": "circle", "size": 70, "opacity": 0.85},
         "encoding": {"x": x, "y": y, "color": colour, "href": {"field": "href"},
                      "description": {"field": "text"}}}]})


def buffers(plan: Plan, hints: Mapping[str, int]) -> str:
    """Storages of the workspace over the host's steps, at their offsets."""
    rows = [{"name": s.name, "from": s.first - 0.45, "to": s.last + 0.45, "low": s.offset,
             "high": s.offset + known(s.bytes, hints), "text":
             f"{s.name}: {size(known(s.bytes, hints))}, steps {s.first} to {s.last}"}
            for s in plan.storages if s.offset is not None]
    if not rows:
        return ""
    return drawn({"width": 620, "height": 240, "data": {"values": rows},
                  "mark": {"type": "rect", "color": "var(--accent)", "opacity": 0.55,
                           "stroke": "var(--paper)"},
                  "encoding": {"x": {"field": "from", "type": "quantitative", "title": "step",
                                     "axis": {"tickMinStep": 1}},
                               "x2": {"field": "to"},
                               "y": {"field": "low", "type": "quantitative",
                                     "title": "bytes in the workspace", "axis": {"format": "~s"}},
                               "y2": {"field": "high"}, "description": {"field": "text"}}})
