"""How the tokens of one sequence are dealt to ranks: pure integers, any length.

Context parallelism deals a causal sequence in a zigzag: 2 * cp chunks in order, of which a rank
takes the r-th and the r-th from the end, so that every rank has as many pairs of query and key to
compute. Tensor parallelism cuts what a cp rank holds into tp runs. For cp = 2 and ten tokens:

    chunk      0      1      2     3
    tokens     0 1 2  3 4 5  6 7   8 9
    cp rank    0      1      1     0

No length needs padding: made-up tokens would be routed. Chunks, and so ranks, may be empty.
"""

from __future__ import annotations


def balanced_sizes(length: int, parts: int) -> list[int]:
    """Sizes of `parts` consecutive pieces; the first ones take the remainder.

    >>> balanced_sizes(10, 4)
    [3, 3, 2, 2]
    """
    base, extra = divmod(length, parts)
    return [base + (i < extra) for i in range(parts)]


def zigzag_chunks(length: int, *, cp: int, rank: int) -> tuple[range, range]:
    """The two runs of places in the sequence that a cp rank holds, in the order it holds them.

    With one rank the runs join to the whole sequence.

    >>> zigzag_chunks(10, cp=2, rank=0)
    (range(0, 3), range(8, 10))
    """
    sizes = balanced_sizes(length, 2 * cp)
    starts = [sum(sizes[:i]) for i in range(2 * cp)]
    early, late = rank, 2 * cp - 1 - rank
    return (
        range(starts[early], starts[early] + sizes[early]),
        range(starts[late], starts[late] + sizes[late]),
    )


def zigzag_places(length: int, *, cp: int, rank: int) -> list[int]:
    """Places in the sequence of a cp rank's tokens, ascending.

    >>> zigzag_places(10, cp=2, rank=1)
    [3, 4, 5, 6, 7]
    """
    early, late = zigzag_chunks(length, cp=cp, rank=rank)
    return [*early, *late]


def zigzag_sizes(length: int, *, cp: int) -> list[int]:
    """Tokens of each cp rank; they differ by one at most."""
    return [len(zigzag_places(length, cp=cp, rank=rank)) for rank in range(cp)]
