"""Validation before the first training step, logged: the first point of the loss curve.

The Trainer's own sanity check logs nothing. Holds no state.
"""

from lightning.pytorch import Callback, LightningModule, Trainer


class ValidateAtStart(Callback):
    """Runs the fit's validation loop once before training, at step 0; a resumed run skips it."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validate. Collective over all ranks."""
        if trainer.global_step == 0 and trainer.enable_validation:
            trainer.validating = True
            trainer.fit_loop.epoch_loop.val_loop.run()
            trainer.training = True
