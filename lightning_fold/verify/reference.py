"""The plain single-process run, without parallelism: `python reference.py requests.json folder`.

For dp = d it is the user's model over the same d sub-batches, each loss divided by d, accumulated,
then one SGD step. What depends on microbatches is run by them, one after the other; all else on
whole sub-batches, since cutting them must change nothing. It is run by its path and fails if it has
imported the package under test.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn


def run_reference(request: dict[str, Any]) -> dict[str, Any]:
    """Train one model for a few steps and record everything that a mapping is compared with.

    Args:
        request: model, dp, clip (bool), precision ("64" or "32"), feature,
            batch (kind of `cases.sub_batch`), pieces (microbatches of a sub-batch).
    """
    dp, dtype = request["dp"], {"64": torch.float64, "32": torch.float32}[request["precision"]]
    model = cases.build_model(request["model"], decoder=decoder).to(dtype)
    tap = cases.RoutingTap(model)
    plain = features.FEATURES[request["feature"]].plain(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=cases.LEARNING_RATE)
    record: dict[str, Any] = {"losses": [], "logits": [], "norms": []}
    for step in range(cases.STEPS):
        optimizer.zero_grad()
        for index in range(step * cases.ACCUMULATE, (step + 1) * cases.ACCUMULATE):
            batches = [cases.sub_batch(index, rank, request["batch"]) for rank in range(dp)]
            scale = 1 / dp / cases.ACCUMULATE
            for logits, loss in _forward_backward(plain, batches, request["pieces"], scale):
                record["losses"].append(loss)
                record["logits"].append(logits)
        if step == 0:
            _check_every_expert_is_hit(tap, request)
            record["grads"] = {f"model.{n}": _grad(p) for n, p in model.named_parameters()}
        record["norms"].append(_norm_and_clip(model, request))
        optimizer.step()
        plain.after_step()
    record["routing"] = [_of_whole_batches(log, dp, request["pieces"]) for log in tap.decisions]
    record["buffers"] = {f"model.{n}": b.clone() for n, b in cases.saved_buffers(model).items()}
    record["weights"] = {f"model.{n}": p.detach().clone() for n, p in model.named_parameters()}
    return record


def _forward_backward(
    plain: Any, batches: Sequence[dict[str, Tensor]], pieces: int, scale: float
) -> list[tuple[Tensor, Tensor]]:
    """Logits and loss of the sub-batch of each dp rank."""
    if pieces == 1:
        results = plain.forward_backward(batches, scale)
        return [(out.logits.detach(), loss.double()) for out, loss in results]
    # A microbatch of every dp rank, then the next ones: what a forward of all ranks sees.
    cuts = [plain_form.cut(batch, pieces) for batch in batches]
    shares = [[share.loss for _, share in own] for own in cuts]
    assert all(map(all, shares)), f"a microbatch without targets counts for nothing: {shares}"
    each = [
        plain.forward_backward([batch for batch, _ in now], scale, [share for _, share in now])
        for now in zip(*cuts, strict=True)
    ]
    found = []
    for results, weights in zip(zip(*each, strict=True), shares, strict=True):
        logits = torch.cat([out.logits.detach() for out, _ in results])
        losses = [loss.double() * w for (_, loss), w in zip(results, weights, strict=True)]
        found.append((logits, torch.stack(losses).sum()))
    return found


def _of_whole_batches(decisions: Sequence[Tensor], dp: int, pieces: int) -> list[Tensor]:
    """Decisions of each sub-batch, from those of the microbatches in the order of the forwards."""
    whole = []
    for first in range(0, len(decisions), dp * pieces):
        forwards = decisions[first : first + dp * pieces]
        whole += [torch.cat(list(forwards[rank::dp])) for rank in range(dp)]
    return whole


def _grad(param: nn.Parameter) -> Tensor:
    assert param.grad is not None, "a parameter of the reference has no gradient"
    return param.grad.clone()


def _norm_and_clip(model: nn.Module, request: dict[str, Any]) -> float:
    limit = cases.CLIP if request["clip"] else float("inf")
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit))
    # An idle clip would test nothing.
    assert not request["clip"] or norm > 1.5 * limit, f"{request}: norm {norm}, clip {limit}"
    return norm


def _check_every_expert_is_hit(tap: Any, request: dict[str, Any]) -> None:
    for layer, decisions in enumerate(tap.decisions):
        experts = torch.cat([index.flatten() for index in decisions]).unique().numel()
        assert experts == 8, f"{request}: MoE layer {layer} uses {experts} of 8 experts"


def _plain_package(name: str, folder: Path) -> None:
    """Make the plain files of `folder` a package that does not lie in the one under test."""
    package = ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package


def main(requests: str, folder: str) -> None:
    """Run every request of a JSON list and save its record under the request's `key`."""
    torch.set_num_threads(1)
    for request in json.loads(Path(requests).read_text()):
        torch.save(run_reference(request), Path(folder) / f"{request['key']}.pt")
    foreign = {name.partition(".")[0] for name in sys.modules} & {"lightning_fold", "lightning"}
    assert not foreign, f"the reference process has imported {sorted(foreign)}"


if __name__ == "__main__":
    _HERE = Path(__file__).resolve().parent
    # The script's folder leads sys.path and would hide the standard library from torch.
    sys.path.pop(0)
    _plain_package("plain", _HERE)
    _plain_package("plain_model", _HERE.parent / "model")
    cases = importlib.import_module("plain.cases")
    plain_form = importlib.import_module("plain.plain")
    features = importlib.import_module("plain.features")
    decoder = importlib.import_module("plain_model.decoder")
    main(*sys.argv[1:3])
