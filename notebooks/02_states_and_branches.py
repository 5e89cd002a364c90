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
# # States and branches
#
# A state never changes. So a search over continuations needs no copies and no bookkeeping: every node of the tree is a
# state, and a branch is a state used twice.

# %%
from importlib import resources

import numpy as np

import pyferrum as pf
from pyferrum import plot
from pyferrum.demo_model import fetch
from pyferrum.sampling import log_softmax

model = pf.load(fetch())

# %% [markdown]
# ## One prompt, read once
#
# We hold back the prompt's last token: it will be the first one of every continuation.

# %%
story = resources.files("pyferrum").joinpath("data/tidewatch.txt").read_text()
prompt = story[: story.index(" she told the")].replace("\n", " ")
print("…" + prompt[-110:])

*before, last = model.tokenizer.encode(prompt)
root, _ = model.forward(model.init_state(), before, last_only=True)
print(root)

# %% [markdown]
# A page of this model has room for the keys and values of 85 tokens in one layer. `arena_stats` counts the pages that
# are held by all states together: here the root's, in each of 30 layers.

# %%
print(pf.arena_stats()["used_pages"], "pages in use =", root.layers[0].pages, "x", len(root.layers))


# %% [markdown]
# ## Forking
#
# Two continuations of `root`. The first goes on in the root's last page, which has room left. The second may not write
# there, so it copies what the root has in that page: 30 pages, one for each layer. Nothing else is copied.


# %%
def pages_in_use() -> int:
    return pf.arena_stats()["used_pages"]


for word in (" the", " a"):
    copied = pf.arena_stats()["copied_pages"]
    state, _ = model.forward(root, [last, *model.tokenizer.encode(word)], last_only=True)
    print(f"{word!r}: {pf.arena_stats()['copied_pages'] - copied} pages copied")
    if word == " the":
        kept = state

# %% [markdown]
# Going back is the same thing the other way round: `truncate` gives the state as it was after so many tokens, at once,
# and the longer one stays.

# %%
earlier = root.truncate(100)
print(earlier.length, root.length, kept.length)

# %% [markdown]
# When nobody holds a state any more, its pages are free.

# %%
held = pages_in_use()
del kept, state, earlier
print(held, "->", pages_in_use())


# %% [markdown]
# ## Best of n, as a tree
#
# Draw three continuations of eight tokens, and three more from the end of each. Nine leaves, and every one begins with
# a state that others share. Randomness is an explicit key: a key for each branch, split from the one above it.


# %%
def grow(state, token, key, depth=2):
    if depth == 0:
        return [(0.0, [], state)]
    leaves = []
    for branch in pf.random.split(key, 3):
        draw, below = pf.random.split(branch)
        steps = list(pf.generate(model, [token], state=state, max_tokens=8, temp=0.8, key=draw, ignore_eos=True))
        said, score = [step.token for step in steps], sum(float(step.logprobs[step.token]) for step in steps)
        deeper = grow(steps[-1].state, said[-1], below, depth - 1)
        leaves += [(score + more, said + rest, end) for more, rest, end in deeper]
    return leaves


leaves = sorted(grow(root, last, pf.random.key(1)), key=lambda leaf: -leaf[0])
for leaf in leaves:
    print(f"{leaf[0]:7.2f}  {model.tokenizer.decode(leaf[1])!r}")

# %% [markdown]
# The pages of one layer, leaf by leaf. A colour is a page that several of them show; grey is what is a leaf's own.

# %%
names = ["root", *(f"leaf {i + 1}" for i in range(len(leaves)))]
ax = plot.pages([root, *(leaf[2] for leaf in leaves)], labels=names)

# %% [markdown]
# ## Beam search in ten lines
#
# Keep the four best continuations. In each step all four go through the model in one packed call, every one of them is
# extended by its four best tokens, and the four best of these sixteen are kept.


# %%
def search(state, token, steps=12, width=4):
    beams = [(0.0, [token], state)]
    for _ in range(steps):
        states, rows = model.forward([beam[2] for beam in beams], [beam[1][-1:] for beam in beams], last_only=True)
        options = []
        for (score, said, _), state, row in zip(beams, states, rows, strict=True):
            logprobs = log_softmax(np.asarray(row)[0])
            options += [(score + float(logprobs[t]), [*said, int(t)], state) for t in np.argsort(-logprobs)[:width]]
        beams = sorted(options, key=lambda option: -option[0])[:width]
    return [(score, said[1:]) for score, said, _ in beams]


by_hand = search(root, last)
for score, said in by_hand:
    print(f"{score:7.2f}  {model.tokenizer.decode(said)!r}")

# %% [markdown]
# `pf.beam_search` is this loop with ends of text and a length penalty. A beam's numbers do not depend on the beams that
# run beside it, so the two find the same. One beam is greedy decoding, which takes the best token each time and may
# miss a better sentence.

# %%
del leaves, leaf
start = pages_in_use()
found = pf.beam_search(model, [last], state=root, beams=4, max_tokens=12, ignore_eos=True)
in_beams = pages_in_use() - start
assert [list(beam.tokens) for beam in found] == [said for _, said in by_hand]
for width in (1, 2, 4, 8):
    best = pf.beam_search(model, [last], state=root, beams=width, max_tokens=12, ignore_eos=True)[0]
    print(f"{width} beams: {best.log_probability:7.2f}  {model.tokenizer.decode(best.tokens)!r}")

# %% [markdown]
# What the four beams cost in memory, beside the root's own pages:

# %%
alone = sum(layer.pages for beam in found for layer in beam.state.layers)
print(f"{in_beams} pages; {alone} if each beam had its own")
ax = plot.pages([root, *(beam.state for beam in found)], labels=["root", "beam 1", "beam 2", "beam 3", "beam 4"])

# %% [markdown]
# Beams that differ in their last token only are one state, used twice: a beam's state is what came before that token.
# The picture tells pages apart by where they lie in the arena: a copy has a number of its own, also while it still says
# the same as its original.
