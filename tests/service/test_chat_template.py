"""Chat templates against expected texts, and against transformers."""

from typing import Any

import pytest

from ottserve.service.chat_template import ChatTemplate
from ottserve.workers.api import InvalidField

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = {"role": "user", "content": 'Is 1 < 2 & "so"?'}
ANSWER = {"role": "assistant", "content": "Yes"}

TEMPLATES = {
    "chatml": CHATML,
    "special tokens": "{{ bos_token }}{% for m in messages %}{{ m.content | trim }}{{ eos_token }}{% endfor %}",
    "whitespace of blocks": "{% for m in messages %}\n  {% if m.role == 'user' %}\nU\n  {% endif %}\n{% endfor %}\nend",
    "json": "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }}",
    "break": "{% for m in messages %}{{ m.content }}{% break %}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "date": "{{ strftime_now('%Y') }}",
    "undefined": "{% if tools %}T{% endif %}{% if tools is defined %}D{% endif %}{{ nothing }}|",
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def test_the_text_of_a_chat() -> None:
    template = ChatTemplate(CHATML, TOKENS)
    assert template.render([USER], True) == (
        '<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nIs 1 < 2 & "so"?<|im_end|>\n<|im_start|>assistant\n'
    )
    assert template.render([USER, ANSWER], False).endswith("<|im_start|>assistant\nYes<|im_end|>\n")


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_the_same_text_as_transformers(name: str, add_generation_prompt: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415 - slow to import

    messages: list[dict[str, str]] = [USER, ANSWER]
    expected: Any = render_jinja_template(
        [messages], chat_template=TEMPLATES[name], add_generation_prompt=add_generation_prompt, **TOKENS
    )
    assert ChatTemplate(TEMPLATES[name], TOKENS).render(messages, add_generation_prompt) == expected[0][0]


def test_a_template_may_refuse() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidField, match="roles must alternate") as caught:
        template.render([USER, USER], True)
    assert caught.value.field == "chat.messages"


@pytest.mark.parametrize(
    "source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}"]
)
def test_a_template_is_boxed_in(source: str) -> None:
    """Neither Python's insides nor the caller's messages are within reach."""
    with pytest.raises(InvalidField):
        ChatTemplate(source, {}).render([USER], True)
