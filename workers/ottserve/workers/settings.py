"""Settings of a replica, by owner, as the operator wrote them; what depends on the model is resolved when it loads.

Unknown names are errors. The gateway has its own settings; the command `ottserve serve` reads both from one file.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def _number(value: object) -> object:
    """Flags and environment variables are text, which a `Literal` of numbers would refuse."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


CodeBits = Annotated[Literal[1, 2, 4, 8, 16], BeforeValidator(_number)]
FineBits = Annotated[Literal[1, 2, 4], BeforeValidator(_number)]


StoredKeys = Literal["post_rope", "pre_rope"]
Preset = Literal["paper", "smallest", "lean", "balanced", "accurate"]

# What a plan file says, so that it can't be set beside one.
PLANNED = (
    "policy", "preset", "k_bits", "v_bits", "group", "pool", "plain_layers", "k_subgroups", "k_fine", "k_fine_bits",
    "fit_rounds", "unbiased", "rotate_values", "keys",
)  # fmt: skip


class Section(BaseModel):
    """A frozen group of settings that refuses unknown names."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def is_written(self, name: str) -> bool:
        """Whether the setting of that name is another than its default."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)


class ModelSettings(Section):
    """Which model, and how it is loaded."""

    path: str = Field(
        "smollm2-135m-instruct", description="Folder, GGUF file, hub id, the bundled default, or random:llama-3-8b."
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        "auto",
        description="Dtype of the weights; auto is float32 on a CPU, on a GPU the checkpoint's own, bfloat16 of GGUF.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes a GPU when there is one.")
    max_context: int | None = Field(None, ge=1, description="Tokens of prompt plus answer; default: the model's own.")
    tensor_parallel: int = Field(
        1, ge=1, le=64, description="Ranks that compute the model together, each with its heads, on a GPU of its own."
    )
    peer_sums: bool | None = Field(
        None, description="Ranks sum small results through each other's GPU memory; default: where that works."
    )
    name: str | None = Field(
        None, pattern=r"^[!-~]{1,256}$", description="What requests call the model; default: read off path."
    )


class CacheSettings(Section):
    """How keys and values are stored (kernels/README.md has the letters)."""

    policy: Literal["ott", "kivi", "fp16"] = Field("ott", description="Outlier tracing, plain 2-bit, or 16 bit.")
    preset: Preset | None = Field(
        None, description="What the settings of the quantiser are where not set; default balanced, for kivi paper."
    )
    plan: str | None = Field(
        None, min_length=1, description="File of `ottserve calibrate` that says how each layer is stored."
    )
    k_bits: CodeBits | None = Field(None, description="Bits of a stored key element; default as the preset's.")
    v_bits: CodeBits | None = Field(None, description="Bits of a stored value element; default as the preset's.")
    group: int | None = Field(
        None, description="G, tokens of a page; a power of two from 32 to 256; default 128, or the preset's."
    )
    window: int = Field(32, ge=1, description="R, newest tokens that always stay exact.")
    pool: int | None = Field(None, ge=0, description="O, outlier tokens kept exact per layer and KV head; default 3.")
    evicted: int | None = Field(None, ge=0, description="E, places for tokens that lost their pool place; default 32.")
    plain_layers: tuple[int, ...] = Field((0, 1), description="Layers that trace no outliers.")
    keep: Literal["smallest", "largest"] = Field("smallest", description="Which key norms are the outliers.")
    k_subgroups: int = Field(1, ge=1, description="Parts of a group with a key scale of their own.")
    k_fine: int | None = Field(
        None,
        ge=0,
        description="Key channels a page gives longer codes, those that vary most; the preset's, or 0 beside k_bits.",
    )
    k_fine_bits: FineBits | None = Field(
        None, description="Bits that the codes of these channels are longer by; default as the preset's."
    )
    fit_rounds: int | None = Field(
        None, ge=0, le=32, description="Least-squares rounds of the quantiser, 0 is min/max; default as the preset's."
    )
    unbiased: bool | None = Field(
        None, description="Widen scales until codes keep the spread of what they stand for; default as the preset's."
    )
    rotate_values: bool | None = Field(
        None, description="Spread large value channels by a rotation folded into the weights; default as the preset's."
    )
    keys: StoredKeys = Field(
        "post_rope", description="Pages hold keys as attention takes them, or as before rotary embedding: slower."
    )
    memory_bytes: int | None = Field(
        None,
        ge=1,
        description="Memory of pages and slots, on each rank; default: 85 % of what is free on a GPU, 2 GiB on a CPU.",
    )
    num_pages: int | None = Field(None, ge=2, description="Pages, instead of what memory_bytes gives.")
    prefix_cache: bool = Field(True, description="Keep sealed pages, so that equal beginnings are computed once.")


class SchedulerSettings(Section):
    """What may run and wait at once."""

    max_running: int = Field(16, ge=1, le=1024, description="Sequences computed together (slots).")
    max_tokens_per_step: int | None = Field(
        None,
        ge=1,
        description="Tokens of one step, decode rows and prompt chunks; default 512 on a CPU, 8192 on a GPU with room.",
    )
    max_prompt_tokens_beside_decoding: int | None = Field(
        None,
        ge=1,
        description="Prompt tokens of a step in which others decode; default 64 on a CPU, on a GPU the first captured "
        "size from 512 on, else 2048.",
    )
    max_waiting: int = Field(256, ge=1, description="Requests that may wait.")
    max_waiting_tokens: int = Field(262144, ge=1, description="Prompt tokens that may wait, over all requests.")
    overlap: bool | None = Field(
        None,
        description="Launch a step before the tokens of the last one are read; default: on a GPU yes, on a CPU no.",
    )
    aligned_chunks: bool = Field(
        False, description="Cut prompts at seal points, so that any way of computing them gives the same codes."
    )


class GraphSettings(Section):
    """What is prepared at start, so that a GPU never waits for Python: CUDA graphs and compiled layers."""

    enabled: bool | None = Field(None, description="Capture steps as CUDA graphs; default: on a GPU yes, on a CPU no.")
    prompt_tokens: tuple[Annotated[int, Field(ge=1, le=8192)], ...] | None = Field(
        None,
        description="Capture steps with a prompt too, padded to the first of so many prompt tokens that holds them; "
        "default: on one GPU 64, 128, 256 and 512, else none.",
    )
    compile_layers: bool | None = Field(
        None, description="Compile the model's layers with torch.compile; default: on a GPU yes, on a CPU no."
    )


class CorrectionSettings(Section):
    """Logits corrected before sampling, for caches of very few bits (docs/dgap.md)."""

    path: str | None = Field(None, min_length=1, description="File of `ottserve dgap-train`; default: no correction.")
    threshold: float | None = Field(
        None, ge=0, le=1, description="Rows of this risk or more are corrected; default: the file's."
    )


class OutputSettings(Section):
    """How answers leave the replica."""

    message_interval_ms: float = Field(
        20.0, ge=0, le=1000, description="At most one message a stream in this time, or in 0.5 ms for each stream."
    )


class MetricsSettings(Section):
    """The replica's own Prometheus endpoint."""

    host: str = Field("0.0.0.0", description="Address that Prometheus scrapes.")
    port: int = Field(0, ge=0, le=65535, description="Port; 0 takes a free one, published by the gateway's /sd.")


class EngineSettings(Section):
    """All that a replica needs to start."""

    model: ModelSettings = ModelSettings()  # type: ignore[call-arg]
    cache: CacheSettings = CacheSettings()  # type: ignore[call-arg]
    scheduler: SchedulerSettings = SchedulerSettings()  # type: ignore[call-arg]
    graphs: GraphSettings = GraphSettings()  # type: ignore[call-arg]
    correction: CorrectionSettings = CorrectionSettings()  # type: ignore[call-arg]
    output: OutputSettings = OutputSettings()  # type: ignore[call-arg]
    metrics: MetricsSettings = MetricsSettings()  # type: ignore[call-arg]

    @model_validator(mode="after")
    def _contradictions(self) -> Self:
        cache = self.cache
        if cache.num_pages is not None and cache.memory_bytes is not None:
            raise ValueError(
                f"cache.num_pages={cache.num_pages}, cache.memory_bytes={cache.memory_bytes}: set the one or the other"
            )
        if self.model.peer_sums and self.model.tensor_parallel == 1:
            raise ValueError("model.peer_sums=True, model.tensor_parallel=1: there is no other rank to sum with")
        graphs, is_on_cpu = self.graphs, self.model.device == "cpu"
        if graphs.prompt_tokens and (graphs.enabled is False or is_on_cpu):
            why = "model.device=cpu" if is_on_cpu else "graphs.enabled=False"
            raise ValueError(f"graphs.prompt_tokens={graphs.prompt_tokens}, {why}: no steps are captured")
        correction = self.correction
        if correction.path is None and correction.threshold is not None:
            raise ValueError(f"correction.threshold={correction.threshold}: there is no correction.path")
        said_twice = [name for name in PLANNED if cache.plan and cache.is_written(name)]
        if said_twice:
            raise ValueError(
                f"cache.plan={cache.plan} decides itself on {', '.join(f'cache.{name}' for name in said_twice)}: "
                "set the one or the other"
            )
        return self


class AutoscaleSettings(Section):
    """How the number of replicas follows the load."""

    min_replicas: int = Field(1, ge=1, le=1024, description="Replicas there are without any load.")
    max_replicas: int | None = Field(None, ge=1, le=1024, description="Most replicas; default: num_replicas, always.")
    target_kv_pressure: float = Field(0.8, gt=0, le=1, description="Pages used or waited for, over those there are.")
    target_slot_pressure: float = Field(0.8, gt=0, le=1, description="Slots used or waited for, over those there are.")
    target_queue_s: float = Field(2.0, gt=0, description="Time that waiting prompts need at the measured token rate.")
    up_delay_s: float = Field(5.0, ge=0, description="More replicas come when they were needed for so long.")
    down_delay_s: float = Field(300.0, ge=0, description="Replicas go when they were too many for so long.")

    @model_validator(mode="after")
    def _contradictions(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas={self.max_replicas} is below min_replicas={self.min_replicas}")
        written = [f"{name}={getattr(self, name)}" for name in type(self).model_fields if self.is_written(name)]
        if self.max_replicas is None and written:
            raise ValueError(f"{', '.join(written)}: without max_replicas nothing follows the load; set it too")
        return self


class DeploymentSettings(Section):
    """How many replicas run, on what, and how Ray Serve watches them."""

    num_replicas: int = Field(1, ge=1, le=1024, description="Replicas (at the start), each with a cache of its own.")
    autoscale: AutoscaleSettings = AutoscaleSettings()  # type: ignore[call-arg]
    num_cpus: float | None = Field(
        None,
        gt=0,
        description="CPU cores of each rank of a replica; default 1 with a GPU, else its share of all but one.",
    )
    num_gpus: float | None = Field(
        None, ge=0, description="GPUs of each rank of a replica; default 1 where it computes on one."
    )
    stall_s: float = Field(120.0, gt=0, description="Work pending and no step for so long: the replica is replaced.")
    grace_s: float = Field(60.0, ge=0, description="Time for running requests to finish when a replica ends.")
    health_period_s: float = Field(1.0, gt=0, description="Serve asks a replica for its health this often.")
    health_timeout_s: float = Field(10.0, gt=0, description="Three health checks unanswered for so long: replaced.")

    @property
    def most_replicas(self) -> int:
        """As many as there can be."""
        return self.autoscale.max_replicas or self.num_replicas

    @model_validator(mode="after")
    def _starts_within_its_bounds(self) -> Self:
        autoscale = self.autoscale
        if autoscale.max_replicas is None:
            return self
        if not autoscale.min_replicas <= self.num_replicas <= autoscale.max_replicas:
            raise ValueError(
                f"num_replicas={self.num_replicas} is not between autoscale.min_replicas={autoscale.min_replicas} "
                f"and autoscale.max_replicas={autoscale.max_replicas}"
            )
        return self


class FurtherModel(EngineSettings):
    """A model beside the first, with replicas of its own."""

    deployment: DeploymentSettings = DeploymentSettings()  # type: ignore[call-arg]
