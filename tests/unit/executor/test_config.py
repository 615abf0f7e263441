from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from executor.config import ExecutorConfig, load_config
from lorafleet.doors.settings import ConfigError
from lorafleet.tls.files import Tls

NEEDED = ["--model", "m", "--store", "s"]


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "executor.toml"
    file.write_text('model = "m"\nstore = "s"\nmax-loras = 2\nmax_seats = 3\nblock-size = 4\n')
    environment = {"LORAFLEET_EXECUTOR_MAX_SEATS": "5", "LORAFLEET_EXECUTOR_BLOCK_SIZE": "6"}
    config = load_config(["--config", str(file), "--block-size", "7"], environment)
    assert (config.max_loras, config.max_seats, config.block_size, config.num_kv_blocks) == (2, 5, 7, 0)


def test_every_kind_of_value(tmp_path: Path) -> None:
    file = tmp_path / "executor.toml"
    file.write_text('lora_modules = ["q_proj", "lm_head"]\nprefix_cache = false\ndrain_timeout = 5\n')
    config = load_config([*NEEDED, "--config", str(file)], {})
    assert (config.lora_modules, config.prefix_cache, config.drain_timeout) == (
        ("q_proj", "lm_head"),
        False,
        5.0,
    )
    config = load_config([*NEEDED, "--lora-modules", "q_proj, k_proj", "--prefix-cache", "false"], {})
    assert (config.lora_modules, config.prefix_cache) == (("q_proj", "k_proj"), False)


@pytest.mark.parametrize(
    ("arguments", "environment", "text"),
    [
        ([], {}, "--model"),
        (["--model", "m"], {}, "--store"),
        ([*NEEDED, "--seats", "3"], {}, "--seats"),
        ([*NEEDED, "--max-seats", "x"], {}, "--max-seats"),
        ([*NEEDED, "--max-seats", "0"], {}, "--max-seats must be above 0"),
        ([*NEEDED, "--max-seats", "9", "--max-batched-tokens", "8"], {}, "at least max-seats"),
        ([*NEEDED, "--listen", "50061"], {}, "--listen must be host:port"),
        ([*NEEDED, "--tls-cert-file", "c"], {}, "--tls-cert-file and --tls-key-file go together"),
        ([*NEEDED, "--tls-client-ca-file", "c"], {}, "--tls-client-ca-file must be with --tls-cert-file"),
        ([*NEEDED, "--health-port", "-2"], {}, "--health-port must be"),
        (
            [*NEEDED, "--listen", "0.0.0.0:1", "--tls-cert-file", "c", "--tls-key-file", "k"],
            {},
            "set --tls-client-ca-file ",
        ),
        ([*NEEDED, "--max-step-ms", "-2"], {}, "--max-step-ms must be -1, or at least 0"),
        ([*NEEDED, "--captured-rows", "2048"], {}, "--captured-rows must be 512 to 1024"),
        ([*NEEDED, "--lora-modules", "q_proj,expert"], {}, "expert"),
        ([*NEEDED, "--expert-parallel", "true", "--fully-sharded-loras", "true"], {}, "--expert-parallel"),
        ([*NEEDED, "--max-full-heads", "-1"], {}, "--max-full-heads must be at least 0"),
        (
            [*NEEDED, "--max-full-heads", "1", "--tensor-parallel-size", "2"],
            {},
            "--max-full-heads must be 0 with --tensor-parallel-size above 1",
        ),
        ([*NEEDED, "--prefix-cache", "maybe"], {}, "true or false"),
        ([*NEEDED, "--config", "/nowhere.toml"], {}, "/nowhere.toml cannot be read"),
        (NEEDED, {"LORAFLEET_EXECUTOR_SEATS": "3"}, "LORAFLEET_EXECUTOR_SEATS: there is no setting"),
        (NEEDED, {"LORAFLEET_EXECUTOR_MAX_SEATS": "1.5"}, "LORAFLEET_EXECUTOR_MAX_SEATS"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    arguments: list[str], environment: dict[str, str], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config(arguments, environment)


def test_a_file_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "executor.toml"
    file.write_text("a = " + "[" * 100_000)
    with pytest.raises(ConfigError, match=r"executor\.toml cannot be read"):
        load_config([*NEEDED, "--config", str(file)], {})


@pytest.mark.parametrize(
    ("device", "ranks", "given", "ahead"),
    [
        ("cpu", 1, "auto", False),
        ("cpu", 1, "true", True),
        ("cuda", 1, "auto", True),
        ("cuda:1", 1, "false", False),
        ("cuda", 2, "auto", False),
        ("cuda", 2, "true", True),
        ("cpu", 1, "maybe", None),
    ],
)
def test_steps_are_planned_ahead_for_one_rank_on_a_gpu(
    device: str, ranks: int, given: str, ahead: bool | None
) -> None:
    flags = ["--device", device, "--tensor-parallel-size", str(ranks), "--async-scheduling", given]
    if ahead is None:
        with pytest.raises(ConfigError, match="--async-scheduling must be one of auto"):
            load_config([*NEEDED, *flags], {})
    else:
        assert load_config([*NEEDED, *flags], {}).schedules_ahead is ahead


@pytest.mark.parametrize(
    ("device", "given", "processes"),
    [
        ("cpu", "-1", 0),
        ("cuda", "-1", 3),
        ("cuda:1", "-1", 3),
        ("cuda", "0", 0),
        ("cpu", "2", 2),
        ("cpu", "5", 3),
    ],
)
def test_each_loader_thread_has_a_process_on_a_gpu(device: str, given: str, processes: int) -> None:
    flags = ["--device", device, "--loader-threads", "3", "--loader-processes", given]
    assert load_config([*NEEDED, *flags], {}).num_loader_processes == processes
    with pytest.raises(ConfigError, match="--loader-processes must be at least -1"):
        load_config([*NEEDED, *flags, "--loader-processes", "-2"], {})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fp8_slots_hold_every_module_but_not_shards_of_adapters(device: str) -> None:
    flags = ["--lora-dtype", "fp8", "--lora-modules", "q_proj,experts,embed_tokens", "--device", device]
    assert load_config([*NEEDED, *flags, "--expert-parallel", "true"], {}).lora_dtype == "fp8"
    with pytest.raises(ConfigError, match="--lora-dtype must be auto with --fully-sharded-loras"):
        load_config([*NEEDED, *flags, "--fully-sharded-loras", "true"], {})


def test_expert_parallelism_is_refused_with_sharded_adapters_only() -> None:
    ranks = ["--tensor-parallel-size", "2"]
    shared, sharded = ["--expert-parallel", "true"], ["--fully-sharded-loras", "true"]
    for flags in (shared, sharded):
        load_config([*NEEDED, *ranks, *flags], {})
    with pytest.raises(ConfigError, match="--fully-sharded-loras must be false with --expert-parallel"):
        load_config([*NEEDED, *ranks, *shared, *sharded], {})


def test_a_gpu_each_for_several_ranks() -> None:
    with pytest.raises(ConfigError, match="--device must be cpu or cuda with --tensor-parallel-size"):
        load_config([*NEEDED, "--device", "cuda:1", "--tensor-parallel-size", "2"], {})


def test_unknown_keys_of_a_file_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "executor.toml"
    file.write_text("seats = 3\n")
    with pytest.raises(ConfigError, match=r"executor\.toml: there is no setting 'seats'"):
        load_config([*NEEDED, "--config", str(file)], {})


def test_service_links_of_kubernetes_are_no_settings() -> None:
    links = {
        "LORAFLEET_EXECUTOR_SERVICE_HOST": "10.0.0.1",
        "LORAFLEET_EXECUTOR_SERVICE_PORT_GRPC": "50061",
        "LORAFLEET_EXECUTOR_PORT_50061_TCP_ADDR": "10.0.0.1",
        "LORAFLEET_EXECUTOR_PORT": "tcp://10.0.0.1:50061",
    }
    assert load_config(NEEDED, links) == load_config(NEEDED, {})


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        load_config(["--help"], {})
    assert end.value.code == 0
    text = capsys.readouterr().out
    for name in ("--listen", "--max-loras", "--host-memory-bytes", "--drain-timeout", "--config"):
        assert name in text
    assert "[127.0.0.1:50061]" in text


def test_a_config_does_not_change() -> None:
    config = ExecutorConfig(model="m", store="s")
    with pytest.raises(FrozenInstanceError):
        config.model = "other"  # type: ignore[misc]


def test_what_the_device_decides() -> None:
    cpu = ExecutorConfig(model="m", store="s")
    gpu = ExecutorConfig(model="m", store="s", device="cuda", max_seats=256)
    assert (cpu.model_dtype, cpu.step_tokens, cpu.schedules_ahead) == ("float32", 512, False)
    assert (gpu.model_dtype, gpu.step_tokens, gpu.schedules_ahead) == ("bfloat16", 8192, True)
    assert ExecutorConfig(model="m", store="s", max_seats=600).step_tokens == 600
    given = ExecutorConfig(model="m", store="s", device="cuda:1", dtype="float16", max_batched_tokens=100)
    assert (given.model_dtype, given.step_tokens) == ("float16", 100)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cpu:0"])
def test_other_devices_are_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="--device"):
        ExecutorConfig(model="m", store="s", device=device)


def test_beyond_loopback_there_is_mutual_tls_or_insecure_says_that_there_is_none() -> None:
    listen = [*NEEDED, "--listen", "0.0.0.0:1"]
    files = ["--tls-cert-file", "c", "--tls-key-file", "k", "--tls-client-ca-file", "ca"]
    assert load_config([*listen, *files], {}).tls == Tls(ca="ca", cert="c", key="k")
    assert "set --tls-cert-file" in load_config([*listen, "--insecure"], {}).open_door
