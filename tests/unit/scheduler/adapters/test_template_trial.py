"""A pushed chat template is compiled and tried, as far as it says by itself what it takes."""

import re
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import pytest_asyncio

from adapter_store import InvalidAdapter
from adapter_store.peft.tokenizer import PushedTemplate
from scheduler.adapters.template_trial import try_template
from scheduler.text.chat import ChatTemplates
from tests.support.adapters.tokenizers import CHAT_TEMPLATE

EACH = "{% for m in messages %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('No system role') }}{% endif %}"
ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
)


@pytest_asyncio.fixture
async def templates() -> AsyncIterator[ChatTemplates]:
    with ThreadPoolExecutor(1) as pool:
        templates = ChatTemplates(None, {"eos_token": "</s>"}, pool, cpu_limit_s=0.3)
        yield templates
        await templates.close()


@pytest.mark.parametrize(
    "template",
    [
        CHAT_TEMPLATE,
        f"{NO_SYSTEM}{EACH}{{{{ m.content }}}}{{% endfor %}}",
        ALTERNATE,
        f"{EACH}{{% generation %}}{{{{ m.content + eos_token }}}}{{% endgeneration %}}{{% endfor %}}",
        "{{ messages[-1].content }}{{ strftime_now('%Y') }}",
    ],
)
async def test_a_template_may_refuse_system_messages(templates: ChatTemplates, template: str) -> None:
    assert await try_template(templates, PushedTemplate("chat_template.jinja", template)) == []


@pytest.mark.parametrize(
    ("template", "named"),
    [
        (EACH, "is not valid in line 1: Unexpected end of template"),
        (f"one\n\n{EACH}\n", "is not valid in line 3: Unexpected end of template"),
        ("{{ messages[0].content", "is not valid in line 1"),
        ("a\n{{ messages | unheard_of }}", "is not valid in line 2: No filter named 'unheard_of'"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "too much time"),
        ("{{ 'x' * 10**9 }}", "fails for every conversation that was tried"),
        ("{{ undefined.field }}", "fails for every conversation .*'undefined' is undefined"),
        ("{% include 'other.jinja' %}", "fails for every conversation"),
        ("{{ raise_exception('Send no chats') }}", "fails for every conversation .*: Send no chats"),
        ("{# nothing #}", "fails for every conversation .*writes nothing"),
    ],
)
async def test_one_that_can_never_run_is_refused(templates: ChatTemplates, template: str, named: str) -> None:
    with pytest.raises(InvalidAdapter, match=f"tokenizer_config.json: chat_template: .*{named}"):
        await try_template(templates, PushedTemplate("tokenizer_config.json: chat_template", template))


@pytest.mark.parametrize(
    ("template", "failing"),
    [
        (
            "{{ messages[0].content }}{% if messages[2] %}{{ raise_exception('One turn') }}{% endif %}",
            ["for a second message: the chat template says: One turn"],
        ),
        (
            "{{ messages[1].content.lower() }}",
            ["for a message: the chat template fails: list object has no element 1"],
        ),
        (
            "{{ messages[0].content }}{% if messages[0].role == 'system' %}{{ nobody.name }}{% endif %}",
            [
                "for a system message and a message: .*'nobody' is undefined",
                "for a system message and a second message: .*'nobody' is undefined",
            ],
        ),
    ],
)
async def test_one_that_fails_for_some_is_warned_of(
    templates: ChatTemplates, template: str, failing: list[str]
) -> None:
    warnings = await try_template(templates, PushedTemplate("chat_template.jinja", template))
    assert {warning.reason for warning in warnings} == {"TEMPLATE_FAILS"}
    for warning, text in zip(warnings, failing, strict=True):
        assert re.fullmatch(f"chat_template.jinja: fails {text}", warning.message)
