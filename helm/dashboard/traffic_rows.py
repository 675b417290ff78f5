"""Rows on calls, their times and their tokens. Knows the metrics, not Grafana."""

from __future__ import annotations

from panels import Kind, Panel, Row, Unit
from queries import mean, quantile, quantiles, rate, series, share, total

TTFT = "ottserve_gateway_time_to_first_token_seconds"
INTER_TOKEN = "ottserve_gateway_inter_token_seconds"
FINISHED = "ottserve_gateway_requests_finished_total"
CORRECTED = "ottserve_correction_rows_total"
GENERATIONS = 'method=~"Generate|GenerateStream|/v1/completions|/v1/chat/completions"'
OUR_FAULT = 'outcome=~"internal|stream_broken|unavailable"'

OVERVIEW = Row(
    "Overview",
    (
        Panel(
            "Replicas",
            Unit.NUMBER,
            {"replicas": f"count({series('ottserve_replica_info')})"},
            "Replicas that Prometheus reaches.",
            Kind.NOW,
            4,
        ),
        Panel(
            "Generations",
            Unit.REQUESTS_PER_S,
            {"ended": rate(FINISHED, GENERATIONS)},
            "Generations that ended, however they did.",
            Kind.NOW,
            4,
        ),
        Panel(
            "Failed by our fault",
            Unit.SHARE,
            {"share": share(rate(FINISHED, f"{GENERATIONS},{OUR_FAULT}"), rate(FINISHED, GENERATIONS))},
            "Internal errors, broken streams and calls that found no replica, of all generations.",
            Kind.NOW,
            4,
        ),
        Panel(
            "First token, p90", Unit.SECONDS, {"p90": quantile(0.9, TTFT)}, "From receipt to first token.", Kind.NOW, 4
        ),
        Panel(
            "Generated",
            Unit.PER_S,
            {"tokens/s": rate("ottserve_generated_tokens_total")},
            "Tokens generated a second.",
            Kind.NOW,
            4,
        ),
        Panel(
            "Pages used",
            Unit.SHARE,
            {"used": share(total("ottserve_kv_pages", 'state="used"'), total("ottserve_kv_pages"))},
            "Pages held by requests, of all.",
            Kind.NOW,
            4,
            max=1,
        ),
    ),
)

LATENCY = Row(
    "Latency",
    (
        Panel("Time to first token", Unit.SECONDS, quantiles(TTFT), "From receipt of a generation to its first token."),
        Panel(
            "Time between tokens",
            Unit.SECONDS,
            quantiles(INTER_TOKEN),
            "Tokens that came together share the time since those before.",
        ),
        Panel(
            "Calls by method, p99",
            Unit.SECONDS,
            {"{{method}}": quantile(0.99, "ottserve_gateway_request_seconds", "method")},
            "From receipt to end, whatever the end.",
        ),
        Panel(
            "In the queue", Unit.SECONDS, quantiles("ottserve_gateway_queue_seconds"), "Waiting for a slot or pages."
        ),
        Panel(
            "Prefill", Unit.SECONDS, quantiles("ottserve_gateway_prefill_seconds"), "From the queue to the first token."
        ),
        Panel(
            "Decode", Unit.SECONDS, quantiles("ottserve_gateway_decode_seconds"), "From the first token to the last."
        ),
    ),
)

THROUGHPUT = Row(
    "Throughput",
    (
        Panel(
            "Tokens",
            Unit.PER_S,
            {
                "generated": rate("ottserve_generated_tokens_total"),
                "prompt, {{source}}": rate("ottserve_prompt_tokens_total", by="source"),
            },
            "Tokens a second; prompt tokens by where their keys and values came from.",
        ),
        Panel(
            "Calls that came in",
            Unit.REQUESTS_PER_S,
            {"{{method}}": rate("ottserve_gateway_requests_received_total", by="method")},
            "By method.",
        ),
        Panel(
            "Calls that ended",
            Unit.REQUESTS_PER_S,
            {"{{outcome}}": rate(FINISHED, by="outcome")},
            "By outcome.",
            Kind.STACKED,
        ),
        Panel(
            "In flight",
            Unit.NUMBER,
            {"{{method}}": total("ottserve_gateway_requests_in_flight", by="method")},
            "Calls that came in and have not ended.",
        ),
        Panel(
            "Internal errors",
            Unit.PER_S,
            {"{{reason}}": rate("ottserve_gateway_internal_errors_total", by="reason")},
            "By kind; the log has each.",
        ),
        Panel("Prompt length", Unit.NUMBER, quantiles("ottserve_gateway_prompt_tokens"), "Tokens of a prompt."),
        Panel("Answer length", Unit.NUMBER, quantiles("ottserve_gateway_output_tokens"), "Tokens of an answer."),
        Panel(
            "Step time by kind, p90",
            Unit.SECONDS,
            {"{{kind}}": quantile(0.9, "ottserve_step_duration_seconds", "kind")},
            "One step of the engine.",
        ),
        Panel("Steps", Unit.PER_S, {"{{kind}}": rate("ottserve_steps_total", by="kind")}, "Steps a second by kind."),
        Panel(
            "Batch",
            Unit.NUMBER,
            {"mean": mean("ottserve_batch_size"), "p90": quantile(0.9, "ottserve_batch_size")},
            "Sequences computed together in a step.",
        ),
        Panel(
            "Steps by graph",
            Unit.SHARE,
            {"share": share(rate("ottserve_graph_steps_total"), rate("ottserve_steps_total"))},
            "Steps that replayed a captured graph, of all.",
            max=1,
        ),
        Panel(
            "Corrected rows",
            Unit.SHARE,
            {
                "share": share(
                    rate("ottserve_correction_rows_total", 'risk="risky"'), rate("ottserve_correction_rows_total")
                )
            },
            "Rows of logits at risk, of all; none without a correction.",
            max=1,
        ),
        Panel(
            "Correction a step",
            Unit.SECONDS,
            {"time": share(rate("ottserve_correction_seconds_total"), rate("ottserve_steps_total"))},
            "Time that correcting logits adds to a step, of the engine's thread.",
        ),
    ),
)
