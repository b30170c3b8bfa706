"""The Trainer's loops: entry points, data, logging, metrics, callbacks, generation."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric, SumMetric

from contract.models import Lit, batches, mixtral
from contract.scenarios_parity import parts_of, whole
from contract.worker import Context


def entry_points(context: Context) -> dict[str, Any]:
    """fit, validate, test, predict, twice, on one Trainer and one module."""
    module, trainer = Lit(mixtral(), parts=parts_of(context)), context.trainer(limit_val_batches=3)
    losses, meshes, folded = [], [], []
    for _ in range(2):
        trainer.fit_loop.max_epochs = trainer.current_epoch + 1
        trainer.fit(module)
        (validated,), (tested,) = (
            trainer.validate(module, verbose=False),
            trainer.test(module, verbose=False),
        )
        rows = DataLoader(batches(3), batch_size=1)
        predicted = trainer.predict(module, rows)
        losses += [validated["val_loss"], tested["test_loss"], float(torch.cat(predicted).sum())]
        meshes.append(id(getattr(trainer.strategy, "_comm", None)))
        folded.append(id(getattr(trainer.strategy, "_folded", None)))
    return {
        "losses": losses,
        "built_once": len(set(meshes)) == 1 and len(set(folded)) == 1,
        "is_module": trainer.strategy.model is trainer.lightning_module,
        "after": whole(trainer, dict(module.named_parameters())),
    }


def string_name(context: Context) -> dict[str, Any]:
    trainer = context.trainer(strategy="folded_moe")
    trainer.fit(Lit(mixtral()))
    return {"mapping": trainer.strategy.folding.mapping_id}


class Seen(Lit):
    """Remembers the rows and the random numbers of its loader's workers.

    In hooks, which get whole batches also where a pipeline cuts them; its steps pop what they read.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[int] = []
        self.drawn: list[float] = []

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.seen += batch["row"].tolist()
        self.drawn += batch["drawn"].tolist()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        batch.pop("row"), batch.pop("drawn")
        return super().training_step(batch, batch_idx)

    def on_validation_batch_start(self, batch: dict[str, Tensor], *args: Any) -> None:
        self.seen += batch["row"].tolist()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        batch.pop("row"), batch.pop("drawn")
        super().validation_step(batch, batch_idx)


class Numbered(Dataset[dict[str, Tensor]]):
    """Rows that know their number and a random number of the process that read them."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        extra = {"row": torch.tensor(row), "drawn": torch.rand(())}
        return {**batches(8)[row], **extra}


def sampler(context: Context) -> dict[str, Any]:
    """Lightning's own sampler, and workers seeded through seed_everything."""
    pl.seed_everything(3, workers=True, verbose=False)
    module = Seen(mixtral())
    trainer = context.trainer(use_distributed_sampler=True)
    trainer.fit(module, DataLoader(Numbered(), batch_size=2, num_workers=1))
    trained, module.seen = module.seen, []
    trainer.limit_val_batches = 1.0
    trainer.validate(module, DataLoader(Numbered(), batch_size=2), verbose=False)
    return {
        "distributed": trainer._accelerator_connector.is_distributed,
        "trained": trained,
        "validated": module.seen,
        "drawn": module.drawn,
    }


class Numbers(Lit):
    """Predicts the first token of each row, so that doubled or missing rows show."""

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.model(input_ids=batch["input_ids"])
        return batch["row"]


def predict(context: Context) -> dict[str, Any]:
    """As many rows as the option says, batches of eight, Lightning's own sampler."""
    rows = [{**row, "row": torch.tensor(i)} for i, row in enumerate(batches(int(context.option)))]
    trainer = context.trainer(use_distributed_sampler=True)
    loader = DataLoader(rows, batch_size=8)  # type: ignore[arg-type]
    predicted = trainer.predict(Numbers(mixtral()), loader)
    return {"rows": torch.cat(predicted).tolist() if predicted else []}


class Sharded(Lit):
    """Keeps the parameters as they are before a forward gathers them: the shards."""

    shards: tuple[Tensor, ...] = ()

    def on_validation_start(self) -> None:
        self.shards = self.shards or tuple(self.parameters())


def reshard(context: Context) -> dict[str, Any]:
    """Validate, write the shards in place, validate again."""
    module, trainer = Sharded(mixtral()), context.trainer(limit_val_batches=1)
    (first,) = trainer.validate(module, verbose=False)
    with torch.no_grad():
        for param in module.shards:
            param.mul_(0.5)
    (second,) = trainer.validate(module, verbose=False)
    return {"first": first["val_loss"], "second": second["val_loss"]}


class Held(Lit):
    """Counts the parameters of its layers that are whole, between forward and backward."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        layers = [p for name, p in self.model.named_parameters() if ".layers." in name]
        self.held = sum(not isinstance(p, DTensor) for p in layers) / len(layers)
        return loss


def held(context: Context) -> dict[str, Any]:
    """Which parameters stay gathered. Option: a value of data_parallel_shard."""
    module = Held(mixtral())
    shard = context.strategy(data_parallel_shard=context.option)
    context.trainer(strategy=shard, accumulate_grad_batches=2).fit(module)
    return {"held": module.held}


class Logging(Lit):
    """Logs what each rank has: its tokens, by mean and by sum over batches."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.total, self.mean = SumMetric(), MeanMetric()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.model(input_ids=batch["input_ids"])
        value = batch["input_ids"].double().mean()
        self.log("mean", value, sync_dist=True, batch_size=1)
        self.log("sum", value, sync_dist=True, reduce_fx="sum")
        self.log("max", value, sync_dist=True, reduce_fx="max")
        self.total.update(batch["input_ids"])
        self.mean.update(batch["input_ids"])
        self.log("metric_sum", self.total)
        self.log("metric_mean", self.mean)


def logging(context: Context) -> dict[str, Any]:
    trainer = context.trainer(limit_val_batches=3)
    rows = batches(12)
    (logged,) = trainer.validate(Logging(mixtral(), rows=rows), verbose=False)
    strategy = trainer.strategy
    mine = bool(context.rank == 0)
    decisions = [strategy.reduce_boolean_decision(mine, all=flag) for flag in (True, False)]
    return {
        "logged": logged,
        "sums": [int(r["input_ids"].sum()) for r in rows],
        "decisions": decisions,
    }


class Scheduled(Lit):
    """AdamW under a schedule, so that LearningRateMonitor has something to show."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def callbacks(context: Context) -> dict[str, Any]:
    """ModelCheckpoint, EarlyStopping, LearningRateMonitor, CSV and TensorBoard loggers together."""
    best = ModelCheckpoint(
        context.folder / "best",
        monitor="val_loss",
        save_top_k=2,
        save_last=True,
        filename="{epoch}",
    )
    stop = EarlyStopping("val_loss", patience=1, min_delta=100.0)
    trainer = context.trainer(
        max_epochs=5,
        limit_val_batches=2,
        enable_checkpointing=True,
        logger=[CSVLogger(context.folder, version=0), TensorBoardLogger(context.folder, version=1)],
        log_every_n_steps=1,
        callbacks=[best, stop, LearningRateMonitor("epoch")],
        strategy=context.strategy(
            **(
                {}
                if context.world == 0
                else {"save_distributed_checkpoint": context.option != "whole"}
            )
        ),
    )
    module = Scheduled(mixtral(), parts=parts_of(context))
    trainer.fit(module)
    trainer.strategy.barrier()
    names = sorted(p.name for p in (context.folder / "best").iterdir())
    trainer.test(module, ckpt_path="best", verbose=False)
    files = sorted(str(p.relative_to(context.folder)) for p in context.folder.rglob("*tfevents*"))
    return {
        "epochs": trainer.current_epoch,
        "best": float(best.best_model_score or 0),
        "best_path": str(best.best_model_path).rpartition("/")[2],
        "files": names,
        "test_loss": float(trainer.callback_metrics["test_loss"]),
        "csv": (context.folder / "lightning_logs/version_0/metrics.csv").read_text(),
        "tensorboard": len(files),
    }


def second_module(context: Context) -> dict[str, Any]:
    """A second module on the same Trainer is folded too."""
    trainer = context.trainer()
    trainer.fit(Lit(mixtral()))
    module = Lit(mixtral(seed=8), parts=parts_of(context))
    trainer.fit_loop.max_epochs = trainer.current_epoch + 1
    trainer.fit(module)
    return {"after": whole(trainer, dict(module.named_parameters()))}


class Starting(Lit):
    """Remembers the weights that every rank starts from."""

    start: dict[str, Tensor]

    def on_train_start(self) -> None:
        self.start = whole(self.trainer, dict(self.named_parameters()))


def unseeded(context: Context) -> dict[str, Any]:
    """Every rank builds other weights; all must train from rank 0's."""
    model = mixtral(seed=100 + context.rank)
    wanted = {f"model.{n}": p.detach().clone() for n, p in model.named_parameters()}
    module = Starting(model)
    context.trainer().fit(module)
    return {"wanted": wanted, "start": module.start}


class Generating(Lit):
    """Generates from each row's first half; ranks may stop at different lengths."""

    def __init__(self, *args: Any, end: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.end, self.generated = end, []

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        for prompt in batch["input_ids"][:, :4]:
            tokens = self.model.generate(
                prompt[None],
                max_new_tokens=4,
                do_sample=False,
                eos_token_id=self.end,
                use_cache=True,
            )
            self.generated.append(tokens[0].tolist())
        super().validation_step(batch, batch_idx)


def generate(context: Context) -> dict[str, Any]:
    """Greedy tokens inside validation; the option is the end token."""
    end = int(context.option) if context.option else None
    module = Generating(mixtral(), end=end, parts=1)
    trainer = context.trainer(limit_val_batches=1)
    (logged,) = trainer.validate(module, verbose=False)
    return {"tokens": module.generated, "val_loss": logged["val_loss"]}
