"""Ahead-of-time gate: every shipped kernel compiles for a GPU that is not there, and is read.

`python -m fold_kernels.aot` calls the host functions of `fold_kernels.gpu` on meta tensors, with a
stub in place of the CUDA driver and launches that compile: what is compiled is what users launch.
`gate.py` says what is wrong with a kernel, `budget.json` what it may cost. Nothing runs, so
nothing here is a measurement of speed, nor of numbers.
"""
