"""Chat templates: the same prompts as transformers renders, and hostile templates that harm nobody."""

import asyncio
import itertools
import shutil
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from transformers import PreTrainedTokenizerFast

from scheduler import workers
from scheduler.errors import InvalidRequest, TooMuchHeld
from scheduler.text import template as program
from scheduler.text.chat import ChatTemplates
from scheduler.text.tokenizer import Tokenizer
from tests.support.adapters.tokenizers import CHAT_TEMPLATE, byte_level, write_folder

MESSAGES = [
    {"role": "system", "content": "Be brief & <kind>."},
    {"role": "user", "content": "你好 {{ 7 * 7 }}\n"},
]
SPECIAL = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
HONEST = [
    CHAT_TEMPLATE,
    "{{ bos_token }}{% for m in messages %}\n    {% if m.role == 'user' %}\n[{{ m['content'] | trim }}]\n"
    "    {% endif %}\n{% endfor %}\n{{ eos_token }}",
    "{{ messages | tojson }}{{ {'b': 1, 'a': '<é>'} | tojson(indent=2) }}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{{ strftime_now('%Y') }}{% if tools is not none %}tools{% endif %}{{ documents is none }}{{ missing }}",
]
HOSTILE = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(10**9) %}{{ i }}{% endfor %}",
    "{{ 'x' * 10**9 }}",
    "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
    "{{ 10 ** (10 ** 9) }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% if %}",
    "{% include '/etc/passwd' %}",
    "{{ messages.append(1) }}",
    "{{ 1 // 0 }}",
    r"{{ '\ud800' }}",
    "{{ raise_exception('roles must alternate') }}",
]


@pytest_asyncio.fixture
async def templates() -> AsyncIterator[ChatTemplates]:
    with ThreadPoolExecutor(2) as pool:
        templates = ChatTemplates(CHAT_TEMPLATE, SPECIAL, pool, cpu_limit_s=0.3)
        yield templates
        await templates.close()


@pytest.mark.parametrize("template", HONEST, ids=itertools.count())
async def test_same_prompt_as_transformers(templates: ChatTemplates, template: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level())
    oracle = PreTrainedTokenizerFast.from_pretrained(folder)
    expected = oracle.apply_chat_template(
        MESSAGES, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    assert await templates.render(MESSAGES, template) == expected
    ids = oracle.apply_chat_template(
        MESSAGES, chat_template=template, add_generation_prompt=True, return_dict=False
    )
    assert Tokenizer.from_folder(folder).encode(expected, add_special_tokens=False) == ids


async def test_the_adapter_s_template_wins(templates: ChatTemplates) -> None:
    assert await templates.render(MESSAGES, "own") == "own"
    assert (await templates.render(MESSAGES, None)).startswith("<|im_start|>system\nBe brief")


@pytest.mark.parametrize("template", HOSTILE, ids=itertools.count())
async def test_hostile_templates_end_and_the_next_one_works(templates: ChatTemplates, template: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await templates.render(MESSAGES, template)
    assert caught.value.violations[0][0] == "chat"
    assert await templates.render(MESSAGES, "fine", tenant="another") == "fine"


async def test_modules_are_found_where_this_process_finds_them_and_nothing_else_runs(
    templates: ChatTemplates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the current folder, with a name that no list of paths holds; only once the program is up."""
    folder = tmp_path / "two:parts"
    copy = folder / "scheduler" / "text"
    copy.mkdir(parents=True)
    shutil.copytree(Path(workers.__file__).parent, copy.parent / "workers")
    for package in (copy, copy.parent):
        (package / "__init__.py").touch()
    text = Path(program.__file__).read_text()
    (copy / "template.py").write_text(text.replace('{"text": render(', '{"text": "copied: " + render('))
    (folder / "sitecustomize.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert await templates.render(MESSAGES, "own") == "copied: own"
    assert not (folder / "ran").exists()


async def test_the_loop_runs_on_while_a_template_does(templates: ChatTemplates) -> None:
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            await asyncio.sleep(0)
            beats += 1

    heart = asyncio.create_task(beat())
    with pytest.raises(InvalidRequest, match="too much time or memory"):
        await templates.render(MESSAGES, HOSTILE[0])
    heart.cancel()
    assert beats > 10


async def test_a_cancelled_rendering_leaves_no_answer_for_the_next(templates: ChatTemplates) -> None:
    task = asyncio.create_task(templates.render(MESSAGES, HOSTILE[0]))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.gather(*(templates.render(MESSAGES, f"mine {i}") for i in range(5))) == [
        f"mine {i}" for i in range(5)
    ]


async def test_a_tenant_s_bombs_hold_up_no_other_tenant(templates: ChatTemplates) -> None:
    bombs = [asyncio.create_task(templates.render(MESSAGES, HOSTILE[0], tenant="bomber")) for _ in range(40)]
    for number in range(20):
        assert await templates.render(MESSAGES, f"mine {number}", tenant="honest") == f"mine {number}"
    ended = sum(bomb.done() for bomb in bombs)
    for bomb in bombs:
        bomb.cancel()
    ends = await asyncio.gather(*bombs, return_exceptions=True)
    assert ended <= 3, ends


async def test_a_tenant_has_so_many_chats_at_the_workers_at_once() -> None:
    with ThreadPoolExecutor(1) as pool:
        templates = ChatTemplates(None, SPECIAL, pool, max_calls=lambda tenant: 2)
        calls = [asyncio.create_task(templates.render(MESSAGES, "x", tenant="acme")) for _ in range(3)]
        assert await templates.render(MESSAGES, "y", tenant="rival") == "y"
        ends = await asyncio.gather(*calls, return_exceptions=True)
        await templates.close()
    (refused,) = [end for end in ends if end != "x"]
    assert isinstance(refused, TooMuchHeld)
    assert (refused.reason, refused.code) == ("TOO_MANY_TEMPLATES", grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert refused.retry_after_s is not None and refused.retry_after_s >= 0.1


async def test_what_the_template_says_reaches_the_client(templates: ChatTemplates) -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        await templates.render(MESSAGES, HOSTILE[-1])


async def test_a_model_without_a_template_says_so() -> None:
    with ThreadPoolExecutor(1) as pool:
        templates = ChatTemplates(None, SPECIAL, pool)
        with pytest.raises(InvalidRequest, match="no chat template"):
            await templates.render(MESSAGES, None)
