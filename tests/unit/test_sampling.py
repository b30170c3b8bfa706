"""The position in the data: every place where a run can stop, and what a resumed run then reads.

One process stands for one dp rank of any mapping: the sampler needs no process group.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.strategies import ParallelStrategy
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    SequentialSampler,
)

from lightning_fold import sampling
from lightning_fold.sampling import DataPosition, ResumableSampler

Events = list[tuple[Any, ...]]

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers:UserWarning",
    "ignore:.*LeafSpec:FutureWarning",
    "ignore:.*Checkpoint directory:UserWarning",
)


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class OneOfRanks(ParallelStrategy):
    """One dp rank without the others: reads its share, and sees nobody."""

    strategy_name = "one_of_ranks"
    is_distributed = True
    is_global_zero = True
    restore_checkpoint_after_setup = True
    root_device = torch.device("cpu")

    def __init__(self, dp: int, dp_rank: int) -> None:
        super().__init__(parallel_devices=[torch.device("cpu")])
        self.share = {"num_replicas": dp, "rank": dp_rank}
        self.saved: dict[str, Any] | None = None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return self.share

    def process_dataloader(self, dataloader: object) -> object:
        trainer = self.lightning_module.trainer
        if trainer.training:
            sampling.resume(trainer, dataloader, self.saved)
        return dataloader

    def on_train_start(self) -> None:
        sampling.run_due_validation(self.lightning_module.trainer, self.saved)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        position = sampling.position_of(self.lightning_module.trainer)
        if position is not None:
            checkpoint[sampling.POSITION] = asdict(position)
        torch.save(checkpoint, filepath)

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict)
        self.saved = checkpoint.get(sampling.POSITION)
        sampling.ask_again(self.lightning_module.trainer)

    def all_gather(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj

    def setup_environment(self) -> None:
        self.accelerator.setup_device(self.root_device)

    def _configure_launcher(self) -> None:
        pass

    def barrier(self, name: str | None = None) -> None:
        pass

    model_to_device = teardown = lambda self: None


class Recorded(pl.LightningModule):
    def __init__(self, *, counts_ahead: bool) -> None:
        super().__init__()
        self.counts_ahead = counts_ahead
        self.layer = torch.nn.Linear(1, 1)
        self.events: Events = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        samples = tuple(int(x) for x in batch.flatten())
        loops = self.trainer.fit_loop
        stepped = loops.epoch_loop._batches_that_stepped
        self.events.append(
            ("batch", self.trainer.current_epoch, batch_idx, samples, self.global_step, stepped)
        )
        return self.layer(batch / 100).mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.events.append(("validation", self.global_step))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.counts_ahead:
            assert self.trainer.estimated_stepping_batches > 1
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Saves(pl.Callback):
    """Notes the hooks, and saves in each: (file, number of events before it)."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.files: list[tuple[Path, int]] = []

    def note(self, trainer: pl.Trainer, module: Recorded, *event: Any) -> None:
        module.events += [event] if event else []
        if self.folder is not None:
            file = self.folder / f"{len(self.files)}.ckpt"
            trainer.save_checkpoint(file)
            self.files.append((file, len(module.events)))

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Recorded) -> None:
        self.note(trainer, module)
        module.events.append(("start", trainer.current_epoch))

    def on_train_batch_end(self, trainer: pl.Trainer, module: Recorded, *args: Any) -> None:
        self.note(trainer, module)

    def on_validation_end(self, trainer: pl.Trainer, module: Recorded) -> None:
        self.note(trainer, module, "validated", trainer.global_step)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Recorded) -> None:
        self.note(trainer, module, "end", trainer.current_epoch, trainer.global_step)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    names = ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning.fabric")
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


def fit(
    *,
    folder: Path | None = None,
    resumed: Path | None = None,
    finally_to: Path | None = None,
    dp: int = 1,
    dp_rank: int = 0,
    size: int = 8,
    batch: int = 2,
    loader: DataLoader[Any] | None = None,
    loading: dict[str, Any] | None = None,
    counts_ahead: bool = False,
    **options: Any,
) -> tuple[Events, Saves]:
    module, saves = Recorded(counts_ahead=counts_ahead), Saves(folder)
    given = {
        "max_epochs": 2,
        "limit_val_batches": 1,
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=OneOfRanks(dp, dp_rank),
        callbacks=[saves],
        **(given | options),
    )
    loader = loader or DataLoader(Numbers(size), batch_size=batch, shuffle=True, **(loading or {}))
    trainer.fit(
        module, loader, DataLoader(Numbers(4), batch_size=2), ckpt_path=resumed, weights_only=True
    )
    if finally_to is not None:
        trainer.save_checkpoint(finally_to)
    return module.events, saves


def batches(events: Events) -> Events:
    return [event for event in events if event[0] == "batch"]


def samples(events: Events) -> list[tuple[int, ...]]:
    return [event[3] for event in batches(events)]


def position(**changes: Any) -> DataPosition:
    start = DataPosition(epoch=1, consumed=8, batch=4, step=4, seed=0, samples=20)
    return replace(start, **changes)


# ---------------------------------------------------------------- the sampler


def order_of(size: int, *, dp: int, batch: int, epoch: int, start: DataPosition | None) -> Any:
    """Sets of global samples of each batch of all dp ranks."""
    shares = []
    for rank in range(dp):
        sampler = ResumableSampler(Numbers(size), num_replicas=dp, rank=rank, drop_last=True)
        sampler.start = start
        sampler.set_epoch(epoch)
        shares.append(list(BatchSampler(sampler, batch // dp, drop_last=True)))
    return [sorted(chain(*parts)) for parts in zip(*shares, strict=True)]


@given(st.integers(8, 60), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.data())
def test_batches_go_on_under_any_dp(size: int, before: int, after: int, data: Any) -> None:
    whole = order_of(size, dp=before, batch=8, epoch=3, start=None)
    assert whole == order_of(size, dp=after, batch=8, epoch=3, start=None)
    done = data.draw(st.integers(0, len(whole)))
    start = position(epoch=3, consumed=8 * done, batch=8, step=8, samples=size)
    assert order_of(size, dp=after, batch=8, epoch=3, start=start) == whole[done:]
    assert len(order_of(size, dp=after, batch=8, epoch=4, start=start)) == len(whole)


def test_length_and_order_are_lightnings() -> None:
    given = DistributedSampler(Numbers(21), num_replicas=2, rank=1, seed=7)
    loader = DataLoader(Numbers(21), batch_size=4, sampler=given)
    sampler = sampling.adopt(loader)
    assert sampler is loader.sampler is loader.batch_sampler.sampler
    given.set_epoch(1)
    sampler.set_epoch(1)
    assert list(sampler) == list(given)
    sampler.start = position(seed=7, samples=21)
    assert [list(sampler), list(sampler)] == [list(given)[4:]] * 2
    assert (len(sampler), len(loader)) == (11, 3)


def test_an_epoch_ends_in_the_order_it_was_begun_in() -> None:
    def order(seed: int, start: DataPosition | None, epoch: int) -> list[int]:
        sampler = ResumableSampler(Numbers(20), num_replicas=1, rank=0, seed=seed)
        sampler.start = start
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(5, position(seed=0), 1) == order(0, None, 1)[8:]
    assert order(5, position(seed=0), 2) == order(5, None, 2)


def test_repeats_make_no_batch_where_incomplete_ones_are_dropped() -> None:
    for dp, expected in ((1, 2), (2, 2), (8, 2)):
        given = DistributedSampler(Numbers(17), num_replicas=dp, rank=0)
        loader = DataLoader(Numbers(17), batch_size=8 // dp, sampler=given, drop_last=True)
        assert sampling.adopt(loader) is not None
        assert len(loader) == expected


class Own(BatchSampler):
    pass


@pytest.mark.parametrize("kind", ["sampler", "batch_sampler", "stateful"])
def test_what_the_user_made_stays(kind: str) -> None:
    data = Numbers(8)
    shared = DistributedSampler(data, num_replicas=2, rank=0)
    loader = {
        "sampler": lambda: DataLoader(data, sampler=SequentialSampler(data)),
        "batch_sampler": lambda: DataLoader(data, batch_sampler=Own(shared, 2, False)),
        "stateful": lambda: stateful(DataLoader(data, sampler=shared)),
    }[kind]()
    before = loader.sampler, loader.batch_sampler
    assert sampling.adopt(loader) is None
    assert (loader.sampler, loader.batch_sampler) == before


def stateful(loader: DataLoader[Any]) -> DataLoader[Any]:
    loader.state_dict = dict
    loader.load_state_dict = lambda state: None
    return loader


# ---------------------------------------------------------------- every place to stop


CONFIGURATIONS = {
    "epochs": {},
    "counted ahead": {"counts_ahead": True},
    "two workers": {
        "resume": {
            "loading": {"num_workers": 2, "persistent_workers": True},
            "counts_ahead": True,
        }
    },
    "steps": {"max_epochs": -1, "max_steps": 7, "limit_val_batches": 0},
    "validation inside": {"val_check_interval": 3, "accumulate_grad_batches": 2},
    "part of an epoch": {"limit_train_batches": 2, "limit_val_batches": 0},
    "uneven": {"size": 7, "check_val_every_n_epoch": 2},
    "validation by steps": {"check_val_every_n_epoch": None, "val_check_interval": 3},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_resumed_anywhere_it_does_what_it_would_have_done(name: str, tmp_path: Path) -> None:
    options = dict(CONFIGURATIONS[name])
    changed = options.pop("resume", {})
    whole, saves = fit(folder=tmp_path, **options)
    assert len(saves.files) >= 8
    for file, done in saves.files:
        events, _ = fit(resumed=file, **(options | changed))
        # The hooks of an epoch that max_steps cuts short do not run again.
        rest = [] if done and not batches(whole[done:]) and "max_steps" in options else whole[done:]
        assert events == rest, f"{file.name} after {whole[:done][-1:]}"


@pytest.mark.parametrize("steps", [1, 3, 4, 6])
@pytest.mark.parametrize("limit", [{"max_epochs": 2}, {"max_epochs": -1, "max_steps": 8}])
def test_a_run_that_max_steps_cut_short_goes_on(
    steps: int, limit: dict[str, int], tmp_path: Path
) -> None:
    whole, _ = fit(limit_val_batches=0)
    file = tmp_path / "cut.ckpt"
    fit(finally_to=file, max_epochs=-1, max_steps=steps, limit_val_batches=0)
    events, _ = fit(resumed=file, limit_val_batches=0, **limit)
    assert batches(events) == batches(whole)[steps:]


def test_dp_and_workers_may_change_in_mid_epoch(tmp_path: Path) -> None:
    def run(dp: int, **options: Any) -> list[list[int]]:
        options |= {"size": 24, "batch": 8 // dp, "dp": dp}
        ranks = [samples(fit(dp_rank=rank, **options)[0]) for rank in range(dp)]
        return [sorted(chain(*parts)) for parts in zip(*ranks, strict=True)]

    whole = run(2)
    _, saves = fit(folder=tmp_path, size=24, batch=4, dp=2)
    file = saves.files[2][0]
    assert torch.load(file)[sampling.POSITION]["consumed"] == 16
    assert run(4, resumed=file) == run(1, resumed=file) == whole[2:]


def test_other_batch_of_the_same_samples(tmp_path: Path) -> None:
    whole, saves = fit(folder=tmp_path, size=24, batch=2)
    flat = [sample for batch in samples(whole) for sample in batch]
    events, _ = fit(resumed=saves.files[6][0], size=24, batch=4, limit_val_batches=0)
    assert [sample for batch in samples(events) for sample in batch] == flat[12:]
    assert [event[2] for event in batches(events)] == [3, 4, 5, 0, 1, 2, 3, 4, 5]
    assert [len(batch) for batch in samples(events)] == [4] * 9


def test_accumulation_counts_in_what_a_step_reads(tmp_path: Path) -> None:
    _, saves = fit(folder=tmp_path, size=24, batch=2, accumulate_grad_batches=2)
    file = saves.files[4][0]  # 8 samples, two steps.
    events, _ = fit(resumed=file, size=24, batch=4, limit_val_batches=0)
    assert [event[4] for event in batches(events)] == list(range(2, 12))
    with pytest.raises(ValueError, match=r"batch_size=1 x dp=1 x .*=3 = 3 does not divide 8"):
        fit(resumed=file, size=24, batch=1, accumulate_grad_batches=3)


def test_a_batch_that_does_not_divide_is_refused_with_the_legal_ones(tmp_path: Path) -> None:
    _, saves = fit(folder=tmp_path, size=24, batch=2)
    message = (
        r"after 12 samples.*batch_size=5 x dp=1 .* 5 does not divide 12 .*: 1, 2, 3, 4, 6, 12\."
    )
    with pytest.raises(ValueError, match=message):
        fit(resumed=saves.files[6][0], size=24, batch=5)
    fit(resumed=saves.files[-1][0], size=24, batch=5, max_epochs=3)


def test_other_data_is_refused_in_mid_epoch_alone(tmp_path: Path) -> None:
    _, saves = fit(folder=tmp_path)
    with pytest.raises(ValueError, match=r"sample 4 of an epoch over 8 samples, .* has 10"):
        fit(resumed=saves.files[2][0], size=10)
    events, _ = fit(resumed=saves.files[-1][0], size=10, max_epochs=3)
    assert len(batches(events)) == 5


def test_checkpoint_of_another_strategy_goes_on_by_its_counters(tmp_path: Path) -> None:
    whole, saves = fit(folder=tmp_path)
    file, done = saves.files[2]
    checkpoint = torch.load(file)
    del checkpoint[sampling.POSITION]
    torch.save(checkpoint, file)
    assert fit(resumed=file)[0] == whole[done:]


def test_loader_without_a_position_warns_once(tmp_path: Path) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(Numbers(8), batch_sampler=Own(SequentialSampler(Numbers(8)), 2, False))

    options = {"use_distributed_sampler": False}
    _, saves = fit(folder=tmp_path, loader=loader(), **options)
    assert sampling.POSITION not in torch.load(saves.files[2][0])
    with pytest.warns(UserWarning, match=r"after 2 batches, .* keeps no position") as said:
        fit(resumed=saves.files[2][0], loader=loader(), **options)
    assert len([w for w in said if "resum" in str(w.message)]) == 1
    fit(resumed=saves.files[-1][0], loader=loader(), **options)
    fit(resumed=saves.files[2][0], loader=stateful(loader()), **options)


# ---------------------------------------------------------------- too few samples


def loader_of(size: int, dp: int, **options: Any) -> DataLoader[Any]:
    sampler = DistributedSampler(Numbers(size), num_replicas=dp, rank=0)
    return DataLoader(Numbers(size), sampler=sampler, **options)


@pytest.mark.parametrize(
    ("size", "dropped", "message"),
    [
        (3, False, r"3 < dp=4, .* at most 3 .*Change `devices`"),
        (7, True, r"7 < dp=4 x batch_size=2 = 8, .* batch_size at dp=4: 1 to 1\. .*`batch_size`"),
    ],
)
def test_fewer_samples_than_a_batch_of_all_ranks(size: int, dropped: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sampling.adopt(loader_of(size, 4, batch_size=2, drop_last=dropped))
    assert sampling.adopt(loader_of(size + 1, 4, batch_size=2, drop_last=dropped))


def test_fewer_samples_to_predict_than_ranks() -> None:
    with pytest.raises(ValueError, match=r"3 < dp=4\..*Change `devices`"):
        sampling.check_predicted(loader_of(3, 4))
    sampling.check_predicted(loader_of(4, 4))
