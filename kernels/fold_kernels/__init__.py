"""Kernels of a folded MoE layer. The only package that may import triton.

Every operation has a plain torch form; `backend.py` decides where a Triton kernel runs instead.
"""
