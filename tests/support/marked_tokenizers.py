"""Tiny tokenizers of common kinds: their marks, templates, and treatment of spaces."""

import json

from support.tiny_models import chat_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_python import PythonBackend

CORPUS = "a red fox describes the snow in words, and the user asks an assistant: system user assistant </s> im_end "
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA2 = "{% for m in messages %}{{ bos_token }}[INST] {{ m['content'] | trim }} [/INST]{% endfor %}"
SMOLLM = (
    "{% for m in messages %}{% if loop.first %}<|im_start|>system\nBe kind<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def _trained(marks, *, pattern=True) -> Tokenizer:
    """Byte-level with merges, some of which reach over white space and punctuation where `pattern` is off."""
    from tokenizers.trainers import BpeTrainer

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern)
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    backend.train_from_iterator([CORPUS, "\nuser\na red\n", "> fox <", "s\n\na fox"] * 4, trainer)
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    return backend


def qwen2():
    return chat_tokenizer()


def llama3():
    marks = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    backend = _trained(marks)
    begin = backend.token_to_id("<|begin_of_text|>")
    backend.post_processor = processors.TemplateProcessing("<|begin_of_text|> $A", None, [("<|begin_of_text|>", begin)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=marks[0], eos_token="<|eot_id|>", chat_template=LLAMA3
    )


def llama2():
    """SentencePiece's way: a mark for spaces, one before every text, bytes for what is unknown."""
    from tokenizers.trainers import BpeTrainer

    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    bytes_of = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = BpeTrainer(vocab_size=420, special_tokens=["<unk>", "<s>", "</s>", *bytes_of], show_progress=False)
    backend.train_from_iterator([CORPUS, "[INST] a fox [/INST]"] * 4, trainer)
    described = json.loads(backend.to_str())  # bytes were marks only so that the trainer gives them ids
    described["added_tokens"] = [mark for mark in described["added_tokens"] if mark["content"] not in bytes_of]
    plain = Tokenizer.from_str(json.dumps(described))
    begin = plain.token_to_id("<s>")
    plain.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", begin)])
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=LLAMA2
    )


def gpt2():
    mark = "<|endoftext|>"
    return PreTrainedTokenizerFast(
        tokenizer_object=_trained([mark]), bos_token=mark, eos_token=mark, unk_token=mark, pad_token=mark
    )


def smollm():
    """Merges go over white space: template and user's text may share a token."""
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<file_sep>"]
    return PreTrainedTokenizerFast(
        tokenizer_object=_trained(marks, pattern=False),
        **{"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"},
        pad_token="<|im_end|>",
        chat_template=SMOLLM,
    )


def words():
    """The small policy that `models.random_init` makes: whole words, marks among them."""
    marks = ["<|pad|>", "<|end|>", "<|unknown|>", "<|next|>"]
    vocabulary = [*marks, "a", "red", "fox", "describe", "in", "words"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<|unknown|>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(Regex(r"[!?]"), " ")])
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    return PreTrainedTokenizerFast(
        **{"tokenizer_object": backend, "pad_token": marks[0], "eos_token": marks[1], "unk_token": marks[2]},
        additional_special_tokens=[marks[3]],
        chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}<|next|>",
    )


class Letters(PythonBackend):
    """A slow tokenizer: one token per code point of the first 256, and of marks."""

    def __init__(self, **named):
        self._letters = {chr(code): code for code in range(256)}
        super().__init__(**named)

    @property
    def vocab_size(self):
        return len(self._letters)

    def get_vocab(self):
        return self._letters | self.added_tokens_encoder

    def _tokenize(self, text, **_):
        return list(text)

    def _convert_token_to_id(self, token):
        return self._letters.get(token, 0)

    def _convert_id_to_token(self, index):
        return chr(index)

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)


def slow():
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    tokenizer = Letters(**named)
    tokenizer.chat_template = SMOLLM
    return tokenizer


TOKENIZERS = {
    **{"qwen2": qwen2, "llama3": llama3, "llama2": llama2, "gpt2": gpt2, "smollm": smollm, "words": words},
    "slow": slow,
}
