"""What a gateway and a replica say to each other. Standard library only; every value here can be pickled.

Knows nothing of gRPC messages (the gateway translates), of tensors, or of Ray.
Token counts are `num_*`; times are seconds as `*_s`; moments are UNIX times as `*_at`.
"""

from __future__ import annotations

from ottserve.workers.api.answer import AbortResult, Finish, FinishReason, TextChunk, Timings, TokenLogprob, Usage
from ottserve.workers.api.errors import (
    INTERNAL_REASONS,
    STEP_REASONS,
    DeadlineExceeded,
    DuplicateRequest,
    Internal,
    InvalidField,
    NotImplementedField,
    OttserveError,
    QueueFull,
    StreamBroken,
    Unavailable,
    UnknownModel,
    invalid,
)
from ottserve.workers.api.info import ModelInfo, ReplicaInfo, ServerInfo, TokenizerFiles
from ottserve.workers.api.load import LoadReport
from ottserve.workers.api.task import (
    Choice,
    Form,
    GenerationTask,
    Grammar,
    JsonSchema,
    Regex,
    SamplingParams,
    StopParams,
    sample_seed,
)

__all__ = [
    "INTERNAL_REASONS",
    "STEP_REASONS",
    "AbortResult",
    "Choice",
    "DeadlineExceeded",
    "DuplicateRequest",
    "Finish",
    "FinishReason",
    "Form",
    "GenerationTask",
    "Grammar",
    "Internal",
    "InvalidField",
    "JsonSchema",
    "LoadReport",
    "ModelInfo",
    "NotImplementedField",
    "OttserveError",
    "QueueFull",
    "Regex",
    "ReplicaInfo",
    "SamplingParams",
    "ServerInfo",
    "StopParams",
    "StreamBroken",
    "TextChunk",
    "Timings",
    "TokenLogprob",
    "TokenizerFiles",
    "Unavailable",
    "UnknownModel",
    "Usage",
    "invalid",
    "sample_seed",
]
