"""Rows on what scaling goes by, and on each replica. Knows the metrics, not Grafana."""

from __future__ import annotations

from panels import Kind, Panel, Row, Unit
from queries import rate, ratio, series, share, total

PAGES = "ottserve_kv_pages"
SLOTS = "ottserve_slots"
WAITING_SLOTS = "ottserve_waiting_slots"
WAITING_TOKENS = "ottserve_waiting_tokens"
USED = 'state="used"'
COMPUTED = " + ".join(
    (rate("ottserve_prompt_tokens_total", 'source="computed"'), rate("ottserve_generated_tokens_total"))
)
PRESSURE_OF_PAGES = " + ".join(
    (ratio(total(PAGES, USED), total(PAGES)), ratio(total(WAITING_TOKENS), total("ottserve_kv_token_capacity")))
)

AUTOSCALING = Row(
    "Autoscaling",
    (
        Panel(
            "Replicas that answer",
            Unit.NUMBER,
            {"replicas": f"count({series('ottserve_replica_info')})"},
            "Follow the load between the bounds of `deployment.autoscale`.",
            width=6,
        ),
        Panel(
            "Pages used or waited for",
            Unit.SHARE,
            {"share": PRESSURE_OF_PAGES},
            "Of all pages; above `deployment.autoscale.target_kv_pressure` replicas are added.",
            width=6,
        ),
        Panel(
            "Slots used or waited for",
            Unit.SHARE,
            {"share": ratio(f"{total(SLOTS, USED)} + {total(WAITING_SLOTS)}", total(SLOTS))},
            "Of all slots; above `deployment.autoscale.target_slot_pressure` replicas are added.",
            width=6,
        ),
        Panel(
            "Time that the queue needs",
            Unit.SECONDS,
            {"time": share(total(WAITING_TOKENS), COMPUTED)},
            "Waiting prompt tokens at the rate of now; above `deployment.autoscale.target_queue_s` replicas are added.",
            width=6,
        ),
    ),
)

REPLICAS = Row(
    "Each replica",
    (
        Panel(
            "Running",
            Unit.NUMBER,
            {"{{instance}}": series("ottserve_running_requests")},
            "Sequences being computed: as many of a request as it has samples.",
        ),
        Panel(
            "Waiting",
            Unit.NUMBER,
            {"{{instance}}, {{reason}}": total("ottserve_waiting_requests", by="instance, reason")},
            "By what for. Slots or pages, lasting, ask for another replica; queue is for those before.",
        ),
        Panel(
            "Waiting tokens",
            Unit.NUMBER,
            {"{{instance}}": series("ottserve_waiting_tokens")},
            "Prompt tokens that wait.",
        ),
        Panel(
            "Generated",
            Unit.PER_S,
            {"{{instance}}": rate("ottserve_generated_tokens_total", by="instance")},
            "Tokens generated a second.",
        ),
        Panel(
            "Pages used",
            Unit.SHARE,
            {"{{instance}}": ratio(total(PAGES, USED, "instance"), total(PAGES, by="instance"))},
            "Pages held by requests, of the replica's.",
            max=1,
        ),
        Panel(
            "Time since the last step",
            Unit.SECONDS,
            {"{{instance}}": f"time() - {series('ottserve_last_step_timestamp_seconds')}"},
            "Grows on an idle replica; with work pending it tells of a stalled engine.",
        ),
        Panel(
            "What runs",
            Unit.NUMBER,
            {"": series("ottserve_replica_info")},
            "Model, policy, device and version.",
            Kind.TABLE,
            24,
        ),
    ),
)
