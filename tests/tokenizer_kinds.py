"""A small tokenizer of every kind that models use, trained on made-up text. Knows nothing of what is tested."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SYLLABLES = [
    "ba",
    "lo",
    "the",
    "ing",
    "an",
    "aa",
    "ab",
    "er",
    "漢",
    "字",
    "かな",
    "é",
    "e\u0301",
    "1",
    "23",
    "Ti",
    "DE",
    "x",
]
GAPS = [
    " ",
    " ",
    " ",
    "",
    "",
    "",
    "  ",
    "\n",
    "\n\n",
    ". ",
    ",",
    "'s ",
    "'",
    "。",
    "、",
    "💧",
    "👨‍👩‍👧",
    "\u00a0",
    "_",
    "▁",
    "=",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>"]
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def made_up_text(seed: int, pieces: int) -> str:
    """Words, gaps, runs and repetitions, in many scripts."""
    source = random.Random(seed)
    parts: list[str] = []
    while len(parts) < pieces:
        kind = source.random()
        if kind < 0.03:
            parts.append(source.choice(SYLLABLES + GAPS) * source.randrange(2, 60))
        elif kind < 0.05:
            parts.append("".join(source.choice("ab") for _ in range(source.randrange(80))))
        else:
            parts.append(source.choice(SYLLABLES if kind < 0.7 else GAPS))
    return "".join(parts)


def _trained(model: Any, trainer: Any, normalizer: Any, pre_tokenizer: Any) -> Tokenizer:
    backend = Tokenizer(model)
    backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizer
    backend.train_from_iterator((made_up_text(seed, 2000) for seed in range(4)), trainer)
    return backend


def _byte_level(
    *patterns: str,
    digits: bool = False,
    normalizer: Any = None,
    ignore_merges: bool = False,
    use_regex: bool | None = None,
) -> Tokenizer:
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    steps += [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    steps.append(
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns if use_regex is None else use_regex)
    )
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        max_token_length=12,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend = _trained(models.BPE(ignore_merges=ignore_merges), trainer, normalizer, pre_tokenizers.Sequence(steps))
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(normalizer: Any, pre_tokenizer: Any, strips: bool, byte_fallback: bool = True) -> Tokenizer:
    """A vocabulary whose letters lack some of the text's, so that bytes or the unknown token stand for them."""
    fallback = [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else []
    trainer = trainers.BpeTrainer(
        vocab_size=700, max_token_length=12, limit_alphabet=18, special_tokens=SPECIAL[:3], show_progress=False
    )
    learned = _trained(models.BPE(), trainer, normalizers.Replace(" ", "▁"), None)
    state = json.loads(learned.to_str())["model"]
    tokens = [*SPECIAL, *fallback, *(token for token in state["vocab"] if token not in SPECIAL)]
    backend = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(pair) for pair in state["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=byte_fallback,
        )
    )
    backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizer
    strip = [decoders.Strip(" ", 1, 0)] if strips else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _llama2(**settings: Any) -> Tokenizer:
    steps = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _sentencepiece(steps, None, True, **settings)


def _unigram() -> Tokenizer:
    trainer = trainers.UnigramTrainer(vocab_size=300, unk_token="<unk>", special_tokens=SPECIAL, show_progress=False)
    backend = _trained(models.Unigram(), trainer, None, pre_tokenizers.Metaspace(split=True))
    backend.decoder = decoders.Metaspace()
    return backend


_MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": _byte_level,
    "digits": lambda: _byte_level(digits=True),
    "llama3": lambda: _byte_level(
        rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}", ignore_merges=True
    ),
    "qwen2": lambda: _byte_level(
        rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}", normalizer=normalizers.NFC()
    ),
    "o200k": lambda: _byte_level(_CASES),
    "deepseek": lambda: _byte_level(*_DEEPSEEK),
    "llama2": _llama2,
    "llama2-unknown": lambda: _llama2(byte_fallback=False),
    "mistral": lambda: _sentencepiece(None, pre_tokenizers.Metaspace("▁", "first", split=False), True),
    "gemma": lambda: _sentencepiece(
        normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous"), False
    ),
    "unigram": _unigram,
    # Nothing here keeps words apart: tokens go across spaces.
    "across-spaces": lambda: _byte_level(use_regex=False),
    "across-spaces-digits": lambda: _byte_level(digits=True, use_regex=False),
    "across-spaces-numbers": lambda: _byte_level(r"\p{N}{1,3}"),
}
KINDS = tuple(_MAKERS)
_made: dict[str, str] = {}


def tokenizer_of(kind: str, added: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """A fresh tokenizer; `added` are tokens of its own that are no control tokens."""
    if kind not in _made:
        backend = _MAKERS[kind]()
        backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
        _made[kind] = backend.to_str()
    backend = Tokenizer.from_str(_made[kind])
    backend.add_tokens([AddedToken(token, normalized=False) for token in added])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
