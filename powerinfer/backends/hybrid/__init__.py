"""A GPU and the CPU at once, joined per layer: what is hot on the GPU, what is cold on the CPU.

`split` says which part of a model goes where and imports nothing heavy; `backend` does it.
"""
