"""Settings of the executor: flag > LORAFLEET_EXECUTOR_<NAME> > TOML file (--config) > default."""

import argparse
import dataclasses
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adapter_store.module_names import FUSED
from executor.errors import ConfigError
from lorafleet.commands.parsing import QuietParser
from lorafleet.doors.options import MAX_CONNECTIONS
from lorafleet.tls.files import Tls
from lorafleet.tls.listening import unmatched_pair, unmet_beyond_loopback

ENVIRONMENT_PREFIX = "LORAFLEET_EXECUTOR_"
# Kubernetes sets LORAFLEET_EXECUTOR_PORT and the like when a Service is called lorafleet-executor.
_SERVICE_LINK = re.compile(r"(SERVICE_HOST|SERVICE_PORT|PORT)(_.*)?")
DENSE_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MODULE_KINDS = (
    *DENSE_PROJECTIONS,
    *FUSED,
    "embed_tokens",
    "lm_head",
    "experts",
    "router",
    "shared_expert_gate",
)
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_LORA_DTYPES = ("auto", "fp8", "fp8-e5m2")
LOG_LEVELS = ("debug", "info", "warning", "error")
AUTO_SLOTS = -1  # of max_loras: executor/slot_count.py chooses


def _setting(default: Any, text: str, words: Mapping[str, Any] | None = None) -> Any:
    """`words` stand for values that are no words."""
    return field(default=default, metadata={"help": text, "words": words or {}})


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig:
    """Raises ConfigError naming the setting that cannot be used."""

    model: str = _setting("", "Folder of the base model: config.json and safetensors. Required.")
    store: str = _setting(
        "", "Adapter store: disk:/folder, a bare path, redis://... or rediss://.... Required."
    )
    allow_volatile: bool = _setting(
        False, "Take a Redis that may lose in a crash what it acknowledged: true or false."
    )
    cache_dir: str = _setting("", "Folder that keeps adapters read from the store; empty: none are kept.")
    cache_bytes: int = _setting(64 << 30, "Bytes that the cache folder may take.")
    listen: str = _setting("127.0.0.1:50061", "host:port for gRPC; port 0 takes any free one.")
    metrics_host: str = _setting("", "Address for /metrics; empty: the one that gRPC is served on.")
    max_connections: int = _setting(
        MAX_CONNECTIONS, "Connections in all; more are closed as soon as they are made."
    )
    metrics_port: int = _setting(9401, "HTTP port of /metrics; 0 takes any free one, -1 is off.")
    health_port: int = _setting(
        -1,
        "Port on the same host that serves grpc.health.v1 in clear and nothing else, for probes that speak "
        "no TLS; 0 takes any free one, -1 is off.",
    )
    tls_cert_file: str = _setting(
        "", "Certificate to serve TLS with, in PEM form; TLS files are read again when they change."
    )
    tls_key_file: str = _setting("", "Its key.")
    tls_client_ca_file: str = _setting(
        "",
        "CA of which every scheduler must have a certificate: mutual TLS. Who has one may run everything "
        "here: let it sign for nobody else.",
    )
    insecure: bool = _setting(
        False,
        "Listen beyond loopback without mutual TLS, where a proxy or mesh does it instead: true or false.",
    )
    load_format: str = _setting(
        "safetensors", "safetensors, or dummy: random weights, for speed runs without a checkpoint."
    )
    device: str = _setting("cpu", "Where the model runs: cpu, cuda (each rank its own GPU) or cuda:N.")
    dtype: str = _setting(
        "auto",
        "Of the model and the slots: float32, bfloat16, float16, or auto: bfloat16 on a GPU, else float32.",
    )
    gpu_memory_utilization: float = _setting(
        0.9, "Share of a GPU's memory for this executor; what nothing else takes becomes KV blocks."
    )
    cuda_graphs: bool = _setting(True, "Capture small steps before the executor is ready: true or false.")
    compile_processes: int = _setting(
        0,
        "Processes that compile kernels before a first start on a GPU; 1: the executor alone; 0: half of the "
        "CPUs, at most 8.",
    )
    tensor_parallel_size: int = _setting(
        1, "Ranks that share the model, each a process with a device of its own."
    )
    expert_parallel: bool = _setting(
        False, "Ranks share a layer's experts out instead of cutting each of them; true or false."
    )
    fully_sharded_loras: bool = _setting(
        False, "Cut both factors of an adapter over the ranks: smaller slots, more exchange; true or false."
    )
    torch_threads: int = _setting(0, "CPU threads for one operation on each rank; 0 leaves it to torch.")
    max_loras: int = _setting(
        8,
        "Slots: adapters that can be in one step. auto: one for each version in the store (64 at least, 512 "
        "at most), as far as a GPU's memory allows beside KV blocks of 1024 tokens for each seat; on the CPU "
        "at most 64, in host-memory-bytes.",
        words={"auto": AUTO_SLOTS},
    )
    max_lora_rank: int = _setting(64, "Highest rank a slot holds; every slot takes memory for it.")
    lora_dtype: str = _setting(
        "auto",
        "Of the slots: auto is the model's; fp8 (e4m3) and fp8-e5m2 take half of bfloat16's memory, with an "
        "error that is logged for every adapter.",
    )
    lora_modules: tuple[str, ...] = _setting(
        DENSE_PROJECTIONS, f"Module kinds a slot holds, with commas, out of {', '.join(MODULE_KINDS)}."
    )
    max_full_heads: int = _setting(
        0,
        "Places for fully trained lm_head and embed_tokens (modules_to_save), each as large as the base's; "
        "an adapter with both takes two. One rank only.",
    )
    max_seats: int = _setting(64, "Sequences that are accepted at once.")
    max_batched_tokens: int = _setting(
        0,
        "Tokens in one step; longer prompts take several. At least max-seats; 0: 512, or 8192 on a GPU, or "
        "max-seats if that is more.",
    )
    max_step_ms: float = _setting(
        -1.0,
        "Milliseconds that a step should take at most while sequences decode: its prompts get as many tokens "
        "as such steps had time for, and 32 at least. Up to 12 times as long while a crowd of prompts waits. "
        "-1: 2.5 times a step that only decodes, as measured; 0: no bound.",
    )
    captured_rows: int = _setting(
        1024, "Rows of the largest captured step with prompts, 512 to 1024; longer ones are launched slowly."
    )
    async_scheduling: str = _setting(
        "auto",
        "Plan a step while the one before it runs: true, false or auto, which is true for one rank on a GPU. "
        "On the CPU nothing would run beside the planning; over several ranks set it to true "
        "on GPUs: the answers are the same, and come faster.",
    )
    num_kv_blocks: int = _setting(
        0, "KV blocks shared by all sequences; 0: 1024 on the CPU, what the memory allows on a GPU."
    )
    block_size: int = _setting(16, "Tokens in a KV block, and the grain of the prefix cache.")
    prefix_cache: bool = _setting(
        True, "Share KV blocks of equal prefixes of one adapter and salt: true or false."
    )
    max_model_len: int = _setting(
        0, "Longest prompt plus answer; 0 is what the model and the KV blocks allow."
    )
    host_memory_bytes: int = _setting(
        4 << 30, "Bytes of host memory for adapters on their way to a slot, over all ranks."
    )
    page_ins_per_step: int = _setting(
        4, "Adapters copied into slots in one step at most; all sequences of the step wait for them."
    )
    loader_threads: int = _setting(4, "Threads that read adapters from the store.")
    loader_processes: int = _setting(
        -1,
        "Processes that lay adapters out for as many loader threads, which then leave the interpreter to the "
        "engine; each takes 0.2 GB and the bytes of an adapter. 0: none; -1: one a loader thread on a GPU, "
        "none on the CPU. Several ranks have none.",
    )
    load_timeout: float = _setting(
        60.0, "Seconds after which a load from the store is given up as retryable."
    )
    adapter_aging: float = _setting(
        2.0, "Seconds until a waiting adapter stops others from joining busy slots."
    )
    outbox_messages: int = _setting(1024, "Events that may wait for a slow scheduler before its time runs.")
    keepalive_time: float = _setting(
        20.0,
        "Seconds of silence after which a scheduler is pinged; one that does not answer for as long again is "
        "gone, and what it sent is cancelled.",
    )
    outbox_timeout: float = _setting(
        10.0, "Seconds that an outbox may stay full before its stream is closed."
    )
    step_timeout: float = _setting(
        60.0,
        "Seconds without progress in a step until liveness fails; with several ranks the executor then ends.",
    )
    start_timeout: float = _setting(
        120.0, "Seconds that another rank may take longer to start than this one."
    )
    drain_timeout: float = _setting(60.0, "Seconds that accepted work has to finish after SIGTERM.")
    step_trace: str = _setting(
        "", "File for one JSON line a step: its rows, its times on host and device, what waits. Empty: none."
    )
    log_format: str = _setting("text", "text or json.")
    log_level: str = _setting("info", f"One of {', '.join(LOG_LEVELS)}.")

    def __post_init__(self) -> None:
        _require("model", self.model, "the base model's folder")
        _require("store", self.store, "a store such as disk:/folder")
        _require("listen", _is_address(self.listen), f"host:port, not {self.listen!r}")
        _require("metrics-port", -1 <= self.metrics_port < 65536, "-1, 0 or a port")
        _require("health-port", -1 <= self.health_port < 65536, "-1, 0 or a port")
        self._check_tls()
        _require("load-format", self.load_format in ("safetensors", "dummy"), "safetensors or dummy")
        _require("device", _DEVICE.fullmatch(self.device), f"cpu, cuda or cuda:N, not {self.device!r}")
        one_gpu = self.device.startswith("cuda:") and self.tensor_parallel_size > 1
        _require("device", not one_gpu, "cpu or cuda with --tensor-parallel-size, for a GPU each")
        _require("dtype", self.dtype in _DTYPES, f"one of {_DTYPES}")
        _require("gpu-memory-utilization", 0 < self.gpu_memory_utilization <= 1, "above 0 and at most 1")
        _require("num-kv-blocks", self.num_kv_blocks >= 0, "at least 0")
        _require("loader-processes", self.loader_processes >= -1, "at least -1")
        _require("compile-processes", self.compile_processes >= 0, "at least 0")
        _require("torch-threads", self.torch_threads >= 0, "at least 0")
        _require("max-model-len", self.max_model_len >= 0, "at least 0")
        _require("max-step-ms", self.max_step_ms == -1 or self.max_step_ms >= 0, "-1, or at least 0")
        _require("captured-rows", 512 <= self.captured_rows <= 1024, "512 to 1024")
        modes = ("auto", "true", "false")
        _require("async-scheduling", self.async_scheduling in modes, f"one of {', '.join(modes)}")
        unknown = sorted(set(self.lora_modules) - set(MODULE_KINDS))
        _require("lora-modules", self.lora_modules and not unknown, f"some of {MODULE_KINDS}, not {unknown}")
        _require("max-loras", self.max_loras > 0 or self.max_loras == AUTO_SLOTS, "above 0, or auto")
        for name in _POSITIVE:
            _require(name.replace("_", "-"), getattr(self, name) > 0, "above 0")
        enough = self.max_batched_tokens == 0 or self.max_batched_tokens >= self.max_seats
        _require("max-batched-tokens", enough, f"0 or at least max-seats ({self.max_seats})")
        _require("adapter-aging", self.adapter_aging >= 0, "at least 0")
        _require("lora-dtype", self.lora_dtype in _LORA_DTYPES, f"one of {', '.join(_LORA_DTYPES)}")
        sharded_fp8 = self.lora_dtype != "auto" and self.fully_sharded_loras
        _require("lora-dtype", not sharded_fp8, "auto with --fully-sharded-loras")
        heads = self.max_full_heads
        _require("max-full-heads", heads >= 0, "at least 0")
        one_rank = self.tensor_parallel_size == 1
        _require("max-full-heads", one_rank or heads == 0, "0 with --tensor-parallel-size above 1")
        both = self.expert_parallel and self.fully_sharded_loras
        _require("fully-sharded-loras", not both, "false with --expert-parallel")
        there = not self.step_trace or Path(self.step_trace).absolute().parent.is_dir()
        _require("step-trace", there, f"a file in a folder that is there, not {self.step_trace!r}")
        _require("log-format", self.log_format in ("text", "json"), "text or json")
        _require("log-level", self.log_level in LOG_LEVELS, f"one of {LOG_LEVELS}")

    def _check_tls(self) -> None:
        cert, key = self.tls_cert_file, self.tls_key_file
        if problem := unmatched_pair("--tls-cert-file", cert, "--tls-key-file", key):
            raise ConfigError(problem)
        both = not self.tls_client_ca_file or cert
        _require("tls-client-ca-file", both, "with --tls-cert-file and --tls-key-file")
        if self.open_door and not self.insecure:
            raise ConfigError(self.open_door)

    @property
    def tls(self) -> Tls | None:
        """What the server has."""
        cert, key = self.tls_cert_file, self.tls_key_file
        return Tls(ca=self.tls_client_ca_file or None, cert=cert, key=key) if cert else None

    @property
    def open_door(self) -> str:
        """What is missing for those who can reach `listen` from outside, and what to do; or ""."""
        wanted = {
            "--tls-cert-file": self.tls_cert_file,
            "--tls-key-file": self.tls_key_file,
            "--tls-client-ca-file": self.tls_client_ca_file,
        }
        return unmet_beyond_loopback(self.host, wanted)

    @property
    def schedules_ahead(self) -> bool:
        if self.async_scheduling == "auto":
            return self.tensor_parallel_size == 1 and self.device.startswith("cuda")
        return self.async_scheduling == "true"

    @property
    def num_loader_processes(self) -> int:
        """On one rank. More than threads would never work."""
        wanted = self.loader_processes
        if wanted < 0:
            wanted = 0 if self.device == "cpu" else self.loader_threads
        return min(wanted, self.loader_threads)

    @property
    def model_dtype(self) -> str:
        """A name in torch."""
        if self.dtype == "auto":
            return "float32" if self.device == "cpu" else "bfloat16"
        return self.dtype

    @property
    def step_tokens(self) -> int:
        """Most tokens of a step."""
        return self.max_batched_tokens or max(self.max_seats, 512 if self.device == "cpu" else 8192)

    @property
    def host(self) -> str:
        return self.listen.rpartition(":")[0]


_POSITIVE = (
    "tensor_parallel_size", "max_lora_rank", "max_seats", "max_connections",
    "block_size", "cache_bytes", "host_memory_bytes", "page_ins_per_step", "loader_threads", "load_timeout",
    "outbox_messages", "outbox_timeout", "keepalive_time", "step_timeout", "start_timeout", "drain_timeout",
)  # fmt: skip


def load_config(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> ExecutorConfig:
    """From the layers. `--help` prints and exits as argparse does; ConfigError for everything else."""
    flags = {key: value for key, value in vars(_parser().parse_args(arguments)).items() if value is not None}
    path = flags.pop("config", None) or environment.get(ENVIRONMENT_PREFIX + "CONFIG")
    settings = _from_file(Path(path)) if path else {}
    settings |= _from_environment(environment)
    settings |= {name: _convert(name, value, "--" + name.replace("_", "-")) for name, value in flags.items()}
    return ExecutorConfig(**settings)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m executor",
        description="Run one base model and page LoRA adapters into it, for a LoraFleet scheduler.",
        epilog=f"Each setting can also come from {ENVIRONMENT_PREFIX}<NAME> or a TOML file; flags win.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings, named as the flags.")
    for name, setting in _FIELDS.items():
        default = ",".join(setting.default) if isinstance(setting.default, tuple) else setting.default
        default = str(default).lower() if isinstance(default, bool) else default
        suffix = "" if default == "" else f" [{default}]"
        text = setting.metadata["help"] + suffix
        switch: dict[str, Any] = {"nargs": "?", "const": "true"} if isinstance(setting.default, bool) else {}
        parser.add_argument("--" + name.replace("_", "-"), metavar="VALUE", help=text, **switch)
    return parser


class _Parser(QuietParser):
    def error(self, message: str) -> Any:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def _from_file(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return {key.replace("-", "_"): _convert(key, value, str(path)) for key, value in values.items()}


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    settings = {}
    for key, value in environment.items():
        prefix, _, name = key.partition(ENVIRONMENT_PREFIX)
        if not prefix and name and name != "CONFIG" and not _SERVICE_LINK.fullmatch(name):
            settings[name.lower()] = _convert(name.lower(), value, key)
    return settings


def _convert(name: str, value: Any, source: str) -> Any:
    """A text, or a TOML value, as the setting's type: that of its default."""
    setting = _FIELDS.get(name.replace("-", "_"))
    if setting is None:
        raise ConfigError(f"{source}: there is no setting {name!r}")
    kind, words = type(setting.default), setting.metadata["words"]
    try:
        if isinstance(value, str) and value.lower() in words:
            return words[value.lower()]
        if kind is bool:
            return {"true": True, "false": False}[str(value).lower()]
        if kind is tuple:
            parts = value.split(",") if isinstance(value, str) else value
            return tuple(str(part).strip() for part in parts)
        if isinstance(value, kind):
            return value
        if isinstance(value, str) or (kind is float and type(value) is int):
            return kind(value)
    except (ValueError, KeyError, TypeError):
        pass
    wanted = " or ".join((_KINDS[kind], *words))
    raise ConfigError(f"{source}: {name} cannot be {value!r}, it is {wanted}")


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and int(port) < 65536


def _require(name: str, holds: object, wanted: str) -> None:
    if not holds:
        raise ConfigError(f"--{name} must be {wanted}")


_KINDS = {str: "a text", int: "an integer", float: "a number", bool: "true or false", tuple: "a list"}
_FIELDS: Mapping[str, Any] = {setting.name: setting for setting in dataclasses.fields(ExecutorConfig)}
