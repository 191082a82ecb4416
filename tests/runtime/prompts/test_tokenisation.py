import pytest
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from tokenizers.processors import ByteLevel, TemplateProcessing
from transformers import PreTrainedTokenizerFast

from runtime.prompts.tokenisation import bos_tokens, common_length, encode, token_ids
from tests.runtime.tiny_text import byte_tokenizer


def words():
    model = Tokenizer(WordLevel({"<unk>": 0, "<s>": 1, "one": 2, "two": 3}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", bos_token="<s>")


def with_bos(tokenizer, template="<s> $A"):
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=template, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


class NoOffsets:
    """A tokenizer that reports ids alone."""

    is_fast = False

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.special_tokens_map = tokenizer.special_tokens_map

    def __call__(self, text, **options):
        return {"input_ids": self.tokenizer(text, **options)["input_ids"]}


@pytest.mark.parametrize("wrap", [lambda tokenizer: tokenizer, NoOffsets])
def test_a_token_is_found_by_the_character_at_which_it_begins(wrap):
    tokenizer = byte_tokenizer(merges=[("b", "\u0120"), ("\u0120", "c"), ("\u0120c", "d")])
    tokens = encode(wrap(tokenizer), "ab cd")
    assert tokenizer.convert_ids_to_tokens(tokens.ids) == ["a", "b\u0120", "c", "d"]
    assert [tokens.index(i) for i in range(6)] == [0, 1, 2, 2, 3, 4]


def test_characters_of_several_tokens():
    tokens = encode(byte_tokenizer(), "a\u20acb")
    assert len(tokens.ids) == 5
    assert [tokens.index(i) for i in range(4)] == [0, 1, 4, 5]


def test_spaces_that_byte_level_offsets_leave_out_belong_to_their_token():
    tokenizer = byte_tokenizer(merges=[("\u0120", "c"), ("\u0120c", "d")])
    tokenizer.backend_tokenizer.post_processor = ByteLevel(trim_offsets=True)
    text = "ab cd"
    reported = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    assert reported[-1] == (3, 5), "the space is trimmed"
    assert encode(tokenizer, text).index(3) == 3, "nothing begins at the letter"
    assert encode(tokenizer, text).index(2) == 2


def test_spaces_that_no_token_has_belong_to_none():
    tokens = encode(words(), "one  two")
    assert [tokens.index(i) for i in (0, 1, 3, 5, 6)] == [0, 1, 1, 1, 2]


def test_bos_is_what_the_tokenizer_puts_before_a_text():
    assert bos_tokens(byte_tokenizer()) == []
    assert bos_tokens(with_bos(byte_tokenizer())) == [1]
    assert bos_tokens(with_bos(byte_tokenizer(), "<s> <s> $A </s>")) == [1, 1]
    assert bos_tokens(with_bos(byte_tokenizer(), "$A </s>")) == []
    assert token_ids(with_bos(words()), "one") == [2], "none in a text as it stands"


def test_common_length():
    assert common_length("abc", "abd") == 2
    assert common_length("abc", "ab") == common_length("ab", "abc") == 2
    assert common_length([], [1]) == common_length("x", "y") == 0


def test_common_length_of_what_is_equal_and_of_lists():
    assert common_length("abc", "abc") == 3
    assert common_length("", "") == common_length("", "a") == 0
    assert common_length([1, 2, 3, 9], [1, 2, 4, 9]) == 2
    assert common_length([1, 2], [1, 2, 3]) == common_length([1, 2, 3], [1, 2]) == 2
    assert common_length("xabc", "yabc") == 0


@pytest.mark.parametrize("wrap", [lambda tokenizer: tokenizer, NoOffsets])
def test_special_tokens_that_are_written_are_read_and_none_is_added(wrap):
    tokenizer = with_bos(byte_tokenizer(), "<s> $A </s>")
    tokens = encode(wrap(tokenizer), "<s>ab</s>c")
    assert tokenizer.convert_ids_to_tokens(tokens.ids) == ["<s>", "a", "b", "</s>", "c"]
    assert [tokens.index(i) for i in (0, 1, 3, 4, 5, 6, 9, 10)] == [0, 1, 1, 2, 3, 4, 4, 5]
    assert token_ids(wrap(tokenizer), "<s>ab") == tokens.ids[:3]


@pytest.mark.parametrize("wrap", [lambda tokenizer: tokenizer, NoOffsets])
def test_a_text_of_no_character_has_no_token(wrap):
    tokens = encode(wrap(byte_tokenizer()), "")
    assert tokens.ids == []
    assert tokens.index(0) == 0


def test_a_long_text_is_tokenised_without_a_warning(caplog):
    tokenizer = byte_tokenizer()
    tokenizer.model_max_length = 4
    for call in (token_ids, encode, lambda t, text: bos_tokens(t)):
        call(tokenizer, "a long text")
    assert not caplog.records


def test_spaces_in_front_of_other_tokens_are_not_theirs():
    """Only what byte-level tokenizers trim is put back."""
    tokens = encode(words(), "one   two  one")
    assert [tokens.index(i) for i in (3, 4, 6, 7, 11)] == [1, 1, 1, 2, 2]
