"""What the entry point of torch's registry of backends loads: the backend, put together.

Several threads may look the name up at once. Each would then register what it loaded, and the
registry refuses all but the first; this module, of which there is one, registers the backend, and
leaves nothing to be registered to those who load it.
"""

from functools import partial
from typing import Any

from rung.compilation import compile_program
from rung.core.options import Options
from rung.frontends.torch.backend import Backend, Run
from rung.frontends.torch.externs import TORCH
from rung.frontends.torch.importer import Imported
from rung.targets import TARGETS


def _verified(run: Run, graph: Any, imported: Imported, options: Options) -> Run:
    """`tools.verify`, which few need, is imported where it is asked for."""
    from rung.tools import verify

    return verify.verified(run, graph, imported, options)


rung = Backend(partial(compile_program, externs=TORCH), _verified, tuple(TARGETS))
rung.register("rung")
loaded = None
