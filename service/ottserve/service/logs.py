"""Logs as JSON lines on standard output. Tracebacks come without local variables: those may hold prompts."""

from __future__ import annotations

import logging

import structlog


def configure_logs() -> None:
    """Once per process, by whoever owns it."""
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
