"""What the ranks of `test_stage_checkpoints` run: a hand-made model, its cut, its saves and loads.

Every case trains the same two steps, saves both forms, and resumes from whatever earlier cases
have saved; errors are those against one plain process.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rank_records
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_fold.checkpoint import (
    OWN,
    Canonical,
    CheckpointStore,
    Peers,
    Stages,
    WholeModel,
    named_state,
)
from lightning_fold.checkpoint.initial import find_initial, load_initial
from lightning_fold.topology.meshes import Meshes, build_meshes
from lightning_fold.verify.plan import Case

VOCABULARY, WIDTH, EXPERTS, FFN, LAYERS = 6, 4, 4, 3, 3
HALVED = tuple(f"core.layers.{i}.experts.gate_up_proj" for i in range(LAYERS))
EMBED, HEAD = "core.embed.weight", "core.head.weight"
KINDS, FORMS = ("adamw", "sgd"), ("folder", "file")

Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class StageCase(Case):
    """One cut of the model.

    Attributes:
        layout: Stage of every layer; the embedding is the first one's, norm and head the last's.
    """

    layout: tuple[int, ...] = (0,) * LAYERS

    @property
    def key(self) -> str:
        """Name of the case in folders."""
        return f"{self.mapping}.{''.join(map(str, self.layout))}"


class Block(nn.Module):
    """A layer with stacked experts, a buffer and an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * FFN, WIDTH))
        self.experts.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, FFN))
        self.register_buffer("count", torch.randint(0, 99, (2,)))
        self.extra = int(torch.randint(0, 99, ()))

    def get_extra_state(self) -> dict[str, int]:
        return {"extra": self.extra}

    def set_extra_state(self, state: Mapping[str, int]) -> None:
        self.extra = state["extra"]


class Model(nn.Module):
    """Embedding, layers, norm and a tied head, and a buffer that every stage has."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.core = nn.Module()
        self.core.register_buffer("table", torch.randn(3))
        self.core.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.core.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.core.norm = nn.LayerNorm(WIDTH)
        self.core.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.core.head.weight = self.core.embed.weight
        self.double()


def optimizer_of(module: nn.Module, kind: str, *, reverse: bool = False) -> torch.optim.Optimizer:
    """The final norm by itself, which most stages lack, and the rest."""
    named = list(module.named_parameters())
    named = named[::-1] if reverse else named
    norm = [param for name, param in named if name.startswith("core.norm")]
    rest = [param for name, param in named if not name.startswith("core.norm")]
    groups = [{"params": norm, "weight_decay": 0.0}, {"params": rest, "lr": 0.02}]
    if kind == "adamw":
        return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, foreach=False)
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9, weight_decay=0.1, foreach=False)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int = 2) -> None:
    """Steps with gradients that follow from the names."""
    for step in range(steps):
        for name, param in module.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
            # Numbers in the user's order: a live first projection is a view of them.
            grad = torch.randn(param.numel(), generator=generator, dtype=param.dtype)
            param.grad = sharded_like(grad.view(param.shape), param)
        optimizer.step()


def sharded_like(whole: Tensor, param: Tensor) -> Tensor:
    if not isinstance(param, DTensor):
        return whole
    return distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)


# Cut and shard.


def owners(layout: Sequence[int], last: int) -> Callable[[str], tuple[int, ...]]:
    def of(name: str) -> tuple[int, ...]:
        if ".layers." in name:
            return (layout[int(name.split(".")[2])],)
        if name == EMBED:
            return (0, last) if last else (0,)
        return tuple(range(last + 1)) if name.endswith("table") else (last,)

    return of


def cut(module: Model, layout: Sequence[int], *, stage: int, last: int) -> None:
    """Leave what the stage owns; the last one keeps the embedding, whose weight is its head's."""
    for i, owner in enumerate(layout):
        if owner != stage:
            module.core.layers[i] = nn.Module()
    if stage not in (0, last):
        module.core.embed = nn.Module()
    if stage != last:
        module.core.norm, module.core.head = nn.Module(), nn.Module()


def shard(module: nn.Module, meshes: Meshes) -> None:
    """First projections live and over ep, with the second ones; all else over the stage."""
    done: dict[int, nn.Parameter] = {}
    for name, param in list(module.named_parameters(remove_duplicate=False)):
        owner, _, key = name.rpartition(".")
        if id(param) not in done:
            value = param.detach()
            value = value.unflatten(1, (2, FFN)) if key == "gate_up_proj" else value
            mesh = meshes.mesh("ep" if ".experts." in name else "stage")
            if meshes.folding.stage_size > 1:
                value = distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)
            done[id(param)] = nn.Parameter(value)
        setattr(module.get_submodule(owner), key, done[id(param)])


@dataclass(frozen=True)
class Site:
    """One rank's model and what saves it."""

    module: Model
    store: CheckpointStore
    stages: Stages | None

    @property
    def stage(self) -> int:
        return 0 if self.stages is None else self.stages.rank


def site_of(case: StageCase, meshes: Meshes, *, seed: int) -> Site:
    module = Model(seed)
    last, stage = case.folding.pp - 1, meshes.rank("pp")
    stages = None
    if last:
        whole = WholeModel.of(module, owners(case.layout, last))
        cut(module, case.layout, stage=stage, last=last)
        stages = Stages(whole, meshes.group("pp"), torch.device("cpu"))
    shard(module, meshes)
    halved = [name for name, _ in module.named_parameters() if name in HALVED]
    canonical = Canonical(module, halved=halved, is_writer=dist.get_rank() == 0, stages=stages)
    peers = Peers(dist.group.WORLD)
    store = CheckpointStore(canonical, mapping=case.mapping, peers=peers, background_peers=None)
    return Site(module, store, stages)


# Save, resume, compare.


def save(site: Site, path: Path, form: str, optimizer: torch.optim.Optimizer) -> None:
    rest = {"global_step": 2}
    state, canonical = site.module.state_dict(), site.store.canonical
    if form == "folder":
        states: list[Any] = [named_state(site.module, optimizer)]
        site.store.save_folder(path, {**rest, "state_dict": state, "optimizer_states": states})
        return
    whole = canonical.consolidate(state)
    states = [canonical.optimizer_state(optimizer)]
    own = site.store.own_entries([optimizer])
    content = {**rest, "state_dict": whole, "optimizer_states": states, OWN: own}
    site.store.save_file(path, content)


def resume(site: Site, path: Path, kind: str, *, reverse: bool) -> dict[str, float]:
    """Worst differences of weights, moments, and weights after one more step."""
    optimizer = optimizer_of(site.module, kind, reverse=reverse)
    site.store.load(path, [optimizer], strict=True)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02]
    whole, theirs = reference(kind)
    errors = {"weights": difference(site.module.state_dict(), whole.state_dict())}
    names = {param: name for name, param in site.module.named_parameters()}
    own = {names[param]: values for param, values in optimizer.state.items()}
    assert own.keys() == set(names.values()), "a parameter has no moments"
    wanted = {n: theirs.state[p] for n, p in whole.named_parameters()}
    for key in next(iter(own.values())):
        errors[key] = difference(
            {name: values[key] for name, values in own.items()},
            {name: values[key] for name, values in wanted.items()},
        )
    train(site.module, optimizer, steps=1)
    train(whole, theirs, steps=1)
    errors["next"] = difference(site.module.state_dict(), whole.state_dict())
    return errors


def reference(kind: str) -> tuple[Model, torch.optim.Optimizer]:
    """The same training in one plain process."""
    module = Model()
    optimizer = optimizer_of(module, kind)
    train(module, optimizer)
    return module, optimizer


def difference(own: Mapping[str, Any], whole: Mapping[str, Any]) -> float:
    """Largest difference of what a rank holds from its part of what one process has."""
    worst = 0.0
    for name, value in own.items():
        if isinstance(value, Tensor):
            wanted = whole[name].detach().reshape(value.shape)
            part = sharded_like(wanted, value)
            pair = (x.to_local() if isinstance(x, DTensor) else x for x in (value, part))
            first, second = (x.detach().double() for x in pair)
            worst = max([worst, *(first - second).abs().flatten().tolist()])
        else:
            worst = max(worst, float(value != whole[name]))
    return worst


def told(action: Callable[[], Any]) -> str:
    """What an action is refused with."""
    try:
        action()
    except ValueError as error:
        return str(error)
    return ""


def run(case: Case, folder: Path) -> None:
    """Run one case. Collective over all ranks."""
    assert isinstance(case, StageCase), case
    dist.init_process_group("gloo")
    meshes = build_meshes(case.folding, "cpu")
    record: dict[str, Any] = {"errors": {}, "refused": {}}
    for kind in KINDS:
        site = site_of(case, meshes, seed=0)
        optimizer = optimizer_of(site.module, kind)
        train(site.module, optimizer)
        for form in FORMS:
            save(site, folder / f"{kind}.{form}", form, optimizer)
    for source in sorted(folder.parent.glob("*/*.f*")):
        kind = source.name.split(".")[0]
        reverse = source.parent.name != "plain" and source.name.endswith("file")
        site = site_of(case, meshes, seed=1)
        errors = resume(site, source, kind, reverse=reverse)
        record["errors"][f"{source.parent.name} {source.name}"] = errors
    if case.folding.pp > 1:
        record["refused"] = refusals(case, meshes, folder)
        record["initial"] = initial(case, meshes, folder)
    rank_records.write_record(folder, record)


def refusals(case: StageCase, meshes: Meshes, folder: Path) -> dict[str, str]:
    """What does not fit one stage, as each rank is told of it."""
    last = case.folding.pp - 1
    refused = {}
    for name, change in CHANGES.items():
        path = folder / f"changed {name}"
        if dist.get_rank() == 0:
            content = torch.load(folder / "adamw.file", weights_only=True)
            change(content)
            torch.save(content, path)
        site = site_of(case, meshes, seed=1)
        optimizer = optimizer_of(site.module, "adamw")
        refused[name] = told(lambda: site.store.load(path, [optimizer], strict=True))  # noqa: B023
    site = site_of(case, meshes, seed=0)
    optimizer = optimizer_of(site.module, "adamw")
    own = optimizer.param_groups[1]
    own["lr"] = 0.5 if site.stage == last else own["lr"]
    for form in FORMS:
        refused[f"options {form}"] = told(lambda: save(site, folder / "no", form, optimizer))  # noqa: B023
    if site.stage == last:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 1.0})
        site.module.extra = optimizer.param_groups[-1]["params"][0]
    refused["groups"] = told(lambda: site.store.own_entries([optimizer]))
    refused["load"] = told(
        lambda: site.store.load(folder / "adamw.folder", [optimizer], strict=False)
    )
    nameless = site_of(case, meshes, seed=0)
    stray = [nn.Parameter(torch.zeros(1))] if site.stage == last else []
    other = torch.optim.SGD([{"params": [*nameless.module.parameters(), *stray]}], lr=0.1)
    refused["nameless"] = told(lambda: nameless.store.canonical.optimizer_state(other))
    return refused


def initial(case: StageCase, meshes: Meshes, folder: Path) -> dict[str, Any]:
    """`init_from` a file with the core's names and one name of the tied weight."""
    whole = Model(seed=7)
    results: dict[str, Any] = {}
    for kept, left in ((EMBED, HEAD), (HEAD, EMBED)):
        state = {
            name.removeprefix("core."): value
            for name, value in whole.state_dict().items()
            if isinstance(value, Tensor) and name != left
        }
        lacking = {name: v for name, v in state.items() if name != "norm.bias"}
        for what, content in (("fits", state), ("lacking", lacking)):
            path = folder / f"{what}.{kept}"
            if dist.get_rank() == 0:
                torch.save(content, path)
            dist.barrier()
            site = site_of(case, meshes, seed=1)
            key = f"{what} {kept}"
            results[key] = told(lambda: _init_from(path, site))  # noqa: B023
            if what == "fits":
                own = {n: v for n, v in site.module.state_dict().items() if isinstance(v, Tensor)}
                results[f"difference {kept}"] = difference(own, whole.state_dict())
    return results


def _init_from(path: Path, site: Site) -> None:
    halved = site.store.canonical.halved
    weights = find_initial(str(path), site.module, core="core", halved=halved, stages=site.stages)
    load_initial(weights, site.module, halved=halved)


def _lacks(content: dict[str, Any]) -> None:
    del content["state_dict"]["core.norm.weight"]


def _foreign(content: dict[str, Any]) -> None:
    content["state_dict"]["core.layers.9.norm.weight"] = torch.zeros(1)


def _misshapen(content: dict[str, Any]) -> None:
    content["state_dict"]["core.norm.bias"] = torch.zeros(9, dtype=torch.float64)


def _rounded(content: dict[str, Any]) -> None:
    state = content["state_dict"]
    state[HALVED[1]] = state[HALVED[1]].float()


def _regrouped(content: dict[str, Any]) -> None:
    names = content[OWN]["optimizer_names"][0]
    names[1].append(names[0].pop())


def _moment(content: dict[str, Any]) -> None:
    # The first group is the final norm, the last stage's.
    content["optimizer_states"][0]["state"][0]["exp_avg"] = torch.zeros(3, dtype=torch.float64)


def _extra(content: dict[str, Any]) -> None:
    content["state_dict"]["core.norm._extra_state"] = 1


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "lacks": _lacks,
    "foreign": _foreign,
    "misshapen": _misshapen,
    "rounded": _rounded,
    "regrouped": _regrouped,
    "moment": _moment,
    "extra": _extra,
}
"""What is changed in a file, of what lies on one stage."""
