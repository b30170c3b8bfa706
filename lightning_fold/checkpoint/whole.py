"""What a model was before pipeline stages divided it: its names, their order, shapes and owners.

Equal on every rank. Owns the way from the names that the stages hold to one list, in the order in
which one process would have them. Pure data; sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class TensorMeta:
    """What is said of a tensor that another stage holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class WholeModel:
    """A LightningModule as it was before it was cut.

    Attributes:
        state: Shape and dtype of every tensor of `state_dict()`, in its order, in the user's
            shapes.
        parameters: Names of `named_parameters()`, in their order; a tied one has its first name.
        owners: Stages (pp ranks) that hold a name of the two above, at least one; what several
            hold is equal, and the first writes it.
    """

    state: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    parameters: tuple[str, ...]
    owners: Mapping[str, tuple[int, ...]]

    def __post_init__(self) -> None:
        lost = [name for name in (*self.state, *self.parameters) if not self.owners.get(name)]
        assert not lost, f"no pipeline stage holds {', '.join(lost[:3])}"

    @classmethod
    def of(
        cls, module: nn.Module, owners: Callable[[str], tuple[int, ...]] | None = None
    ) -> WholeModel:
        """Describe a module that is whole.

        Args:
            module: The LightningModule.
            owners: Stages that will hold a name; None is the first one.
        """
        state = {
            name: (tuple(value.shape), value.dtype)
            for name, value in module.state_dict().items()
            if isinstance(value, Tensor)
        }
        parameters = tuple(name for name, _ in module.named_parameters())
        names = dict.fromkeys((*state, *parameters))
        return cls(state, parameters, {n: owners(n) if owners else (0,) for n in names})

    def in_order(self, held: Sequence[Sequence[str]]) -> list[str]:
        """Names of all stages, each once, in the order of the whole `state_dict()`.

        A name that is not in `state`, such as an extra state or a buffer that set-up has added,
        goes beside the one of its neighbours whose name has more of its parts.

        Args:
            held: What each stage holds, in its own order.
        """
        known = {name for names in held for name in names}
        order = [name for name in self.state if name in known]
        placed = set(order)
        for names in held:
            for i, name in enumerate(names):
                if name not in placed:
                    before = names[i - 1] if i else None
                    after = next((later for later in names[i + 1 :] if later in placed), None)
                    order.insert(_place(name, order, before=before, after=after), name)
                    placed.add(name)
        return order


def _place(name: str, order: Sequence[str], *, before: str | None, after: str | None) -> int:
    if before is not None and _shared(before, name) >= _shared(after, name):
        return order.index(before) + 1
    return order.index(after) if after is not None else len(order)


def _shared(other: str | None, name: str) -> int:
    """Number of leading parts that two names have in common; -1 without another."""
    if other is None:
        return -1
    pairs = zip(other.split("."), name.split("."), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
