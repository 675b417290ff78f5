"""Settings that no replica could start with are told at once, in the replica's words: a line, status 2, no Ray."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ottserve.cli.foresight import check_replicas
from ottserve.cli.main import app
from ottserve.cli.outline import read_outline
from ottserve.cli.settings import SettingsError, read_settings
from ottserve.workers.kv.shape import ModelShape
from ottserve.workers.models.source import DEFAULT_MODEL, find_source

FREE_PORTS = ("--gateway.port", "0", "--gateway.http_port", "0", "--gateway.metrics.port", "0")
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "hidden_size": 512, "max_position_embeddings": 1000,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a model without weights."""
    return configure(tmp_path)


def configure(folder: Path, **changes: object) -> Path:
    fields = {name: value for name, value in (LLAMA | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def refusal(*flags: str, num_cores: int = 2) -> str:
    with pytest.raises(SettingsError) as caught:
        check_replicas(read_settings(None, flags), num_cores)
    return str(caught.value)


def test_a_refusal_is_one_line_with_status_2_before_torch_or_ray_is_imported() -> None:
    code = (
        "import sys; from ottserve.cli.main import app\n"
        f"sys.argv = ['ottserve', 'serve', *{FREE_PORTS}, '--cache.group=100']\n"
        "try: app()\n"
        "finally: print({'torch', 'ray', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    told = (done.returncode, done.stdout, done.stderr)
    assert told == (2, "set()\n", "error: cache.group=100: must be one of (32, 64, 128, 256)\n")


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--cache.window=100000", "cache.window=100000: must be at most cache.group=128"),
        ("--cache.memory_bytes=1000", "cache.memory_bytes=1000: "),
        ("--model.max_context=99999999", "model.max_context=99999999: the model has positions for 8192 tokens"),
        ("--deployment.num_cpus=4096", "deployment.num_cpus=4096, deployment.num_replicas=1: 4096 cores are"),
        ("--cache.plan=/no/such/plan", "cache.plan=/no/such/plan: No such file"),
        ("--cache.plain_layers=[0,30]", "cache.plain_layers=30: the model has layers 0 to 29"),
        ("--scheduler.max_tokens_per_step=4", "scheduler.max_tokens_per_step=4, scheduler.max_running=16, "),
    ],
)
def test_the_command_names_field_value_and_limit(flag: str, told: str) -> None:
    result = CliRunner().invoke(app, ["serve", *FREE_PORTS, flag])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {told}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--cache.k_fine=64",), "cache.k_fine=64: must be one of (0, 16, 32, 64, 128), below the head size 64"),
        (("--cache.pool=40",), "cache.evicted=32: must be at least cache.pool=40"),
        (("--model.tensor_parallel=3",), "model.tensor_parallel=3: 2 KV heads do not divide evenly"),
        (("--model.max_context=1001",), "model.max_context=1001: the model has positions for 1000 tokens"),
        (("--model.device=cpu", "--graphs.enabled=true"), "graphs.enabled=True, model.device=cpu"),
        (("--model.device=cpu", "--scheduler.max_running=1024", "--cache.window=256", "--cache.group=256"), "slots"),
        (("--deployment.num_replicas=3",), "deployment.num_replicas=3: 3 cores are needed, this machine has 2"),
    ],
)
def test_a_folder_tells_the_shape(folder: Path, flags: tuple[str, ...], told: str) -> None:
    if told == "slots":
        configure(folder, num_hidden_layers=64, num_key_value_heads=8, hidden_size=2048)
    assert told in refusal("--model.path", str(folder), *flags)


@pytest.mark.parametrize("path", [DEFAULT_MODEL, "toy"])
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--cache.fit_rounds=8",), "cache.fit_rounds=8: policy fp16 stores 16 bits; leave it out"),
        (("--cache.preset=lean", "--cache.v_bits=4"), "cache.preset=lean, cache.v_bits=4: policy fp16 stores 16 bits"),
        (("--cache.pool=3",), "cache.pool=3: policy fp16 has no pool; leave it out"),
    ],
)
def test_settings_that_change_nothing_are_refused(path: str, flags: tuple[str, ...], told: str) -> None:
    assert told in refusal("--model.path", path, "--cache.policy=fp16", *flags)


@pytest.mark.parametrize("path", [DEFAULT_MODEL, "toy"])
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            ("--scheduler.max_tokens_per_step=4",),
            "scheduler.max_tokens_per_step=4, scheduler.max_running=16, scheduler.aligned_chunks=False: a step must",
        ),
        (
            ("--scheduler.aligned_chunks=true", "--scheduler.max_prompt_tokens_beside_decoding=8"),
            "scheduler.max_prompt_tokens_beside_decoding=8, scheduler.aligned_chunks=True: a prompt chunk has 160 ",
        ),
        (
            ("--graphs.prompt_tokens=[512,64]", "--scheduler.max_tokens_per_step=100"),
            "graphs.prompt_tokens=[64, 512]: a step has at most 100 (scheduler.max_tokens_per_step)",
        ),
    ],
)
def test_steps_without_room_for_what_is_set_are_refused(path: str, flags: tuple[str, ...], told: str) -> None:
    assert told in refusal("--model.path", path, *flags)


@pytest.mark.parametrize("flag", ["--scheduler.max_running=1024", "--scheduler.aligned_chunks=true"])
def test_steps_whose_size_is_left_open_are_made_to_fit(flag: str) -> None:
    check_replicas(read_settings(None, ["--model.path=toy", "--graphs.prompt_tokens=[8192]", flag]), 2)


def test_an_architecture_that_is_not_served_is_told_by_its_files(folder: Path) -> None:
    configure(folder, model_type="t5", head_dim=64)
    assert "models of type t5 are not served" in refusal("--model.path", str(folder))


def test_of_several_models_the_one_at_fault_is_named(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f"model: {{path: toy}}\nmodels:\n- model: {{path: {folder}}}\n  cache: {{group: 96}}\n")
    with pytest.raises(SettingsError, match=f"{folder}: cache.group=96"):
        check_replicas(read_settings(file, []), 2)


@pytest.mark.parametrize("path", ["toy", "random:llama-3-8b", "nobody/has-this-model"])
def test_without_files_the_settings_alone_are_checked(path: str) -> None:
    assert read_outline(find_source(path)) is None
    check_replicas(read_settings(None, ["--model.path", path, "--cache.keys=pre_rope"]), 2)
    assert "cache.group=100" in refusal("--model.path", path, "--cache.group=100")


@pytest.mark.parametrize("changes", [{"hidden_size": None}, {"model_type": "gemma"}, {"num_key_value_heads": None}])
def test_what_files_leave_to_defaults_is_not_guessed(folder: Path, changes: dict[str, object]) -> None:
    assert read_outline(find_source(str(configure(folder, **changes)))) is None


def test_the_bundled_model_is_known_by_its_header() -> None:
    outline = read_outline(find_source(DEFAULT_MODEL))
    assert outline is not None
    assert (outline.shape, outline.context_length) == (ModelShape(30, 9, 3, 64), 8192)
    check_replicas(read_settings(None, []), 1)


def test_a_gguf_calls_architectures_by_other_names(tmp_path: Path) -> None:
    """Such as gemma3 for gemma3_text: whether it is served, the replica says."""
    file = tmp_path / "model.gguf"
    numbers = {"block_count": 4, "attention.head_count": 8, "attention.head_count_kv": 2, "attention.key_length": 64}
    fields = [text("general.architecture") + struct.pack("<I", 8) + text("gemma3")]
    for name, value in (numbers | {"embedding_length": 512, "context_length": 1000}).items():
        fields.append(text(f"gemma3.{name}") + struct.pack("<II", 4, value))
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(fields)) + b"".join(fields))
    outline = read_outline(find_source(str(file)))
    assert outline is not None
    assert outline.shape == ModelShape(4, 8, 2, 64)
    check_replicas(read_settings(None, ["--model.path", str(file)]), 2)
    assert "model.max_context=1001" in refusal("--model.path", str(file), "--model.max_context=1001")


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGML" + bytes(40), b"GGUF" + bytes(12) + b"\xff" * 24])
def test_a_file_that_is_no_gguf_tells_nothing(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    assert read_outline(find_source(str(file))) is None
