"""Vocabularies of GGUF files, from tokenizers that are built here."""

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from compress.checkpoint.formats.gguf_files.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, vocabulary_of

TIMES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|" + TIMES % "{1,3}"
QWEN2 = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|" + TIMES % ""

CASES = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"


def fast(model, pre=None, normalizer=None, special="<s>"):
    """A fast tokenizer."""
    built = Tokenizer(model)
    if pre is not None:
        built.pre_tokenizer = pre
    if normalizer is not None:
        built.normalizer = normalizer
    return PreTrainedTokenizerFast(tokenizer_object=built, bos_token=special, unk_token="<unk>")


def of_bytes(pre, **options):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE({c: i for i, c in enumerate([*letters, "ab", "abc"])}, [("a", "b"), ("ab", "c")], **options)
    return fast(model, pre)


def split(expression):
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(expression), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


@pytest.mark.parametrize(
    ("pre", "options", "name"),
    [
        (pre_tokenizers.ByteLevel(add_prefix_space=False), {}, "gpt-2"),
        (
            pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
            {},
            "smollm",
        ),
        (split(LLAMA3), {"ignore_merges": True}, "llama-bpe"),
        (split(LLAMA3), {}, "smaug-bpe"),
        (split(QWEN2), {}, "qwen2"),
        (split(CASES % (SHORT, SHORT, "{1,3}")), {}, "gpt-4o"),
        (split(CASES % ("", "", "")), {}, "tekken"),
        (
            pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Punctuation("contiguous"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                    pre_tokenizers.Digits(False),
                    pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
                ]
            ),
            {},
            "falcon",
        ),
    ],
)
def test_pre_tokenizers_have_the_names_of_llama_cpp(pre, options, name):
    found = vocabulary_of(of_bytes(pre, **options), 300)
    assert (found.model, found.pre) == ("gpt2", name)
    assert found.merges == ["a b", "ab c"] and found.scores == []
    assert len(found.tokens) == len(found.types) == 300
    assert found.types[-1] == UNUSED and found.tokens[-1] == "[PAD299]"
    assert found.types[found.tokens.index("<s>")] == CONTROL and found.types[found.tokens.index("ab")] == NORMAL


def test_an_unknown_pre_tokenizer_is_refused():
    with pytest.raises(ValueError, match=r"its pre-tokenizer \(Split, ByteLevel\) is none that compress can name"):
        vocabulary_of(of_bytes(split(r"\w+")), 300)
    with pytest.raises(ValueError, match="its pre-tokenizer"):
        vocabulary_of(of_bytes(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)), 300)


@pytest.mark.parametrize(
    ("pre", "normalizer", "reason"),
    [
        (pre_tokenizers.ByteLevel(add_prefix_space=True), None, r"puts a space before a text \(add_prefix_space\)"),
        (pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.Lowercase(), "changes texts by Lowercase"),
        (pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.NFKC(), "changes texts by NFKC"),
        (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()]),
            "changes texts by StripAccents",
        ),
        (pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.Replace("a", "b"), "changes texts by Replace"),
    ],
)
def test_texts_that_llama_cpp_does_not_change_are_refused(pre, normalizer, reason):
    tokenizer = of_bytes(pre)
    if normalizer is not None:
        tokenizer.backend_tokenizer.normalizer = normalizer
    with pytest.raises(ValueError, match=reason):
        vocabulary_of(tokenizer, 300)


def test_composed_characters_are_accepted_as_by_the_converter_of_llama_cpp():
    tokenizer = of_bytes(split(QWEN2))
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    assert vocabulary_of(tokenizer, 300).pre == "qwen2"


def pieces(**options):
    tokens = ["<unk>", "<s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    model = models.BPE({t: i for i, t in enumerate(tokens)}, merges, byte_fallback=True, unk_token="<unk>")
    return fast(model, **options)


def test_merges_of_pieces_become_scores():
    found = vocabulary_of(pieces(pre=pre_tokenizers.Metaspace(prepend_scheme="first", split=False)), 264)
    assert (found.model, found.pre, found.merges) == ("llama", "default", [])
    score = dict(zip(found.tokens, found.scores, strict=True))
    assert score["▁a"] > score["ab"] > score["▁ab"] > score["b"]
    kinds = dict(zip(found.tokens, found.types, strict=True))
    assert (kinds["<unk>"], kinds["<s>"], kinds["<0x41>"], kinds["a"]) == (UNKNOWN, CONTROL, BYTE, NORMAL)
    assert found.flags["add_space_prefix"] is True and found.flags["bos_token_id"] == 1


@pytest.mark.parametrize(
    ("options", "added"),
    [
        ({"normalizer": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])}, True),
        ({"normalizer": normalizers.Replace(" ", "▁")}, False),
        ({"pre": pre_tokenizers.Metaspace(prepend_scheme="never")}, False),
    ],
)
def test_whether_a_space_is_put_first(options, added):
    assert vocabulary_of(pieces(**options), 264).flags["add_space_prefix"] is added


def test_other_tokenizers_are_refused():
    with pytest.raises(ValueError, match="no fast tokenizer"):
        vocabulary_of(None, 10)
    with pytest.raises(ValueError, match="of the type Unigram, not BPE"):
        vocabulary_of(fast(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0)), 10)
    with pytest.raises(ValueError, match="merges characters and has no bytes to fall back to"):
        vocabulary_of(fast(models.BPE({"a": 0, "<unk>": 1}, [])), 10)
    with pytest.raises(ValueError, match="its tokenizer has 264 tokens, but the embedding has 20 rows"):
        vocabulary_of(pieces(), 20)
