# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Evaluation
#
# How well does a model predict a text, where does it fail, and what does a coarser quantisation cost? The negative
# log-likelihood (NLL) of a token answers all three: how surprised the model was by it, in nats. 0 is certainty, and
# ln 49152 = 10.8 is knowing nothing in a vocabulary of 49,152.

# %%
import tempfile
from importlib import resources
from pathlib import Path

import gguf
import matplotlib.pyplot as plt
import numpy as np

import pyferrum as pf
from pyferrum import plot
from pyferrum.demo_model import fetch

model = pf.load(fetch())
text = resources.files("pyferrum").joinpath("data/tidewatch.txt").read_text()
tokens = model.tokenizer.encode(text)[:1025]
pieces = [model.tokenizer.decode([token]) for token in tokens]
print(len(tokens), "tokens of a story that ships with pyferrum:", repr(text[:60]))

# %% [markdown]
# ## One number
#
# Perplexity is the exponential of the mean NLL. The result says how it was measured, because the same text has other
# perplexities with other windows. It also has the NLL of each token, the hash of the model's file, the versions of
# everything: `score.save("result.json")` keeps all that.

# %%
score = pf.evaluate.perplexity(model, tokens, window=512)
print(f"perplexity {score.perplexity:.2f} of {score.scored_tokens} tokens")
print(f"{score.method}: {score.definition}")

# %% [markdown]
# ## Where it comes from
#
# The NLL of each token, on the text itself. Dark is surprising: a name when it first comes, and not when it comes
# again. The first token has no score; there is nothing before it.

# %%
nlls = score.token_nlls
shown = 220
strip = [piece.replace("\n\n", "¶\n").replace("\n", " ") for piece in pieces[:shown]]
ax = plot.nll_strip(strip, np.concatenate([[np.nan], nlls[: shown - 1]]))

# %% [markdown]
# The most surprising tokens:

# %%
for i in np.argsort(-nlls)[:6]:
    print(f"{nlls[i]:5.1f} nats  {''.join(pieces[max(i - 4, 0) : i + 1])!r} then {pieces[i + 1]!r}")

# %% [markdown]
# ## Choosing an answer
#
# A test with answers to choose from is the same thing once more: which of them is the least surprising? `pf.score`
# reads the question once, and every answer goes on from the same state. An answer of several tokens has a lower sum for
# its length alone, so look at the mean as well.

# %%
question = "Question: Which body in the sky pulls most strongly on the tides of the sea?\nAnswer: The"
answers = [" Moon.", " Sun.", " planet Jupiter.", " North Star."]
for answer, scored in zip(answers, pf.score(model, question, answers), strict=True):
    print(f"{scored.logprob:7.2f} nats, {scored.logprob / scored.token_count:6.2f} a token {answer}")

# %% [markdown]
# ## A second quantisation
#
# The file has its matrices as Q4_1: blocks of 32 weights of four bits, with a scale and an offset. Q4_0 has no offset
# and saves half a bit a weight. We write a second file with the `gguf` package, from the Q4_1 weights: so they are
# rounded twice, and will be worse than in a Q4_0 file made from the original.

# %%
folder = tempfile.TemporaryDirectory()
path = Path(folder.name) / "SmolLM2-135M-Instruct-Q4_0.gguf"
source, target = gguf.GGUFReader(model.path), gguf.GGUFWriter(path, "llama")
target.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
for key, field in source.fields.items():
    if not key.startswith("GGUF.") and key not in (gguf.Keys.General.ARCHITECTURE, gguf.Keys.General.FILE_TYPE):
        target.add_key_value(key, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
for tensor in source.tensors:
    kind, data = tensor.tensor_type, tensor.data
    if kind == gguf.GGMLQuantizationType.Q4_1:
        kind = gguf.GGMLQuantizationType.Q4_0
        data = gguf.quants.quantize(gguf.quants.dequantize(data, tensor.tensor_type), kind)
    target.add_tensor(tensor.name, data, raw_dtype=kind)
target.write_header_to_file()
target.write_kv_data_to_file()
target.write_tensors_to_file()
target.close()

coarse = pf.load(path)
print(model.params.layers[0].gate_proj, f"in a file of {model.path.stat().st_size / 1e6:.0f} MB")
print(coarse.params.layers[0].gate_proj, f"in a file of {path.stat().st_size / 1e6:.0f} MB")

# %% [markdown]
# ## Token against token
#
# The two perplexities differ, but is it chance? Both models read the same tokens, so the comparison goes token by
# token: what counts is the spread of the *differences*, and that is much smaller than the spread of the scores.

# %%
coarse_score = pf.evaluate.perplexity(coarse, tokens, window=512)
coarse_nlls = coarse_score.token_nlls
print(pf.evaluate.compare(score, coarse_score))
print(f"\nstandard error of one mean alone {score.standard_error:.3f}")
print(f"tokens that are less surprising with Q4_0: {np.mean(coarse_nlls < nlls):.0%}")

# %%
fig, ax = plt.subplots(figsize=(4.6, 4.4), layout="constrained")
ax.plot([0, 18], [0, 18], color=plot.GREY, zorder=0)
ax.plot(nlls, coarse_nlls, ".", ms=4, alpha=0.5, color=plot.COLOURS[0])
ax.set(xlabel="NLL with Q4_1 (nats)", ylabel="NLL with Q4_0 (nats)", aspect="equal")
ax.set(xlim=(0, 18), ylim=(0, 18), xticks=range(0, 19, 3), yticks=range(0, 19, 3))
title = ax.set_title("one dot a token; above the line, Q4_0 is worse", size=10)

# %% [markdown]
# The story's own words do not say all of it: two models may give the same probability to the word that came, and differ
# in all others. The Kullback-Leibler divergence compares whole distributions.


# %%
def log_probabilities(of, rows=tokens[:512]):
    """log p of every token of the vocabulary behind each row: float64 [rows, vocabulary]."""
    _, logits = of.forward(of.init_state(), rows)
    x = np.asarray(logits).astype(np.float64)
    return x - np.logaddexp.reduce(x, axis=1, keepdims=True)


fine, rough = log_probabilities(model), log_probabilities(coarse)
divergence = (np.exp(fine) * (fine - rough)).sum(axis=1)
same = fine.argmax(axis=1) == rough.argmax(axis=1)
print(f"mean divergence of Q4_0 from Q4_1 {divergence.mean():.3f} nats; same most probable token {same.mean():.0%}")

# %% [markdown]
# ## Is it as sure as it should be?
#
# Take the token that a model holds most probable, at each place. When it says 70 %, is it right in 70 % of the cases?
# Points above the line are too modest, points below it too sure.

# %%
truth = np.array(tokens[1:513])
ax = None
for name, scores in (("Q4_1", fine), ("Q4_0", rough)):
    ax = plot.calibration(np.exp(scores.max(axis=1)), scores.argmax(axis=1) == truth, bins=8, label=name, ax=ax)

# %% [markdown]
# Five hundred tokens leave wide bars. They shrink with the square root of the number of tokens: for half their width,
# read four times the text.

# %%
del coarse
folder.cleanup()
