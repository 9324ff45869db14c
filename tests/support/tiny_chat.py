"""A tiny random chat model: a byte tokenizer, a chat template, and an end-of-turn token."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import GenerationConfig, PreTrainedTokenizerFast

from support.models import TINY_VOCAB, tiny_qwen3

_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_BYTES = 256
END_OF_TEXT, START_OF_TURN, END_OF_TURN = range(_BYTES, _BYTES + len(_SPECIALS))
MASK_TOKEN = TINY_VOCAB - 1  # a reserved token that no text contains

# Like Qwen3's: without thinking, the answer starts with an empty thought.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking -%}"
    "{{ '<think>\n\n</think>\n\n' }}"
    "{%- endif -%}"
    "{%- endif -%}"
)


def tiny_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per byte, three for the turns, and reserved ones up to the vocabulary size."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    reserved = TINY_VOCAB - _BYTES - len(_SPECIALS)
    tokenizer.add_special_tokens([*_SPECIALS, *(f"<|reserved_{n}|>" for n in range(reserved))])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=chat_template,
    )


def write_tiny_chat_target(folder: Path, seed: int = 0) -> Path:
    """Write a random Qwen3 and its tokenizer to `folder`; deterministic in the seed."""
    model = tiny_qwen3(seed)
    model.config.eos_token_id = END_OF_TURN
    model.generation_config = GenerationConfig(
        eos_token_id=[END_OF_TURN, END_OF_TEXT], pad_token_id=END_OF_TEXT
    )
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
