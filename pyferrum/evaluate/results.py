"""A perplexity with everything needed to get it again, as a value and as a JSON file."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np

from pyferrum._show import to_json
from pyferrum.errors import InvalidArgument

OUTCOME = ("perplexity", "mean_nll", "standard_error", "word_perplexity", "byte_perplexity", "bits_per_byte")
"""The fields of an Evaluation that were measured; the others say how."""


@dataclass(frozen=True)
class Evaluation:
    """A perplexity, and how it was measured."""

    perplexity: float
    """exp of the mean NLL of a token."""
    mean_nll: float
    """Nats per scored token."""
    standard_error: float | None
    """Of the mean NLL, as if tokens were independent; None for one token."""
    word_perplexity: float | None
    """exp of all NLLs by the number of words in what was scored; None where only token ids were given."""
    byte_perplexity: float | None
    """The same by bytes of UTF-8."""
    bits_per_byte: float | None
    """log2 of `byte_perplexity`."""
    method: str
    """stream, rolling, half-window or strided."""
    definition: str
    """What the method fed and scored, in words."""
    window: int
    stride: int | None
    bos: int | None
    documents: int
    text_tokens: int
    scored_tokens: int
    scored_words: int | None
    scored_bytes: int | None
    text_sha256: str
    """Of the token ids of all documents."""
    scored_sha256: str
    """Of which tokens were scored: two results with the same one can be compared token by token."""
    residual_stream: str
    """dtype of the residual stream."""
    model: Mapping[str, Any]
    """Name, SHA-256 and architecture of the checkpoint."""
    devices: tuple[Mapping[str, Any], ...]
    """Name, instruction set and library build of every device that scored something."""
    versions: Mapping[str, str]
    """Of Python, pyferrum and packages."""
    token_nlls: np.ndarray[Any, np.dtype[np.float32]] = field(repr=False, compare=False)
    """NLL of each scored token, in the order of the text, float32 [scored_tokens]."""
    seconds: float = field(compare=False)
    """Wall time of this run. A resumed one scores less than all."""
    tokens_per_second: float = field(compare=False)
    """Tokens scored in this run, by its seconds."""

    def to_dict(self, *, nlls: bool = False) -> dict[str, Any]:
        """Plain data for JSON, the same for the same measurement: timings are left out, token NLLs unless asked for."""
        values = {name: value for name, value in asdict(self).items() if name not in _APART}
        values["devices"] = [dict(device) for device in self.devices]
        return {"kind": "perplexity", **values} | ({"token_nlls": self.token_nlls.tolist()} if nlls else {})

    def save(self, path: str | os.PathLike[str], *, nlls: bool = True) -> None:
        """Write the result as JSON. The file is there as a whole or as it was before."""
        write_json(path, self.to_dict(nlls=nlls))


_COMPARED: Mapping[str, Mapping[str, Any]] = {
    "perplexity": {**dict.fromkeys(OUTCOME, (int, float, NoneType)), "scored_sha256": str},
    "tasks": {"tasks": dict},
}
"""What a result of each kind is compared by."""
_APART = ("token_nlls", "seconds", "tokens_per_second")


def summary(nlls: np.ndarray[Any, Any], words: int | None, nbytes: int | None) -> dict[str, Any]:
    """The outcome fields of an Evaluation."""
    total = float(np.sum(nlls, dtype=np.float64))
    mean = float(np.mean(nlls, dtype=np.float64))
    spread = float(np.std(nlls, dtype=np.float64)) / (len(nlls) - 1) ** 0.5 if len(nlls) > 1 else None
    bits = total / nbytes / math.log(2) if nbytes else None
    with np.errstate(over="ignore"):  # an unlikely text of few words has an infinite word perplexity
        return {
            "perplexity": float(np.exp(mean)),
            "mean_nll": mean,
            "standard_error": spread,
            "word_perplexity": float(np.exp(total / words)) if words else None,
            "byte_perplexity": float(np.exp(total / nbytes)) if nbytes else None,
            "bits_per_byte": bits,
        }


def write_json(path: str | os.PathLike[str], value: Mapping[str, Any]) -> None:
    """Replace a file by JSON, in one step. Lists of numbers go on one line each; what is not finite becomes null."""
    path = Path(path)
    lines = [f"  {json.dumps(key)}: {to_json(entry)}" for key, entry in value.items()]
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        try:
            file.write("{\n" + ",\n".join(lines) + "\n}\n")
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).chmod(0o644)
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def read_result(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A result file as plain data.

    Raises:
        InvalidArgument: it is not one.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidArgument(f"{path}: not JSON: {error}") from error
    wanted = _COMPARED.get(str(value.get("kind"))) if isinstance(value, dict) else None
    if wanted is None or not all(isinstance(value.get(name, ...), kinds) for name, kinds in wanted.items()):
        raise InvalidArgument(f"{path}: not a result that `pyferrum eval --output` wrote, or damaged")
    return dict(value)
