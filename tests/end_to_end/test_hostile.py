"""Illegal configurations, each in a process of its own: it ends soon, and says why at the end.

The table of the cases that were selected is printed once all have ended.
"""

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

LIMIT_SECONDS = 60
AT_ONCE = 2
PREFIX = "lightning-fold: error: "

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
    # One of a pair that takes the same way through the program.
    slow: bool = False


@dataclass(frozen=True)
class Ending:
    """How the process of a case ended."""

    status: int
    seconds: float
    last_line: str
    stderr: str
    left_over: bool


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
        "cp is not built",
        r"context_parallel_size=2 .*not built.*Change `context_parallel_size`",
        {STRATEGY + "context_parallel_size": 2},
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
]
CASES = [
    pytest.param(case, id=case.name.replace(" ", "-"), marks=[pytest.mark.slow] * case.slow)
    for case in (*TOPOLOGY, *MODELS, *CONFIGS, *DATA)
]


def write_config(case: Case, folder: Path) -> None:
    config = deepcopy(BASE)
    for key, value in case.changes.items():
        node = config
        *groups, last = key.split(".")
        for group in groups:
            node = node[group]
        node[last] = value
    text = yaml.safe_dump(config).encode()
    (folder / "config.yaml").write_bytes(text if case.content is None else case.content)
    (folder / "hollow").mkdir()
    (folder / "noise.txt").write_bytes(b"\0\1\2")


def command_of(case: Case) -> list[str]:
    command = [str(Path(sys.executable).with_name("lightning-fold")), "fit"]
    named = () if "--config" in case.options else ("--config", "config.yaml")
    return [*command, *named, *case.options]


def outlives(group: int) -> bool:
    """Tell whether a process of the group still runs, and kill it."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def run_case(case: Case, folder: Path) -> Ending:
    folder.mkdir()
    write_config(case, folder)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    process = subprocess.Popen(
        command_of(case),
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, stderr = process.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        _, stderr = process.communicate()
    seconds = time.monotonic() - start
    last_line = next(iter(stderr.splitlines()[-1:]), "")
    return Ending(process.returncode, seconds, last_line, stderr, outlives(process.pid))


def table(endings: dict[str, Ending]) -> str:
    rows = [
        f"{name:<38} {ending.status:>6} {ending.seconds:>7.1f}  {ending.last_line}"
        for name, ending in endings.items()
    ]
    return "\n".join(["", f"{'case':<38} {'status':>6} {'seconds':>7}  last line", *rows])


@pytest.fixture(scope="module")
def endings(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, Ending]:
    callspecs = (getattr(item, "callspec", None) for item in request.session.items)
    params = [callspec.params.get("case") for callspec in callspecs if callspec is not None]
    cases = [case for case in params if isinstance(case, Case)]
    root = tmp_path_factory.mktemp("hostile")
    folders = [root / str(number) for number in range(len(cases))]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ended = dict(
            zip((case.name for case in cases), pool.map(run_case, cases, folders), strict=True)
        )
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(table(ended))
    return ended


@pytest.mark.parametrize("case", CASES)
def test_refused_at_once_with_the_reason_on_the_last_line(
    case: Case, endings: dict[str, Ending]
) -> None:
    ending = endings[case.name]
    assert ending.last_line.startswith(PREFIX), ending.stderr
    assert re.search(case.says, ending.last_line), ending.stderr
    assert ending.status in (1, 2)
    assert ending.seconds < LIMIT_SECONDS
    assert ending.stderr.count(PREFIX) == 1
    assert "Traceback" not in ending.stderr
    assert not ending.left_over
