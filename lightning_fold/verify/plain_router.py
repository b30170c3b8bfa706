"""Routing and balance by the textbook, for the single-process reference.

Everything is written a second time: the decision token by token, each auxiliary loss from the
probabilities and counts of the tokens of its unit. Torch alone.
"""

# Shapes.  B sequences   S tokens of a sequence   T tokens = B*S   K top-k   E all experts

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .plain import Batch, Feature, Plain, Share, shares_of

DEEPSEEK = "DeepseekV3"


@dataclass(frozen=True)
class Seen:
    """What one router said of one sub-batch.

    Attributes:
        logits_TE: With gradient.
        index_TK: The chosen experts.
        valid_T: False at padding.
    """

    logits_TE: Tensor
    index_TK: Tensor
    valid_T: Tensor


class PlainRouting(Plain):
    """A plain model with the `router` and `router_options` of a strategy."""

    def __init__(
        self, model: nn.Module, *, router: str = "model", router_options: Mapping[str, Any]
    ) -> None:
        super().__init__(model)
        self.options = router_options
        self.gates: list[Any] = [m for n, m in model.named_modules() if n.endswith("mlp.gate")]
        self.scores = "sigmoid" if type(model).__name__.startswith(DEEPSEEK) else "softmax"
        self.scores = getattr(model.config, "scoring_func", self.scores)
        self.running: list[list[Any]] = []
        self.since_step: list[list[Seen]] = []
        for gate in self.gates:
            self._prepare(gate, router)
            gate.register_forward_hook(self._note)

    def _prepare(self, gate: Any, router: str) -> None:
        if router == "folded":
            self.scores = self.options.get("scores", "softmax")
            if "bias_update_rate" in self.options:
                bias_E = torch.zeros(gate.weight.shape[0])
                gate.register_buffer("e_score_correction_bias", bias_E)
            gate.forward = partial(decide, gate, self.options)
        if router == "balanced":
            gate.forward = partial(self._in_turn, gate)

    def _in_turn(self, gate: Any, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE = hidden_TD @ gate.weight.T
        number, ids = gate.weight.shape[0], []
        for token in range(hidden_TD.shape[0]):
            ids.append([(token * gate.top_k + turn) % number for turn in range(gate.top_k)])
        index_TK = torch.tensor(ids)
        weights_TK = logits_TE.softmax(-1).gather(1, index_TK)
        return logits_TE, weights_TK / weights_TK.sum(-1, keepdim=True), index_TK

    def _note(self, gate: nn.Module, args: Any, out: Any) -> None:
        self.running[-1].append((out[0], out[2]))

    def forward_backward(
        self, batches: Sequence[Batch], scale: float, shares: Sequence[Share] = ()
    ) -> list[tuple[Any, Tensor]]:
        """Run all sub-batches, then one backward: `global_batch` ties them together."""
        outs, seen = [], []
        for batch in batches:
            self.running.append([])
            outs.append(self.model(**batch))
            valid = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
            seen.append([Seen(x, i, valid.flatten()) for x, i in self.running.pop()])
        self.since_step += seen
        shared = self._of_all(seen)
        rows = [len(batch["input_ids"]) for batch in batches]
        each = shares_of(batches, shares)
        losses = [
            # In the loss's own dtype: Hugging Face's is fp32.
            out.loss + (self._of_one(s, n, share) + shared).to(out.loss.dtype)
            for out, s, n, share in zip(outs, seen, rows, each, strict=True)
        ]
        parts = [loss * share.loss for loss, share in zip(losses, each, strict=True)]
        (torch.stack(parts).sum() * scale).backward()
        return [(out, loss.detach()) for out, loss in zip(outs, losses, strict=True)]

    def _of_one(self, layers: Sequence[Seen], sequences: int, share: Share) -> Tensor:
        """What one sub-batch alone adds to its loss; `per_sequence` counts by its sequences."""
        total = torch.zeros(())
        for aux in self.options.get("aux_losses", ()):
            formula, coefficient = aux["formula"], aux["coefficient"]
            if formula == "per_layer":
                total = total + coefficient * sum(self._switch([seen]) for seen in layers)
            elif formula == "model":
                top_k = layers[0].index_TK.shape[1]
                total = total + coefficient * top_k * self._switch(layers)
            elif formula == "per_sequence":
                for seen in layers:
                    parts = _sequences(seen, sequences)
                    mean = sum(self._switch([part]) for part in parts) / sequences
                    total = total + coefficient * mean * share.rows / share.loss
        for seen in layers:
            squares_T = seen.logits_TE[seen.valid_T].exp().sum(-1).log() ** 2
            total = total + self.options.get("z_loss", 0.0) * squares_T.mean()
        return total

    def _of_all(self, forward: Sequence[Sequence[Seen]]) -> Tensor:
        """What every sub-batch's loss holds of all of them: f since the last step, P of these."""
        total = torch.zeros(())
        for aux in self.options.get("aux_losses", ()):
            for layer in range(len(self.gates)) if aux["formula"] == "global_batch" else ():
                counts_E = sum(counts(seen[layer]) for seen in self.since_step)
                probs = [self._probs(seen[layer]) for seen in forward]
                mean_E = torch.cat(probs).mean(0)
                share_E = counts_E / counts_E.sum()
                total = total + aux["coefficient"] * len(mean_E) * (share_E * mean_E).sum()
        return total

    def _switch(self, layers: Sequence[Seen]) -> Tensor:
        """E * sum over experts of share of the routed rows * mean probability."""
        counts_E = sum(counts(seen) for seen in layers)
        mean_E = torch.cat([self._probs(seen) for seen in layers]).mean(0)
        loss: Tensor = len(mean_E) * (counts_E / counts_E.sum() * mean_E).sum()
        return loss

    def _probs(self, seen: Seen) -> Tensor:
        """Normalised scores of the tokens that are no padding."""
        scores_TE = score(seen.logits_TE[seen.valid_T], self.scores)
        return scores_TE / scores_TE.sum(-1, keepdim=True)

    def after_step(self) -> None:
        """Move each bias by the sign of mean - count, over all sub-batches of the step."""
        rate = self.options.get("bias_update_rate")
        for layer, gate in enumerate(self.gates) if rate else ():
            counts_E = sum(counts(seen[layer]) for seen in self.since_step)
            for expert, count in enumerate(counts_E.tolist()):
                difference = float(counts_E.sum()) / len(counts_E) - count
                sign = (difference > 0) - (difference < 0)
                gate.e_score_correction_bias[expert] += rate * sign
        self.since_step.clear()


def counts(seen: Seen) -> Any:
    """Rows that each expert gets from tokens that are no padding."""
    ids = seen.index_TK[seen.valid_T].flatten()
    return (ids[:, None] == torch.arange(seen.logits_TE.shape[1])).sum(0).double()


def score(logits_TE: Tensor, kind: str) -> Tensor:
    """Scores over all experts."""
    if kind == "sigmoid":
        return 1 / (1 + (-logits_TE).exp())
    if kind == "sqrt_softplus":
        return (1 + logits_TE.exp()).log().sqrt()
    return logits_TE.exp() / logits_TE.exp().sum(-1, keepdim=True)


def decide(
    gate: Any, options: Mapping[str, Any], hidden_TD: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Decide for one token after the other."""
    logits_TE = hidden_TD @ gate.weight.T
    scores_TE = score(logits_TE, options.get("scores", "softmax"))
    bias_E = getattr(gate, "e_score_correction_bias", torch.zeros(logits_TE.shape[1]))
    ranked = (scores_TE.detach() + bias_E).tolist()
    top_k = options.get("top_k", gate.top_k)
    index_TK = torch.tensor([_best(row, top_k, options) for row in ranked])
    weights_TK = scores_TE.gather(1, index_TK)
    if options.get("renormalise", True):
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return logits_TE, weights_TK * options.get("scaling_factor", 1.0), index_TK


def _best(row: list[float], top_k: int, options: Mapping[str, Any]) -> list[int]:
    """Ids of the best experts of the best groups; of equal ones the lower id."""
    groups = options.get("num_groups", 1)
    size = len(row) // groups
    members = [list(range(g * size, (g + 1) * size)) for g in range(groups)]
    rank = [sum(sorted((row[e] for e in group), reverse=True)[:2]) for group in members]
    best = sorted(range(groups), key=lambda g: (-rank[g], g))[: options.get("top_groups", 1)]
    open_ids = [expert for group in best for expert in members[group]]
    return sorted(open_ids, key=lambda expert: (-row[expert], expert))[:top_k]


def _sequences(seen: Seen, number: int) -> list[Seen]:
    parts = zip(
        seen.logits_TE.chunk(number),
        seen.index_TK.chunk(number),
        seen.valid_T.chunk(number),
        strict=True,
    )
    return [Seen(*part) for part in parts]


def _feature(**strategy: Any) -> Feature:
    return Feature(strategy, partial(PlainRouting, **strategy))


def _aux(formula: str, coefficient: float) -> dict[str, Any]:
    return {"formula": formula, "coefficient": coefficient}


_FORMULAS = ("per_sequence", "per_layer", "model", "global_batch")
_GROUPS = {
    "scores": "sigmoid",
    "num_groups": 4,
    "top_groups": 2,
    "scaling_factor": 1.5,
    "bias_update_rate": 0.05,
}

ROUTER: Mapping[str, Feature] = {
    # Coefficients of the size that training uses times ten: errors must show beside the loss.
    **{name: _feature(router_options={"aux_losses": [_aux(name, 0.1)]}) for name in _FORMULAS},
    "z_loss": _feature(router_options={"z_loss": 0.02}),
    "aux": _feature(
        router_options={
            "aux_losses": [_aux(name, 0.03 * (i + 1)) for i, name in enumerate(_FORMULAS)],
            "z_loss": 0.02,
        }
    ),
    "bias": _feature(
        router_options={"bias_update_rate": 0.05, "aux_losses": [_aux("per_sequence", 0.1)]}
    ),
    "folded": _feature(router="folded", router_options=_GROUPS),
    "balanced": _feature(router="balanced", router_options={}),
}
