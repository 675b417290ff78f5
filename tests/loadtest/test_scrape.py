"""What is left in hand, and accounts that do not balance, out of a page as Prometheus would read it."""

from __future__ import annotations

from ottserve.loadtest.scrape import Series, imbalances, in_hand

IDLE: list[Series] = [
    ("ottserve_gateway_requests_received_total", {"method": "Generate"}, 5.0),
    ("ottserve_gateway_requests_finished_total", {"method": "Generate", "outcome": "ok"}, 3.0),
    ("ottserve_gateway_requests_finished_total", {"method": "Generate", "outcome": "cancelled"}, 2.0),
    ("ottserve_gateway_requests_in_flight", {"method": "Generate"}, 0.0),
    ("ottserve_slots", {"state": "used"}, 0.0),
    ("ottserve_slots", {"state": "free"}, 4.0),
    ("ottserve_kv_pages", {"state": "used"}, 0.0),
    ("ottserve_kv_pages", {"state": "cached"}, 3.0),
    ("ottserve_kv_memory_bytes", {"kind": "pages", "state": "cached"}, 300.0),
    ("ottserve_kv_memory_bytes", {"kind": "pages", "state": "free"}, 100.0),
    ("ottserve_kv_memory_bytes", {"kind": "tails", "state": "free"}, 77.0),
    ("ottserve_kv_token_capacity", {}, 40.0),
    ("ottserve_kv_bytes_per_token", {}, 10.0),
]


def test_nothing_is_left_when_idle() -> None:
    assert in_hand(IDLE) == {}
    assert imbalances(IDLE) == {}


def test_what_is_left_is_named() -> None:
    left: list[Series] = [
        ("ottserve_slots", {"state": "used"}, 1.0),
        ("ottserve_waiting_requests", {"reason": "kv"}, 2.0),
    ]
    assert in_hand(IDLE + left) == {"ottserve_slots": 1.0, "ottserve_waiting_requests": 2.0}


def test_a_call_without_an_end_and_a_lost_page_are_told() -> None:
    lost: list[Series] = [("ottserve_gateway_requests_received_total", {"method": "Abort"}, 1.0)]
    assert imbalances(IDLE + lost) == {"calls": 1.0}
    page = ("ottserve_kv_memory_bytes", {"kind": "pages", "state": "free"}, 100.0)
    assert imbalances([series for series in IDLE if series != page]) == {"page bytes": -100.0}
