"""The command line: `show`, what it says about mistakes, and a run with a configured optimizer."""

import json
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentParser, Namespace

import lightning_fold
from lightning_fold import __version__
from lightning_fold.cli import main
from lightning_fold.cli_config import check_arguments, explain_parse_error, read_config
from lightning_fold.cli_errors import (
    RELAY_VARIABLE,
    TRACEBACK_VARIABLE,
    UsageError,
    end_with,
    relayed,
    render,
)
from lightning_fold.topology.folding import Folding

SHOWN = ["show", *("--world=16", "--tp=2", "--cp=2", "--pp=2", "--ep=4", "--etp=1")]
PROGRAM = str(Path(sys.executable).with_name("lightning-fold"))


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.splitlines()[-1]


def run(
    *command: str, cwd: Path, limit: float = 120, **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=limit
    )


# show


def test_show_prints_both_views_and_draws_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, numbers = tmp_path / "map.png", tmp_path / "map.json"
    assert main([*SHOWN, "--png", str(picture), "--json", str(numbers)]) == 0
    printed = capsys.readouterr().out
    assert "tp2cp2dp2pp2-etp1ep4edp2: 16 ranks, 2 nodes of 8 GPUs" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(numbers.read_text())["mapping_id"] == "tp2cp2dp2pp2-etp1ep4edp2"


def test_show_json_is_all_of_stdout_and_holds_the_groups(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*SHOWN, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    folding = Folding.from_world(16, tp=2, cp=2, pp=2, ep=4)
    for view, axes in (("attention", ("pp", "dp", "cp", "tp")), ("moe", ("pp", "edp", "ep"))):
        for axis in axes:
            assert shown[view][axis] == [list(group) for group in folding.groups(axis)]


def test_show_draws_node_boundaries_where_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHOWN, "--gpus-per-node", "4"]) == 0
    assert "4 nodes of 4 GPUs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--world 16 --tp 3", r"Legal tp for cp=1: 1, 2, 4, 8, 16\. .*Change `--tp`"),
        ("--world 16 --ep 0", r"ep=0 leaves no rank.*Change `--ep`"),
        ("--world 0", r"Change `--world`"),
        ("--world 70000", r"Legal world: 1 to 65536\. .*`--world`"),
        ("--world 4 --ep x", r"invalid int value: 'x'.*Change `--ep`"),
        ("--tp 2", r"required: --world"),
        ("--world 4 --gpus-per-node 0", r"Change `--gpus-per-node`"),
        ("--world 4 --png nowhere/map.png", r"no directory.*Change `--png`"),
    ],
)
def test_show_names_the_option_to_change(
    options: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", *options.split()]) in (1, 2)
    line = last_line(capsys)
    assert line.startswith("lightning-fold: error: ")
    assert re.search(says, line)


# the program


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"lightning-fold {__version__}"
    for words in ([], ["--help"]):
        assert main(words) == 0
        assert "fit, validate, test, predict" in capsys.readouterr().out


def test_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fti", "--config", "x"]) == 2
    assert "Change it to `fit`" in last_line(capsys)


def test_module_is_the_program(tmp_path: Path) -> None:
    shown = run(sys.executable, "-m", "lightning_fold.cli", "show", "--world", "4", cwd=tmp_path)
    assert shown.returncode == 0
    assert shown.stdout.startswith("tp1cp1dp4pp1-etp1ep1edp4")
    assert shown.stderr == ""


# config files and options


@pytest.fixture(scope="module")
def known() -> Namespace:
    parser = ArgumentParser(exit_on_error=False)
    for key in ("trainer.max_steps", "trainer.devices", "trainer.strategy", "model", "ckpt_path"):
        parser.add_argument(f"--{key}")
    return parser.get_defaults()


STRATEGY = {"class_path": "lightning_fold.FoldedMoEStrategy", "init_args": {}}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--trainer.max_stepz 3", "`trainer.max_stepz`.*`max_steps`"),
        ("--trainer.max_stepz=3", "`trainer.max_stepz`.*`max_steps`"),
        ("--trainr.max_steps 3", "`trainr`.*`trainer`"),
        ("--trainer.strategy.tensor_parallel 2", "`tensor_parallel_size`"),
        ("--trainer.strategy.init_args.tp 2", "`tensor_parallel_size`"),
        ("--trainer.strategy.init_arg.x 2", "`init_arg` is not an argument"),
        ("--trainer.strategy.edp 2", "derived"),
        ("--checkpoint_path x", "`checkpoint_path`.*`ckpt_path`"),
    ],
)
def test_misspelt_option_names_the_nearest_key(
    options: str, says: str, known: Namespace, tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"trainer": {"strategy": STRATEGY}}))
    with pytest.raises(UsageError, match=says):
        check_arguments(["--config", str(file), *options.split()], known)


@pytest.mark.parametrize(
    "options",
    [
        "--trainer.max_steps 3 --ckpt_path x",
        "--trainer.strategy.tensor_parallel_size 2",
        "--trainer.strategy.init_args.tensor_parallel_size=2",
        "--trainer.strategy ddp --trainer.strategy.find_unused_parameters true",
        "--model Decoder --model.width 3",
        "--trainer.strategy.help ddp --print_config",
    ],
)
def test_known_options_pass(options: str, known: Namespace, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"trainer": {"strategy": STRATEGY}}))
    check_arguments([f"--config={file}", *options.split()], known)


def test_keys_are_checked_in_lists_of_classes(known: Namespace, tmp_path: Path) -> None:
    config = {"trainer": {"devices": [{"class_path": "fractions.Fraction", "init_arg": {}}]}}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    with pytest.raises(UsageError, match=r"`trainer.devices\[0\].init_arg`.*`init_args`"):
        check_arguments(["-c", str(file)], known)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"- 1\n", "holds list"),
        (b"5\n", "holds int"),
        (b"\xff\xfe\x00", "not YAML"),
        (b"a: [1,\nb: 2: 3\n", "not YAML.*line 2"),
    ],
)
def test_config_file_that_holds_no_mapping(content: bytes, says: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=says):
        read_config(str(file))
    with pytest.raises(UsageError, match="is a directory"):
        read_config(str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        (
            int,
            "two",
            "top.field=two is not a value of this field. Legal: int.  Change `top.field`.",
        ),
        (int | None, "x", "top.field=x is not .* Legal: int, null. "),
        (list[int], "x", "top.field"),
    ],
)
def test_wrong_type_names_field_value_and_legal_types(kind: Any, value: str, says: str) -> None:
    # Against the parser itself, so that a new wording of its messages is noticed.
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--top.field", type=kind)
    with pytest.raises(Exception, match=r"top\.field") as error:
        parser.parse_args([f"--top.field={value}"])
    explained = explain_parse_error(str(error.value))
    assert re.match(says, explained)
    assert "\n" not in explained


# how a command ends


def test_numbers_come_before_the_line_that_names_the_remedy() -> None:
    text = render(ValueError("It does not close.\n  tp=3\n  world=4\nLegal tp: 1.  Change `tp`."))
    assert text.splitlines() == [
        "  tp=3",
        "  world=4",
        "lightning-fold: error: It does not close. Legal tp: 1.  Change `tp`.",
    ]


def test_heading_stays_with_the_lines_below_it() -> None:
    text = render(ValueError("No block. Build one. Modules seen:\n  model: Linear"))
    assert text.splitlines() == [
        "Modules seen:",
        "  model: Linear",
        "lightning-fold: error: No block. Build one",
    ]


def test_defect_shows_its_traceback_and_a_refusal_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def raised(error: Exception) -> Exception:
        try:
            raise error
        except Exception as caught:
            return caught

    monkeypatch.delenv(TRACEBACK_VARIABLE, raising=False)
    assert "Traceback" not in render(raised(ValueError("x")))
    defect = render(raised(KeyError("x"))).splitlines()
    assert defect[0].startswith("Traceback")
    assert defect[-1] == "lightning-fold: error: KeyError: 'x'"
    monkeypatch.setenv(TRACEBACK_VARIABLE, "1")
    assert "Traceback" in render(raised(ValueError("x")))


def test_status_tells_a_request_from_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert (end_with(UsageError("x")), end_with(ValueError("x"))) == (2, 1)
    assert last_line(capsys) == "lightning-fold: error: x"


# The module by itself, since importing the package takes seconds in every process.
RANK = """
    import sys, time
    from cli_errors import end_with
    sys.exit(end_with(ValueError("from a rank")) if sys.argv[1] == "fails" else time.sleep(600))
"""
LAUNCHER = """
    import subprocess, sys, time
    from types import SimpleNamespace
    from cli_errors import end_with, relayed

    launcher = SimpleNamespace(procs=[])
    try:
        with relayed(launcher):
            for word in sys.argv[2:]:
                launcher.procs.append(subprocess.Popen([sys.executable, "rank.py", word]))
            print(*[process.pid for process in launcher.procs], flush=True)
            time.sleep(600 if sys.argv[1] == "waits" else 0)
            raise ValueError("from the launcher")
    except ValueError as error:
        sys.exit(end_with(error))
"""


@pytest.mark.parametrize(
    ("launcher", "ranks", "speaker"),
    [
        ("waits", ["fails"], "a rank"),
        ("waits", ["fails", "fails", "hangs"], "a rank"),
        ("fails", ["hangs", "hangs"], "the launcher"),
    ],
)
def test_one_message_and_no_rank_left(
    launcher: str, ranks: list[str], speaker: str, tmp_path: Path
) -> None:
    (tmp_path / "rank.py").write_text(textwrap.dedent(RANK))
    (tmp_path / "launcher.py").write_text(textwrap.dedent(LAUNCHER))
    package = str(Path(lightning_fold.__file__).parent)
    command = (sys.executable, "launcher.py", launcher, *ranks)
    ended = run(*command, cwd=tmp_path, limit=30, PYTHONPATH=package)
    assert ended.stderr == f"lightning-fold: error: from {speaker}\n"
    assert ended.returncode == 1
    pids = [int(pid) for pid in ended.stdout.split()]
    assert len(pids) == len(ranks)
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


def test_relay_leaves_nothing_behind_after_success() -> None:
    launcher = SimpleNamespace(procs=[])
    with relayed(launcher):
        folder = Path(os.environ[RELAY_VARIABLE].partition(":")[2])
        assert folder.is_dir()
        time.sleep(0.01)
    assert RELAY_VARIABLE not in os.environ
    assert not folder.exists()


# the optimizer of the command line

LATE = """
    import lightning.pytorch as pl
    from lightning_fold.model.decoder import Decoder, DecoderConfig

    class Late(pl.LightningModule):
        def configure_model(self):
            if not hasattr(self, "model"):
                self.model = Decoder(DecoderConfig(
                    hidden_size=16, num_hidden_layers=1, num_experts=4, moe_intermediate_size=8
                ))

        def training_step(self, batch, batch_idx):
            return self.model(**batch).loss

        def on_train_start(self):
            self.before = [p.detach().to_local().clone() for p in self.parameters()]

        def on_train_end(self):
            optimizer = self.trainer.optimizers[0]
            stepped = [p for group in optimizer.param_groups for p in group["params"]]
            same = all(a is b for a, b in zip(stepped, self.parameters(), strict=True))
            moved = sum(
                bool((p.to_local() != old).any())
                for p, old in zip(self.parameters(), self.before, strict=True)
            )
            if self.trainer.is_global_zero:
                print("same", same, "moved", moved > 5, type(optimizer).__name__,
                      optimizer.param_groups[0]["lr"])
"""


def late_config(folder: Path) -> Path:
    (folder / "late.py").write_text(textwrap.dedent(LATE))
    for number in range(12):
        (folder / f"{number}.txt").write_text("the cat sat on the mat. " * 40)
    config = {
        "seed_everything": 1,
        "trainer": {
            "accelerator": "cpu",
            "devices": 2,
            "strategy": {
                "class_path": "lightning_fold.FoldedMoEStrategy",
                "init_args": {"tensor_parallel_size": 2, "expert_parallel_size": 2},
            },
            "max_steps": 1,
            "limit_val_batches": 0,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        },
        "model": {"class_path": "late.Late"},
        "data": {
            "class_path": "lightning_fold.data.TextDataModule",
            "init_args": {
                "paths": ["*.txt"],
                "seq_len": 31,
                "batch_size": 4,
                "validation_fraction": 0.3,
            },
        },
        "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}},
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def test_optimizer_of_the_config_steps_a_model_built_in_configure_model(tmp_path: Path) -> None:
    config = str(late_config(tmp_path))
    ended = run(PROGRAM, "fit", "--config", config, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert "same True moved True SGD 0.5" in ended.stdout


@pytest.mark.slow
def test_torchrun_starts_the_same_program(tmp_path: Path) -> None:
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    start = [torchrun, "--nproc-per-node", "2", "-m", "lightning_fold.cli"]
    config = str(late_config(tmp_path))
    ended = run(*start, "fit", "--config", config, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert "same True moved True SGD 0.5" in ended.stdout
