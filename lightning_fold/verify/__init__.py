"""Equivalence with the plain single-process model: cases, reference, ranks, comparison, mutations.

The oracle is always the user's class in another process that never imports this package. Nothing
here is used in training.
"""
