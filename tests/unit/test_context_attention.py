"""Context-parallel attention over threads as ranks: every method equals plain attention."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_fold.model.context import ring
from lightning_fold.model.context.attention import METHODS
from lightning_fold.model.context.dense import attend_runs
from lightning_fold.model.context.rule import AttentionRule
from lightning_fold.moe.tokens import TokenLayout
from lightning_fold.topology.comm import Pending
from lightning_fold.topology.sequence import zigzag_chunks, zigzag_places

SCALING = 0.4


class Meeting:
    """Where the threads of one test exchange tensors."""

    def __init__(self, cp: int) -> None:
        self.cp = cp
        self.barrier = threading.Barrier(cp, timeout=20)
        self.shown: list[Any] = [None] * cp

    def show(self, rank: int, mine: Any) -> list[Any]:
        """What every rank shows."""
        self.shown[rank] = mine
        self.barrier.wait()
        seen = list(self.shown)
        self.barrier.wait()
        return seen


class ThreadComm:
    """All that the methods ask of a Comm, for one thread."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self._rank = meeting, rank
        self.shifts = 0

    def size(self, axis: str) -> int:
        assert axis == "cp"
        return self.meeting.cp

    def rank(self, axis: str) -> int:
        return self._rank

    def all_gather_rows(self, x: Tensor, sizes: Sequence[int], *, axis: str) -> Tensor:
        parts = self.meeting.show(self._rank, x)
        assert [part.shape[0] for part in parts] == list(sizes)
        return torch.cat(parts)

    def reduce_scatter_rows(self, x: Tensor, sizes: Sequence[int], *, axis: str) -> Tensor:
        parts = self.meeting.show(self._rank, x)
        return torch.stack([p.split(list(sizes))[self._rank] for p in parts]).sum(0)

    def all_to_all_rows(
        self, x: Tensor, send: Sequence[int], recv: Sequence[int], *, axis: str
    ) -> Tensor:
        parts = self.meeting.show(self._rank, x.split(list(send)))
        mine = [part[self._rank] for part in parts]
        assert [part.shape[0] for part in mine] == list(recv)
        return torch.cat(mine)

    def start_shift(self, x: Tensor, *, shape: Sequence[int], axis: str) -> Pending:
        self.shifts += 1
        received = self.meeting.show(self._rank, x)[self._rank - 1]
        assert received.shape == tuple(shape)
        return Pending(received.clone())


def on_ranks(cp: int, run: Callable[[Any], Any]) -> list[Any]:
    """Run `run(comm)` on cp threads."""
    meeting = Meeting(cp)
    with ThreadPoolExecutor(cp) as pool:
        return list(pool.map(lambda rank: run(ThreadComm(meeting, rank)), range(cp)))


def whole_mask(rule: AttentionRule) -> Tensor:
    """[B, 1, S, S] in the plainest way."""
    layout, length = rule.layout, rule.layout.length
    mask = torch.zeros(layout.num_sequences, 1, length, length, dtype=torch.bool)
    for b in range(layout.num_sequences):
        for q in range(length):
            for k in range(q + 1):
                near = rule.window is None or q - k < rule.window
                docs, valid = layout.documents_BS, layout.valid_BS
                together = docs is None or bool(docs[b, q] == docs[b, k])
                real = valid is None or bool(valid[b, k])
                mask[b, 0, q, k] = (near and together and real) or (
                    rule.sees_itself and valid is not None and q == k
                )
    return mask


def plain(query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    return F.scaled_dot_product_attention(
        query,
        key.repeat_interleave(groups, 1),
        value.repeat_interleave(groups, 1),
        attn_mask=whole_mask(rule),
        scale=rule.scaling,
    )


PADDED = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]]).bool()
PACKED = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2]])


def a_rule(length: int = 11, **options: Any) -> AttentionRule:
    layout = {k: options.pop(k) for k in ("valid_BS", "documents_BS") if k in options}
    return AttentionRule(TokenLayout(2, length, torch.arange(length), **layout), SCALING, **options)


RULES = {
    "plain": a_rule(),
    "padded": a_rule(valid_BS=PADDED),
    "padded_seeing_itself": a_rule(valid_BS=PADDED, sees_itself=True),
    "packed": a_rule(documents_BS=PACKED),
    "window": a_rule(window=3),
    "window_padded": a_rule(window=4, valid_BS=PADDED),
    "window_packed": a_rule(window=1, documents_BS=PACKED),
    "long": a_rule(23),
    "one_token_for_most_ranks": a_rule(3),
    "one_token": a_rule(1),
}


def inputs(rule: AttentionRule, heads: int, kv_heads: int, dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value of another width, and the gradient of the output."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((heads, 6), (kv_heads, 6), (kv_heads, 4), (heads, 4))
    return [
        torch.randn(2, h, rule.layout.length, width, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for h, width in shapes
    ]


def attend(method: str, cp: int, rule: AttentionRule, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Output and gradients of all ranks, put together."""

    def run(comm: Any) -> tuple[Tensor, list[Tensor]]:
        places = torch.tensor(zigzag_places(rule.layout.length, cp=cp, rank=comm.rank("cp")))
        own = [x.detach()[:, :, places.long()].requires_grad_() for x in tensors]
        layout = replace(rule.layout, places_s=places.long())
        out = METHODS[method](*own[:3], comm=comm, rule=replace(rule, layout=layout))
        (out * own[3].detach()).sum().backward()
        grads = [x.grad for x in own[:3]]
        assert all(grad is not None and not grad.isnan().any() for grad in grads)
        return places, [out.detach(), *(grad for grad in grads if grad is not None)]

    results = on_ranks(cp, run)
    order = torch.cat([places for places, _ in results]).argsort()
    return [
        torch.cat(parts, 2)[:, :, order] for parts in zip(*(t for _, t in results), strict=True)
    ]


def expected(rule: AttentionRule, tensors: Sequence[Tensor]) -> list[Tensor]:
    own = [x.detach().double().requires_grad_() for x in tensors]
    out = plain(*own[:3], rule)
    (out * own[3].detach()).sum().backward()
    return [out.detach(), *(x.grad for x in own[:3] if x.grad is not None)]


def assert_equal(actual: Sequence[Tensor], wanted: Sequence[Tensor], tolerance: float) -> None:
    for name, a, b in zip(("out", "query", "key", "value"), actual, wanted, strict=True):
        assert a.shape == b.shape
        error = (a.double() - b).norm() / b.norm().clamp(min=1e-3)
        assert error < tolerance, f"{name}: {error}"


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("method", METHODS)
def test_output_and_gradients_equal_plain_attention(method: str, name: str, cp: int) -> None:
    rule = RULES[name]
    tensors = inputs(rule, 8, 2, torch.float64)
    assert_equal(attend(method, cp, rule, tensors), expected(rule, tensors), 1e-12)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (6, 1), (6, 6)])
def test_any_number_of_heads_with_an_odd_cp(method: str, heads: int, kv_heads: int) -> None:
    rule = RULES["padded"]
    tensors = inputs(rule, heads, kv_heads, torch.float64)
    assert_equal(attend(method, 3, rule, tensors), expected(rule, tensors), 1e-12)


# fp32: a few roundings of 6e-8. bf16: eight bits of mantissa, in inputs of products and in results.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("method", METHODS)
def test_narrow_types_keep_their_type_and_precision(
    method: str, dtype: torch.dtype, tolerance: float
) -> None:
    rule = RULES["padded"]
    tensors = inputs(rule, 4, 2, dtype)
    actual = attend(method, 2, rule, tensors)
    assert {x.dtype for x in actual} == {dtype}
    assert_equal(actual, expected(rule, tensors), tolerance)


def test_ring_is_more_precise_than_its_inputs() -> None:
    # The running softmax in bf16 would lose the small blocks of a long sequence.
    rule = RULES["long"]
    tensors = inputs(rule, 2, 2, torch.bfloat16)
    (out, *_), (wanted, *_) = attend("ring", 4, rule, tensors), expected(rule, tensors)
    assert (out.double() - wanted).abs().max() <= wanted.abs().max() * 2**-8


def test_ring_skips_what_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    scores = ring._scores

    def counted(query: Tensor, *rest: Any) -> Tensor:
        seen.append(tuple(query.shape))
        return scores(query, *rest)

    monkeypatch.setattr(ring, "_scores", counted)
    rule = a_rule(16)
    attend("ring", 4, rule, inputs(rule, 2, 2, torch.float64))
    # Of 8 x 8 pairs of chunks 36 lie on or below the diagonal; forward and backward each.
    assert len(seen) == 2 * 36
    seen.clear()
    narrow = a_rule(16, window=2)
    attend("ring", 4, narrow, inputs(narrow, 2, 2, torch.float64))
    assert len(seen) == 2 * (8 + 7)


@pytest.mark.parametrize("cp", [1, 2, 3])
def test_ranks_have_as_much_to_attend_to(cp: int) -> None:
    chunks = [zigzag_chunks(12 * cp, cp=cp, rank=rank) for rank in range(cp)]
    pairs = {sum(place + 1 for run in runs for place in run) for runs in chunks}
    assert len(pairs) == 1


def test_dropout_draws_from_the_generator() -> None:
    rule = replace(RULES["plain"], dropout=0.5)
    query, key, value, _ = inputs(rule, 4, 2, torch.float64)
    outs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(attend_runs(query, key, value, runs=[range(11)], rule=rule))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


@st.composite
def rules(draw: st.DrawFn) -> AttentionRule:
    length = draw(st.integers(1, 9))
    flags = st.lists(st.booleans(), min_size=length, max_size=length)
    padded = draw(st.booleans())
    options: dict[str, Any] = {"window": draw(st.none() | st.integers(1, 10))}
    rows = [draw(flags), draw(flags)]
    if padded:
        options |= {"valid_BS": torch.tensor(rows), "sees_itself": draw(st.booleans())}
    elif draw(st.booleans()):
        options["documents_BS"] = torch.tensor(rows).long().cumsum(1)
    return a_rule(length, **options)


@given(rules(), st.data())
def test_blocks_are_cut_from_the_mask_of_whole_sequences(
    rule: AttentionRule, data: st.DataObject
) -> None:
    length, whole = rule.layout.length, whole_mask(rule)
    runs = []
    for _ in range(2):
        start = data.draw(st.integers(0, length - 1))
        runs.append(range(start, data.draw(st.integers(start + 1, length))))
    queries, keys = runs
    block = whole[:, :, queries.start : queries.stop, keys.start : keys.stop]
    if rule.is_empty(queries, keys):
        assert not block.any()
        return
    mask = rule.mask(queries, keys)
    assert torch.equal(block, torch.ones_like(block) if mask is None else mask.expand_as(block))
    assert not whole[:, :, queries.start : queries.stop, : rule.first_key(queries)].any()
