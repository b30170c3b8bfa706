"""Kernels of a folded MoE layer. The only package that may import triton.

Holds the plain torch forms until the Triton kernels join them; `backend.py` decides which form
runs.
"""
