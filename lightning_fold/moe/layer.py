"""One folded experts container: dispatch, experts, combine.

A MoE layer is five segments: attend and route (1) and merge (5) stay the model's own code; this
module owns the three between them, behind the contract `experts(hidden_TD, index_TK,
weights_TK)`. It holds configuration only; parameters stay in the container that the user built.
"""

# Shapes.  T local tokens   K top-k   R rows of this rank's experts   E all experts   D model width

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fold_kernels.expert_forms import Precision
from fold_kernels.weight_store import WeightNode, weight_node
from lightning_fold.moe.dispatch.base import Dispatcher
from lightning_fold.moe.experts import ExpertRows, run_experts
from lightning_fold.moe.routing import Routing
from lightning_fold.moe.shared import SharedBeside
from lightning_fold.moe.tokens import RunningTokens, in_backward
from lightning_fold.params import local_tensor
from lightning_fold.telemetry import RoutingCounts, Telemetry


class FoldedExperts:
    """Replaces the forward of an experts container whose weights live on (ep, etp).

    Args:
        container: Holds `gate_up_proj` [E, 2, F, D] and `down_proj` [E, D, F], as DTensors on
            (ep, etp) or plain.
        name: Qualified name of the container, for errors and telemetry.
        num_experts: E, over all ranks.
        dispatcher: Moves the rows.
        activation: Maps [R, 2F], gate half then up half, to [R, F].
        telemetry: Receives one `RoutingCounts` a forward when somebody subscribed.
        tokens: Which tokens of the batch the rows are.
        capacity: Drops rows of a decision; None keeps all.
        beside: Shared experts that run while rows are on the wire; None where there are none.
        recompute: Whether backward computes the experts' first product again. No row travels again.
        precision: See `FoldedConfig.expert_precision`.
    """

    def __init__(
        self,
        container: nn.Module,
        *,
        name: str,
        num_experts: int,
        dispatcher: Dispatcher[Any],
        activation: Callable[[Tensor], Tensor],
        telemetry: Telemetry,
        tokens: RunningTokens,
        capacity: Callable[[Routing], Routing] | None = None,
        beside: SharedBeside | None = None,
        recompute: bool = False,
        precision: Precision = "bf16",
    ) -> None:
        self.container = container
        self.name = name
        self.num_experts = num_experts
        self.dispatcher = dispatcher
        self.activation = activation
        self.telemetry = telemetry
        self.tokens = tokens
        self.capacity = capacity
        self.beside = beside
        self.recompute = recompute
        self.precision = precision

    def __call__(self, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Weighted sum of the chosen experts of every local token, [T, D].

        Collective over ep and etp: every rank calls it once a layer and forward, also with T = 0.

        Raises:
            ValueError: Routing weights are NaN; names the layer and the rank.
        """
        routing = self.decide(index_TK, weights_TK)
        x_TD = hidden_TD.to(compute_dtype(hidden_TD))
        put_off: WeightNode | None = None

        def meanwhile() -> None:
            nonlocal put_off
            if self.beside is not None:
                self.beside.run(hidden_TD)
            # Made while rows are on the wire, so that in backward the weights' gradients are
            # computed while those of the rows are.
            put_off = weight_node(*self._weights)

        rows, state = self.dispatcher.dispatch(x_TD, routing, meanwhile=meanwhile)
        return self.dispatcher.combine(self.compute(rows, put_off), state).to(hidden_TD.dtype)

    def decide(self, index_TK: Tensor, weights_TK: Tensor) -> Routing:
        """The router's decision as it is carried out: counted for who asks, cut to the capacity."""
        routing = Routing(index_TK, weights_TK, self.num_experts, layer=self.name)
        if self.telemetry.wants(RoutingCounts) and not in_backward():
            counts_E, training = routing.counts_E(), self.container.training
            self.telemetry.emit(RoutingCounts(self.name, counts_E, training))
        return routing if self.capacity is None else self.capacity(routing)

    def compute(self, rows: ExpertRows, put_off: WeightNode | None = None) -> Tensor:
        """Sum over this rank's experts of every row that has arrived, [S, D]. Local.

        Args:
            rows: The rows.
            put_off: Of this call's weights, where their gradients are not to come at once.
        """
        gate_up_e2FD, down_eDF = self._weights if put_off is None else put_off.weights
        return run_experts(
            rows,
            gate_up_e2FD=gate_up_e2FD,
            down_eDF=down_eDF,
            activation=self.activation,
            recompute=self.recompute,
            precision=self.precision,
            put_off=put_off,
        )

    @property
    def _weights(self) -> tuple[Tensor, Tensor]:
        return local_tensor(self.container.gate_up_proj), local_tensor(self.container.down_proj)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The autocast dtype where autocast is on, else the dtype of `x`.

    `grouped_mm` ignores autocast: without this cast a bf16-mixed run would compute its experts in
    fp32.
    """
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype
