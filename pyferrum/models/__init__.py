"""Models as pure functions of parameters, states and tokens, and the loader of checkpoints."""

from pyferrum.models.checkpoints import load
from pyferrum.models.model import Model, ModelState, load_model_state

__all__ = ["Model", "ModelState", "load", "load_model_state"]
