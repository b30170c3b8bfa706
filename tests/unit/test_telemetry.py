"""The event sink: delivery by exact type, order, and silence without subscribers."""

import pytest
import torch

from lightning_fold.telemetry import CollectiveBytes, RoutingCounts, Telemetry

BYTES = CollectiveBytes(axis="ep", operation="all_to_all", num_bytes=64)


def test_events_reach_the_handlers_of_their_type_in_order_of_subscription():
    telemetry, seen = Telemetry(), []
    telemetry.subscribe(CollectiveBytes, lambda event: seen.append(("first", event)))
    telemetry.subscribe(CollectiveBytes, lambda event: seen.append(("second", event)))
    telemetry.subscribe(RoutingCounts, lambda event: seen.append(("other", event)))
    telemetry.emit(BYTES)
    assert seen == [("first", BYTES), ("second", BYTES)]


def test_routing_counts_carry_the_very_tensor():
    telemetry, seen = Telemetry(), []
    telemetry.subscribe(RoutingCounts, seen.append)
    counts = torch.tensor([3, 0, 1])
    telemetry.emit(RoutingCounts(layer="model.layers.0.mlp", counts_E=counts, training=True))
    assert seen[0].counts_E is counts


def test_wants_follows_the_subscriptions():
    telemetry, seen = Telemetry(), []
    assert not telemetry.wants(CollectiveBytes)
    telemetry.subscribe(CollectiveBytes, seen.append)
    assert telemetry.wants(CollectiveBytes)
    assert not telemetry.wants(RoutingCounts)
    telemetry.unsubscribe(CollectiveBytes, seen.append)
    assert not telemetry.wants(CollectiveBytes)
    telemetry.emit(BYTES)
    assert seen == []


def test_unsubscribe_removes_one_of_two_subscriptions():
    telemetry, seen = Telemetry(), []
    for _ in range(2):
        telemetry.subscribe(CollectiveBytes, seen.append)
    telemetry.unsubscribe(CollectiveBytes, seen.append)
    telemetry.emit(BYTES)
    assert seen == [BYTES]


def test_unsubscribe_of_a_stranger_is_refused():
    with pytest.raises(RuntimeError, match="not subscribed to CollectiveBytes"):
        Telemetry().unsubscribe(CollectiveBytes, print)


def test_a_handler_may_unsubscribe_while_an_event_is_handed_out():
    telemetry, seen = Telemetry(), []

    def once(event: CollectiveBytes) -> None:
        telemetry.unsubscribe(CollectiveBytes, once)
        seen.append("once")

    telemetry.subscribe(CollectiveBytes, once)
    telemetry.subscribe(CollectiveBytes, lambda event: seen.append("always"))
    telemetry.emit(BYTES)
    telemetry.emit(BYTES)
    assert seen == ["once", "always", "always"]
