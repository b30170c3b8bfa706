"""The table of illegal configurations: what changes in a legal one, and what must be said of it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import pytest

BASE: dict[str, Any] = {
    "seed_everything": 1,
    "trainer": {
        "accelerator": "cpu",
        "devices": 4,
        "strategy": {"class_path": "lightning_fold.FoldedMoEStrategy", "init_args": {}},
        "max_steps": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    },
    "model": {
        "class_path": "lightning_fold.module.FoldedLitModule",
        "init_args": {
            "config": {
                "hidden_size": 24,
                "num_hidden_layers": 2,
                "mlp_only_layers": [0],
                "num_attention_heads": 3,
                "num_key_value_heads": 1,
                "intermediate_size": 15,
                "num_experts": 4,
                "moe_intermediate_size": 7,
            }
        },
    },
    "data": {"class_path": "lightning_fold.data.TextDataModule", "init_args": {"seq_len": 31}},
}
STRATEGY = "trainer.strategy.init_args."
MODEL = "model.init_args.config."


@dataclass(frozen=True)
class Case:
    """One configuration: changes to BASE by dotted key, or a whole config file, or none."""

    name: str
    says: str
    changes: dict[str, Any] = field(default_factory=dict)
    content: bytes | None = None
    options: tuple[str, ...] = ()
    # A damage of `hostile_checkpoints`, applied to the checkpoint that the case resumes from.
    checkpoint: str = ""
    # One of a pair that takes the same way through the program.
    slow: bool = False
    # Why it cannot be tried here.
    skipped: str = ""

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        slow = [pytest.mark.slow] if self.slow else []
        return slow + ([pytest.mark.skip(reason=self.skipped)] if self.skipped else [])


TOPOLOGY = [
    Case(
        "tp does not divide the world",
        r"Legal tp for cp=1: 1, 2, 4\. .*Change `tensor_parallel_size`",
        {STRATEGY + "tensor_parallel_size": 3},
    ),
    Case(
        "etp x ep does not divide the stage",
        r"etp\*ep\*edp must equal tp\*cp\*dp .*`expert_tensor_parallel_size`",
        {STRATEGY + "expert_tensor_parallel_size": 3, STRATEGY + "expert_parallel_size": 2},
    ),
    Case(
        "ep is larger than the world",
        r"Legal ep for etp=1: 1, 2, 4\. .*Change `expert_parallel_size`",
        {STRATEGY + "expert_parallel_size": 8},
        slow=True,
    ),
    Case(
        "tp is zero",
        r"tp=0 leaves no rank.*Change `tensor_parallel_size`",
        {STRATEGY + "tensor_parallel_size": 0},
    ),
    Case(
        "ep is negative",
        r"ep=-2 leaves no rank.*Change `expert_parallel_size`",
        options=(f"--{STRATEGY}expert_parallel_size=-2",),
        slow=True,
    ),
    Case(
        "local dispatcher with spread experts",
        r"dispatcher='local'.*1\*2 = 2 .*Change `dispatcher`",
        {STRATEGY + "dispatcher": "local", STRATEGY + "expert_parallel_size": 2},
    ),
]
MODELS = [
    Case(
        "ep does not divide the experts",
        r"layers\.1\.mlp\.experts: 6 experts .* ep=4; legal ep: 1 2 .*`expert_parallel_size`",
        {STRATEGY + "expert_parallel_size": 4, MODEL + "num_experts": 6},
    ),
    Case(
        "etp does not divide the expert width",
        r"expert width 7 .* etp=2; legal etp: 1 .*`expert_tensor_parallel_size`",
        {STRATEGY + "expert_tensor_parallel_size": 2},
    ),
    Case(
        "blocks of fp8 do not divide the width",
        r"model width 24 = 0\*128 \+ 24 cannot be cut into blocks .*`expert_precision`",
        {STRATEGY + "expert_precision": "fp8_block"},
    ),
    Case(
        "tp does not divide the heads",
        r"layers\.0\.self_attn: 3 heads .* tp=2; legal tp: 1 .*`tensor_parallel_size`",
        {STRATEGY + "tensor_parallel_size": 2},
    ),
    Case(
        "tp does not divide a dense layer",
        r"layers\.0\.mlp: width 15 .* tp=2.*Change `tensor_parallel_size`",
        {
            STRATEGY + "tensor_parallel_size": 2,
            MODEL + "num_attention_heads": 2,
        },
        slow=True,
    ),
    Case("no MoE block", r"FoldedLitModule has no MoE block", {MODEL + "mlp_only_layers": [0, 1]}),
    Case(
        "empty vocabulary",
        r"vocab_size=0 .*Change `vocab_size`",
        {MODEL + "vocab_size": 0},
        slow=True,
    ),
    Case(
        "unknown family of transformers",
        r"model_type='qwen3_mo' .*'qwen3_moe'.*Change `model_type`",
        {
            "model": {
                "class_path": "lightning_fold.hf_module.HFLitModule",
                "init_args": {"model_type": "qwen3_mo", "config": {}},
            }
        },
    ),
]
CONFIGS = [
    Case(
        "misspelt Trainer key",
        r"`trainer\.max_stepz` is not a known key\. Change it to `max_steps`",
        {"trainer.max_stepz": 3},
    ),
    Case(
        "misspelt strategy key",
        r"init_args\.expert_paralel_size: .*Change it to `expert_parallel_size`",
        {STRATEGY + "expert_paralel_size": 2},
        slow=True,
    ),
    Case(
        "misspelt key of the model's config",
        r"`model\.init_args\.config\.num_expert` is not .*Change it to `num_experts`",
        {MODEL + "num_expert": 8},
    ),
    Case(
        "unknown section",
        r"`optimisation` is not a known key",
        {"optimisation": {"lr": 1}},
        slow=True,
    ),
    Case(
        "wrong type",
        r"init_args\.tensor_parallel_size=two is not .*Legal: int\. .*tensor_parallel_size`",
        {STRATEGY + "tensor_parallel_size": "two"},
    ),
    Case(
        "class that does not exist",
        r"has no FoldedMoeStrategy\. Change it to `lightning_fold\.FoldedMoEStrategy`",
        {"trainer.strategy.class_path": "lightning_fold.FoldedMoeStrategy"},
        slow=True,
    ),
    Case(
        "missing checkpoint",
        r"checkpoint 'nowhere\.ckpt' does not exist\. Change `ckpt_path`",
        options=("--ckpt_path", "nowhere.ckpt"),
    ),
    Case("missing file", r"'nowhere\.yaml' does not exist", options=("--config", "nowhere.yaml")),
    Case("binary file", r"config\.yaml' is not YAML: .*decode", content=bytes(range(256))),
    Case(
        "broken YAML",
        r"config\.yaml' is not YAML: .*line 2",
        content=b"a: [1,\nb: 2: 3\n",
        slow=True,
    ),
    Case("empty file", r"config\.yaml' is empty", content=b"", slow=True),
]
DATA = [
    Case(
        "missing text",
        r"'nowhere' does not exist\. Change `paths`",
        {"trainer.devices": 1, "data.init_args.paths": ["nowhere"]},
    ),
    Case(
        "empty folder",
        r"No files under paths=\['hollow'\]",
        {"trainer.devices": 1, "data.init_args.paths": ["hollow"]},
        slow=True,
    ),
    # Found by every rank after launching: one message all the same.
    Case(
        "binary text, two ranks",
        r"noise\.txt is not text: .*`paths`",
        {"trainer.devices": 2, "data.init_args.paths": ["noise.txt"]},
    ),
    Case(
        "folder of pictures",
        r"pictures/a\.png is not text: .*`paths`",
        {"trainer.devices": 1, "data.init_args.paths": ["pictures"]},
        slow=True,
    ),
    Case(
        "nothing but empty files",
        r"12 files under paths=\['blank'\], all empty.*Change `paths`",
        {"trainer.devices": 1, "data.init_args.paths": ["blank"]},
    ),
    Case(
        "fewer samples than ranks x batch",
        r"32 < dp=4 x batch_size=16 = 64,.*Legal batch_size at dp=4: 1 to 8\..*`batch_size`",
        {"data.init_args.paths": ["texts"]},
    ),
    Case(
        "sequence longer than the text",
        r"1 windows of seq_len=100000 < batch_size=16\..*`seq_len`",
        {
            "trainer.devices": 1,
            "data.init_args.paths": ["texts"],
            "data.init_args.seq_len": 100_000,
        },
        slow=True,
    ),
    Case(
        "one text, a line of 50 MB",
        r"one file cannot serve both sides.*`paths`",
        {"trainer.devices": 1, "data.init_args.paths": ["line.txt"]},
        slow=True,
    ),
    Case(
        "text that may not be read",
        r"secret\.txt cannot be read: Permission denied\..*`paths`",
        {"trainer.devices": 1, "data.init_args.paths": ["secret.txt"]},
        skipped="root reads every file" if os.geteuid() == 0 else "",
    ),
]


def resuming(
    name: str, says: str, checkpoint: str, *, slow: bool = False, ranks: int = 1, **changes: Any
) -> Case:
    """A run that resumes from `x.ckpt`."""
    changed = {"trainer.devices": ranks, "trainer.max_steps": 2, **changes}
    return Case(
        name, says, changed, options=("--ckpt_path", "x.ckpt"), checkpoint=checkpoint, slow=slow
    )


_WIDER = {MODEL + "hidden_size": 48}
CHECKPOINTS = [
    resuming(
        "folder of another model",
        r"x\.ckpt does not fit the model: .* has shape .*24.* there and .*48.* here",
        "folder",
        **_WIDER,
    ),
    resuming(
        "file of another model", r"x\.ckpt does not fit the model", "file", slow=True, **_WIDER
    ),
    resuming(
        "file with other names",
        r"names are missing \(.*q_proj.*\) and .* are unknown \(.*query",
        "file: other names",
        slow=True,
    ),
    resuming(
        "folder of another dtype, two ranks",
        r"as torch\.float32, the model has torch\.float64.*`precision`",
        "folder",
        ranks=2,
        **{"trainer.precision": "64-true"},
    ),
    resuming(
        "file of another dtype",
        r"as torch\.float32, the model has torch\.bfloat16.*`precision`",
        "file",
        slow=True,
        **{"trainer.precision": "bf16-true"},
    ),
    resuming(
        "missing shard, two ranks",
        r"x\.ckpt lacks its file __0_0\.distcp\. Change `ckpt_path`",
        "folder: missing shard",
        ranks=2,
    ),
    resuming(
        "truncated shard",
        r"distcp is damaged: it has \d+ bytes, \d+ were written",
        "folder: truncated shard",
        slow=True,
    ),
    resuming("flipped bit in a shard", r"distcp is damaged: its checksum", "folder: flipped bit"),
    resuming("unfinished save", r"x\.ckpt has no manifest\.json.*unfinished", "folder: unfinished"),
    resuming(
        "folder with nothing in it",
        r"x\.ckpt is a folder without the files of a sharded checkpoint",
        "folder: hollow",
        slow=True,
    ),
    resuming(
        "pickle in the index",
        r"asks for \w+\.system to be executed",
        "folder: pickle in the index",
    ),
    resuming(
        "pickle in the meta",
        r"meta\.pt asks for \w+\.system to be executed",
        "folder: pickle in the meta",
        slow=True,
    ),
    resuming("pickle in a file", r"x\.ckpt holds a pickle that asks for", "file: pickle"),
    resuming("truncated file", r"x\.ckpt is (damaged|truncated)", "file: truncated"),
    resuming("flipped bit in a file", r"x\.ckpt is damaged", "file: flipped bit", slow=True),
    resuming(
        "empty checkpoint", r"x\.ckpt is truncated, or no checkpoint", "file: empty", slow=True
    ),
    resuming("text for a checkpoint", r"x\.ckpt is truncated, or no checkpoint", "file: text"),
    resuming("no weights", r"x\.ckpt has no `state_dict`", "file: without weights", slow=True),
    resuming(
        "no optimizer", r"x\.ckpt holds no optimizer state", "file: without optimizer", slow=True
    ),
    Case(
        "checkpoints into a place that cannot be written",
        r"saving .*/proc/.* failed on rank 0: .*cannot be created.*Change `dirpath`",
        {
            "trainer.devices": 1,
            "trainer.enable_checkpointing": True,
            "trainer.callbacks": [
                {
                    "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                    "init_args": {"dirpath": "/proc/nowhere", "every_n_train_steps": 1},
                }
            ],
        },
    ),
    Case(
        "init_from a file that is not there",
        r"nowhere\.safetensors .*",
        {"trainer.devices": 1, STRATEGY + "init_from": "nowhere.safetensors"},
        slow=True,
    ),
]
ALL = (*TOPOLOGY, *MODELS, *CONFIGS, *DATA, *CHECKPOINTS)
