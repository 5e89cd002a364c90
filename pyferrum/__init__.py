"""pyferrum: the inside of LLM inference as pure functions over immutable handles.

state, y = pf.causal_attention(state, x, weights)
"""

from pyferrum import _random as random
from pyferrum import evaluate, rope
from pyferrum.array import Array, array, block_until_ready
from pyferrum.attention import Ragged, causal_attention
from pyferrum.beam_search import Beam, beam_search
from pyferrum.config import AttentionConfig
from pyferrum.device import Device, arena_stats, default_device, device_info
from pyferrum.dflash2 import (
    dflash2_attention,
    dflash2_commit,
    dflash2_conv,
    dflash2_heads,
    dflash2_mask,
    dflash2_mask_rows,
    dflash2_pack,
    dflash2_select,
)
from pyferrum.errors import (
    CheckpointError,
    DeviceError,
    FerrumError,
    InvalidArgument,
    OutOfPages,
    StateError,
    UnsupportedError,
)
from pyferrum.formats import bfloat16
from pyferrum.generate import GenerationResponse, generate
from pyferrum.jit import jit
from pyferrum.models import Model, ModelState, load, load_model_state
from pyferrum.models.draft import DraftModel, Proposal, load_draft
from pyferrum.ops import argmax, cross_entropy, embed, linear, residual_add, rms_norm, swiglu, top_k
from pyferrum.plan import Plan, plan_attention
from pyferrum.ring import DFlash2Ring, init_dflash2_ring, load_dflash2_ring
from pyferrum.score import Score, score
from pyferrum.speculative import SpeculativeResponse, speculative_generate, speculative_generate_batch
from pyferrum.state import KVState, init_state, load_state
from pyferrum.weights import AttentionWeights, BlockArray, block_array, prepare

__version__ = "0.1.0"

__all__ = [
    "Array",
    "AttentionConfig",
    "AttentionWeights",
    "Beam",
    "BlockArray",
    "CheckpointError",
    "DFlash2Ring",
    "Device",
    "DeviceError",
    "DraftModel",
    "FerrumError",
    "GenerationResponse",
    "InvalidArgument",
    "KVState",
    "Model",
    "ModelState",
    "OutOfPages",
    "Plan",
    "Proposal",
    "Ragged",
    "Score",
    "SpeculativeResponse",
    "StateError",
    "UnsupportedError",
    "arena_stats",
    "argmax",
    "array",
    "beam_search",
    "bfloat16",
    "block_array",
    "block_until_ready",
    "causal_attention",
    "cross_entropy",
    "default_device",
    "device_info",
    "dflash2_attention",
    "dflash2_commit",
    "dflash2_conv",
    "dflash2_heads",
    "dflash2_mask",
    "dflash2_mask_rows",
    "dflash2_pack",
    "dflash2_select",
    "embed",
    "evaluate",
    "generate",
    "init_dflash2_ring",
    "init_state",
    "jit",
    "linear",
    "load",
    "load_dflash2_ring",
    "load_draft",
    "load_model_state",
    "load_state",
    "plan_attention",
    "prepare",
    "random",
    "residual_add",
    "rms_norm",
    "rope",
    "score",
    "speculative_generate",
    "speculative_generate_batch",
    "swiglu",
    "top_k",
]
