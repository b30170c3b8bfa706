"""The example of docs/kernels.md computes a layer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from fold_kernels.swiglu import swiglu

DOCS = Path(__file__).parents[2] / "docs" / "kernels.md"


def test_the_example_is_a_layer_of_experts() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    exec(example, found)
    rows, first, second = (found[name].double() for name in ("rows", "first", "second"))
    wanted = torch.zeros(5, 64, dtype=torch.float64)
    for token in range(5):
        for weight, expert in zip(found["weights"][token], found["experts"][token], strict=True):
            wanted[token] += weight * (second[expert] @ swiglu(first[expert] @ rows[token]))
    torch.testing.assert_close(found["sums"].double(), wanted, rtol=1e-4, atol=1e-3)
