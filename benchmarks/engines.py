"""One engine in a process of its own: reads commands, one JSON object a line, and answers in the same way.

Run by `compare.py` as `python engines.py NAME`, perhaps with an interpreter of another environment, so it imports
nothing of this folder, and each engine's package only when asked for it. What is timed ends when the logits of the last
token can be read on the host.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np


class Engine(Protocol):
    """What is measured. An engine keeps the context of its last prompt, so that decode can start there again."""

    def version(self) -> str:
        """Of the engine, with what was built in."""

    def load(self, path: str, threads: int, context: int) -> None:
        """Weights, and room for `context` tokens."""

    def prefill(self, tokens: list[int]) -> np.ndarray[Any, Any]:
        """From nothing: float32 logits of the last token."""

    def rewind(self) -> None:
        """Back to what the last prefill left."""

    def step(self, token: int) -> np.ndarray[Any, Any]:
        """One token more."""


class _Pyferrum:
    """This library."""

    def version(self) -> str:
        import pyferrum as pf

        info = pf.device_info()
        return f"pyferrum {pf.__version__}, {info['instruction_set']}, build {info['build'][:12]}"

    def load(self, path: str, threads: int, context: int) -> None:
        import pyferrum as pf

        self.model = pf.load(path, device=pf.Device(threads=threads))

    def prefill(self, tokens: list[int]) -> np.ndarray[Any, Any]:
        self.state, logits = self.model.forward(self.model.init_state(), tokens, last_only=True)
        self.current = self.state
        return np.asarray(logits)[0]

    def rewind(self) -> None:
        self.current = self.state

    def step(self, token: int) -> np.ndarray[Any, Any]:
        self.current, logits = self.model.forward(self.current, [token], last_only=True)
        return np.asarray(logits)[0]


class _LlamaCpp:
    """llama.cpp through llama-cpp-python's C functions: default batch sizes and attention, last token's logits only."""

    def version(self) -> str:
        import llama_cpp

        return f"llama-cpp-python {llama_cpp.__version__}, {llama_cpp.llama_print_system_info().decode().strip()}"

    def load(self, path: str, threads: int, context: int) -> None:
        import llama_cpp as c

        self.c, self.silent = c, c.llama_log_callback(lambda *_: None)
        c.llama_log_set(self.silent, ctypes.c_void_p(0))
        self.model = c.llama_model_load_from_file(path.encode(), c.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        options = c.llama_context_default_params()
        options.n_ctx = context
        options.n_threads = options.n_threads_batch = threads
        self.context = c.llama_init_from_model(self.model, options)
        self.memory = c.llama_get_memory(self.context)
        self.batch = c.llama_n_batch(self.context)
        self.vocabulary = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self.model))

    def prefill(self, tokens: list[int]) -> np.ndarray[Any, Any]:
        self.c.llama_memory_clear(self.memory, False)
        self.length = len(tokens)
        return self._decode(tokens)

    def rewind(self) -> None:
        self.c.llama_memory_seq_rm(self.memory, 0, self.length, -1)

    def step(self, token: int) -> np.ndarray[Any, Any]:
        return self._decode([token])

    def _decode(self, tokens: list[int]) -> np.ndarray[Any, Any]:
        for start in range(0, len(tokens), self.batch):
            part = tokens[start : start + self.batch]
            ids = (self.c.llama_token * len(part))(*part)
            if self.c.llama_decode(self.context, self.c.llama_batch_get_one(ids, len(part))):
                raise RuntimeError("llama_decode failed")
        return np.ctypeslib.as_array(self.c.llama_get_logits_ith(self.context, -1), (self.vocabulary,))


class _Torch:
    """PyTorch bfloat16 through transformers, from the folder of dequantised weights beside the GGUF file."""

    def version(self) -> str:
        import torch
        import transformers

        return f"torch {torch.__version__}, transformers {transformers.__version__}"

    def load(self, path: str, threads: int, context: int) -> None:
        import torch
        import transformers

        self.torch, self.cache_of = torch, transformers.DynamicCache
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        transformers.utils.logging.disable_progress_bar()
        self.model = transformers.LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16)

    def prefill(self, tokens: list[int]) -> np.ndarray[Any, Any]:
        self.cache, self.steps = self.cache_of(), 0
        return self._forward(tokens)

    def rewind(self) -> None:
        if self.steps:
            self.cache.crop(-self.steps)
        self.steps = 0

    def step(self, token: int) -> np.ndarray[Any, Any]:
        self.steps += 1
        return self._forward([token])

    def _forward(self, tokens: list[int]) -> np.ndarray[Any, Any]:
        ids = self.torch.tensor([tokens])
        return self.model(ids, cache=self.cache, logits_to_keep=1).logits[0, 0].float().numpy()


class _Mlx:
    """MLX bfloat16 on the CPU through mlx-lm, from the same folder. It takes its number of threads by itself."""

    def version(self) -> str:
        import mlx.core
        import mlx_lm

        return f"mlx {mlx.core.__version__}, mlx-lm {mlx_lm.__version__}"

    def load(self, path: str, threads: int, context: int) -> None:
        import mlx.core as mx
        from mlx_lm.models import cache
        from mlx_lm.utils import load_model

        mx.set_default_device(mx.cpu)
        self.mx, self.caches = mx, cache
        self.model, _ = load_model(Path(path))
        mx.eval(self.model.parameters())

    def prefill(self, tokens: list[int]) -> np.ndarray[Any, Any]:
        self.cache, self.steps = self.caches.make_prompt_cache(self.model), 0
        return self._forward(tokens)

    def rewind(self) -> None:
        self.caches.trim_prompt_cache(self.cache, self.steps)
        self.steps = 0

    def step(self, token: int) -> np.ndarray[Any, Any]:
        self.steps += 1
        return self._forward([token])

    def _forward(self, tokens: list[int]) -> np.ndarray[Any, Any]:
        logits = self.model(self.mx.array([tokens]), cache=self.cache)[0, -1]
        return np.array(logits.astype(self.mx.float32))


ENGINES: dict[str, type[Engine]] = {"pyferrum": _Pyferrum, "llama.cpp": _LlamaCpp, "torch": _Torch, "mlx": _Mlx}


def peak_bytes() -> int:
    """Largest resident size of this process. Not ru_maxrss: that one counts the parent's size before exec too."""
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Worker:
    """The commands."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.prefilled: list[int] = []

    def version(self) -> dict[str, Any]:
        """What runs here."""
        return {"version": self.engine.version(), "peak_bytes": peak_bytes()}

    def load(self, path: str, threads: int, context: int) -> dict[str, Any]:
        """Time to have the weights, imports not counted."""
        start = time.perf_counter()
        self.engine.load(path, threads, context)
        return {"seconds": time.perf_counter() - start}

    def prefill(self, tokens: list[int]) -> dict[str, Any]:
        """Time of a prompt from nothing."""
        start = time.perf_counter()
        logits = self.engine.prefill(tokens)
        seconds = time.perf_counter() - start
        self.prefilled = tokens
        return {"seconds": seconds, "best": int(logits.argmax())}

    def decode(self, context: list[int], tokens: list[int]) -> dict[str, Any]:
        """Time of some tokens, one call each, behind a context that is there already."""
        if self.prefilled != context:
            self.prefill(context)
        self.engine.rewind()
        start = time.perf_counter()
        for token in tokens:
            logits = self.engine.step(token)
        return {"seconds": time.perf_counter() - start, "best": int(logits.argmax())}

    def peak(self) -> dict[str, Any]:
        """Of the memory so far."""
        return {"peak_bytes": peak_bytes()}


def main() -> None:
    """Answer until the input ends. Engines that print to the standard output do not reach the answers' pipe."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    worker = Worker(ENGINES[sys.argv[1]]())
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(worker, command.pop("do"))(**command)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
