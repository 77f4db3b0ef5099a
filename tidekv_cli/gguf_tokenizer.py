"""A tokenizer from a GGUF file's metadata: byte-level BPE or sentencepiece BPE. Knows no weights.

Sources: the pre-tokenizer expressions that llama.cpp lists per `tokenizer.ggml.pre`; sentencepiece's rule that
a merge is as good as the score of the token it makes.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tidekv_cli.errors import ModelError
from tidekv_cli.gguf_file import GgufFile

_CONTROL, _USER_DEFINED = 3, 4
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
_GPT2 = ("default", "gpt-2")
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "codeshell", "command-r")


def build_tokenizer(file: GgufFile) -> PreTrainedTokenizerFast:
    """The tokenizer that `file` describes, with its chat template. Raises `ModelError` for unknown kinds."""
    meta = file.metadata
    kind = meta.get("tokenizer.ggml.model")
    try:
        tokens: list[str] = meta["tokenizer.ggml.tokens"]
        if kind == "gpt2":
            backend = _byte_level(file, tokens)
        elif kind == "llama":
            backend = _sentencepiece(meta, tokens)
        else:
            raise ModelError(
                f"{file.path} has a tokenizer of kind {kind!r}, which is not supported",
                "supported are 'gpt2' (byte-level BPE) and 'llama' (sentencepiece)",
            )
        added = [
            AddedToken(token, normalized=False, special=token_type == _CONTROL)
            for token, token_type in zip(tokens, meta.get("tokenizer.ggml.token_type", ()), strict=False)
            if token_type in (_CONTROL, _USER_DEFINED)
        ]
        backend.add_tokens(added)
        named = {
            name: tokens[meta[key]]
            for name, key in (
                ("bos_token", "tokenizer.ggml.bos_token_id"),
                ("eos_token", "tokenizer.ggml.eos_token_id"),
                ("unk_token", "tokenizer.ggml.unknown_token_id"),
                ("pad_token", "tokenizer.ggml.padding_token_id"),
            )
            if meta.get(key) is not None
        }
    except (KeyError, IndexError, TypeError) as error:
        raise ModelError(f"the tokenizer in {file.path} lacks {error}", "use a complete GGUF file") from error
    # Sentencepiece vocabularies begin a text with BOS unless the file says otherwise.
    if meta.get("tokenizer.ggml.add_bos_token", kind == "llama") and "bos_token" in named:
        bos = named["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, meta["tokenizer.ggml.bos_token_id"])]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **named)
    tokenizer.chat_template = meta.get("tokenizer.chat_template")
    return tokenizer


def _byte_level(file: GgufFile, tokens: list[str]) -> Tokenizer:
    pre = file.metadata.get("tokenizer.ggml.pre", "default")
    merges = [tuple(merge.split(" ")) for merge in file.metadata["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    whole_words = _SPLIT_OF.get(pre) == "llama3" and pre != "smaug-bpe"  # a word that is a token is not merged
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=whole_words))
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
    elif pre in _GPT2:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        raise ModelError(
            f"{file.path} splits text by the rule {pre!r}, which is not known",
            f"known are {', '.join(sorted({*_SPLIT_OF, *_SINGLE_DIGITS, *_GPT2}))}",
        )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(meta: dict[str, Any], tokens: list[str]) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    scores: list[float] = meta["tokenizer.ggml.scores"]
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for index, token in enumerate(tokens):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[index], vocab[left], vocab[right], (left, right)))
    ranked.sort()
    unknown = tokens[meta.get("tokenizer.ggml.unknown_token_id", 0)]
    merges = [pair for *_, pair in ranked]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    unspace: list[Any] = []
    if meta.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
        unspace = [decoders.Strip(content=" ", left=1)]
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *unspace]
    )
    return backend
