"""The vocabulary of a tokenizer in a GGUF file.

llama.cpp knows three kinds that models of today have: byte-pair encoding of bytes, with a pre-tokenizer that it knows
by name (`gpt2`), merges of characters with bytes as the fallback, as SentencePiece makes them (`llama`), and the
longest pieces of words, as those of BERT (`bert`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""gguf.TokenType."""
SPACE = "\u2581"
PIECE = "##"
"""The beginning of a piece inside of a word."""
WHOLE = CONTROL, UNKNOWN, UNUSED
"""Kinds of tokens that no text is divided into."""
NEVER = -1e6  # the score of a token that no merge makes
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{digits}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BY_CASE = r"[^\r\n\p{L}\p{N}]?{upper}*{lower}+{short}|[^\r\n\p{L}\p{N}]?{upper}+{lower}*{short}|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
NAMED = {
    "gpt-4o": (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}"),
    "tekken": ("", r"\p{N}"),
}
"""Expressions that divide words by case, as in llama.cpp (llama-vocab.cpp): contractions and numbers by name."""
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r" ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)
"""Expressions that divide texts one after the other, of DeepSeek-V3: `deepseek-v3` of llama.cpp (llama-vocab.cpp)."""
DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[A-Za-zµÀ-Ö",
    "\\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-퟿]+",
)
"""The same of DeepSeek-V2 (`deepseek-llm`); of the second, the beginning. Single digits follow."""
SUFFIXES = ("(?i:'s|'t|'re|'ve|'m|'ll|'d)|", "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|")
"""The two spellings of the contractions at the beginning of the expressions."""
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}
"""The keys of special tokens; that of `sep` is spelled so by llama.cpp."""
TOKENIZER = "tokenizer.huggingface.json"
"""The key of a tokenizer.json (gguf.md of the format's owners)."""


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary of a file.

    model: its kind in llama.cpp. pre: the name of the pre-tokenizer. tokens, types, scores: one for each row of the
    embedding. merges: for byte-pair encoding of bytes. flags: other keys after `tokenizer.ggml.`. template: of chats.
    text: the tokenizer.json, where transformers does not make the tokenizer of the other values.
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)
    flags: dict[str, bool | int] = field(default_factory=dict)
    template: str | None = None
    text: str | None = None


def vocabulary_of(tokenizer: PreTrainedTokenizerBase | None, size: int) -> Vocabulary:
    """Return the vocabulary of a tokenizer for an embedding of so many rows.

    Raises ValueError with the reason for a tokenizer that llama.cpp does not know.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if tokenizer is None or backend is None:
        raise ValueError("the model has no fast tokenizer (tokenizer.json)")
    stated = json.loads(backend.to_str())
    model = stated["model"]
    if model["type"] == "WordPiece":
        return _word_pieces(tokenizer, stated, size)
    if model["type"] != "BPE":
        raise ValueError(f"its tokenizer is of the type {model['type']}, not BPE or WordPiece")
    _check_normalizer(stated)
    pairs = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
    if _is_bytes(stated):
        pre = _pre_tokenizer(stated, bool(model.get("ignore_merges")))
        tokens, types = _tokens(tokenizer, size, "")
        merges = [f"{prefix} {suffix}" for prefix, suffix in pairs]
        vocabulary = Vocabulary("gpt2", pre, tokens, types, merges=merges)
    elif model.get("byte_fallback"):
        tokens, types = _tokens(tokenizer, size, str(model.get("unk_token") or tokenizer.unk_token or ""))
        vocabulary = Vocabulary("llama", "default", tokens, types, _scores(tokens, pairs))
        vocabulary.flags["add_space_prefix"] = _adds_space(stated)
    else:
        raise ValueError("its tokenizer merges characters and has no bytes to fall back to")
    vocabulary.flags.update(_special(tokenizer))
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return Vocabulary(**{**vars(vocabulary), "template": template})


def _word_pieces(tokenizer: PreTrainedTokenizerBase, stated: dict[str, Any], size: int) -> Vocabulary:
    """Return the vocabulary of BERT: pieces at the beginning of words have `SPACE` before them, others no `##`."""
    normalizer, splitter = (stated[part] or {"type": "None"} for part in ("normalizer", "pre_tokenizer"))
    kinds = normalizer["type"], splitter["type"]
    if kinds != ("BertNormalizer", "BertPreTokenizer") or stated["model"]["continuing_subword_prefix"] != PIECE:
        raise ValueError(f"its WordPiece tokenizer has other steps ({', '.join(kinds)}) than that of BERT")
    if not (normalizer["clean_text"] and normalizer["handle_chinese_chars"]):
        raise ValueError("its tokenizer keeps control characters or words of Chinese, which llama.cpp does not do")
    ids, plain = (tokenizer("a", add_special_tokens=special).input_ids for special in (True, False))
    begin, end = tokenizer.cls_token_id, tokenizer.sep_token_id
    if ids != [begin, *plain, end]:
        raise ValueError("its tokenizer does not put the tokens cls and sep around a text, as llama.cpp does")
    pieces, types = _tokens(tokenizer, size, str(tokenizer.unk_token or ""))
    texts = [piece if kind in WHOLE else _phantom(piece) for piece, kind in zip(pieces, types, strict=True)]
    accents, lower = normalizer["strip_accents"], normalizer["lowercase"]
    flags = _special(tokenizer) | {
        "normalizer.lowercase": lower,
        "normalizer.strip_accents": lower if accents is None else accents,
        "bos_token_id": begin,
        "cls_token_id": begin,
        "add_bos_token": True,
        "add_sep_token": True,
    }
    return Vocabulary("bert", "default", texts, types, flags=flags, text=json.dumps(stated))


def _phantom(piece: str) -> str:
    """Return a piece with `SPACE` at the beginning of a word, and without `PIECE` inside of one."""
    return piece.removeprefix(PIECE) if piece.startswith(PIECE) else SPACE + piece


def _steps(part: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """The steps of a pre-tokenizer or normalizer."""
    if part is None:
        return []
    return list(part[inner]) if part["type"] == "Sequence" else [part]


def _check_normalizer(stated: dict[str, Any]) -> None:
    """Check that a tokenizer changes a text only as llama.cpp does, before it is split. Raises ValueError.

    llama.cpp writes spaces as `SPACE`, with one before the text if `add_space_prefix` says so. It does not compose
    characters (NFC), but the texts that users write are composed; its own converter writes such tokenizers too.
    """
    for step in _steps(stated["normalizer"], "normalizers"):
        spaces = step["type"] == "Replace" and (step["pattern"], step["content"]) == ({"String": " "}, SPACE)
        prefix = step["type"] == "Prepend" and step["prepend"] == SPACE
        if not (spaces or prefix or step["type"] == "NFC"):
            raise ValueError(f"its tokenizer changes texts by {step['type']}, which llama.cpp does not do")
    for step in _steps(stated["pre_tokenizer"], "pretokenizers"):
        if step["type"] == "ByteLevel" and step.get("add_prefix_space"):
            raise ValueError("its tokenizer puts a space before a text (add_prefix_space), which llama.cpp does not do")


def _is_bytes(stated: dict[str, Any]) -> bool:
    return any(step["type"] == "ByteLevel" for step in _steps(stated["pre_tokenizer"], "pretokenizers"))


def _pre_tokenizer(stated: dict[str, Any], ignores_merges: bool) -> str:
    """Return the name in llama.cpp of the pre-tokenizer. Raises ValueError for an unknown one."""
    steps = _steps(stated["pre_tokenizer"], "pretokenizers")
    kinds = [step["type"] for step in steps]
    uses_regex = steps[-1].get("use_regex", True)
    if kinds == ["ByteLevel"] and uses_regex:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and uses_regex and steps[0]["individual_digits"]:
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not uses_regex:
        expression = steps[0]["pattern"].get("Regex", "")
        for name, (short, digits) in NAMED.items():
            words = BY_CASE.replace("{upper}", UPPER).replace("{lower}", LOWER).replace("{short}", short)
            if expression == words + digits + REST:
                return name
        for spelled in SUFFIXES:
            pattern = expression.removeprefix(spelled)
            if pattern != expression and pattern == WORDS.replace("{digits}", "{1,3}"):
                return "llama-bpe" if ignores_merges else "smaug-bpe"
            if pattern != expression and pattern == WORDS.replace("{digits}", ""):
                return "qwen2"
    if kinds == ["Punctuation", "ByteLevel", "Digits", "Split"]:
        return "falcon"
    if name := _deepseek(steps):
        return name
    raise ValueError(f"its pre-tokenizer ({', '.join(kinds)}) is none that compress can name for llama.cpp")


def _deepseek(steps: list[dict[str, Any]]) -> str | None:
    """Return the name of a pre-tokenizer of DeepSeek, which divides texts several times; None for others."""
    kinds = [step["type"] for step in steps]
    splits = [
        step["pattern"].get("Regex", "").replace("\r", r"\r").replace("\n", r"\n")
        for step in steps
        if "pattern" in step
    ]
    if kinds == ["Split"] * 3 + ["ByteLevel"] and tuple(splits) == DEEPSEEK:
        return "deepseek-v3"
    if kinds == ["Split"] * 5 + ["Digits", "ByteLevel"] and all(map(str.startswith, splits, DEEPSEEK_LLM)):
        return "deepseek-llm"
    return None


def _tokens(tokenizer: PreTrainedTokenizerBase, size: int, unknown: str) -> tuple[list[str], list[int]]:
    """The tokens of an embedding's rows, and their types."""
    ids = tokenizer.get_vocab()
    if max(ids.values()) >= size:
        raise ValueError(f"its tokenizer has {max(ids.values()) + 1} tokens, but the embedding has {size} rows")
    tokens, types = [f"[PAD{i}]" for i in range(size)], [UNUSED] * size
    added = getattr(tokenizer, "added_tokens_decoder", {})
    for token, i in ids.items():
        kind = BYTE if unknown and re.fullmatch("<0x[0-9A-F]{2}>", token) else NORMAL
        if i in added:
            kind = CONTROL if added[i].special else USER_DEFINED
        if unknown and token == unknown:
            kind = UNKNOWN
        tokens[i], types[i] = token, kind
    return tokens, types


def _scores(tokens: list[str], pairs: list[list[str]]) -> list[float]:
    """Scores with which llama.cpp merges in the order of the tokenizer: the earlier the merge, the higher the score."""
    rank: dict[str, int] = {}
    for i, (prefix, suffix) in enumerate(pairs):
        rank.setdefault(prefix + suffix, i)
    return [float(-rank[token]) if token in rank else NEVER for token in tokens]


def _adds_space(stated: dict[str, Any]) -> bool:
    """Whether a space is put before a text."""
    steps = _steps(stated["normalizer"], "normalizers") + _steps(stated["pre_tokenizer"], "pretokenizers")
    return any(
        (step["type"] == "Prepend" and step["prepend"] == SPACE)
        or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )


def _special(tokenizer: PreTrainedTokenizerBase) -> dict[str, bool | int]:
    """Return the ids of special tokens, and whether they are put around a text."""
    values: dict[str, bool | int] = {}
    for name, key in SPECIAL.items():
        number = getattr(tokenizer, f"{name}_token_id", None)
        if number is not None:
            values[f"{key}_token_id"] = number
    ids, plain = (tokenizer("a", add_special_tokens=special).input_ids for special in (True, False))
    values["add_bos_token"] = len(ids) > len(plain) and ids[0] == tokenizer.bos_token_id
    values["add_eos_token"] = len(ids) > len(plain) and ids[-1] == tokenizer.eos_token_id
    return values
