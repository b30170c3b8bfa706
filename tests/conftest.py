"""Triton reads at its first import whether it interprets, so that is settled before any test."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    import triton  # noqa: F401

    # Ranks and commands that tests start decide for themselves.
    del os.environ["TRITON_INTERPRET"]
