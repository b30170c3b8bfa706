"""`FoldedLitModule` as an ordinary Lightning module, and the demo recipe's arguments."""

import math
from collections.abc import Iterator
from pathlib import Path

import jsonargparse
import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger, Logger

from lightning_fold.data import TextDataModule
from lightning_fold.model.decoder import DecoderConfig
from lightning_fold.module import FoldedLitModule, decay_groups, learning_rate_factor

RECIPE = Path(__file__).parents[2] / "recipes" / "demo.tp2cp1dp2pp1-etp1ep4edp1.yaml"
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_experts": 4,
    "moe_intermediate_size": 8,
    "mlp_only_layers": (0,),
    "intermediate_size": 16,
}

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec:FutureWarning",
    "ignore:.*does not have many workers:UserWarning",
    "ignore:.*number of training batches:UserWarning",
)


def small_module(**options: object) -> FoldedLitModule:
    torch.manual_seed(0)
    return FoldedLitModule(DecoderConfig(**SMALL), **options)


@pytest.fixture
def text(tmp_path: Path) -> TextDataModule:
    for number in range(12):
        (tmp_path / f"{number}.txt").write_text("the cat sat on the mat. " * 40)
    return TextDataModule([str(tmp_path)], seq_len=31, batch_size=8, validation_fraction=0.3)


def quiet_trainer(folder: Path, **options: object) -> pl.Trainer:
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": CSVLogger(folder),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
    }
    return pl.Trainer(**(defaults | options))


@pytest.fixture
def no_process_group_left() -> Iterator[None]:
    yield
    # Lightning's DDP leaves it, and a later single-device Trainer would take itself for a rank.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("no_process_group_left")
@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_training_lowers_the_loss(text: TextDataModule, tmp_path: Path, strategy: str) -> None:
    trainer = quiet_trainer(tmp_path, strategy=strategy, max_steps=30, val_check_interval=10)
    module = small_module(learning_rate=2e-2, warmup_steps=3)
    before = trainer.validate(module, text, verbose=False)[0]["val_loss"]
    trainer.fit(module, text)
    assert before == pytest.approx(math.log(264), abs=0.15)
    assert trainer.callback_metrics["val_loss"] < before - 1.5
    assert {"train_loss", "val_loss"} <= set(trainer.callback_metrics)


def test_test_and_predict_run(text: TextDataModule, tmp_path: Path) -> None:
    trainer, module = quiet_trainer(tmp_path), small_module()
    validated = trainer.validate(module, text, verbose=False)[0]["val_loss"]
    assert trainer.test(module, text, verbose=False)[0]["test_loss"] == pytest.approx(validated)
    predictions = trainer.predict(module, text)
    assert predictions[0].shape == (8, 32)


def test_val_loss_is_the_mean_over_windows(text: TextDataModule, tmp_path: Path) -> None:
    module = small_module()
    logged = quiet_trainer(tmp_path).validate(module, text, verbose=False)[0]["val_loss"]
    total = count = 0.0
    with torch.no_grad():
        for batch in text.val_dataloader():
            size = len(batch["input_ids"])
            total, count = total + size * module.model(**batch).loss.item(), count + size
    assert logged == pytest.approx(total / count, rel=1e-5)


def test_checkpoint_loads_with_weights_only(text: TextDataModule, tmp_path: Path) -> None:
    trainer, module = quiet_trainer(tmp_path, max_steps=2), small_module(learning_rate=1e-3)
    trainer.fit(module, text)
    path = tmp_path / "run.ckpt"
    trainer.save_checkpoint(path)
    torch.load(path, weights_only=True)
    copy = FoldedLitModule.load_from_checkpoint(path, weights_only=True)
    assert copy.hparams == module.hparams
    assert copy.model.config == module.model.config
    expected = module.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in copy.state_dict().items())


def test_norms_and_biases_do_not_decay() -> None:
    module = FoldedLitModule(DecoderConfig(**SMALL, attention_bias=True))
    decayed, kept = decay_groups(module.model, weight_decay=0.1)
    names = {id(p): name for name, p in module.model.named_parameters()}
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert all(names[id(p)].endswith(("norm.weight", "bias")) for p in kept["params"])
    assert not any(names[id(p)].endswith(("norm.weight", "bias")) for p in decayed["params"])
    assert len(decayed["params"]) + len(kept["params"]) == len(names)


def test_frozen_parameters_stay_out_of_the_optimizer() -> None:
    module = small_module()
    module.model.model.embed_tokens.weight.requires_grad_(False)
    groups = decay_groups(module.model, weight_decay=0.1)
    frozen = module.model.model.embed_tokens.weight
    assert not any(p is frozen for group in groups for p in group["params"])


def test_learning_rate_warms_up_and_decays() -> None:
    options = {"total_steps": 100, "warmup_steps": 10, "min_lr_ratio": 0.1}
    factors = [learning_rate_factor(step, **options) for step in range(120)]
    assert factors[0] == pytest.approx(1 / 11)
    assert factors[10] == 1.0
    assert factors[:11] == sorted(factors[:11])
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[55] == pytest.approx(0.55)
    assert factors[100] == factors[119] == pytest.approx(0.1)
    assert learning_rate_factor(10**6, **(options | {"total_steps": math.inf})) == 1.0
    assert learning_rate_factor(50, total_steps=5, warmup_steps=10, min_lr_ratio=0.2) > 0


def test_schedule_runs_per_step_to_the_end(text: TextDataModule, tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, max_steps=6)
    module = small_module(learning_rate=1e-2, warmup_steps=2, min_lr_ratio=0.5)
    trainer.fit(module, text)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(5e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": 0.0}, r"learning_rate=0\.0"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"min_lr_ratio": 1.5}, r"min_lr_ratio=1\.5"),
    ],
)
def test_impossible_schedules_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_module(**options)


def test_demo_recipe_builds_model_data_and_loggers() -> None:
    recipe = yaml.safe_load(RECIPE.read_text())
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(pl.LightningModule, "model")
    parser.add_subclass_arguments(pl.LightningDataModule, "data")
    parser.add_argument("--logger", type=list[Logger])
    chosen = {"logger": recipe["trainer"]["logger"]} | {k: recipe[k] for k in ("model", "data")}
    built = parser.instantiate(parser.parse_object(chosen))
    config = built.model.model.config
    assert (config.num_experts, config.num_experts_per_tok) == (8, 2)
    assert config.mlp_only_layers == (0,)
    assert config.shared_expert_intermediate_size > 0
    assert config.num_key_value_heads < config.num_attention_heads
    assert (built.data.seq_len + 1) % 2 == 0
    (folder,) = {Path(logger.log_dir) for logger in built.logger}
    assert folder.parent == Path("runs/demo")
    strategy = recipe["trainer"]["strategy"]["init_args"]
    assert strategy["tensor_parallel_size"] == 2
    assert strategy["expert_parallel_size"] == recipe["trainer"]["devices"] == 4
