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
# # First steps
#
# One attention layer of a real model, called by hand; then the whole model, which is a loop over such layers. You need
# the demonstration model, a file of 98 MB that `make demo` has fetched.

# %%
import numpy as np

import pyferrum as pf
from pyferrum import plot
from pyferrum.demo_model import fetch
from pyferrum.models import llama

model = pf.load(fetch())
print(model)

# %% [markdown]
# ## Tokens, then vectors
#
# The tokenizer cuts text into tokens. The embedding has a row of numbers for each token of the vocabulary, and `x` is
# the rows of ours: one line of 576 numbers for each token.

# %%
text = "The keeper reads the tide gauge, and the keeper writes the tide down."
tokens = model.tokenizer.encode(text)
pieces = [model.tokenizer.decode([token]) for token in tokens]
x = pf.embed(tokens, model.params.embedding)
print(pieces)
print(x.shape, x.dtype)

# %% [markdown]
# ## One layer
#
# A layer has a configuration (how many heads, how wide) and weights. This one stays as it is in the file: blocks of 32
# weights in four bits each, Q4_1.

# %%
config, weights = model.config.attention, model.params.layers[0].attention
print(config.query_heads, "query heads,", config.key_value_heads, "heads of keys and values,", config.head_dim, "wide")
print(weights.q_proj)

# %% [markdown]
# Attention needs to remember the keys and values of earlier tokens. That memory is a *state*. The call takes a state
# and gives a new one; the old one is what it was.

# %%
empty = pf.init_state(config)
state, y = pf.causal_attention(empty, x, weights)
print("before:", empty)
print("after: ", state)
print("y:     ", y.shape, y.dtype)

# %% [markdown]
# You may cut a sequence into calls as you like: the numbers are the same, to the last bit.

# %%
first, y1 = pf.causal_attention(empty, x[:5], weights)
second, y2 = pf.causal_attention(first, x[5:], weights)
assert np.array_equal(np.concatenate([y1, y2]), y)
print(first.length, "+", second.length - first.length, "tokens: same bits")

# %% [markdown]
# ## What a head looks at
#
# A row of this picture is a token, and the dark cells in it are the tokens it takes from. Nothing lies right of the
# diagonal, because no token sees a later one. This head of the first layer takes almost everything from the small
# words: the dark columns are *The*, *the* and the comma. Try another `head`, 0 to 8.

# %%
ax = plot.attention_map(state, x, weights, head=8, labels=pieces)

# %% [markdown]
# ## The plan
#
# A call is a list of launches: kernels, each over a grid of threadgroups. The list can be had without running anything.
# Here it is for one more token behind our state; the bar in front of a kernel says that it waits for those above it.

# %%
plan = pf.plan_attention(config, 1, starts=state.length, weights=weights)
print(plan)

# %% [markdown]
# The same as a picture. The three projections in one step do not depend on each other.

# %%
ax = plot.plan(plan)

# %% [markdown]
# A long state is cut into spans that are worked on side by side, and a launch more puts them together.

# %%
long = pf.plan_attention(config, 1, starts=4000, weights=weights)
print(*[f"{launch.kernel:32} {launch.grid}" for launch in long.launches if "attention" in launch.kernel], sep="\n")

# %% [markdown]
# ## The model is a loop
#
# Thirty layers, each attention and then a small network for every token by itself. Then a last norm, and a score for
# every token of the vocabulary.

# %%
h, states = x, []
for layer in model.params.layers:
    layer_state, h = pf.causal_attention(pf.init_state(config), h, layer.attention)
    h = llama.mlp(h, layer, epsilon=config.epsilon)
    states.append(layer_state)
h = pf.rms_norm(h, model.params.norm, epsilon=config.epsilon)
logits = pf.linear(h, model.params.output, dtype=np.float32)
print(len(states), "states, logits", logits.shape)

# %% [markdown]
# `model.forward` does the same, and its state holds all thirty.

# %%
model_state, same = model.forward(model.init_state(), tokens)
assert np.array_equal(logits, same)
print(model_state)

# %% [markdown]
# The last row scores what comes next:

# %%
row = np.asarray(same)[-1].astype(np.float64)
probabilities = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
for token in np.argsort(-probabilities)[:5]:
    print(f"{probabilities[token]:6.1%}  {model.tokenizer.decode([token])!r}")

# %% [markdown]
# `pf.generate` picks, appends and goes on.

# %%
for step in pf.generate(model, [{"role": "user", "content": "What is a tide gauge?"}], max_tokens=40):
    print(step.text, end="")
print(f"\n\n{step.generation_tokens} tokens, {step.generation_tps:.0f} a second; the state has {step.state.length}")
