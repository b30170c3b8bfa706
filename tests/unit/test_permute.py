"""Row permutation and its gradients against plain indexing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fold_kernels.permute import order_of_chunks, permute, sort_by_expert, unpermute

# Shapes.  T tokens   K top-k   N = T*K routed rows   D model width


def _routing(tokens: int, top_k: int, num_experts: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, num_experts, generator=generator)
    return scores.topk(top_k, dim=1).indices


@given(st.integers(0, 9), st.integers(1, 4), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_order_sorts_by_expert_and_inverse_undoes_it(tokens: int, top_k: int, seed: int) -> None:
    index_TK = _routing(tokens, top_k, 4, seed)
    order_N, inverse_N = sort_by_expert(index_TK)
    sorted_N = index_TK.reshape(-1)[order_N]
    assert torch.equal(sorted_N, sorted_N.sort().values)
    assert torch.equal(order_N[inverse_N], torch.arange(tokens * top_k))


def test_ties_keep_token_order() -> None:
    order_N, _ = sort_by_expert(torch.tensor([[1], [0], [1], [0]]))
    assert order_N.tolist() == [1, 3, 0, 2]


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("top_k", [1, 3])
def test_permute_copies_rows_and_unpermute_sums_them(tokens: int, top_k: int) -> None:
    x_TD = torch.randn(tokens, 2, dtype=torch.float64)
    order_N, inverse_N = sort_by_expert(_routing(tokens, top_k, 4))
    rows_ND = permute(x_TD, order_N, inverse_N, top_k)
    torch.testing.assert_close(rows_ND, x_TD.repeat_interleave(top_k, 0)[order_N])
    torch.testing.assert_close(unpermute(rows_ND, order_N, inverse_N, top_k), x_TD * top_k)


@pytest.mark.parametrize("tokens", [1, 4])
def test_gradients_match_numerical_ones(tokens: int) -> None:
    order_N, inverse_N = sort_by_expert(_routing(tokens, 2, 3))
    x_TD = torch.randn(tokens, 2, dtype=torch.float64, requires_grad=True)
    rows_ND = torch.randn(tokens * 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: permute(x, order_N, inverse_N, 2), x_TD)
    assert torch.autograd.gradcheck(lambda r: unpermute(r, order_N, inverse_N, 2), rows_ND)


def test_the_gradient_of_a_permutation_without_rows_exists() -> None:
    order_N, inverse_N = sort_by_expert(torch.empty(0, 2, dtype=torch.int64))
    x_TD = torch.empty(0, 3, requires_grad=True)
    permute(x_TD, order_N, inverse_N, 2).sum().backward()
    assert x_TD.grad is not None
    assert x_TD.grad.shape == (0, 3)


# Slots 0, 2 and 3 of five hold rows of two tokens with two choices; the third row is dropped.
ORDER_M, INVERSE_N = torch.tensor([1, 4, 0, 3, 4]), torch.tensor([2, 0, 5, 3])


def test_places_without_a_row_are_zeros_and_rows_without_a_place_count_as_zero() -> None:
    x_TD = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    rows_MD = permute(x_TD, ORDER_M, INVERSE_N, 2, holes=True)
    assert rows_MD.tolist() == [[1, 2], [0, 0], [1, 2], [3, 4], [0, 0]]
    # What comes back in a place without a row is never read.
    rows_MD[1] = rows_MD[4] = float("nan")
    assert unpermute(rows_MD, ORDER_M, INVERSE_N, 2, holes=True).tolist() == [[2, 4], [3, 4]]


def test_gradients_with_holes_match_numerical_ones() -> None:
    x_TD = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    rows_MD = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    holes = (ORDER_M, INVERSE_N, 2)
    assert torch.autograd.gradcheck(lambda x: permute(x, *holes, holes=True), x_TD)
    assert torch.autograd.gradcheck(lambda r: unpermute(r, *holes, holes=True), rows_MD)


def test_a_rank_without_tokens_fills_its_places_with_zeros() -> None:
    x_TD, none = torch.empty(0, 2, requires_grad=True), torch.empty(0, dtype=torch.int64)
    rows_MD = permute(x_TD, torch.zeros(3, dtype=torch.int64), none, 2, holes=True)
    assert rows_MD.tolist() == [[0, 0]] * 3
    assert unpermute(rows_MD, torch.zeros(3, dtype=torch.int64), none, 2, holes=True).shape == (
        0,
        2,
    )
    rows_MD.sum().backward()
    assert x_TD.grad is not None


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_order_of_chunks_is_the_stable_sort(chunks: int, experts: int, seed: int) -> None:
    counts = torch.randint(0, 4, (chunks, experts), generator=torch.Generator().manual_seed(seed))
    ids = torch.arange(experts).repeat(chunks).repeat_interleave(counts.flatten())
    order, _ = sort_by_expert(ids)
    assert torch.equal(order_of_chunks(counts, ids.shape[0]), order)
