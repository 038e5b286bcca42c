"""What the entry point of torch's registry of backends loads.

Several threads may look the name up at once. Each would then register what it loaded, and the
registry refuses all but the first; this module, of which there is one, registers the backend, and
leaves nothing to be registered to those who load it.
"""

from torch._dynamo.backends.registry import register_backend

from rung.frontends.torch.backend import rung

register_backend(rung, name="rung")
loaded = None
