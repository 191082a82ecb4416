import json

import pytest

from runtime.errors import ConfigError
from runtime.prompts.conversation import Skipped
from runtime.prompts.template import ChatTemplate, TemplateChoice
from tests.runtime.prompts.test_tokenisation import with_bos
from tests.runtime.tiny_text import CHATML, STRICT, TAGGED, byte_tokenizer, talk

U, A = "user", "assistant"
SWITCHED = (
    "{% for m in messages %}{{ m.role }}|{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}assistant|{% if enable_thinking is defined and "
    "not enable_thinking %}<no>{% endif %}{{ effort }}{% endif %}"
)
PARTS = (
    "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
    "{% endif %}{% endfor %}</s>{% endfor %}"
)


def of(template, choice="target", **keywords):
    return ChatTemplate.of(byte_tokenizer(template), TemplateChoice.read(choice, keywords))


def test_the_targets_own_template_renders():
    assert (
        of(CHATML).render(talk((U, "hi")), answer_next=True) == "<s><user>\nhi</s>\n<assistant>\n"
    )
    assert of(CHATML).bos == (), "the template writes it"


def test_keywords_reach_the_template():
    hello = talk((U, "hi"))
    assert of(SWITCHED).render(hello, answer_next=True) == "user|hi;assistant|"
    found = of(SWITCHED, enable_thinking=False, effort="high").render(hello, answer_next=True)
    assert found == "user|hi;assistant|<no>high"


@pytest.mark.parametrize(
    ("keyword", "message"),
    [
        ("enable_thinkin", "reads no such name; did you mean 'enable_thinking'"),
        ("colour", "the target's chat template reads no such name$"),
        ("messages", "is set with each conversation"),
        ("add_generation_prompt", "is set with each conversation"),
        ("chat_template", "is set with each conversation"),
    ],
)
def test_keywords_that_would_do_nothing_or_harm_are_refused(keyword, message):
    with pytest.raises(ConfigError, match=message) as caught:
        of(SWITCHED, **{keyword: False})
    assert caught.value.field == f"data.template.{keyword}"


def test_keywords_within_generation_tags_are_known():
    assert of(
        TAGGED.replace("{{ m.content }}</s>", "{{ mood }}</s>"), mood="calm"
    ).has_generation_tags


@pytest.mark.parametrize("template", [None, "", {}, {"tool_use": CHATML}])
def test_a_missing_template_is_refused(template):
    with pytest.raises(ConfigError, match=r'none default|set it to "plain"') as caught:
        of(template)
    assert caught.value.field == "data.chat_template"


def test_the_default_of_named_templates_is_taken():
    assert of({"tool_use": STRICT, "default": CHATML}).source == CHATML


def test_the_plain_form_keeps_its_lines_and_has_the_tokenizers_bos():
    messages = talk((U, "hi"), (A, "yes"), (U, "no"))
    for template in (None, CHATML):
        text = of(template, "plain").render(messages, answer_next=True)
        assert text == "user: hi\nassistant: yes</s>\nuser: no\nassistant:"
    tokenizer = with_bos(byte_tokenizer(None))
    assert ChatTemplate.of(tokenizer, TemplateChoice("plain")).bos == (1,)
    assert of(None, "plain").bos == ()


def test_a_template_from_a_file(tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    template = of(CHATML, str(path))
    assert template.render(talk((U, "hi"))) == "[hi]"
    assert template.name == "chat template mine.jinja"
    with pytest.raises(ConfigError, match="must be target, plain or a readable jinja file"):
        of(CHATML, str(tmp_path / "none.jinja"))
    path.write_text("{% for m in messages %}")
    with pytest.raises(ConfigError, match="must be jinja \\(line 1: "):
        of(CHATML, str(path))


def test_content_goes_as_parts_to_a_template_that_reads_nothing_else():
    assert of(PARTS).render(talk((U, "hi"), (A, "yes"))) == "hi</s>yes</s>"


@pytest.mark.parametrize(
    "template",
    [
        STRICT,
        "{{ messages[7].content }}",
        "{{ 1 // 0 }}",
        "{{ messages.content + 1 }}",
        "{{ messages[0]['content'] | int('x') + none }}",
        "{{ ''.join(3) }}",
        "{% generation %}{{ raise_exception('no') }}{% endgeneration %}",
        "{{ messages.__class__.__mro__ }}",
    ],
)
def test_whatever_a_template_raises_is_one_reason(template):
    with pytest.raises(Skipped) as caught:
        of(template).render(talk((U, "hi")))
    assert caught.value.reason == "refused by the target's chat template"


def test_reasoning_reaches_a_template_under_each_name():
    answer = {"role": A, "content": "yes", "reasoning": "so"}
    for key in ("reasoning_content", "reasoning", "thinking"):
        template = of("{% for m in messages %}{{ m." + key + " }}|{{ m.content }};{% endfor %}")
        assert template.render([*talk((U, "hi")), answer]) == "|hi;so|yes;"


def test_a_choice_is_plain_data_and_comes_back(tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text("{{ messages }}{{ a }}")
    for choice in (
        TemplateChoice.read("target", {"a": [1, "b"]}),
        TemplateChoice.read("plain", {}),
        TemplateChoice.read(str(path), {"a": True}),
    ):
        assert TemplateChoice.from_dict(json.loads(json.dumps(choice.as_dict()))) == choice
    saved = TemplateChoice.read(str(path), {"a": 1}).with_keywords({"a": 2}).as_dict()
    assert saved == {
        "chat_template": "mine.jinja",
        "keywords": {"a": 2},
        "text": "{{ messages }}{{ a }}",
    }


@pytest.mark.parametrize(
    "saved",
    [
        {},
        [],
        "target",
        {"chat_template": "plain", "keywords": 3},
        {"chat_template": "mine.jinja", "keywords": {}},
        {"chat_template": 5, "keywords": {}},
        {"chat_template": "mine.jinja", "keywords": {}, "text": 5},
    ],
)
def test_a_choice_that_is_none_is_refused(saved):
    with pytest.raises(ConfigError, match=r"must be as runtime\.prepare writes it"):
        TemplateChoice.from_dict(saved)
