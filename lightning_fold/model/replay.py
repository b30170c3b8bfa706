"""Record which experts each token took, and take the same ones again.

Serves the routers whose decision is this package's: the built-in decoder's, and any model's under
router='folded'. Weights of a replayed choice come from the logits of the forward that runs, with
gradient. Every rank records and replays its own tokens, so mapping and batches must be the same.
"""

# Shapes.  T local tokens   K top-k   E all experts

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fold_kernels.router import RouterSpec, scores_of, weights_of
from lightning_fold.model.folded_router import FoldedRouter
from lightning_fold.moe.tokens import in_backward

Hook = Callable[[nn.Module, Any, Any], Any]


class RouterReplay:
    """Decisions of the routers of one model, in order of the forwards.

    Args:
        module: The model, or the LightningModule around it; once it is folded, if it gets folded.

    Attributes:
        decisions: Of every router by name, one index [T, K] a forward.

    Raises:
        ValueError: It has no router whose decision is known.
    """

    def __init__(self, module: nn.Module) -> None:
        self.routers = {n: (m, s) for n, m in module.named_modules() if (s := _spec(m)) is not None}
        if not self.routers:
            raise ValueError(
                f"{type(module).__name__} has no router whose decision this package makes. Use the "
                "built-in decoder, or set router='folded'.  Change `router`."
            )
        self.decisions: dict[str, list[Tensor]] = {name: [] for name in self.routers}

    @contextmanager
    def record(self) -> Iterator[RouterReplay]:
        """Append the decisions of the forwards inside; a layer that backward repeats is left out.

        Costs a copy to the host per router and forward.
        """
        with self._hooked(self._recorder):
            yield self

    @contextmanager
    def replay(self) -> Iterator[RouterReplay]:
        """Let the forwards inside decide as the recorded ones did, from the first on.

        Raises:
            ValueError: In a forward that has no recorded decision, or one for other tokens.
        """
        with self._hooked(self._player):
            yield self

    def save(self, path: str | Path) -> None:
        """Write this rank's decisions as a safetensors file."""
        flat = {f"{n}.{i}": x for n, all_TK in self.decisions.items() for i, x in enumerate(all_TK)}
        save_file({key: index_TK.contiguous() for key, index_TK in flat.items()}, str(path))

    def load(self, path: str | Path) -> None:
        """Read what `save` wrote, in place of what is recorded.

        Raises:
            ValueError: The file has decisions of other routers.
        """
        stored = load_file(str(path))
        found: dict[str, dict[int, Tensor]] = {name: {} for name in self.routers}
        for key, index_TK in stored.items():
            name, _, number = key.rpartition(".")
            if name not in found:
                raise ValueError(f"{path} has decisions of {name!r}, which this model has not.")
            found[name][int(number)] = index_TK
        self.decisions = {n: [by[i] for i in sorted(by)] for n, by in found.items()}

    @contextmanager
    def _hooked(self, make: Callable[[str, RouterSpec], Hook]) -> Iterator[None]:
        with ExitStack() as stack:
            for name, (module, spec) in self.routers.items():
                # Before all others, which then see the replayed decision.
                hook = module.register_forward_hook(make(name, spec), prepend=True)
                stack.callback(hook.remove)
            yield

    def _recorder(self, name: str, spec: RouterSpec) -> Hook:
        def record(module: nn.Module, args: Any, out: Any) -> None:
            if not in_backward():
                self.decisions[name].append(out[2].detach().to("cpu", torch.int32))

        return record

    def _player(self, name: str, spec: RouterSpec) -> Hook:
        left = iter(self.decisions[name])

        def play(module: nn.Module, args: Any, out: Any) -> tuple[Tensor, Tensor, Tensor]:
            logits_TE = out[0]
            index_TK = None if in_backward() else next(left, None)
            if index_TK is None or index_TK.shape != out[2].shape:
                raise ValueError(_explain(name, index_TK, out[2]))
            index_TK = index_TK.to(logits_TE.device, torch.long)
            scores_TE = scores_of(logits_TE, spec.scores)
            return logits_TE, weights_of(logits_TE, scores_TE, index_TK, spec), index_TK

        return play


def _spec(module: nn.Module) -> RouterSpec | None:
    own = module.__dict__.get("forward")
    if isinstance(own, FoldedRouter):
        return None if own.even else own.spec
    spec = module.__dict__.get("spec")
    return spec if isinstance(spec, RouterSpec) else None


def _explain(name: str, index_TK: Tensor | None, asked_TK: Tensor) -> str:
    if in_backward():
        return f"{name}: a layer that backward repeats cannot be replayed. Do not checkpoint it."
    if index_TK is None:
        return f"{name}: all recorded decisions are used up. Record as many forwards as you replay."
    return (
        f"{name}: the recorded decision is {list(index_TK.shape)} for {list(asked_TK.shape)} rows. "
        "Replay under the mapping and with the batches that were recorded."
    )
