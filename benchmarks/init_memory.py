"""Peak resident memory of a rank while a model gets its first values, shard by shard.

    python benchmarks/init_memory.py [--width 6144] [--folder DIR]

Sets a decoder of more than 2 GB (fp32) up through the real Trainer, with `meta_init` and with
`init_from` (a safetensors file, written in pieces first), on 4 ranks (ep4) and on 2 (tp2 ep2).
Each rank reports its VmHWM with all imports done, the process group started and a tiny model set
up (`interpreter`), and again at the end of set-up (`peak`). Prints peak / (interpreter + shard +
largest parameter), the aim of issue 3 being at most 1.20, and peak / (interpreter + shard).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import socket
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

MAPPINGS: dict[str, tuple[int, dict[str, int]]] = {
    "ep4": (4, {"expert_parallel_size": 4}),
    "tp2ep2": (2, {"tensor_parallel_size": 2, "expert_parallel_size": 2}),
}
AIM = 1.20


def main() -> None:
    """Start one run per mapping and source of values, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=6144, help="of an expert")
    parser.add_argument("--folder", type=Path, help="for the file of weights")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        measure(arguments.width, *arguments.rank.split(":"))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path = Path(folder) / "weights.safetensors"
        size = write_weights(arguments.width, path)
        print(f"model of {size / 1e9:.2f} GB; {platform.machine()}, {os.cpu_count()} cores")
        for mapping in MAPPINGS:
            for source in ("meta_init", "init_from"):
                report(mapping, source, run(arguments.width, mapping, source, path))


def run(width: int, mapping: str, source: str, path: Path) -> list[dict[str, float]]:
    """Bytes that each rank reports."""
    world, _ = MAPPINGS[mapping]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "benchmark", "OMP_NUM_THREADS": 1}
    command = [sys.executable, __file__, "--width", str(width)]
    command += ["--rank", f"{mapping}:{source}:{path}"]
    ranks = []
    for rank in range(world):
        variables = {k: str(v) for k, v in (shared | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        ranks.append(
            subprocess.Popen(command, env=os.environ | variables, stdout=subprocess.PIPE, text=True)
        )
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank failed")
    return [json.loads(output.strip().splitlines()[-1]) for output in outputs]


def measure(width: int, mapping: str, source: str, path: str) -> None:
    """Set up a tiny model, then the large one, and print this rank's figures as JSON."""
    import logging

    import torch

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    set_up(config(8, hidden=16), mapping, {"meta_init": True})
    before = peak()
    options: dict[str, dict[str, Any]] = {
        "meta_init": {"meta_init": True},
        "init_from": {"init_from": path},
    }
    module = set_up(config(width), mapping, options[source])
    after = peak()
    shards = [p.to_local() if hasattr(p, "to_local") else p for p in module.parameters()]
    figures = {
        "interpreter": before,
        "peak": after,
        "shard": sum(p.numel() * p.element_size() for p in shards),
        "parameter": max(p.numel() * p.element_size() for p in module.parameters()),
    }
    print(json.dumps(figures), flush=True)


def set_up(decoder: Any, mapping: str, options: dict[str, Any]) -> Any:
    """Run the Trainer's set-up and no step."""
    from lightning.pytorch import Trainer

    from lightning_fold import FoldedMoEStrategy

    world, degrees = MAPPINGS[mapping]
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=FoldedMoEStrategy(**degrees, **options),
        max_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = project(decoder)
    trainer.fit(module, [])
    return module


def project(decoder: Any) -> Any:
    """A module that builds its model where the strategy lets it be built."""
    import lightning.pytorch as pl
    import torch

    from lightning_fold.model.decoder import Decoder

    class Project(pl.LightningModule):
        def configure_model(self) -> None:
            if not hasattr(self, "model"):
                self.model = Decoder(decoder)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Project()


def config(width: int, *, hidden: int = 1024) -> Any:
    """Two layers of sixteen experts: four parameters make up nearly all of the model."""
    from lightning_fold.model.decoder import DecoderConfig

    return DecoderConfig(
        hidden_size=hidden,
        num_hidden_layers=2,
        num_experts=16,
        moe_intermediate_size=width,
        num_attention_heads=8,
        num_key_value_heads=4,
    )


def write_weights(width: int, path: Path) -> int:
    """Write random weights under the module's names, a piece at a time; return their bytes."""
    import torch

    from lightning_fold.model.decoder import Decoder

    with torch.device("meta"):
        state = Decoder(config(width)).state_dict()
    header, offset = {}, 0
    for name, tensor in state.items():
        end = offset + tensor.numel() * 4
        span = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [offset, end]}
        header[f"model.{name}"], offset = span, end
    text = json.dumps(header).encode()
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, offset, 1 << 24):
            values = torch.randn(min(1 << 24, offset - start) // 4) * 0.02
            out.write(values.numpy().tobytes())
    return offset


def peak() -> int:
    """Highest resident memory of this process so far, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) * 1024


def report(mapping: str, source: str, ranks: list[dict[str, float]]) -> None:
    """Print the rank whose ratio is worst."""
    rank = max(ranks, key=ratio)
    megabytes = {name: f"{value / 1e6:.0f} MB" for name, value in rank.items()}
    figures = "  ".join(f"{name} {value}" for name, value in megabytes.items())
    close = rank["peak"] / (rank["interpreter"] + rank["shard"])
    print(
        f"{mapping:7} {source:10} {figures}   "
        f"ratio {ratio(rank):.3f} (aim {AIM:.2f})   without the parameter {close:.3f}",
        flush=True,
    )
    print("json:", json.dumps({"mapping": mapping, "source": source, "ranks": ranks}), flush=True)


def ratio(rank: dict[str, float]) -> float:
    """Peak over what has to be there."""
    whole = rank["interpreter"] + rank["shard"] + rank["parameter"]
    return rank["peak"] / whole if whole else math.inf


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main()
