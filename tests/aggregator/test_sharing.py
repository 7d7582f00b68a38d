"""How aggregators even out their shares of the shards, and how the answers of all shards are put together."""

from __future__ import annotations

import random

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily

from healthd.aggregator.merging import MERGED, of_all
from healthd.aggregator.metrics import ByShard
from healthd.aggregator.sharing import Living, share_of, to_give
from healthd.core.http.server import exposition


@pytest.mark.parametrize(
    ("leaders", "gives"),
    [
        ({"s1": "a", "s2": "a"}, "s2"),
        ({"s1": "a", "s2": "b"}, None),
        ({"s1": "a", "s2": "a", "s3": "b"}, None),  # a difference of one stays: it would only go to and fro
        ({"s1": "a", "s2": "a", "s3": ""}, None),  # one that nobody leads is taken first
        ({"s1": "a", "s2": "a", "s3": "gone"}, None),
    ],
)
def test_aggregator_hands_over_only_what_makes_the_shares_more_even(leaders: dict[str, str], gives: str | None) -> None:
    assert to_give("a", leaders, {"a", "b"}) == gives
    assert to_give("b", leaders, {"a", "b"}) is None


@pytest.mark.parametrize("seed", range(20))
def test_handing_over_comes_to_an_end_with_even_shares(seed: int) -> None:
    chance = random.Random(seed)
    alive = [f"agg{number}" for number in range(chance.randint(1, 6))]
    leaders = {f"s{number}": chance.choice(alive) for number in range(chance.randint(1, 64))}
    for _ in range(len(leaders)):
        given = [shard for own in alive if (shard := to_give(own, leaders, alive))]
        assert len(given) <= 1, "two at once hand over"
        if not given:
            break
        share = share_of(len(leaders), len(alive))
        fewest = min(alive, key=lambda url: list(leaders.values()).count(url))
        leaders[given[0]] = fewest
        assert list(leaders.values()).count(fewest) <= share
    counts = [list(leaders.values()).count(url) for url in alive]
    assert max(counts) - min(counts) <= 1


def test_aggregator_whose_row_stands_still_is_gone_and_an_outage_of_the_database_proves_nothing() -> None:
    living = Living()
    for second in range(10):
        living.note({"a": float(second), "b": 0.0}, float(second))
    assert living.alive(9.0) == {"a"}
    living.note(None, 100.0)
    assert living.alive(101.0) == {"a", "b"}
    living.note({"a": 9.0, "b": 1.0}, 104.0)
    assert living.alive(107.0) == {"b"}


def fleet_of(nodes: int, *, recovering: str | None = None) -> dict[str, object]:
    counts = dict.fromkeys(("quarantined", "accused", "leased", "gates_holding"), 1)
    return {
        "issuer": "store-1",
        "nodes": nodes,
        **counts,
        "health": {"healthy": nodes},
        "pools": {"train": nodes},
        "overrides": [{"job": "j"}],
        "recovering": recovering,
        "breakers": {},
    }


def test_fleet_is_the_sum_of_its_shards_and_names_those_that_do_not_answer() -> None:
    found = MERGED["/v1/fleet"]({"a": fleet_of(2), "b": fleet_of(3, recovering="starting")}, {"c": "gone"}, {})
    assert (found["nodes"], found["health"], found["pools"], found["leased"]) == (5, {"healthy": 5}, {"train": 5}, 2)
    assert found["overrides"] == [{"job": "j"}]
    assert found["recovering"] == "b: starting; c does not answer: gone"
    assert found["unanswered"] == {"c": "gone"}
    assert MERGED["/v1/fleet"]({}, {"c": "gone"}, {}) is None


def test_pages_of_a_list_go_through_all_shards_in_order() -> None:
    names = {"a": ["n1", "n4", "n5"], "b": ["n2", "n3"]}
    after, seen = "", []
    while True:
        parts = {}
        for shard, there in names.items():
            rows = [{"node": name} for name in there if name > after]
            parts[shard] = {"nodes": rows[:2], "next": rows[1]["node"] if len(rows) > 2 else None}
        page = MERGED["/v1/nodes"](parts, {}, {"limit": "2"})
        seen += [row["node"] for row in page["nodes"]]
        if page["next"] is None:
            break
        after = page["next"]
    assert seen == ["n1", "n2", "n3", "n4", "n5"]


def test_prometheus_gets_all_targets_or_no_answer() -> None:
    targets = MERGED["/v1/sd/prometheus"]
    assert targets({"a": [1], "b": [2]}, {}, {}) == [1, 2]
    assert targets({"a": [1]}, {"b": "gone"}, {}) is None


def test_what_was_compared_in_two_shards_is_listed_together() -> None:
    parts = {
        "a": {"nodes": 2, "confirmed": ["x"], "suspects": []},
        "b": {"nodes": 3, "confirmed": [], "suspects": ["y"]},
    }
    found = MERGED["/v1/fleet/stragglers"](parts, {"c": "gone"}, {})
    assert found == {"nodes": 5, "confirmed": ["x"], "suspects": ["y"], "unanswered": {"c": "gone"}}


def series(devices: int, values: list[float], name: str = "matmul") -> dict[str, object]:
    kind = {"hardware": "h", "accelerator": "cpu", "versions": {"torch": "2"}}
    return {**kind, "name": name, "devices": devices, "values": values}


def test_samples_of_one_kind_are_one_series_in_which_each_shard_has_its_share() -> None:
    samples = MERGED["/v1/fleet/samples"]
    parts = {"a": {"series": [series(2, [1.0, 2.0])]}, "b": {"series": [series(1, [3.0]), series(1, [4.0], "memory")]}}
    assert samples(parts, {}, {}) == {"series": [series(3, [1.0, 2.0, 3.0]), series(1, [4.0], "memory")]}
    assert samples(parts, {"c": "gone"}, {}) is None
    large = {"a": {"series": [series(900, [1.0] * 256)]}, "b": {"series": [series(100, [2.0] * 100)]}}
    (drawn,) = samples(large, {}, {})["series"]
    assert (drawn["devices"], len(drawn["values"])) == (1000, 256)
    assert 20 <= drawn["values"].count(2.0) <= 30


def test_claims_of_all_shards_are_listed_or_none() -> None:
    claims = MERGED["/v1/claims"]
    parts = {"a": {"claims": [{"gate": "g2"}]}, "b": {"claims": [{"gate": "g1"}]}}
    assert claims(parts, {}, {}) == {"claims": [{"gate": "g1"}, {"gate": "g2"}]}
    assert claims(parts, {"c": "gone"}, {}) is None


def test_change_in_all_shards_tells_what_any_of_them_changed() -> None:
    assert of_all([{"recovered": False}, {"recovered": True}]) == {"recovered": True}
    assert of_all([{"reset": ["b"]}, {"reset": ["a"]}]) == {"reset": ["a", "b"]}


def test_series_of_two_shards_are_one_family_told_apart_by_a_label() -> None:
    def collect(value: float) -> list[GaugeMetricFamily]:
        return [GaugeMetricFamily("healthd_things", "Things.", value=value)]

    registry = CollectorRegistry(auto_describe=False)
    registry.register(ByShard({"a": lambda: collect(1), "b": lambda: collect(2)}))
    text = exposition(registry, "")[0].decode()
    assert text.count("# TYPE healthd_things gauge") == 1
    assert 'healthd_things{shard="a"} 1.0' in text
    assert 'healthd_things{shard="b"} 2.0' in text
