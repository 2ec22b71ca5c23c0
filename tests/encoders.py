"""A tokenizer for the tiny models that says which token is the mask, and puts [CLS] and [SEP] around a text."""

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
MASK, VOCAB = 4, 64
NAMES = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}


def tokenizer(size=VOCAB, **names):
    """A tokenizer of words w5, w6, ...; names: of special tokens, where they are others than `NAMES`, None: none."""
    words = [*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), size))]
    made = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    made.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    known = {name: token for name, token in {**NAMES, **names}.items() if token is not None}
    return PreTrainedTokenizerFast(tokenizer_object=made, **known)


def write_words(path, count):
    """Write a text of so many words of the tokenizer, and return its path as text."""
    drawn = torch.randint(5, VOCAB, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    path.write_text(" ".join(f"w{i}" for i in drawn), encoding="utf-8")
    return str(path)
