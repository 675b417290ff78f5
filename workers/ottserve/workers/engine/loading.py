"""Makes an engine out of settings: model, cache, scheduler, in that order. Seconds of work; knows no thread."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence

import structlog
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from ottserve.workers.api import ServerInfo
from ottserve.workers.core.ledger import Ledger
from ottserve.workers.core.limits import Limits
from ottserve.workers.core.prefix import PrefixCache
from ottserve.workers.core.scheduler import Scheduler
from ottserve.workers.engine.capacity import Capacity, plan_capacity
from ottserve.workers.engine.dgap.loading import load_correction
from ottserve.workers.engine.engine import Engine
from ottserve.workers.engine.graphs import PROMPT_TOKENS, GraphSizes
from ottserve.workers.engine.no_room import refuse_no_room
from ottserve.workers.engine.ranks.crew import Crew
from ottserve.workers.engine.ranks.lead import LeadRunner, UnreadLeadRunner, agree, choose_sums
from ottserve.workers.engine.runner import Runner
from ottserve.workers.engine.step_size import find_limits
from ottserve.workers.engine.unread import runner_over
from ottserve.workers.engine.warm_up import warm_up
from ottserve.workers.kv.store import KVStore
from ottserve.workers.kv.table import resolve_spec
from ottserve.workers.models.key_bias import drowned_layers
from ottserve.workers.models.loading import LoadedModel, find_device, load_model
from ottserve.workers.models.tuning import tune
from ottserve.workers.progress import Progress
from ottserve.workers.settings import EngineSettings
from ottserve.workers.text.detokenizer import Vocabulary
from ottserve.workers.version import package_version

log = structlog.get_logger(__name__)


def load_engine(settings: EngineSettings, progress: Progress, crew: Crew | None = None) -> Engine:
    """Load the model, allocate the cache and put an engine on top.

    Args:
        settings: all of the replica's settings.
        progress: told in words what is going on.
        crew: the other ranks, as many as `model.tensor_parallel` says beside this one.

    Raises:
        ValueError: a setting is impossible, contradicts another, or the model can't be served; names both values.
        RankLost: another rank failed.
    """
    num_ranks = 1 if crew is None else crew.share.num_ranks
    if settings.model.tensor_parallel != num_ranks:
        raise ValueError(f"model.tensor_parallel={settings.model.tensor_parallel}: {num_ranks} ranks are there")
    if crew is None:
        return make_engine(settings, load_model(settings.model, progress), progress, keep_model=False)
    crew.join(find_device(settings.model.device))
    model = load_model(settings.model, progress, crew.share)
    return make_engine(settings, model, progress, keep_model=False, crew=crew)


def make_engine(
    settings: EngineSettings,
    model: LoadedModel,
    progress: Progress,
    *,
    keep_model: bool = True,
    crew: Crew | None = None,
    make_runner: Callable[[PreTrainedModel, KVStore], Runner] | None = None,
) -> Engine:
    """Allocate the cache over a loaded model and put an engine on top; `settings.model` is not read.

    Args:
        settings, progress: as of `load_engine`.
        model: what is loaded.
        keep_model: leave it as it is, for others to use, at the price of merged weights being there twice.
        crew: the other ranks, where the model is a share.
        make_runner: what runs the model over the cache, where it is another than the usual one.

    Raises:
        ValueError: as `load_engine`, but for the model.
        RankLost: another rank failed.
    """
    model = prepare_model(settings, model, keep_model=keep_model)
    capacity = find_capacity(settings, model)
    store = make_store(settings, model, capacity if crew is None else agree(crew, capacity))
    spec = store.spec
    progress(
        f"the cache holds {(store.num_pages - 1) * spec.group:,} tokens at {spec.bits_per_element:.2f} bits an element "
        f"(policy {spec.policy}, {store.num_pages * store.page_bytes / 2**20:,.0f} MiB of pages)"
    )
    runner = _runner(settings, model, store, crew) if make_runner is None else make_runner(model.module, store)
    prompts = _prompts_to_capture(settings, model)
    limits = find_limits(settings.scheduler, model, spec, prompts)
    graphs = _graph_sizes(settings, model, store, limits, prompts)
    if model.device.type == "cuda":
        progress("compiling what the first requests will need")
        warm_up(runner.run, spec, model.device)  # before steps are captured: what it compiles is for those that are not
    if graphs is not None:
        progress("capturing steps as CUDA graphs")
        runner.capture(graphs)
    ledger = Ledger(store.num_pages, store.num_slots)
    prefix = PrefixCache(ledger, spec.group, spec.fingerprint, enabled=settings.cache.prefix_cache)
    scheduler = Scheduler(spec, ledger, prefix, limits, model.info.eos_token_ids, time.time)
    return Engine(
        model_info=model.info,
        server_info=_server_info(settings, model, store, limits, graphs is not None),
        tokenizer_files=model.tokenizer,
        vocabulary=Vocabulary.of(Tokenizer.from_str(model.tokenizer.tokenizer_json)),
        scheduler=scheduler,
        ledger=ledger,
        store=store,
        runner=runner,
        correction=load_correction(settings.correction, model, store),
        overlaps=_wants(settings.scheduler.overlap, model),
        now=time.time,
    )


def prepare_model(settings: EngineSettings, model: LoadedModel, *, keep_model: bool) -> LoadedModel:
    """The model as the settings want it computed; arguments and errors as of `make_engine`."""
    spec = resolve_spec(settings.cache, model.shape)
    drowned = drowned_layers(model.module, model.shape, [layer.k_bits for layer in spec.layers])
    if drowned and not spec.key_frequencies:
        log.warning("large_key_biases", layers=drowned, remedy="cache.keys=pre_rope, or more cache.k_bits")
    if spec.rotate_values:
        model = model.with_rotated_values()
    elif keep_model:
        model = model.shared()
    tune(model.module, compiled=_wants(settings.graphs.compile_layers, model))
    return model


def find_capacity(settings: EngineSettings, model: LoadedModel) -> Capacity:
    """What there is memory for over this model.

    Raises:
        ValueError: as `resolve_spec` and `plan_capacity` do.
    """
    spec = resolve_spec(settings.cache, model.shape)
    return plan_capacity(settings, spec, model.info.context_length, model.device)


def make_store(settings: EngineSettings, model: LoadedModel, capacity: Capacity | None = None) -> KVStore:
    """The cache that the settings ask for over this model, of the capacity that there is memory for or another.

    Raises:
        ValueError: as `resolve_spec` and `plan_capacity` do.
    """
    spec = resolve_spec(settings.cache, model.shape)
    capacity = capacity or find_capacity(settings, model)
    return KVStore(spec, capacity.num_pages, capacity.num_slots, exact_dtype(model.dtype), model.device)


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a cache keeps exact is stored in, under a model of that dtype."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float16


def _runner(settings: EngineSettings, model: LoadedModel, store: KVStore, crew: Crew | None) -> Runner:
    if crew is None:
        return runner_over(model, store)
    choose_sums(settings.model, model)
    return (LeadRunner if model.reads_prompts else UnreadLeadRunner)(model.module, store, crew)


def _prompts_to_capture(settings: EngineSettings, model: LoadedModel) -> tuple[int, ...]:
    """Prompt tokens of captured steps, ascending, as far as settings and model say. Raises ValueError where the model
    has no prompts to compute, or the device captures nothing."""
    asked, is_wanted = settings.graphs.prompt_tokens, _wants(settings.graphs.enabled, model)
    if asked is None:
        return PROMPT_TOKENS if is_wanted and model.reads_prompts and model.num_ranks == 1 else ()
    prompts = sorted(set(asked))
    if prompts and not model.reads_prompts:
        raise ValueError(f"graphs.prompt_tokens={prompts}, model.path={model.info.name}: prompts are left unread")
    if prompts and model.device.type != "cuda":
        raise ValueError(f"graphs.prompt_tokens={prompts}, model.device={model.device}: CUDA graphs need a CUDA device")
    return tuple(prompts)


def _graph_sizes(
    settings: EngineSettings, model: LoadedModel, store: KVStore, limits: Limits, prompts: tuple[int, ...]
) -> GraphSizes | None:
    """What is to be captured; None where nothing is. Raises ValueError where more is asked for than can be."""
    if settings.graphs.enabled and model.device.type != "cuda":
        raise ValueError(f"graphs.enabled=True, model.device={model.device}: CUDA graphs need a CUDA device")
    most = limits.max_tokens_per_step
    refuse_no_room(settings.graphs, most)
    if not _wants(settings.graphs.enabled, model):
        return None
    fitting = tuple(tokens for tokens in prompts if tokens <= most)
    return GraphSizes(settings.scheduler.max_running, store.most_pages(model.info.context_length), fitting)


def _wants(setting: bool | None, model: LoadedModel) -> bool:
    """What is not set is wanted on a GPU."""
    return model.device.type == "cuda" if setting is None else setting


def _server_info(
    settings: EngineSettings, model: LoadedModel, store: KVStore, limits: Limits, graphs: bool
) -> ServerInfo:
    spec, scheduler, ranks = store.spec, settings.scheduler, model.num_ranks
    return ServerInfo(
        version=package_version(),
        backend="triton" if model.device.type == "cuda" else "torch",
        device=_device_name(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        policy=spec.policy,
        k_bits=_where_alike([layer.k_bits for layer in spec.layers]),
        v_bits=_where_alike([layer.v_bits for layer in spec.layers]),
        group=spec.group,
        window=spec.window,
        pool=max(layer.pool for layer in spec.layers),
        evicted=spec.evicted,
        num_pages=store.num_pages - 1,
        num_slots=store.num_slots - 1,
        page_bytes=ranks * store.page_bytes,
        slot_bytes=ranks * store.slot_bytes,
        bytes_per_token=ranks * store.page_bytes / spec.group,
        bits_per_element=spec.bits_per_element,
        token_capacity=(store.num_pages - 1) * spec.group,
        prefix_cache=settings.cache.prefix_cache,
        graphs=graphs,
        max_running=scheduler.max_running,
        max_waiting=scheduler.max_waiting,
        max_waiting_tokens=scheduler.max_waiting_tokens,
        max_tokens_per_step=limits.max_tokens_per_step,
        tail_bytes=ranks * spec.tail_bytes,
        k_fine=_where_alike([layer.k_fine for layer in spec.layers]),
        k_fine_bits=_where_alike([layer.k_fine and layer.k_fine_bits for layer in spec.layers]),
        fit_rounds=spec.fit_rounds,
    )


def _where_alike(bits: Sequence[int]) -> int:
    """The bits of every layer, or 0 where layers differ."""
    return bits[0] if len(set(bits)) == 1 else 0


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"
