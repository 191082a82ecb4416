import json
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from runtime import generate
from runtime.dflash.decoding.generation import stream_text
from runtime.dflash.decoding.speculate import DraftSession, greedy
from runtime.dflash.folder.saved_drafter import save_published
from runtime.dflash.start.initialise import drafter_config, from_target
from runtime.errors import ConfigError
from runtime.prompts.template import ChatTemplate, TemplateChoice
from tests.runtime.tiny_llama import prompts, save_target
from tests.runtime.tiny_text import CHATML, byte_target, byte_tokenizer


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    root = tmp_path_factory.mktemp("generate")
    target = save_target(root / "target")
    network = drafter_config(target, num_layers=2, draft_block_size=4, target_layer_ids=(1, 2, 3))
    drafter = from_target(
        target, network, torch.Generator(), input_ids=torch.tensor([prompts(3)[2]])
    )
    record = {"name": str(root / "target"), "digest": target.digest}
    save_published(root / "drafter", network, drafter.state_dict(), target=record)
    return root, target, drafter


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """A tiny model gains nothing from more, and waits for them on a busy machine."""
    monkeypatch.setattr("runtime.dflash.decoding.generation.enter_thread", lambda *_: None)


def invoke(root, *more):
    arguments = ["--drafter", str(root / "drafter"), "--target", str(root / "target")]
    arguments += ["--prompt", "w5 w9", "--max-new-tokens", "12", "--device", "cpu"]
    return CliRunner().invoke(generate.main, [*arguments, *more])


def own_text(target):
    """The chat template of the tiny target puts w1, its unknown token, before each message."""
    prompt = target.tokenizer("w1 w5 w9 ")["input_ids"]
    tokens = greedy(target, prompt, 12).tokens
    return target.tokenizer.decode(tokens, skip_special_tokens=True)


def test_prints_the_targets_own_text_and_tau(workplace):
    root, target, _ = workplace
    result = invoke(root)
    assert result.exit_code == 0, result.output
    text, _, summary = result.stdout.strip().rpartition("\n")
    assert text == own_text(target)
    assert summary.startswith("[12 tokens, ")
    assert "tau " in summary
    assert result.stderr == f"loading target {root}/target\n"


def test_the_target_is_that_of_the_drafter(workplace):
    root, target, _ = workplace
    result = CliRunner().invoke(
        generate.main,
        ["--drafter", f"{root}/drafter", "--prompt", "w5 w9", "--max-new-tokens", "12"],
    )
    assert result.exit_code == 0, result.output
    assert result.stderr == f"loading target {root}/target\n"
    assert own_text(target) in result.stdout


def test_a_target_that_is_not_where_it_was(workplace, tmp_path):
    _, target, drafter = workplace
    record = {"name": str(tmp_path / "gone"), "digest": target.digest}
    save_published(tmp_path / "drafter", drafter.config, drafter.state_dict(), target=record)
    arguments = ["--drafter", f"{tmp_path}/drafter", "--prompt", "w5"]
    result = CliRunner().invoke(generate.main, arguments)
    assert result.exit_code == 1
    assert f"target '{tmp_path}/gone'" in result.stderr
    assert result.stderr.endswith("; name the drafter's with --target\n")


def test_a_drafter_of_another_target_is_reported(workplace, tmp_path):
    root, _, _ = workplace
    other = save_target(tmp_path / "other", seed=9)
    result = invoke(root, "--target", str(tmp_path / "other"), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["same_target"] is False
    assert found["text"] == own_text(other)
    _, warning = result.stderr.splitlines()
    assert warning.startswith(f"warning: the drafter in {root}/drafter was trained for target '")
    assert f"and this is '{tmp_path}/other' ({other.digest[:12]})" in warning


def test_prints_json(workplace):
    root, target, _ = workplace
    found = json.loads(invoke(root, "--json").stdout)
    assert found["same_target"] is True
    assert found["text"] == own_text(target)
    assert found["tokens"] == 12
    assert found["tau"] == pytest.approx(11 / found["target_calls"])


class BytePieces:
    """Decodes each token to one byte of a text, as byte-level tokenizers do."""

    def __init__(self, text):
        self.bytes = text.encode()

    def decode(self, tokens, **_):
        return self.bytes[: len(tokens)].decode(errors="replace")


def test_split_characters_come_whole():
    chat = ChatTemplate.of(byte_tokenizer(), TemplateChoice())
    text = "a\u00e9\u20acb"
    session = SimpleNamespace(stream=lambda *_: iter([[5], [5, 5], [5], [5, 5], [5, 2]]))
    target = SimpleNamespace(tokenizer=BytePieces(text), eos_token_ids={2})
    found = list(stream_text(session, target, chat, "hello", 9))
    assert found == [(1, "a"), (2, "\u00e9"), (1, ""), (2, "\u20ac"), (2, "b")]


@pytest.mark.parametrize(
    ("source", "prompt", "message"),
    [
        (
            "{{ raise_exception('no user') }}",
            "w5",
            "refused by the target's chat template .*no user",
        ),
        (CHATML, "w5 \udce9", "content that is not Unicode text"),
    ],
)
def test_refused_prompt(source, prompt, message):
    chat = ChatTemplate.of(byte_tokenizer(source), TemplateChoice())
    target = SimpleNamespace(eos_token_ids=frozenset({2}))
    with pytest.raises(ConfigError, match=f"cannot be asked: {message}"):
        list(stream_text(None, target, chat, prompt, 4))


def asked(monkeypatch, folder, *options):
    """The text of the prompt that is asked of a drafter's target."""
    found = []

    def stream(self, prompt_ids, _):
        found.append(self._target.tokenizer.decode(prompt_ids))
        return iter([[2]])

    monkeypatch.setattr(DraftSession, "stream", stream)
    command = ["--drafter", str(folder), "--prompt", "hi", "--device", "cpu", *options]
    result = CliRunner().invoke(generate.main, command)
    assert result.exit_code == 0, result.output
    return found[0]


def test_the_prompt_is_rendered_as_the_training_did_or_as_asked(tmp_path, monkeypatch):
    target = byte_target("{{ messages[0].content }}|{{ mode }}{{ level }}")
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    network = drafter_config(target, num_layers=1, draft_block_size=4, target_layer_ids=(1, 2, 3))
    drafter = from_target(target, network, torch.Generator(), input_ids=torch.tensor([[3, 4]]))
    record = {"name": str(tmp_path / "target"), "digest": "d"}
    folder = tmp_path / "drafter"

    def save(choice):
        more = {} if choice is None else {"template": choice.as_dict()}
        save_published(folder, network, drafter.state_dict(), target={**record, **more})

    save(None)
    assert asked(monkeypatch, folder) == "hi|"
    save(TemplateChoice("target", {"mode": "calm", "level": 1}))
    assert asked(monkeypatch, folder) == "hi|calm1"
    assert asked(monkeypatch, folder, "--template", "mode=loud") == "hi|loud1"
    assert asked(monkeypatch, folder, "--template", "level=[2, 3]") == "hi|calm[2, 3]"
    assert asked(monkeypatch, folder, "--chat-template", "plain") == "user: hi\nassistant:"
    save(TemplateChoice("mine.jinja", {}, "<{{ messages[0].content }}>"))
    assert asked(monkeypatch, folder) == "<hi>"


@pytest.mark.parametrize("setting", ["mode", "=3"])
def test_keywords_are_key_and_value(workplace, setting):
    result = invoke(workplace[0], "--template", setting)
    assert result.exit_code == 2
    assert f"--template = {setting!r}: must read KEY=VALUE" in result.stderr


def test_a_keyword_that_the_template_does_not_read(workplace):
    result = invoke(workplace[0], "--template", "enable_thinking=false")
    assert result.exit_code == 2
    assert "the target's chat template reads no such name" in result.stderr


def test_command_without_a_drafter(workplace):
    root, _, _ = workplace
    result = CliRunner().invoke(
        generate.main, ["--drafter", str(root), "--prompt", "w5", "--device", "cpu"]
    )
    assert result.exit_code == 1
    assert f"there is no drafter in {root} (no config.json)" in result.stderr
    assert (
        "name a folder of a published drafter, such as runtime.train and runtime.export write\n"
        in result.stderr
    )


@pytest.mark.parametrize("prompt", ["", " \n"])
def test_empty_prompt(workplace, prompt):
    root, _, _ = workplace
    result = invoke(root, "--prompt", prompt)
    assert result.exit_code == ConfigError.exit_code == 2
    assert result.stderr == f"Error: --prompt = {prompt!r}: must not be empty\n"


@pytest.mark.parametrize("prompt", ["caf\udce9", "half a pair: \ud83d"])
def test_a_prompt_that_is_no_utf_8(workplace, prompt):
    root, _, _ = workplace
    result = invoke(root, "--prompt", prompt)
    assert result.exit_code == 2
    assert result.stderr == f"Error: --prompt = {prompt!r}: must be UTF-8\n"
