"""Settings of the executor, and what fits together of them."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from adapter_store.module_names import DENSE_PROJECTIONS, FUSED
from lorafleet.doors.logs import FORMATS, LEVELS
from lorafleet.doors.options import MAX_CONNECTIONS
from lorafleet.doors.settings import ConfigError, load, setting
from lorafleet.tls.files import Tls
from lorafleet.tls.listening import unmatched_pair, unmet_beyond_loopback

MODULE_KINDS = (
    *DENSE_PROJECTIONS,
    *FUSED,
    "c_fc",
    "c_proj",
    "embed_tokens",
    "lm_head",
    "experts",
    "router",
    "shared_expert_gate",
)
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_LORA_DTYPES = ("auto", "fp8", "fp8-e5m2")
AUTO_SLOTS = -1  # of max_loras: executor/slot_count.py chooses


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig:
    """Raises ConfigError naming the setting that cannot be used."""

    model: str = setting("", "Folder of the base model: config.json and safetensors. Required.")
    store: str = setting(
        "", "Adapter store: disk:/folder, a bare path, redis://... or rediss://.... Required."
    )
    allow_volatile: bool = setting(
        False, "Take a Redis that may lose in a crash what it acknowledged: true or false."
    )
    cache_dir: str = setting("", "Folder that keeps adapters read from the store; empty: none are kept.")
    cache_bytes: int = setting(64 << 30, "Bytes that the cache folder may take.")
    listen: str = setting("127.0.0.1:50061", "host:port for gRPC; port 0 takes any free one.")
    metrics_host: str = setting("", "Address for /metrics; empty: the one that gRPC is served on.")
    max_connections: int = setting(
        MAX_CONNECTIONS, "Connections in all; more are closed as soon as they are made."
    )
    metrics_port: int = setting(9401, "HTTP port of /metrics; 0 takes any free one, -1 is off.")
    health_port: int = setting(
        -1,
        "Port on the same host that serves grpc.health.v1 in clear and nothing else, for probes that speak "
        "no TLS; 0 takes any free one, -1 is off.",
    )
    tls_cert_file: str = setting(
        "", "Certificate to serve TLS with, in PEM form; TLS files are read again when they change."
    )
    tls_key_file: str = setting("", "Its key.")
    tls_client_ca_file: str = setting(
        "",
        "CA of which every scheduler must have a certificate: mutual TLS. Who has one may run everything "
        "here: let it sign for nobody else.",
    )
    insecure: bool = setting(
        False,
        "Listen beyond loopback without mutual TLS, where a proxy or mesh does it instead: true or false.",
    )
    load_format: str = setting(
        "safetensors", "safetensors, or dummy: random weights, for speed runs without a checkpoint."
    )
    device: str = setting("cpu", "Where the model runs: cpu, cuda (each rank its own GPU) or cuda:N.")
    dtype: str = setting(
        "auto",
        "Of the model and the slots: float32, bfloat16, float16, or auto: bfloat16 on a GPU, else float32.",
    )
    gpu_memory_utilization: float = setting(
        0.9, "Share of a GPU's memory for this executor; what nothing else takes becomes KV blocks.", "SHARE"
    )
    cuda_graphs: bool = setting(True, "Capture small steps before the executor is ready: true or false.")
    compile_processes: int = setting(
        0,
        "Processes that compile kernels before a first start on a GPU; 1: the executor alone; 0: half of the "
        "CPUs, at most 8.",
    )
    tensor_parallel_size: int = setting(
        1, "Ranks that share the model, each a process with a device of its own."
    )
    expert_parallel: bool = setting(
        False, "Ranks share a layer's experts out instead of cutting each of them; true or false."
    )
    fully_sharded_loras: bool = setting(
        False, "Cut both factors of an adapter over the ranks: smaller slots, more exchange; true or false."
    )
    torch_threads: int = setting(0, "CPU threads for one operation on each rank; 0 leaves it to torch.")
    max_loras: int = setting(
        8,
        "Slots: adapters that can be in one step. auto: one for each version in the store (64 at least, 512 "
        "at most), as far as a GPU's memory allows beside KV blocks of 1024 tokens for each seat; on the CPU "
        "at most 64, in host-memory-bytes.",
        words={"auto": AUTO_SLOTS},
    )
    max_lora_rank: int = setting(64, "Highest rank a slot holds; every slot takes memory for it.")
    lora_dtype: str = setting(
        "auto",
        "Of the slots: auto is the model's; fp8 (e4m3) and fp8-e5m2 take half of bfloat16's memory, with an "
        "error that is logged for every adapter.",
    )
    lora_modules: tuple[str, ...] = setting(
        DENSE_PROJECTIONS, f"Module kinds a slot holds, with commas, out of {', '.join(MODULE_KINDS)}."
    )
    max_full_heads: int = setting(
        0,
        "Places for fully trained lm_head and embed_tokens (modules_to_save), each as large as the base's; "
        "an adapter with both takes two. One rank only.",
    )
    max_seats: int = setting(64, "Sequences that are accepted at once.")
    max_batched_tokens: int = setting(
        0,
        "Tokens in one step; longer prompts take several. At least max-seats; 0: 512, or 8192 on a GPU, or "
        "max-seats if that is more.",
    )
    max_step_ms: float = setting(
        -1.0,
        "Milliseconds that a step should take at most while sequences decode: its prompts get as many tokens "
        "as such steps had time for, and 32 at least. Up to 12 times as long while a crowd of prompts waits. "
        "-1: 2.5 times a step that only decodes, as measured; 0: no bound.",
        "MS",
    )
    captured_rows: int = setting(
        1024, "Rows of the largest captured step with prompts, 512 to 1024; longer ones are launched slowly."
    )
    async_scheduling: str = setting(
        "auto",
        "Plan a step while the one before it runs: true, false or auto, which is true for one rank on a GPU. "
        "On the CPU nothing would run beside the planning; over several ranks set it to true "
        "on GPUs: the answers are the same, and come faster.",
    )
    num_kv_blocks: int = setting(
        0, "KV blocks shared by all sequences; 0: 1024 on the CPU, what the memory allows on a GPU."
    )
    block_size: int = setting(16, "Tokens in a KV block, and the grain of the prefix cache.")
    prefix_cache: bool = setting(
        True, "Share KV blocks of equal prefixes of one adapter and salt: true or false."
    )
    max_model_len: int = setting(
        0, "Longest prompt plus answer; 0 is what the model and the KV blocks allow."
    )
    host_memory_bytes: int = setting(
        4 << 30, "Bytes of host memory for adapters on their way to a slot, over all ranks."
    )
    page_ins_per_step: int = setting(
        4, "Adapters copied into slots in one step at most; all sequences of the step wait for them."
    )
    loader_threads: int = setting(4, "Threads that read adapters from the store.")
    loader_processes: int = setting(
        -1,
        "Processes that lay adapters out for as many loader threads, which then leave the interpreter to the "
        "engine; each takes 0.2 GB and the bytes of an adapter. 0: none; -1: one a loader thread on a GPU, "
        "none on the CPU. Several ranks have none.",
    )
    load_timeout: float = setting(60.0, "Seconds after which a load from the store is given up as retryable.")
    adapter_aging: float = setting(
        2.0, "Seconds until a waiting adapter stops others from joining busy slots."
    )
    outbox_messages: int = setting(1024, "Events that may wait for a slow scheduler before its time runs.")
    keepalive_time: float = setting(
        20.0,
        "Seconds of silence after which a scheduler is pinged; one that does not answer for as long again is "
        "gone, and what it sent is cancelled.",
    )
    outbox_timeout: float = setting(10.0, "Seconds that an outbox may stay full before its stream is closed.")
    step_timeout: float = setting(
        60.0,
        "Seconds without progress in a step until liveness fails; with several ranks the executor then ends.",
    )
    start_timeout: float = setting(120.0, "Seconds that another rank may take longer to start than this one.")
    drain_timeout: float = setting(60.0, "Seconds that accepted work has to finish after SIGTERM.")
    step_trace: str = setting(
        "", "File for one JSON line a step: its rows, its times on host and device, what waits. Empty: none."
    )
    log_format: str = setting("text", f"One of {', '.join(FORMATS)}.")
    log_level: str = setting("info", f"One of {', '.join(LEVELS)}.")

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
        _require("log-format", self.log_format in FORMATS, " or ".join(FORMATS))
        _require("log-level", self.log_level in LEVELS, f"one of {LEVELS}")

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
    about = "Run one base model and page LoRA adapters into it, for a LoraFleet scheduler."
    return load(ExecutorConfig, "executor", about, arguments, environment)


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and int(port) < 65536


def _require(name: str, holds: object, wanted: str) -> None:
    if not holds:
        raise ConfigError(f"--{name} must be {wanted}")
