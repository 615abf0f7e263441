"""Tries a pushed chat template on short conversations, so that none is found broken later."""

from collections.abc import Mapping, Sequence

from adapter_store import InvalidAdapter, PushWarning
from adapter_store.peft.source import printable
from adapter_store.peft.tokenizer import PushedTemplate
from scheduler.text.chat import NO_TOKENS, ChatTemplates, CostlyTemplate
from scheduler.text.template import InvalidTemplate, RefusedConversation, TemplateFailed

_SYSTEM = {"role": "system", "content": "Answer in one word."}
_USER, _ANSWER = {"role": "user", "content": "Ping?"}, {"role": "assistant", "content": "Pong."}
# What people send. Many templates take no system message, and say so.
_CONVERSATIONS: Mapping[str, Sequence[Mapping[str, str]]] = {
    "a message": [_USER],
    "a system message and a message": [_SYSTEM, _USER],
    "a second message": [_USER, _ANSWER, _USER],
    "a system message and a second message": [_SYSTEM, _USER, _ANSWER, _USER],
}


async def try_template(
    templates: ChatTemplates,
    template: PushedTemplate,
    tokens: Mapping[str, str] = NO_TOKENS,
    *,
    tenant: str = "",
) -> list[PushWarning]:
    """Warns of conversations that fail while others do not. `tokens`: special ones of the adapter's own.
    `tenant` has the turns that it takes.

    Raises InvalidAdapter for a template that is not valid, too costly, or good for no conversation.
    """
    failures: dict[str, TemplateFailed] = {}
    for name, messages in _CONVERSATIONS.items():
        try:
            if not (await templates.render_apart(template.text, messages, tokens, tenant=tenant)).strip():
                failures[name] = TemplateFailed("the chat template writes nothing")
        except (InvalidTemplate, CostlyTemplate) as error:
            raise InvalidAdapter(f"{template.place}: {error}") from error
        except TemplateFailed as error:
            failures[name] = error
    if len(failures) == len(_CONVERSATIONS):
        first = next(iter(failures.values()))
        raise InvalidAdapter(f"{template.place}: fails for every conversation that was tried: {first}")
    return [
        PushWarning("TEMPLATE_FAILS", f"{template.place}: fails for {name}: {printable(str(error))}")
        for name, error in failures.items()
        if not (isinstance(error, RefusedConversation) and _SYSTEM in _CONVERSATIONS[name])
    ]
