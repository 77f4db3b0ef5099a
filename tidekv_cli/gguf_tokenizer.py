"""A tokenizer from a GGUF file's metadata: byte-level BPE or sentencepiece BPE. Knows no weights.

Sources: the pre-tokenizer expressions that llama.cpp lists per `tokenizer.ggml.pre`; sentencepiece's rule that
a merge is as good as the score of the token it makes.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tidekv_cli.errors import ModelError
from tidekv_cli.gguf_file import GgufFile

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPLITS = {
    "llama3": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    "qwen2": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",
}
_SPLIT_OF = {
    "llama3": "llama3",
    "llama-v3": "llama3",
    "llama-bpe": "llama3",
    "smaug-bpe": "llama3",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
}
_LLAMA3 = ("llama3", "llama-v3", "llama-bpe")  # a word that is a token is not merged; a text begins with BOS
_NAMED = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_GPT2, _UNNAMED = "gpt-2", "default"
# What llama.cpp takes where a file names no rule: each expression splits what the one before left.
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "codeshell", "command-r")


def build_tokenizer(file: GgufFile) -> PreTrainedTokenizerFast:
    """The tokenizer that `file` describes, with its chat template. Raises `ModelError` for unknown kinds."""
    kind = file.value("tokenizer.ggml.model", str)
    tokens = file.values("tokenizer.ggml.tokens", str)
    types = file.values("tokenizer.ggml.token_type", int, [])
    named = {name: _token_id(file, key, tokens) for name, key in _NAMED.items() if key in file.metadata}
    if kind == "gpt2":
        pre = file.value("tokenizer.ggml.pre", str, _UNNAMED)
        backend, begins_with_bos = _byte_level(file, pre, tokens), pre in _LLAMA3
    elif kind == "llama":
        backend, begins_with_bos = _sentencepiece(file, tokens, types, named.get("unk_token", 0)), True
    else:
        raise ModelError(
            f"{file.path} has a tokenizer of kind {kind!r}, which is not supported",
            "supported are 'gpt2' (byte-level BPE) and 'llama' (sentencepiece)",
        )
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=token_type == _CONTROL)
            for token, token_type in zip(tokens, types, strict=False)
            if token_type in (_CONTROL, _USER_DEFINED)
        ]
    )
    if file.value("tokenizer.ggml.add_bos_token", bool, begins_with_bos) and "bos_token" in named:
        bos = tokens[named["bos_token"]]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, named["bos_token"])]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        **{name: tokens[index] for name, index in named.items()},
    )
    tokenizer.chat_template = file.value("tokenizer.chat_template", str, None)
    return tokenizer


def _token_id(file: GgufFile, key: str, tokens: list[str]) -> int:
    index: int = file.value(key, int)
    if not 0 <= index < len(tokens):
        raise ModelError(f"{file.path} has {key} {index}, and {len(tokens)} tokens", "use a complete GGUF file")
    return index


def _bpe(file: GgufFile, **settings: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(**settings))
    except Exception as error:  # the library raises plain Exception, for a merge outside the vocabulary too
        raise ModelError(f"the tokenizer in {file.path} is damaged: {error}", "fetch or copy the file again") from error


def _byte_level(file: GgufFile, pre: str, tokens: list[str]) -> Tokenizer:
    merges = [tuple(merge.split(" ")) for merge in file.values("tokenizer.ggml.merges", str)]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = _bpe(file, vocab=vocab, merges=merges, ignore_merges=pre in _LLAMA3)
    if pre in _SPLIT_OF:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLITS[_SPLIT_OF[pre]]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    elif pre in _SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif pre == _UNNAMED:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in _DEFAULT),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    elif pre == _GPT2:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        raise ModelError(
            f"{file.path} splits text by the rule {pre!r}, which is not known",
            f"known are {', '.join(sorted({*_SPLIT_OF, *_SINGLE_DIGITS, _UNNAMED, _GPT2}))}",
        )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(file: GgufFile, tokens: list[str], types: list[int], unknown: int) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    scores = file.values("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens) or not tokens:
        raise ModelError(f"{file.path} has {len(scores)} scores for {len(tokens)} tokens", "use a complete GGUF file")
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for index, (token, token_type) in enumerate(zip_longest(tokens, types[: len(tokens)])):
        if token_type in (_UNKNOWN, _CONTROL, _BYTE):  # text never becomes one of these
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[index], vocab[left], vocab[right], (left, right)))
    ranked.sort()
    merges = [pair for *_, pair in ranked]
    backend = _bpe(file, vocab=vocab, merges=merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    unspace: list[Any] = []
    if file.value("tokenizer.ggml.add_space_prefix", bool, True):
        steps.insert(0, normalizers.Prepend("▁"))
        unspace = [decoders.Strip(content=" ", left=1)]
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *unspace]
    )
    return backend
