"""The table of errors is total, and its labels are few."""

import pickle

import grpc
import pytest
from google.rpc import error_details_pb2

from ottserve.service import errors
from ottserve.workers import api


def kinds(root: type[api.OttserveError]) -> set[type[api.OttserveError]]:
    """All subclasses that ottserve defines."""
    found = {kind for kind in root.__subclasses__() if kind.__module__.startswith("ottserve.")}
    return found.union(*(kinds(kind) for kind in found))


def example(kind: type[api.OttserveError]) -> api.OttserveError:
    return kind("m", "f", "v", "l") if issubclass(kind, api.InvalidField) else kind("m")


def test_every_kind_has_a_row() -> None:
    """A new kind of error fails here until someone says which status it is."""
    assert kinds(api.OttserveError) == errors.TABLE.keys()


@pytest.mark.parametrize("kind", sorted(errors.TABLE, key=lambda kind: kind.__name__))
def test_every_row_makes_a_status(kind: type[api.OttserveError]) -> None:
    status = errors.status_of(example(kind))
    assert status.code == errors.TABLE[kind].code.value[0]
    assert status.message == "m"


@pytest.mark.parametrize("kind", sorted(errors.TABLE, key=lambda kind: kind.__name__))
def test_every_kind_survives_the_way_from_the_replica(kind: type[api.OttserveError]) -> None:
    error = example(kind)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert copy.__dict__ == error.__dict__


@pytest.mark.parametrize("kind", [api.QueueFull, api.Unavailable])
def test_whoever_may_try_again_is_told_when(kind: type[api.OttserveError]) -> None:
    """Milliseconds: 1,234 is one second and 234 million nanoseconds."""
    [detail] = errors.details_of(kind("m", 1234))  # type: ignore[call-arg]
    assert isinstance(detail, error_details_pb2.RetryInfo)
    assert (detail.retry_delay.seconds, detail.retry_delay.nanos) == (1, 234_000_000)


@pytest.mark.parametrize("error", [ValueError("/a/path"), api.OttserveError("unnamed"), KeyError("x")])
def test_what_the_table_lacks_is_internal(error: Exception) -> None:
    told = errors.as_ottserve_error(error, "r1")
    assert isinstance(told, api.Internal)
    assert told.message == "internal error in request r1"
    assert told.reason == type(error).__name__
    assert errors.TABLE[type(told)].code == grpc.StatusCode.INTERNAL
