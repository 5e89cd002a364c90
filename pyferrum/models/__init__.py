"""Models as pure functions of parameters, states and tokens, and the loader of checkpoints."""

from pyferrum.models.checkpoints import load
from pyferrum.models.model import Model, ModelState

__all__ = ["Model", "ModelState", "load"]
