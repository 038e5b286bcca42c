"""The options of one `torch.compile` call: a table, as a frozen `Options`.

A new option is one field with its meaning; `rung --help`, the checks and the messages follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from rung.core.config import PRECISIONS, Settings

MODES = {
    "default": "",
    "reduce-overhead": "",
    "max-autotune": "mappings are chosen by price, and none is measured",
    "max-autotune-no-cudagraphs": "mappings are chosen by price, and none is measured",
}
"""Names of torch.compile's modes, and why one does the same as "default"."""


def _option(default: Any, meaning: str, known: Sequence[str] = ()) -> Any:
    return field(default=default, metadata={"meaning": meaning, "known": tuple(known)})


@dataclass(frozen=True)
class Options:
    """`options=` of torch.compile; the environment gives the defaults of target and precision."""

    target: str = _option("", "the machine to compile for; that of the tensors' device if empty")
    precision: str = _option("default", "eager has eager's bits: sums, products and functions that "
                             "are approximated stay calls; default keeps chains of bf16 ops in f32",
                             PRECISIONS)
    mappings: str = _option("", "a file of mappings to use, by kernel")
    deterministic: bool = _option(False, "each run gives the same: no sums of floats by atomic "
                                  "updates, whose order nothing fixes")
    strict: bool = _option(False, "raise where a graph would otherwise run without rung")
    verify: float = _option(0.0, "this share of calls, 0 to 1, is run again in eager and compared; "
                            "at a difference the graph runs in eager from then on")
    mode: str = _option("default", "as torch.compile(mode=...), which cannot stand beside options; "
                        "reduce-overhead replays CUDA graphs, the others do as default so far",
                        tuple(MODES))

    @staticmethod
    def of(given: Mapping[str, object], targets: Sequence[str]) -> Options:
        """Checked options; ValueError or TypeError names what is known."""
        settings = Settings.from_environment()
        known = {f.name: f for f in fields(Options)}
        values: dict[str, Any] = {"target": settings.target,
                                  "precision": settings.precision}
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"rung has no option {name!r}; it has {', '.join(known)}")
            kind = type(known[name].default)
            accepted = (int, float) if kind is float else kind
            if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
                raise TypeError(f"rung's option {name} is a {kind.__name__}, not {value!r}")
            values[name] = value
        for name, value in values.items():
            _one_of(name, value, targets if name == "target" else known[name].metadata["known"])
        if not 0 <= values.get("verify", 0) <= 1:
            raise ValueError(f"rung's option verify is a share from 0 to 1, not {values['verify']}")
        return Options(**values)

    @staticmethod
    def describe() -> list[tuple[str, str, str, str]]:
        """(name, type, default, meaning) of each option."""
        return [(f.name, type(f.default).__name__, repr(f.default), _meaning(f.metadata))
                for f in fields(Options)]


def _meaning(metadata: Mapping[str, Any]) -> str:
    known = ", ".join(metadata["known"])
    return f"{metadata['meaning']} ({known})" if known else str(metadata["meaning"])


def _one_of(name: str, value: object, known: Sequence[str]) -> None:
    if known and value and value not in known:
        raise ValueError(f"rung has no {name} {value!r}; it has {', '.join(known)}")
