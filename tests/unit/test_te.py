"""Transformer Engine's products through a stand-in of its class: the real one needs a GPU."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fold_kernels import te
from fold_kernels.expert_forms import form_of
from fold_kernels.expert_operands import Needs, Operands
from fold_kernels.swiglu import swiglu

SIZES = [3, 0, 4]


class GroupedLinear(nn.Module):
    """Parameters and call of Transformer Engine 2.20's class (kernels.md 2d)."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        params_dtype: torch.dtype,
        device: str,
    ) -> None:
        super().__init__()
        assert not bias
        for e in range(num_gemms):
            weight = torch.empty(out_features, in_features, dtype=params_dtype, device=device)
            self.register_parameter(f"weight{e}", nn.Parameter(weight))

    def forward(self, rows: Tensor, m_splits: Tensor) -> Tensor:
        parts = rows.split(m_splits.tolist())
        return torch.cat([x @ getattr(self, f"weight{e}").T for e, x in enumerate(parts)])


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    package, module = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    module.GroupedLinear = GroupedLinear
    package.pytorch = module
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", module)
    caches = te.te_obstacle, te._linear
    for cache in caches:
        cache.cache_clear()
    yield module
    for cache in caches:
        cache.cache_clear()


def test_an_import_that_fails_in_any_way_is_an_obstacle(monkeypatch) -> None:
    """Without cuDNN it raises RuntimeError, not ImportError."""

    class Broken:
        def find_spec(self, name: str, *_: Any) -> None:
            if name.partition(".")[0] == "transformer_engine":
                raise RuntimeError("cudnn shared object not found")

    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    te.te_obstacle.cache_clear()
    try:
        assert "RuntimeError: cudnn shared object not found" in str(te.te_obstacle())
    finally:
        te.te_obstacle.cache_clear()


def test_products_and_gradients_are_those_of_grouped_mm(stand_in) -> None:
    assert te.te_obstacle() is None
    torch.manual_seed(0)
    counts = torch.tensor(SIZES)
    x = Operands(
        torch.randn(5, 8),
        torch.rand(7),
        torch.randn(3, 8, 8),
        torch.randn(3, 8, 4),
        torch.arange(7) % 5,
        counts,
        SIZES,
        swiglu,
    )
    upstream, needs = torch.randn(5, 8), Needs(source=True, gate_up=True, down=True)
    results = []
    for form in (form_of("te"), form_of("torch_grouped_mm")):
        out, hidden = form.forward(x, keep_hidden=True)
        grads = form.backward(x, upstream, hidden, needs)
        results.append((out, *vars(grads).values()))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
