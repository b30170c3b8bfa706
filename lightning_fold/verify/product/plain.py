"""The oracle: a plain loop over the user's module in one process, without a strategy.

For dp = d it runs the module over the same d sub-batches, each loss divided by d, accumulated, then
one SGD step; where mappings have a pipeline, over the microbatches of each, one after the other.
For each other way to take batches it also makes the step that a run resumed in that way makes.
Learning rate and clip are chosen here, from the first gradient, and told to the ranks.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fold.model.adapters import adapter_of, refusal_of, stack_block
from lightning_fold.model.inspect import find_parts
from lightning_fold.verify.features import FEATURES, Plain
from lightning_fold.verify.harness import be_quiet
from lightning_fold.verify.plain import Share, cut, shares_of, weighed
from lightning_fold.verify.plan import Case
from lightning_fold.verify.product.batches import batches_of, in_fp64
from lightning_fold.verify.product.record import Tap
from lightning_fold.verify.product.subject import DEFAULT, Subject, build, takes

STEPS, MOMENTUM = 3, 0.9
"""Steps before the checkpoint; one more follows. The first one is not clipped, the others are."""
_RELATIVE_STEP, _CLIP = 0.05, 0.25


@dataclass(frozen=True)
class Scale:
    """Numbers that fit the model: steps that move it, a clip that acts."""

    learning_rate: float
    clip: float


@dataclass(frozen=True)
class Way:
    """What a mapping's result depends on: all that the plain loop knows of it.

    Attributes:
        dp: Ranks with batches of their own.
        batch: Kind of the batches, see `batches_of`.
        num_microbatches: Pieces of each.
    """

    dp: int
    batch: str
    num_microbatches: int = 1

    @classmethod
    def of(cls, case: Case) -> Way:
        """That of a mapping's case."""
        number = case.num_microbatches if case.folding.pp > 1 else None
        return cls(case.folding.dp, case.batch, number or 1)


@dataclass(frozen=True)
class PlainCase(Case):
    """The single-process run.

    Attributes:
        subject: The model.
        ways: How the mappings take batches.
    """

    subject: Subject = DEFAULT
    ways: tuple[Way, ...] = ()

    @property
    def key(self) -> str:
        """Name of its folder."""
        return "plain"


def run_plain(case: Case, folder: Path) -> None:
    """Run the loop in every way and write `plain.pt` into `folder`. In one process."""
    assert isinstance(case, PlainCase), case
    be_quiet()
    warnings.filterwarnings("ignore", module="lightning")
    scale: Scale | None = None
    records: dict[Way, Any] = {}
    for way in case.ways:
        run = _Loop(case, way, scale)
        records[way] = run.train()
        scale = run.scale
        # What a feature keeps beside the module cannot be set back.
        later = () if case.feature else case.ways
        records[way]["resumed"] = {to: run.resumed(to) for to in later}
    torch.save({"scale": scale, "runs": records}, folder / "plain.pt")


class _Loop:
    """The training in one way."""

    def __init__(self, case: PlainCase, way: Way, scale: Scale | None) -> None:
        self.case = case
        built = build(case.subject)
        self.dtype = torch.float64 if case.precision == "64" else torch.float32
        self.module = built.module.to(self.dtype)
        self.batches = {to.batch: batches_of(built, to.batch) for to in case.ways}
        self.way = way
        self.scale = scale
        self.tap = Tap(microbatch=lambda: self.microbatch)
        parts = find_parts(self.module)
        self.plain: Plain = _Steps(self.module, self._announce)
        if case.feature:
            self.plain = FEATURES[case.feature].plain(parts.core)
            parts.core.register_forward_pre_hook(lambda module, args: self._announce())
        self.tap.install(self.module, parts, None)
        self.running: Iterator[tuple[int, int, int]] = iter(())
        self.microbatch = 0
        self.velocity: list[Tensor | None] = []

    def train(self) -> dict[str, Any]:
        """Make the steps before the checkpoint; everything a mapping is compared with."""
        record: dict[str, Any] = {"losses": {}, "norms": []}
        if not self.case.feature:
            self._check_repeatable()
        for step in range(STEPS):
            for rank, loss in enumerate(self._accumulate(step, self.way)):
                record["losses"][step, rank] = loss
            if step == 0:
                record["grads"] = self._renamed("grad")
            record["norms"].append(self._step(clipped=step > 0))
        return record | {"weights": self._renamed("data"), "seen": list(self.tap.seen)}

    def resumed(self, way: Way) -> dict[str, Tensor]:
        """Weights after one step more in another way; the loop stays where it was."""
        kept = copy.deepcopy(self.module.state_dict()), [_cloned(v) for v in self.velocity]
        self._accumulate(STEPS, way)
        self._step(clipped=True)
        after = self._renamed("data")
        self.module.load_state_dict(kept[0])
        self.velocity = kept[1]
        return after

    def _check_repeatable(self) -> None:
        losses = [self._accumulate(0, replace(self.way, dp=1))[0] for _ in range(2)]
        if not torch.equal(*losses):
            raise ValueError(
                f"two equal steps give the losses {losses[0]:.9g} and {losses[1]:.9g}: the model "
                "draws random numbers, so no two runs of it can be compared. Turn that off in "
                "the model's config."
            )
        self.tap.seen.clear()

    def _accumulate(self, step: int, way: Way) -> list[Tensor]:
        """Gradients of a step; the loss of each dp rank."""
        self.module.zero_grad()
        ranks, number = range(way.dp), way.num_microbatches
        batches = [self.batches[way.batch](step, rank, way.dp) for rank in ranks]
        if self.dtype == torch.float64:
            batches = [in_fp64(batch) for batch in batches]
        self.running = iter([(step, rank, m) for m in range(number) for rank in ranks])
        losses = [torch.zeros((), dtype=self.dtype) for _ in ranks]
        # A microbatch of every dp rank, then the next ones: what a forward of all ranks sees.
        for pieces in zip(*(self._pieces(batch, number) for batch in batches), strict=True):
            shares = [share for _, share in pieces]
            with _default_dtype(self.dtype):
                told = self.plain.forward_backward([b for b, _ in pieces], 1 / way.dp, shares)
            for rank, (share, (_, loss)) in enumerate(zip(shares, told, strict=True)):
                losses[rank] += loss * share.loss if share.loss else 0.0
        return losses

    def _pieces(self, batch: Any, number: int) -> list[tuple[Any, Share]]:
        own = getattr(self.module, "split_batch", None)
        if number == 1:
            return [(batch, Share())]
        return cut(batch, number) if own is None else weighed(list(own(batch, number)))

    def _announce(self) -> None:
        """Name the dp rank and the microbatch that come next."""
        step, rank, self.microbatch = next(self.running, (*self.tap.at, self.microbatch))
        self.tap.at = step, rank

    def _step(self, *, clipped: bool) -> float:
        trained = [p for p in self.module.parameters() if p.requires_grad]
        if self.scale is None:
            self.scale = _scale_for(trained)
        self.velocity = self.velocity or [None] * len(trained)
        limit = self.scale.clip if clipped else float("inf")
        norm = float(nn.utils.clip_grad_norm_(trained, limit))
        optimizer = torch.optim.SGD(trained, lr=self.scale.learning_rate, momentum=MOMENTUM)
        for param, velocity in zip(trained, self.velocity, strict=True):
            optimizer.state[param]["momentum_buffer"] = velocity
        optimizer.step()
        self.plain.after_step()
        self.velocity = [optimizer.state[param]["momentum_buffer"] for param in trained]
        return norm

    def _renamed(self, what: str) -> dict[str, Tensor]:
        values = {
            name: value
            for name, param in self.module.named_parameters()
            if (value := getattr(param, what)) is not None
        }
        return as_folded(self.module, values)


def as_folded(module: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by parameter name under the names that a folded module has: lists get stacked.

    Args:
        module: The module before folding; stays as it is.
        values: One tensor for each of its parameters, or for some.
    """
    blocks = [
        (name, adapter)
        for name, block in module.named_modules()
        if (adapter := adapter_of(block)) is not None and refusal_of(adapter, block) is None
    ]
    out = {name: value.detach().clone() for name, value in values.items()}
    for name, adapter in blocks:
        block = copy.deepcopy(module.get_submodule(name))
        prefix = f"{name}.{adapter.experts}."
        taken = [key for key in out if key.startswith(prefix)]
        for key in taken:
            block.get_parameter(key.removeprefix(f"{name}.")).data = out.pop(key)
        if taken:
            stacked = stack_block(block, adapter)
            out |= {f"{prefix}{key}": p.detach() for key, p in stacked.named_parameters()}
    return out


class _Steps(Plain):
    """A user's module by its own training step."""

    def __init__(self, module: nn.Module, announce: Callable[[], None]) -> None:
        super().__init__(module)
        self.announce = announce

    def forward_backward(
        self, batches: Sequence[Any], scale: float, shares: Sequence[Any] = ()
    ) -> list[tuple[Any, Tensor]]:
        step: Any = self.model.training_step
        results = []
        for batch, share in zip(batches, shares_of(batches, shares), strict=True):
            self.announce()
            more = {"batch_idx": 0} if takes(step, "batch_idx") else {}
            out = step(batch, **more)
            loss = out["loss"] if isinstance(out, Mapping) else out
            # Without targets a mean over them is no number, and the microbatch counts for nothing.
            if share.loss:
                (loss * share.loss * scale).backward()
            results.append((None, loss.detach().clone()))
        return results


def _scale_for(params: Sequence[nn.Parameter]) -> Scale:
    grads = torch.stack([p.grad.norm() for p in params if p.grad is not None]).norm()
    weights = torch.stack([p.detach().norm() for p in params]).norm()
    return Scale(_RELATIVE_STEP * float(weights / grads), _CLIP * float(grads))


def _cloned(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.clone()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """As Lightning's 64-true while a step runs."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
