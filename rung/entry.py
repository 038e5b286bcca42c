"""What the entry point of torch's registry of backends loads: the backend, put together.

Several threads may look the name up at once. Each would then register what it loaded, and the
registry refuses all but the first; this module, of which there is one, registers the backend, and
leaves nothing to be registered to those who load it.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from rung.compilation import compile_program
from rung.core.options import Options
from rung.frontends.torch.backend import Backend, Run
from rung.frontends.torch.externs import torch_on
from rung.frontends.torch.graphs import replayed
from rung.frontends.torch.importer import Imported
from rung.targets import TARGETS
from rung.targets.device import settle


def _chosen(imported: Imported, options: Options) -> Options:
    """The options, with the target of the device that a graph runs on unless they name another."""
    return replace(options, target=options.target or imported.home.type)


def _verified(run: Run, graph: Any, imported: Imported, options: Options) -> Run:
    """`tools.verify`, which few need, is imported where it is asked for."""
    from rung.tools import verify

    return verify.verified(run, graph, imported, _chosen(imported, options))


def _compiled(imported: Imported, options: Options, hints: Mapping[str, int]) -> Run:
    """The callable of an imported graph."""
    run = compile_program(imported.func, _chosen(imported, options), imported.constants, hints,
                          torch_on(imported.home))
    if options.mode == "reduce-overhead" and imported.home.type == "cuda":
        return replayed(run, imported.func, partial(settle, wait=False))
    return run


rung = Backend(_compiled, _verified, tuple(TARGETS))
rung.register("rung")
loaded = None
