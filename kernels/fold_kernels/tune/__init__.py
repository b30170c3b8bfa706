"""Which tile is quickest on a GPU, and whether the kernels pay: the sweep of `lightning-fold tune`.

`layers.py` draws the operands, `cases.py` says what is timed, `sweep.py` times it and makes a
table of it, `report.py` prints it, `compile.py` compiles it beforehand. A tool for people: no step
of a training comes here, and it reads results back to the host at will.
"""
