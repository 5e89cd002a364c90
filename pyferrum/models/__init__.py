"""Models as pure functions of parameters, states and tokens, and the loader of checkpoints."""

from pyferrum.models.checkpoints import load
from pyferrum.models.model import Model
from pyferrum.models.model_state import ModelState, load_model_state

__all__ = ["Model", "ModelState", "load", "load_model_state"]
