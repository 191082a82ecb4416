"""A byte-level tokenizer that reads any text, chat templates of several kinds, a tiny target."""

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from runtime.target.model import Target
from tests.runtime.tiny_llama import tiny_model

SPECIALS = ["<unk>", "<s>", "</s>", "<pad>", "<|u|>", "<|a|>"]
EOS = 2

CHATML = (
    "<s>{% for m in messages %}<{{ m.role }}>\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
INST = (
    "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}</s>{% else %}"
    "[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
TAGGED = (
    "{% for m in messages %}<|u|>{{ m.role }}:{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}</s>{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|u|>assistant:{% endif %}"
)
THINKING = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' and loop.last %}(thought){% endif %}"
    "{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
STRICT = "{{ raise_exception('only calm conversations') }}"


def talk(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def byte_tokenizer(template=CHATML, merges=(), **options):
    tokens = SPECIALS + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += [a + b for a, b in merges]
    vocab = {token: index for index, token in enumerate(tokens)}
    model = Tokenizer(BPE(vocab, list(merges)))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(SPECIALS)
    settings = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, **{**settings, "pad_token": "<pad>", **options}
    )
    tokenizer.chat_template = template
    return tokenizer


def byte_target(template=CHATML, **options):
    tokenizer = byte_tokenizer(template)
    model = tiny_model(len(tokenizer) + 2, initializer_range=0.3, **options)
    return Target(model, tokenizer, name="bytes", digest="d" * 64)


def supervised(tokenizer, conversation):
    """The texts of the runs of supervised tokens."""
    runs, run = [], []
    for token, mask in zip(conversation.input_ids, conversation.loss_mask, strict=True):
        if mask:
            run.append(token)
        elif run:
            runs.append(tokenizer.decode(run))
            run = []
    return runs + ([tokenizer.decode(run)] if run else [])
