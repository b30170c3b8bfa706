"""Router replay: the same experts again, with weights of the logits that run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_fold.model.decoder import Decoder, DecoderConfig
from lightning_fold.model.replay import RouterReplay


def build(seed: int = 0, **fields: object) -> Decoder:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2, "initializer_range": 0.3}
    return Decoder(DecoderConfig(**(sizes | {"moe_intermediate_size": 8} | fields))).double()


def ids(seed: int) -> Tensor:
    return torch.randint(0, 31, (2, 7), generator=torch.Generator().manual_seed(seed))


def watch(model: Decoder) -> list[Tensor]:
    seen: list[Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, args, out: seen.append(out[2]))
    return seen


def test_same_weights_and_tokens_give_the_same_logits() -> None:
    model = build(routed_scaling_factor=2.0)
    replay = RouterReplay(model)
    with replay.record():
        expected = [model(ids(seed)).logits for seed in (0, 1)]
    with replay.replay():
        assert all(torch.equal(model(ids(seed)).logits, expected[seed]) for seed in (0, 1))


def test_another_model_takes_the_recorded_experts_with_weights_of_its_own(tmp_path: Path) -> None:
    first, second = build(0), build(1)
    replay = RouterReplay(first)
    recorded = watch(first)
    with replay.record():
        first(ids(0))
    replay.save(tmp_path / "decisions.safetensors")
    other = RouterReplay(second)
    other.load(tmp_path / "decisions.safetensors")
    replayed = watch(second)
    with other.replay():
        second(ids(0), labels=ids(0)).loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(recorded, replayed, strict=True))
    gate = second.model.layers[0].mlp.gate
    assert gate.weight.grad is not None
    assert gate.weight.grad.abs().max() > 0
    # Hooks are gone: it decides by itself again.
    second(ids(0))
    assert not torch.equal(replayed[-1], recorded[1])


def test_repeated_layers_are_recorded_once_and_not_replayed() -> None:
    model = build(gradient_checkpointing=True)
    replay = RouterReplay(model)
    with replay.record():
        for seed in (0, 1):
            model(ids(seed), labels=ids(seed)).loss.backward()
    assert [len(all_TK) for all_TK in replay.decisions.values()] == [2, 2]
    with replay.replay(), pytest.raises(ValueError, match="backward repeats cannot be replayed"):
        model(ids(0), labels=ids(0)).loss.backward()


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Linear has no router whose decision"):
        RouterReplay(nn.Linear(2, 2))
    model = build()
    replay = RouterReplay(model)
    with replay.record():
        model(ids(0))
    with replay.replay(), pytest.raises(ValueError, match=r"is \[14, 2\] for \[6, 2\] rows"):
        model(ids(0)[:, :3])
    with replay.replay():
        model(ids(0))
        with pytest.raises(ValueError, match="all recorded decisions are used up"):
            model(ids(0))
    replay.save(tmp_path / "all")
    other = build(num_hidden_layers=1)
    with pytest.raises(ValueError, match="which this model has not"):
        RouterReplay(other).load(tmp_path / "all")
