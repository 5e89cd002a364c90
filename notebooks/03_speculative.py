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
# # Speculative decoding
#
# A small *drafter* guesses the next few tokens. The model, here called the target, reads all of them in one call and
# says how many it would have chosen itself. The text is the target's, always; only the speed depends on the guesses.
#
# We know of no published DFlash drafter for this model. So this notebook uses three stand-ins, and says of each what it
# is: one with random weights, to see the machinery of DFlash 2; one that looks up what came before; and the target
# itself.

# %%
import json
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from safetensors.numpy import save_file

import pyferrum as pf
from pyferrum import plot
from pyferrum.demo_model import fetch
from pyferrum.models.dflash_files import hf_config, tensor_shapes

model = pf.load(fetch())
passage = (
    "A pipe runs from the open harbour into a deep well under the hut. Because the pipe is narrow, the waves outside "
    "cannot hurry through it, and the water in the well rises and falls only with the slow breathing of the tide. A "
    "float rests on that water."
)
tokens = model.tokenizer.encode(f"{passage}\n\nThe same once more:\n\nA pipe runs")
plain = [step.token for step in pf.generate(model, tokens, max_tokens=64, ignore_eos=True)]
print(model.tokenizer.decode(plain))

# %% [markdown]
# ## A DFlash 2 drafter
#
# A few layers that guess a whole block in one pass. They read the target's residual stream behind some of its layers
# (the *taps*), and borrow its embedding and its output matrix. This one has two layers and **random weights**: its
# guesses are noise. A trained one has the same two files.

# %%
settings = {
    "architectures": ["DFlash2DraftModel"],
    "hidden_size": 576,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "is_causal": False,
    "layer_types": ["sliding_attention"] * 2,
    "sliding_window": 64,
    "dflash_config": {
        "block_size": 8,
        "mask_token_id": 0,
        "target_layer_ids": [1, 15, 28],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 16,
        "selector_top_k": 4,
    },
}
shapes = tensor_shapes(
    hf_config(SimpleNamespace(path="settings", config=settings, tensors={}), model.config.vocabulary)
)
rng = np.random.default_rng(0)


def random_tensor(shape):
    """Ones for a norm; for a matrix, numbers that neither grow nor shrink what goes through."""
    x = np.ones(shape) if len(shape) == 1 else rng.standard_normal(shape) / np.sqrt(shape[-1])
    return x.astype(np.float32)


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    (folder / "config.json").write_text(json.dumps(settings))
    save_file({name: random_tensor(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    drafter = pf.load_draft(folder, model)
print(f"{len(shapes)} tensors, {sum(np.prod(shape) for shape in shapes.values()) / 1e6:.1f} million weights")
print(f"blocks of {drafter.block_size}, taps behind layers {drafter.taps}")

# %% [markdown]
# ## One round by hand
#
# The target reads the prompt, and its taps become the drafter's context.

# %%
taps = dict.fromkeys(drafter.taps)
state, logits = model.forward(model.init_state(), tokens, last_only=True, taps=taps)
features = np.concatenate([np.asarray(taps[layer]) for layer in drafter.taps], axis=1)
context = drafter.extend(drafter.init_state(1), [tokens], [features])
anchor = int(np.asarray(logits)[0].argmax())
print("features", features.shape, "context", context.lengths)

# %% [markdown]
# The drafter guesses seven tokens behind the target's next one, the *anchor*.

# %%
[draft] = drafter.propose(context, [anchor], [8], 0.0, [pf.random.key(0)])
print(repr(model.tokenizer.decode([anchor])), "and then", [model.tokenizer.decode([t]) for t in draft.tokens])

# %% [markdown]
# The target reads anchor and guesses in one call. Row i says what it would have chosen there. We keep the guesses up to
# the first one that it would not have chosen, and its own choice behind them. Going back is `truncate`.


# %%
def verify(state, block):
    verified, logits = model.forward(state, block)
    best = np.asarray(logits).argmax(axis=1).tolist()
    accepted = next((i for i, guess in enumerate(block[1:]) if guess != best[i]), len(block) - 1)
    return verified.truncate(state.length + accepted + 1), accepted, best[accepted]


kept, accepted, following = verify(state, [anchor, *draft.tokens])
print(accepted, "accepted, then", repr(model.tokenizer.decode([following])), "| state", state.length, "->", kept.length)
assert [anchor, following] == plain[:2] or accepted

# %% [markdown]
# If the guesses are what the target says anyway, all of them stand: eight tokens for one call.

# %%
kept, accepted, following = verify(state, plain[:8])
print(accepted, "accepted, then", repr(model.tokenizer.decode([following])))
assert following == plain[8]

# %% [markdown]
# ## Two more drafters
#
# Anything that proposes tokens is a drafter. It is asked for all prompts that run side by side at once, and for no
# guesses where one has ended or is about to.
#
# This one has no weights at all: it finds the last place where the two newest tokens stood before, and proposes what
# came behind them. It is good where a text repeats itself, as ours does on purpose, and of no use where it does not.


# %%
class Lookup:
    taps = ()
    block_size = 8

    def init_state(self, lanes):
        return ((),) * lanes

    def extend(self, state, tokens, features):
        return tuple((*old, *new) for old, new in zip(state, tokens, strict=True))

    def guess(self, seen, count):
        for end in range(len(seen) - 1, 1, -1):
            if seen[end - 2 : end] == seen[-2:]:
                return [*seen[end : end + count], *[0] * count][:count]
        return [0] * count

    def propose(self, state, anchors, rows, temperature, keys):
        guesses = [
            self.guess([*seen, anchor], count - 1) if count > 1 else []
            for seen, anchor, count in zip(state, anchors, rows, strict=True)
        ]
        return [pf.Proposal(guess, np.array(guess, int)[:, None], np.ones((len(guess), 1))) for guess in guesses]


# %% [markdown]
# The last one is the target itself. Its guesses are always right, and cost more than they save: it shows the most that
# a block of eight can give in tokens a round, and no gain in time.


# %%
class Itself(Lookup):
    def guess(self, seen, count):
        said = pf.generate(model, seen, max_tokens=count, ignore_eos=True)
        return [step.token for step in said]


# %% [markdown]
# ## Side by side
#
# Each way in turn, three times over, and the median of each: timings of one run after another drift. All of them give
# the same tokens.


# %%
def run(drafter):
    start = time.perf_counter()
    if drafter is None:
        steps = list(pf.generate(model, tokens, max_tokens=64, ignore_eos=True))
    else:
        steps = list(pf.speculative_generate(model, drafter, tokens, max_tokens=64, ignore_eos=True))
    assert [step.token for step in steps] == plain
    return time.perf_counter() - start, steps[-1]


ways = {"plain": None, "DFlash 2, random weights": drafter, "lookup": Lookup(), "the target itself": Itself()}
seconds, ends = {name: [] for name in ways}, {}
for _ in range(3):
    for name, way in ways.items():
        taken, ends[name] = run(way)
        seconds[name].append(taken)
for name, way in ways.items():
    rate = 64 / statistics.median(seconds[name])
    rounds = sum(ends[name].histogram.values()) if way else 63
    print(f"{name:26}{rate:6.0f} tokens/s   {63 / rounds:.2f} tokens a call of the target")

# %% [markdown]
# The first token comes with the prompt; the other 63 come in rounds. How many guesses stood in each, for the lookup:

# %%
ax = plot.accepted_lengths(ends["lookup"].histogram, drafted=7, label="lookup: guesses that stood")

# %% [markdown]
# The random drafter slows everything down and changes nothing in the text. That is the promise, and it holds bit for
# bit: a row of the target's call does not depend on how many rows come with it. (With a temperature, a drafter leaves
# the distribution of texts as it is, but the same key draws another one from it.)
