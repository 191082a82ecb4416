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


def test_refusals_of_a_template_say_what_stands_there_and_what_helps(tmp_path):
    for template, said in (
        (
            None,
            'the target has no chat template; set it to "plain" for the plain form, or to a jinja '
            "file",
        ),
        (
            {"tool_use": CHATML, "rag": CHATML},
            "the target's templates are named rag, tool_use and none default; write the one to use "
            "to a file and name that",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            of(template)
        assert str(caught.value) == f"data.chat_template = 'target': {said}"
    with pytest.raises(
        ConfigError, match=r"^data\.chat_template = 'target': must be jinja \(line 2: "
    ):
        of("a\n{% if %}")
    path = tmp_path / "latin.jinja"
    path.write_bytes(b"na\xefve")
    with pytest.raises(ConfigError) as caught:
        of(CHATML, str(path))
    assert str(caught.value).startswith(
        f"data.chat_template = {str(path)!r}: must be target, plain or a readable jinja file ("
    )


def test_a_keyword_that_is_refused_is_named_with_its_value():
    with pytest.raises(ConfigError) as caught:
        of(SWITCHED, effort="high", enabled_thinking=True)
    assert str(caught.value) == (
        "data.template.enabled_thinking = True: the target's chat template reads no such name; "
        "did you mean 'enable_thinking'?"
    )
    with pytest.raises(ConfigError) as caught:
        of(SWITCHED, "plain", zzz=1)
    assert str(caught.value) == "data.template.zzz = 1: the plain form reads no such name"


def test_every_refusal_of_a_rendering_has_the_templates_own_words():
    with pytest.raises(Skipped) as caught:
        of(STRICT).render(talk((U, "hi")))
    assert caught.value.detail == "TemplateError: only calm conversations"


def test_a_prompt_ends_where_an_answer_begins_and_only_when_asked():
    template, hello = of(CHATML), talk((U, "hi"))
    assert template.render(hello) == "<s><user>\nhi</s>\n"
    assert template.render(hello, answer_next=False) == template.render(hello)
    assert template.render(hello, answer_next=True) == template.render(hello) + "<assistant>\n"
    tagged = of(TAGGED).render_tagged(hello, answer_next=True)
    assert tagged == ("<|u|>user:hi<|u|>assistant:", [])
    assert of(TAGGED).render_tagged(hello) == ("<|u|>user:hi", [])


def test_the_characters_within_generation_tags_are_told_of_each_answer():
    template = of(TAGGED)
    text, spans = template.render_tagged(talk((U, "a"), (A, "yes"), (U, "b"), (A, "no")))
    assert [text[start:stop] for start, stop in spans] == ["yes</s>", "no</s>"]
    assert template.has_generation_tags
    plain = of(CHATML)
    assert not plain.has_generation_tags
    assert plain.render_tagged(talk((U, "a"), (A, "b")))[1] == []


@pytest.mark.parametrize(
    "tag", ["{% generation %}", "{%generation%}", "{%-  generation -%}", "{%+ generation %}"]
)
def test_generation_tags_in_any_hand(tag):
    assert of(f"{{{{ messages }}}}{tag}x{{% endgeneration %}}").has_generation_tags
    assert not of("{{ messages }}{# generation #}{{ add_generation_prompt }}").has_generation_tags


def test_loops_may_be_left_in_a_template():
    text = "{% for m in messages %}{{ m.content }}{% break %}{% endfor %}"
    assert of(text).render(talk((U, "a"), (A, "b"))) == "a"


def test_content_is_parts_only_where_the_text_itself_is_not_shown():
    both = "{% if messages[0].content is string %}{{ messages[0].content }}{% else %}x{% endif %}"
    assert not of(both).reads_parts
    assert of(both).render(talk((U, "hi"))) == "hi"
    assert of(PARTS).reads_parts
    # One that shows users in neither way is asked with text.
    assert not of("{{ messages | length }}").reads_parts


def test_reasoning_is_given_only_where_there_is_some():
    template = of(
        "{{ messages[0].keys() | sort | join(',') }}|{{ messages[1].keys() | sort | join(',') }}"
    )
    answer = {"role": A, "content": "yes", "reasoning": "so", "weight": 0}
    assert template.render([*talk((U, "hi")), answer]) == (
        "content,role|content,reasoning,reasoning_content,role,thinking"
    )


def test_the_special_tokens_of_the_tokenizer_reach_a_template_and_keywords_come_over_them():
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    assert of(template).render(talk((U, "hi"))) == "<s>hi</s>"
    assert of(template, eos_token="!").render(talk((U, "hi"))) == "<s>hi!"


def test_a_choice_keeps_its_own_copy_of_the_keywords():
    keywords = {"a": 1}
    choice = TemplateChoice.read("plain", keywords)
    keywords["a"] = 2
    assert choice.as_dict() == {"chat_template": "plain", "keywords": {"a": 1}}
    more = choice.with_keywords({"b": 3})
    assert more.as_dict()["keywords"] == {"a": 1, "b": 3}
    assert choice.as_dict()["keywords"] == {"a": 1}
    assert TemplateChoice().as_dict() == {"chat_template": "target", "keywords": {}}
    assert TemplateChoice().with_keywords({"b": 3}).keywords == {"b": 3}


@pytest.mark.parametrize(
    "saved",
    [
        {"chat_template": "plain", "keywords": {}, "more": 1},
        {"chat_template": "plain"},
        {"keywords": {}},
        {"chat_template": "mine.jinja", "keywords": {}, "text": None},
    ],
)
def test_what_is_almost_a_choice_is_refused_and_named(saved):
    with pytest.raises(ConfigError) as caught:
        TemplateChoice.from_dict(saved)
    assert caught.value.field == "template"
    assert caught.value.value == saved


def test_a_file_named_as_the_targets_own_is_taken_for_what_it_is():
    saved = {"chat_template": "plain", "keywords": {}, "text": "{{ messages }}"}
    choice = TemplateChoice.from_dict(saved)
    assert ChatTemplate.of(byte_tokenizer(CHATML), choice).source == "{{ messages }}"
