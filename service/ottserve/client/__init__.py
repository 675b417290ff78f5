"""The Python client of an ottserve gateway: `Client` for plain code, `AsyncClient` for asyncio. Imports no torch."""

from ottserve.client.aio import AsyncClient
from ottserve.client.connection import Tls
from ottserve.client.errors import (
    AlreadyExists,
    Cancelled,
    ClientError,
    DeadlineExceeded,
    FieldProblem,
    InternalError,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    StreamBroken,
    Unauthenticated,
    Unavailable,
)
from ottserve.client.retry import RetryPolicy
from ottserve.client.sync import Client
from ottserve.client.types import (
    Answer,
    Chat,
    ChatMessage,
    Chunk,
    Finish,
    FinishReason,
    ModelInfo,
    Options,
    Prompt,
    ReplicaLoad,
    ServerInfo,
    Timings,
    Tokens,
    Usage,
)

__all__ = [
    "AlreadyExists",
    "Answer",
    "AsyncClient",
    "Cancelled",
    "Chat",
    "ChatMessage",
    "Chunk",
    "Client",
    "ClientError",
    "DeadlineExceeded",
    "FieldProblem",
    "Finish",
    "FinishReason",
    "InternalError",
    "InvalidArgument",
    "ModelInfo",
    "NotFound",
    "Options",
    "Prompt",
    "ReplicaLoad",
    "ResourceExhausted",
    "RetryPolicy",
    "ServerInfo",
    "StreamBroken",
    "Timings",
    "Tls",
    "Tokens",
    "Unauthenticated",
    "Unavailable",
    "Usage",
]
