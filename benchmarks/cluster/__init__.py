"""An emulated cluster: nodes are network namespaces, links have the rate they are given.

    python -m benchmarks.cluster          # as root on Linux; elsewhere it says why it does nothing

All communication is real and goes through the product's own code. Compute is slept, in a model's
proportions, so that eight ranks share two cores honestly. `network` makes the nodes, `launch` runs
ranks in them, `emulate` sleeps, `no_exchange` sends nothing, `measure` watches exchanges, `cases`
says what is compared.
"""
