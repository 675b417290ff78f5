"""What Serve may log of a replica's errors."""

from __future__ import annotations

import logging

import pytest

from ottserve.service.logs import configure_logs
from ottserve.workers import api


@pytest.mark.parametrize(("error", "is_logged"), [(api.invalid("regex", "a caller's text", "well formed"), False),
                                                  (RuntimeError("ours"), True)])  # fmt: skip
def test_a_refusal_is_no_failure_and_its_text_is_the_callers(
    caplog: pytest.LogCaptureFixture, error: Exception, is_logged: bool
) -> None:
    configure_logs()
    serve = logging.getLogger("ray.serve")
    try:
        raise error
    except (RuntimeError, api.OttserveError):
        with caplog.at_level(logging.ERROR, "ray.serve"):
            serve.addHandler(caplog.handler)
            serve.exception("Request failed.")
            serve.removeHandler(caplog.handler)
    assert bool(caplog.records) is is_logged
