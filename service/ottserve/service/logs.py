"""Logs as JSON lines on standard output. Tracebacks come without local variables: those may hold prompts."""

from __future__ import annotations

import logging

import structlog

from ottserve.workers.api import OttserveError


def _is_no_refusal(record: logging.LogRecord) -> bool:
    """Serve logs whatever a replica raises, with a trace. What a caller is told is no failure, and may quote him."""
    return not (record.exc_info and isinstance(record.exc_info[1], OttserveError))


def configure_logs() -> None:
    """Once per process, by whoever owns it."""
    logging.getLogger("ray.serve").addFilter(_is_no_refusal)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    )
