"""Checkpoint files in, named tensors and a tokenizer out: nothing is copied, nothing is trusted."""

from pyferrum.checkpoint.gguf import GGUFFile, open_gguf
from pyferrum.checkpoint.safetensors import SafetensorsFiles, open_safetensors
from pyferrum.checkpoint.stored import StoredTensor
from pyferrum.checkpoint.tokenizer import Tokenizer

__all__ = [
    "GGUFFile",
    "SafetensorsFiles",
    "StoredTensor",
    "Tokenizer",
    "open_gguf",
    "open_safetensors",
]
