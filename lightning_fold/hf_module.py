"""The LightningModule that trains a Hugging Face causal language model in a recipe.

Steps, optimizer and schedule are `FoldedLitModule`'s; only the model differs. Not here: the
models themselves, and pretrained weights.
"""

from typing import Any

from lightning_fold.model.hf import build_causal_lm
from lightning_fold.module import FoldedLitModule, check_schedule


class HFLitModule(FoldedLitModule):
    """Train a model of transformers, built from its config, as `FoldedLitModule` trains its own.

    Args:
        model_type: Family as transformers names it, `qwen3_moe` or `mixtral` for example.
        config: Fields of the family's config; the others keep their defaults.
        learning_rate: Peak of the schedule.
        warmup_steps: Optimizer steps of linear warm-up.
        min_lr_ratio: Last learning rate, relative to the peak.
        betas: Decay rates of AdamW's moments.
        weight_decay: Decay of matrices; norms and biases have none.
    """

    def __init__(
        self,
        model_type: str,
        config: dict[str, Any],
        learning_rate: float = 3e-3,
        warmup_steps: int = 100,
        min_lr_ratio: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
    ) -> None:
        # Past FoldedLitModule's constructor, which builds the decoder of this package.
        super(FoldedLitModule, self).__init__()
        check_schedule(learning_rate, warmup_steps=warmup_steps, min_lr_ratio=min_lr_ratio)
        self.save_hyperparameters(
            {
                "model_type": model_type,
                "config": dict(config),
                "learning_rate": learning_rate,
                "warmup_steps": warmup_steps,
                "min_lr_ratio": min_lr_ratio,
                "betas": list(betas),
                "weight_decay": weight_decay,
            }
        )
        self.model = build_causal_lm(model_type, config)  # type: ignore[assignment]
