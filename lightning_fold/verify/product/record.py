"""What one forward shows of itself: routing decisions, logits and auxiliary losses, with places.

Used alike by the plain loop and by the ranks. A rank's rows come with their places in the
sequence, so that any dealing of tokens over tp and cp can be put together again. Compares nothing.
"""

# Shapes.  B sequences   S tokens of a sequence   s tokens of it on this rank   T = B*s   K top-k

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fold.model.adapters import Adapter
from lightning_fold.model.inspect import ExpertsSpec, ModelParts
from lightning_fold.moe.tokens import RunningTokens, TokenLayout, in_backward


@dataclass(frozen=True)
class Seen:
    """One tensor that a forward showed.

    Attributes:
        what: Experts container, or "logits" or "aux_loss".
        at: Step and dp rank.
        value: The tensor; of routing [T, K].
        places_s: Places in the sequence of its tokens; None where it holds all.
        sequences: B.
        length: S.
        microbatch: Of the step; 0 without a pipeline.
    """

    what: str
    at: tuple[int, int]
    value: Tensor
    places_s: Tensor | None = None
    sequences: int = 0
    length: int = 0
    microbatch: int = 0


@dataclass
class Tap:
    """Hooks on a model, and what they have seen.

    Attributes:
        seen: In order of the calls.
        at: Step and dp rank of what comes next.
        microbatch: Says which one runs.
    """

    seen: list[Seen] = field(default_factory=list)
    at: tuple[int, int] = (0, 0)
    microbatch: Callable[[], int] = field(default=lambda: 0)

    def install(self, root: nn.Module, parts: ModelParts, tokens: RunningTokens | None) -> None:
        """Hook the core, and the calls of experts containers.

        Args:
            root: The LightningModule.
            parts: Its parts.
            tokens: Which tokens a rank sees; None in a plain loop, which sees all.
        """
        known = tokens or RunningTokens()
        parts.core.register_forward_hook(
            lambda module, args, out: self._outputs(out, known.attention)
        )
        for spec in parts.experts:
            _hook_routing(root, spec, lambda name, index: self._routing(name, index, known.moe))

    def _routing(self, name: str, index_TK: Tensor, layout: TokenLayout | None) -> None:
        # Recomputation in backward repeats decisions that have been seen.
        if not in_backward():
            self._note(name, index_TK, layout)

    def _outputs(self, out: Any, layout: TokenLayout | None) -> None:
        for what in ("logits", "aux_loss"):
            value = out.get(what) if isinstance(out, Mapping) else getattr(out, what, None)
            if value is None and what == "logits" and isinstance(out, Tensor) and out.dim() > 1:
                value = out
            if isinstance(value, Tensor):
                part = what == "logits" and _is_part(value, layout)
                self._note(what, value, layout if part else None)

    def _note(self, what: str, value: Tensor, layout: TokenLayout | None) -> None:
        seen = Seen(what, self.at, value.detach().clone(), microbatch=self.microbatch())
        if layout is not None:
            seen = replace(
                seen,
                places_s=layout.places_s.clone(),
                sequences=layout.num_sequences,
                length=layout.length,
            )
        self.seen.append(seen)


def _is_part(logits: Tensor, layout: TokenLayout | None) -> bool:
    """Whether logits [B, s, V] are those of this rank's tokens alone."""
    if layout is None or logits.dim() != 3:
        return False
    return logits.shape[1] == layout.places_s.shape[0] < layout.length


def _hook_routing(root: nn.Module, spec: ExpertsSpec, note: Callable[[str, Tensor], None]) -> None:
    """Note what the experts are called with; a list of experts is not called, its block is."""
    block = root.get_submodule(spec.name.rpartition(".")[0])
    adapter = spec.adapter
    if adapter is not None:
        block.register_forward_pre_hook(
            lambda module, args: note(spec.name, _decision(adapter, module, args[0]))
        )
    elif not isinstance(spec.module, nn.ModuleList):
        spec.module.register_forward_pre_hook(
            lambda module, args, kwargs: note(spec.name, [*args, *kwargs.values()][1]),
            with_kwargs=True,
        )


@torch.no_grad()
def _decision(adapter: Adapter, block: nn.Module, hidden: Tensor) -> Tensor:
    return adapter.route(block, hidden.reshape(-1, hidden.shape[-1]))[0]
