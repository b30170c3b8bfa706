"""Triton kernels, one op a file: the kernels first, then the host function that launches them.

Imported only where `fold_kernels.backend` chose Triton: importing triton takes a second, and not
every machine has it. Every launch takes its tile from the tables, never from a timing of its own,
so all ranks run the same program. No kernel adds floats atomically: reruns are equal bit for bit.
"""
