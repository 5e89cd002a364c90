"""Benchmarks: `python -m benchmarks compare` and `python -m benchmarks kernels`; `make bench` runs both.

compare     pyferrum and its peers on the same files, in one process tree, interleaved: prefill, decode, load, memory
kernels     achieved GB/s and GOP/s of single functions beside what this machine can do, and what forks cost

Peers are optional: `pip install '.[peers]'`, or `--llama-python PATH` for an environment that has llama-cpp-python.
`--json FILE` keeps every number. docs/performance.md says how to read them.
"""
