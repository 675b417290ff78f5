"""What replicas say → messages. Knows no request and decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import modf

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from ottserve.service.readiness import ServedModel
from ottserve.service.settings import GatewaySettings
from ottserve.v1 import generation_pb2 as pb
from ottserve.workers.api import Finish, FinishReason, LoadReport, ServerInfo, TextChunk, Timings, TokenLogprob, Usage

REASONS: dict[FinishReason, pb.FinishReason.ValueType] = {
    FinishReason.EOS: pb.FINISH_REASON_EOS,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.STOP_STRING: pb.FINISH_REASON_STOP_STRING,
    FinishReason.STOP_TOKEN: pb.FINISH_REASON_STOP_TOKEN,
    FinishReason.ABORTED: pb.FINISH_REASON_ABORTED,
}

PROMPT_TOKENS_PER_MESSAGE = 1024
"""Of their logprobs, with 20 alternatives each: some 300 kB, far below any message limit."""


def stream_messages(chunk: TextChunk) -> Iterator[pb.GenerateStreamResponse]:
    """What has gathered, if anything, and then the end, if it is one."""
    for begin in range(0, len(chunk.prompt_logprobs), PROMPT_TOKENS_PER_MESSAGE):
        piece = chunk.prompt_logprobs[begin : begin + PROMPT_TOKENS_PER_MESSAGE]
        prompt = pb.PromptLogprobs(tokens=map(_token_logprobs, piece))
        yield pb.GenerateStreamResponse(request_id=chunk.request_id, prompt_logprobs=prompt)
    if chunk.text or chunk.token_ids:
        event = pb.Chunk(
            index=chunk.index,
            text=chunk.text,
            token_ids=chunk.token_ids,
            logprobs=map(_token_logprobs, chunk.logprobs),
        )
        yield pb.GenerateStreamResponse(request_id=chunk.request_id, chunk=event)
    if chunk.finish is not None:
        yield pb.GenerateStreamResponse(request_id=chunk.request_id, finish=_finish(chunk.finish))


def whole_answer(request_id: str, chunks: Sequence[TextChunk]) -> pb.GenerateResponse:
    """All chunks of a request as one message."""
    indices = sorted({chunk.index for chunk in chunks})
    samples = [_sample(index, [chunk for chunk in chunks if chunk.index == index]) for index in indices]
    prompt = [_token_logprobs(token) for chunk in chunks for token in chunk.prompt_logprobs]
    return pb.GenerateResponse(request_id=request_id, samples=samples, prompt_logprobs=prompt)


def model_info(served: ServedModel) -> pb.GetModelInfoResponse:
    """The model as its replicas describe it."""
    model = served.info.model
    return pb.GetModelInfoResponse(
        model=model.name,
        architecture=model.architecture,
        num_parameters=model.num_parameters,
        context_length=model.context_length,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        has_chat_template=served.tokenizer.has_chat_template,
        default_sampling=pb.DefaultSampling(
            temperature=model.default_temperature, top_k=model.default_top_k, top_p=model.default_top_p
        ),
        random_weights=model.random_weights,
    )


def server_info(server: ServerInfo, settings: GatewaySettings) -> pb.GetServerInfoResponse:
    """The effective settings of a replica, and the limits of this gateway."""
    return pb.GetServerInfoResponse(
        version=server.version,
        cache=_cache_info(server),
        engine=_engine_info(server),
        gateway=pb.GatewayInfo(
            max_requests=settings.admission.max_requests,
            max_tokens=settings.admission.max_tokens,
            max_request_bytes=settings.messages.max_request_bytes,
            max_response_bytes=settings.messages.max_response_bytes,
            default_max_new_tokens=settings.default_max_new_tokens,
        ),
    )


def loads(reports: Iterable[LoadReport]) -> pb.GetLoadResponse:
    """The state of each replica."""
    return pb.GetLoadResponse(replicas=[_load(report) for report in reports])


def _sample(index: int, chunks: Sequence[TextChunk]) -> pb.Sample:
    """All chunks of one sample as one message."""
    last = chunks[-1].finish
    return pb.Sample(
        index=index,
        text="".join(chunk.text for chunk in chunks),
        token_ids=[token_id for chunk in chunks for token_id in chunk.token_ids],
        logprobs=[_token_logprobs(token) for chunk in chunks for token in chunk.logprobs],
        finish=_finish(last) if last else None,
    )


def _finish(finish: Finish) -> pb.Finish:
    message = pb.Finish(
        index=finish.index,
        reason=REASONS[finish.reason],
        usage=_usage(finish.usage),
        seed=finish.seed,
        timings=_timings(finish.timings),
    )
    if finish.matched_stop is not None:
        message.matched_stop = finish.matched_stop
    elif finish.matched_stop_token_id is not None:
        message.matched_stop_token_id = finish.matched_stop_token_id
    return message


def _token_logprobs(token: TokenLogprob | None) -> pb.TokenLogprobs:
    """Empty for the first token of a prompt, which nothing predicts."""
    if token is None:
        return pb.TokenLogprobs()
    chosen = pb.TokenLogprob(token_id=token.token_id, logprob=token.logprob)
    top = (pb.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in token.top)
    return pb.TokenLogprobs(chosen=chosen, top=top)


def _usage(usage: Usage) -> pb.Usage:
    return pb.Usage(
        num_prompt_tokens=usage.num_prompt_tokens,
        num_cached_tokens=usage.num_cached_tokens,
        num_completion_tokens=usage.num_completion_tokens,
    )


def _timings(timings: Timings) -> pb.Timings:
    return pb.Timings(
        queue=_duration(timings.queue_s),
        prefill=_duration(timings.prefill_s),
        decode=_duration(timings.decode_s),
        first_token=_duration(timings.first_token_s),
    )


def _duration(seconds: float) -> Duration:
    part, whole = modf(seconds)
    return Duration(seconds=int(whole), nanos=int(part * 1e9))


def _timestamp(moment: float | None) -> Timestamp | None:
    if moment is None:
        return None
    part, whole = modf(moment)
    return Timestamp(seconds=int(whole), nanos=int(part * 1e9))


def _cache_info(server: ServerInfo) -> pb.CacheInfo:
    return pb.CacheInfo(
        policy=server.policy,
        k_bits=server.k_bits,
        v_bits=server.v_bits,
        group=server.group,
        window=server.window,
        pool=server.pool,
        evicted=server.evicted,
        num_pages=server.num_pages,
        num_slots=server.num_slots,
        page_bytes=server.page_bytes,
        slot_bytes=server.slot_bytes,
        bytes_per_token=server.bytes_per_token,
        bits_per_element=server.bits_per_element,
        token_capacity=server.token_capacity,
        prefix_cache=server.prefix_cache,
        k_fine=server.k_fine,
        k_fine_bits=server.k_fine_bits,
        fit_rounds=server.fit_rounds,
    )


def _engine_info(server: ServerInfo) -> pb.EngineInfo:
    return pb.EngineInfo(
        backend=server.backend,
        device=server.device,
        dtype=server.dtype,
        graphs=server.graphs,
        max_running=server.max_running,
        max_waiting=server.max_waiting,
        max_waiting_tokens=server.max_waiting_tokens,
        max_tokens_per_step=server.max_tokens_per_step,
    )


def _load(report: LoadReport) -> pb.ReplicaLoad:
    return pb.ReplicaLoad(
        replica_id=report.replica_id,
        num_running=report.num_running,
        num_waiting=report.num_waiting,
        num_waiting_tokens=report.num_waiting_tokens,
        pages_used=report.pages_used,
        pages_cached=report.pages_cached,
        pages_free=report.pages_free,
        pages_total=report.pages_total,
        slots_used=report.slots_used,
        slots_free=report.slots_free,
        slots_total=report.slots_total,
        pool_places_used=report.pool_places_used,
        pool_places_total=report.pool_places_total,
        evicted_places_used=report.evicted_places_used,
        evicted_places_total=report.evicted_places_total,
        frozen_heads=report.frozen_heads,
        decode_tokens_per_s=report.decode_tokens_per_s,
        last_step_time=_timestamp(report.last_step_at),
    )
