"""Where training is in its data: a sampler that goes on mid-epoch, and from which position.

Owns the order of the global samples, which (seed, epoch) decide and no mapping: a batch of all dp
ranks is a slice of it, dealt round robin. Invariant: a resumed epoch goes on with the sample after
the last one of a whole batch, and Lightning's counters agree with it. Not here: samplers of the
user's own, which stay as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loops.evaluation_loop import RestartStage
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.progress import _BatchProgress, _ProcessedTracker
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import (  # type: ignore[attr-defined]
    rank_zero_warn,
)
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

# Key of the position in a checkpoint.
POSITION = "lightning_fold.data"


@dataclass(frozen=True)
class DataPosition:
    """How far training has read its samples: global, so equal on all ranks.

    Attributes:
        epoch: The sampler's epoch.
        consumed: Samples of the epoch's order that whole batches have used, over all dp ranks.
        batch: Samples of one batch over all dp ranks.
        step: Samples of one optimizer step: `batch` times the accumulated batches.
        seed: What the epoch's order was drawn from, with `epoch`.
        samples: Size of the dataset.
        finished: Whether the last batch of the epoch is among the consumed ones.
        validation_due: Whether a validation was to follow the last batch, and had not begun.
    """

    epoch: int
    consumed: int
    batch: int
    step: int
    seed: int
    samples: int
    finished: bool = False
    validation_due: bool = False


class ResumableSampler(DistributedSampler[Any]):
    """A `DistributedSampler` whose epoch may be entered at a position.

    Its length stays that of the whole epoch, as Lightning's counters of batches expect.
    """

    start: DataPosition | None = None

    def __iter__(self) -> Iterator[Any]:
        # By epoch and not by the first call: workers are started, and iterators are made, more
        # than once before the first batch.
        start, own_seed = self.start, self.seed
        self.seed = self.epoch_seed
        try:
            order = super().__iter__()
        finally:
            self.seed = own_seed
        if start is None or start.epoch != self.epoch:
            return order
        return islice(order, start.consumed // self.num_replicas, None)

    @property
    def samples(self) -> int:
        """Size of the dataset."""
        return len(self.dataset)  # type: ignore[arg-type]

    @property
    def epoch_seed(self) -> int:
        """Seed of the present epoch's order: an epoch is finished in the order it was begun in."""
        if self.start is not None and self.start.epoch == self.epoch:
            return self.start.seed
        return self.seed


def adopt(loader: DataLoader[Any]) -> ResumableSampler | None:
    """Put a `ResumableSampler` in the place of a loader's `DistributedSampler`.

    Returns:
        None for a loader that keeps its own state, or has another sampler or batch sampler.

    Raises:
        ValueError: There are too few samples for one batch, or for the ranks.
    """
    given = loader.sampler
    if isinstance(given, ResumableSampler):
        return given
    plain = loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler
    if type(given) is not DistributedSampler or not plain or keeps_state(loader):
        return None
    sampler = ResumableSampler(
        given.dataset,
        num_replicas=given.num_replicas,
        rank=given.rank,
        shuffle=given.shuffle,
        seed=given.seed,
        # Repeats that pad the dataset to the ranks would make up whole batches of a loader that
        # leaves out what does not, and their number would depend on dp.
        drop_last=given.drop_last or loader.drop_last,
    )
    _check_enough(sampler, loader)
    # DataLoader refuses to assign it; a second loader of a user's class might not be the same.
    vars(loader)["sampler"] = sampler
    if loader.batch_sampler is not None:
        loader.batch_sampler.sampler = sampler  # type: ignore[attr-defined]
    return sampler


def keeps_state(loader: object) -> bool:
    """Whether a loader saves and restores its own position, which Lightning then does."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def position_of(trainer: Trainer) -> DataPosition | None:
    """Return how far `fit` has read; None if its loader's sampler is not ours."""
    loaders = trainer.fit_loop._combined_loader
    if loaders is None or len(loaders.flattened) != 1:
        return None
    loader = loaders.flattened[0]
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, ResumableSampler):
        return None
    return _position(trainer, loader, sampler, epoch=sampler.epoch)


def resume(trainer: Trainer, loader: object, saved: Mapping[str, Any] | None) -> None:
    """Enter a training loader's epoch where the checkpoint left it.

    To be called when Lightning has restored its loops and asks for the loader, before `fit` runs.

    Args:
        trainer: Its loops' counters are made to agree with the data.
        loader: A training loader.
        saved: What the checkpoint holds under POSITION.

    Raises:
        ValueError: The batch does not divide the consumed samples, or the dataset is another one.
    """
    fit_loop = trainer.fit_loop
    if fit_loop.is_resuming:
        # Of samples that are read again Lightning warns whatever the sampler does.
        warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended")
    sampler = adopt(loader) if isinstance(loader, DataLoader) else None
    if sampler is None or not isinstance(loader, DataLoader):
        _warn_of_repeats(trainer, loader)
        return
    if fit_loop.is_resuming:
        here = _position(trainer, loader, sampler, epoch=_last_epoch(fit_loop))
        position = here if saved is None else DataPosition(**saved)
        if not position.finished:
            _check(position, here, sampler)
        _align(fit_loop, position, here)
        sampler.start = position
        if position.finished:
            # Where `fit` enters an epoch that has only its end left, it asks for one batch more.
            sampler.start = replace(position, consumed=sampler.total_size)
    # Workers draw from the sampler before Lightning tells it the epoch.
    sampler.set_epoch(_epochs(fit_loop)[1].processed)


def ask_again(trainer: Trainer) -> None:
    """Let `fit` ask for its training loader once more, when a checkpoint has been read.

    `estimated_stepping_batches` asks for it before that, and may have started its workers.
    """
    fit_loop = trainer.fit_loop
    if trainer.state.fn != TrainerFn.FITTING:
        return
    if fit_loop._data_fetcher is not None:
        fit_loop._data_fetcher.teardown()
    fit_loop._combined_loader = fit_loop._data_fetcher = None


def check_predicted(loader: object) -> None:
    """Refuse to predict fewer samples than there are dp ranks: a rank would have no batch.

    Raises:
        ValueError: On all ranks.
    """
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        return
    samples, dp = len(sampler.dataset), sampler.num_replicas  # type: ignore[arg-type]
    if samples < dp:
        raise ValueError(
            f"Fewer samples to predict than data-parallel ranks: {samples} < dp={dp}. A rank "
            "without a batch would not serve the experts of the others. Add samples, or take fewer "
            "ranks. Change `devices`."
        )


def run_due_validation(trainer: Trainer, saved: Mapping[str, Any] | None) -> None:
    """Let a resumed run begin with the validation that was to follow the checkpoint.

    Lightning leaves it out. To be called once `fit` has found out where its loops restart.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    if saved and saved["validation_due"] and epoch_loop.restarted_on_last:
        epoch_loop.val_loop._restart_stage = RestartStage.RESTARTED_MID_EVALUATION


def draw_as_iterators_do(trainer: Trainer) -> None:
    """Draw from torch's generator what making the iterators of the training loaders draws."""
    loaders = trainer.fit_loop._combined_loader
    for loader in loaders.flattened if loaders is not None else ():
        if getattr(loader, "generator", None) is None:
            torch.empty((), dtype=torch.int64).random_()


def _check_enough(sampler: ResumableSampler, loader: DataLoader[Any]) -> None:
    samples, dp = sampler.samples, sampler.num_replicas
    size = loader.batch_size or 1
    if samples < dp:
        raise ValueError(
            f"Fewer training samples than data-parallel ranks: {samples} < dp={dp}, so ranks would "
            f"train on repeats. Add data, or take at most {samples} such ranks. Change `devices`."
        )
    if loader.drop_last and samples < dp * size:
        raise ValueError(
            f"Fewer training samples than one batch of all ranks: {samples} < dp={dp} x batch_size="
            f"{size} = {dp * size}, and incomplete batches are dropped, so there is no step. Legal "
            f"batch_size at dp={dp}: 1 to {samples // dp}. Add data, or change `batch_size`."
        )


def _position(
    trainer: Trainer, loader: DataLoader[Any], sampler: ResumableSampler, *, epoch: int
) -> DataPosition:
    epoch_loop = trainer.fit_loop.epoch_loop
    progress = epoch_loop.batch_progress
    ended = _is_ending(progress)
    # Until its first batch the counters are still those of the epoch before.
    batches = 0 if _is_between_epochs(trainer.fit_loop) else progress.current.completed + ended
    batch = (loader.batch_size or 1) * sampler.num_replicas
    fetcher = trainer.fit_loop._data_fetcher
    return DataPosition(
        epoch=epoch,
        consumed=batches * batch,
        batch=batch,
        step=batch * trainer.accumulate_grad_batches,
        seed=sampler.epoch_seed,
        samples=sampler.samples,
        finished=batches > 0 and progress.is_last_batch,
        validation_due=ended and fetcher is not None and epoch_loop._should_check_val_fx(fetcher),
    )


def _is_ending(progress: _BatchProgress) -> bool:
    """Whether a batch is processed and its `on_train_batch_end` hooks run: a place to save."""
    total = cast("_ProcessedTracker", progress.total)
    return total.ready == total.started == total.processed == total.completed + 1


def _epochs(fit_loop: _FitLoop) -> tuple[_ProcessedTracker, _ProcessedTracker]:
    """Lightning's counters of epochs: over all runs, and the ones that loops go by."""
    progress = fit_loop.epoch_progress
    return cast("_ProcessedTracker", progress.total), cast("_ProcessedTracker", progress.current)


def _is_between_epochs(fit_loop: _FitLoop) -> bool:
    current = _epochs(fit_loop)[1]
    return current.ready > current.started


def _last_epoch(fit_loop: _FitLoop) -> int:
    """The epoch that the counters of batches are of."""
    current = _epochs(fit_loop)[1]
    return current.processed - (current.ready == current.processed > 0)


def _check(position: DataPosition, here: DataPosition, sampler: ResumableSampler) -> None:
    if position.samples != here.samples:
        raise ValueError(
            f"The checkpoint stands at sample {position.consumed} of an epoch over "
            f"{position.samples} samples, and the training data has {here.samples}: the rest of "
            "the epoch would be another one. Give the same data, or resume from a checkpoint of "
            "an epoch's end."
        )
    accumulated, dp = here.step // here.batch, sampler.num_replicas
    same = (position.batch, position.step) == (here.batch, here.step)
    if same or position.consumed % here.step == 0:
        return
    per_rank, rest = divmod(position.consumed, dp * accumulated)
    size = here.batch // dp
    legal = [n for n in range(1, 4 * size + 1) if not rest and per_rank % n == 0]
    raise ValueError(
        f"The checkpoint stands mid-epoch, after {position.consumed} samples, and no whole number "
        f"of steps has as many: batch_size={size} x dp={dp} x accumulate_grad_batches="
        f"{accumulated} = {here.step} does not divide {position.consumed} (saved with "
        f"{position.step}). Legal batch_size at this dp and accumulation: "
        f"{', '.join(map(str, legal)) or 'none'}. Change `batch_size`."
    )


def _align(fit_loop: _FitLoop, position: DataPosition, here: DataPosition) -> None:
    """Make Lightning's counters say what the position says, as in a run that never stopped."""
    epoch_loop = fit_loop.epoch_loop
    counted = _epochs(fit_loop)[1].processed > position.epoch
    if _is_between_epochs(fit_loop) or (position.finished and counted):
        _begin_next_epoch(fit_loop)
    elif position.finished:
        _end_epoch(epoch_loop, position)
    else:
        if counted:  # By max_steps or a stop in mid-epoch, after which Lightning skips its rest.
            _reopen_epoch(fit_loop)
        _shift(epoch_loop.batch_progress, (position.consumed - here.consumed) // here.batch)
        if position.validation_due and position.batch == here.batch:
            epoch_loop.batch_progress.increment_completed()


def _begin_next_epoch(fit_loop: _FitLoop) -> None:
    # With max_steps Lightning would restart inside the epoch that has ended.
    for tracker in _epochs(fit_loop):
        tracker.completed = tracker.processed
    fit_loop.epoch_loop.batch_progress.reset_on_run()
    fit_loop.epoch_loop.restarting = False


def _end_epoch(epoch_loop: _TrainingEpochLoop, position: DataPosition) -> None:
    # Saved between the last batch and its end, after which Lightning would skip the epoch's.
    if not _is_ending(epoch_loop.batch_progress):
        return
    epoch_loop.batch_progress.increment_completed()
    if not position.validation_due:
        epoch_loop._batches_that_stepped += 1


def _reopen_epoch(fit_loop: _FitLoop) -> None:
    for tracker in _epochs(fit_loop):
        tracker.processed = tracker.completed = tracker.started - 1
    fit_loop.restarting = True


def _shift(progress: _BatchProgress, batches: int) -> None:
    """Count in batches of the present size."""
    current = progress.current
    for name in ("ready", "started", "processed", "completed"):
        setattr(current, name, getattr(current, name) + batches)


def _warn_of_repeats(trainer: Trainer, loader: object) -> None:
    fit_loop = trainer.fit_loop
    progress = fit_loop.epoch_loop.batch_progress
    batches = progress.current.completed + _is_ending(progress)
    if not fit_loop.is_resuming or keeps_state(loader) or not batches or progress.is_last_batch:
        return
    rank_zero_warn(
        f"The epoch is resumed after {batches} batches, and the training loader "
        f"({type(loader).__name__}) keeps no position: its samples are read again from the first. "
        "Leave the sampler to the Trainer (use_distributed_sampler=True), or give the loader "
        "state_dict and load_state_dict."
    )
