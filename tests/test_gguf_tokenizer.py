"""Tokenizers from GGUF metadata against ones put together by hand."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from tests.builders import (
    byte_level_metadata,
    byte_level_parts,
    byte_level_tokenizer,
    sentencepiece_metadata,
    sentencepiece_parts,
)
from tidekv_cli.errors import ModelError
from tidekv_cli.gguf_file import GgufFile
from tidekv_cli.gguf_tokenizer import build_tokenizer

TEXTS = [
    "",
    " ",
    "the",
    "The theory and the singing, they're and the 1212 and 12.",
    "naïve café — 東京 🙂 \u200b",
    "line\n\n  indented\tand tabs\r\n",
    "  two spaces   and more    ",
    "<|im_start|>user\nthe<|im_end|>",
    "\x00\x07 control bytes",
]


def file_with(metadata: dict[str, Any]) -> GgufFile:
    return GgufFile(Path("some/model.gguf"), metadata, {})


def built(**changes: Any) -> Any:
    """The byte-level tokenizer with `changes` to its metadata; None removes a key."""
    metadata = byte_level_metadata() | {f"tokenizer.{key.replace('__', '.')}": value for key, value in changes.items()}
    return build_tokenizer(file_with({key: value for key, value in metadata.items() if value is not None}))


def sentencepiece(**changes: Any) -> Any:
    """The sentencepiece tokenizer with `changes` to its metadata; None removes a key."""
    metadata = sentencepiece_metadata() | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return build_tokenizer(file_with({key: value for key, value in metadata.items() if value is not None}))


def merged_by_score(text: str) -> list[str]:
    """Sentencepiece's rule, slowly: join the neighbours that make the best-scored token, leftmost first."""
    tokens, scores, _ = sentencepiece_parts()
    score_of = dict(zip(tokens, scores, strict=True))
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [left + right for left, right in pairwise(pieces)]
        pairs = [(-score_of[token], index) for index, token in enumerate(joined) if token in score_of]
        if not pairs:
            return pieces
        _, at = min(pairs)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_equals_the_same_built_directly(text: str) -> None:
    tokenizer, direct = built(), byte_level_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert ids == direct(text)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_every_byte_comes_back() -> None:
    text = "".join(map(chr, range(1, 0x300))) + "".join(chr(point) for point in range(0x3000, 0x3100))
    tokenizer = built()
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_gpt2_keeps_numbers_whole() -> None:
    assert built(ggml__pre="gpt-2").tokenize("12 1212") == ["12", "Ġ", "12", "12"]


@pytest.mark.parametrize("kind", ["default", None])
def test_no_rule_is_llama_cpps_default(kind: str | None) -> None:
    """Marks and digits stand apart from words, digits in threes from the left."""
    tokenizer = built(ggml__pre=kind)
    words = [word for word, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a 121212+(b 12's")]
    assert words == ["a", "Ġ", "121", "212", "+(", "b", "Ġ", "12", "'", "s"]


@pytest.mark.parametrize("kind", ["smollm", "starcoder", "refact", "codeshell", "command-r"])
def test_single_digits(kind: str) -> None:
    assert built(ggml__pre=kind).tokenize("and 1212") == ["and", "Ġ", "1", "2", "1", "2"]


@pytest.mark.parametrize(
    ("kind", "digits"),
    [
        ("llama-bpe", ["121", "2"]),
        ("llama3", ["121", "2"]),
        ("llama-v3", ["121", "2"]),
        ("smaug-bpe", ["121", "2"]),
        ("qwen2", ["1", "2", "1", "2"]),
        ("deepseek-r1-qwen", ["1", "2", "1", "2"]),
    ],
)
def test_splitting_expressions(kind: str, digits: list[str]) -> None:
    text = "1212'S\tthe...\n\n   né \n"
    split = built(ggml__pre=kind).backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    parts = [text[start:end] for _, (start, end) in split]
    assert parts == [*digits, "'S", "\tthe", "...\n\n", "  ", " né", " \n"]
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    assert [piece for piece, _ in split] == [spelled.pre_tokenize_str(part)[0][0] for part in parts]


@pytest.mark.parametrize("kind", ["llama-bpe", "qwen2", "smollm", "gpt-2"])
@pytest.mark.parametrize("text", TEXTS)
def test_every_rule_round_trips(kind: str, text: str) -> None:
    tokenizer = built(ggml__pre=kind)
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_control_tokens_are_special_and_can_stay_text() -> None:
    tokenizer = built()
    _, _, control = byte_level_parts()
    text = "the<|im_end|>the"
    as_control = tokenizer(text)["input_ids"]
    assert as_control == [tokenizer.convert_tokens_to_ids(token) for token in ("the", "<|im_end|>", "the")]
    as_text = tokenizer(text, split_special_tokens=True)["input_ids"]
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in as_text
    assert tokenizer.decode(as_text) == text
    assert tokenizer.decode(as_control, skip_special_tokens=True) == "thethe"
    assert {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special} == set(control)


def test_user_defined_tokens_are_whole_but_not_special() -> None:
    metadata = byte_level_metadata()
    tokens = [*metadata["tokenizer.ggml.tokens"], "[[tool]]"]
    types = [*metadata["tokenizer.ggml.token_type"], 4]
    tokenizer = built(ggml__tokens=tokens, ggml__token_type=types)
    assert tokenizer.tokenize("the[[tool]]the") == ["the", "[[tool]]", "the"]
    ids = tokenizer("[[tool]]")["input_ids"]
    assert ids == [len(tokens) - 1] and tokenizer.decode(ids, skip_special_tokens=True) == "[[tool]]"


def test_ids_follow_the_files_order() -> None:
    tokens, _, _ = byte_level_parts()
    tokenizer = built()
    assert tokenizer.convert_ids_to_tokens(list(range(len(tokens)))) == tokens and len(tokenizer) == len(tokens)


def test_named_tokens_and_chat_template() -> None:
    tokenizer = built(chat_template="{{ messages }}", ggml__padding_token_id=0, ggml__unknown_token_id=1)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert (tokenizer.pad_token, tokenizer.unk_token) == ("<|endoftext|>", "<|im_start|>")
    assert tokenizer.chat_template == "{{ messages }}"
    bare = built(ggml__bos_token_id=None, ggml__eos_token_id=None)
    assert (bare.bos_token, bare.eos_token, bare.pad_token, bare.chat_template) == (None, None, None, None)


def test_id_zero_is_a_token() -> None:
    assert built(ggml__bos_token_id=0).bos_token_id == 0


@pytest.mark.parametrize(("flag", "expected"), [(None, False), (False, False), (True, True)])
def test_bos_of_byte_level(flag: bool | None, expected: bool) -> None:
    tokenizer = built(ggml__add_bos_token=flag)
    ids = tokenizer("the")["input_ids"]
    assert ids == [tokenizer.bos_token_id] * expected + tokenizer("the", add_special_tokens=False)["input_ids"]
    assert tokenizer("")["input_ids"] == [tokenizer.bos_token_id] * expected


@pytest.mark.parametrize(("flag", "expected"), [(None, True), (False, False), (True, True)])
def test_bos_of_sentencepiece(flag: bool | None, expected: bool) -> None:
    tokenizer = sentencepiece(add_bos_token=flag)
    ids = tokenizer("the")["input_ids"]
    assert (ids[0] == 1) == expected and ids[expected:] == tokenizer("the", add_special_tokens=False)["input_ids"]
    assert sentencepiece(bos_token_id=None)("the")["input_ids"] == ids[expected:]


@pytest.mark.parametrize(
    "text",
    ["the", "hello", "hello and the", "the thing", "he  he", "lollo helloing", "and, and.", "ththe", "a band lands"],
)
def test_sentencepiece_merges_by_score(text: str) -> None:
    tokenizer = sentencepiece()
    assert tokenizer.tokenize(text) == merged_by_score(text)
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


@pytest.mark.parametrize("text", ["東京", "naïve 🙂 the", "\n", "A"])
def test_sentencepiece_falls_back_to_bytes(text: str) -> None:
    tokenizer = sentencepiece()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert 0 not in ids and tokenizer.decode(ids) == text
    expected = [3 + byte for byte in text.encode() if byte >= 0x80] or [3 + ord(text)]
    assert [i for i in ids if 3 <= i < 259] == expected


def test_sentencepiece_without_the_first_space() -> None:
    tokenizer = sentencepiece(add_space_prefix=False)
    assert tokenizer.tokenize("hello the") == ["hello", "▁the"]
    ids = tokenizer(" the", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == " the"


def test_sentencepiece_control_tokens_can_stay_text() -> None:
    tokenizer = sentencepiece()
    assert tokenizer("the</s>", add_special_tokens=False)["input_ids"][-1] == 2
    ids = tokenizer("the</s>", add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert 2 not in ids and tokenizer.decode(ids) == "the</s>"


@pytest.mark.parametrize("kind", ["bert", "t5", "rwkv", "no_vocab", ""])
def test_unknown_kinds(kind: str) -> None:
    with pytest.raises(ModelError, match=r"not supported") as caught:
        built(ggml__model=kind)
    assert repr(kind) in caught.value.message and "some/model.gguf" in caught.value.message
    assert "gpt2" in caught.value.hint


@pytest.mark.parametrize("rule", ["tekken", "gpt-4o", ""])
def test_unknown_splitting_rules(rule: str) -> None:
    with pytest.raises(ModelError) as caught:
        built(ggml__pre=rule)
    assert repr(rule) in caught.value.message and "some/model.gguf" in caught.value.message
    assert "llama-bpe" in caught.value.hint and "smollm" in caught.value.hint


@pytest.mark.parametrize(
    "changes",
    [
        {"ggml__tokens": None},
        {"ggml__merges": None},
        {"ggml__merges": ["one"]},
        {"ggml__tokens": 5},
        {"ggml__tokens": [1, 2]},
        {"ggml__token_type": 5},
        {"ggml__eos_token_id": 99999},
        {"ggml__bos_token_id": "<s>"},
    ],
)
def test_incomplete_byte_level(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"some/model\.gguf"):
        built(**changes)


@pytest.mark.parametrize("changes", [{"scores": None}, {"scores": [0.0]}, {"tokens": None}, {"unknown_token_id": 9999}])
def test_incomplete_sentencepiece(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"some/model\.gguf"):
        sentencepiece(**changes)


@pytest.mark.parametrize("pre", ["llama3", "llama-v3", "llama-bpe"])
def test_llama3_vocabularies_begin_with_bos(pre: str) -> None:
    bos = byte_level_parts()[0].index("<|endoftext|>")
    assert built(ggml__pre=pre)("the")["input_ids"][0] == bos
    assert built(ggml__pre=pre, ggml__add_bos_token=False)("the")["input_ids"][0] != bos
    assert built(ggml__pre=pre)("the", add_special_tokens=False)["input_ids"][0] != bos


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "smaug-bpe"])
def test_other_byte_level_vocabularies_do_not(pre: str) -> None:
    bos = byte_level_parts()[0].index("<|endoftext|>")
    assert bos not in built(ggml__pre=pre)("the")["input_ids"]
    assert built(ggml__pre=pre, ggml__add_bos_token=True)("the")["input_ids"][0] == bos


@pytest.mark.parametrize(("pre", "merged"), [("llama-bpe", False), ("smaug-bpe", True), ("qwen2", True)])
def test_a_word_that_is_a_token_is_not_merged_by_llama3(pre: str, merged: bool) -> None:
    tokens, merges, _ = byte_level_parts()
    tokens = [*tokens, "ouan"]  # a token that no merge makes: "o u" comes after "a n", and nothing joins the two
    ids = built(ggml__pre=pre, ggml__tokens=tokens, ggml__merges=merges)("ouan", add_special_tokens=False)["input_ids"]
    assert (ids == [len(tokens) - 1]) is not merged


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"ggml__model": None}, "lacks tokenizer.ggml.model"),
        ({"ggml__model": 5}, "no str"),
        ({"ggml__tokens": "abc"}, "no list"),
        ({"ggml__tokens": ["a", 5]}, "no str"),
        ({"ggml__tokens": None}, "lacks tokenizer.ggml.tokens"),
        ({"ggml__token_type": ["x"]}, "no int"),
        ({"ggml__merges": None}, "lacks tokenizer.ggml.merges"),
        ({"ggml__merges": ["qq zz"]}, "damaged"),
        ({"ggml__merges": [5]}, "no str"),
        ({"ggml__merges": ["the"]}, "damaged"),
        ({"ggml__pre": 7}, "no str"),
        ({"ggml__bos_token_id": "x"}, "no int"),
        ({"ggml__bos_token_id": 100_000}, "100000"),
        ({"ggml__eos_token_id": -1}, "-1"),
        ({"ggml__add_bos_token": "yes"}, "no bool"),
        ({"chat_template": 5}, "no str"),
    ],
)
def test_damaged_metadata(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelError, match=word) as caught:
        built(**changes)
    assert "some/model.gguf" in caught.value.message


@pytest.mark.parametrize(
    "changes", [{"scores": [1.0]}, {"scores": ["x"]}, {"tokens": [], "scores": []}, {"add_space_prefix": "no"}]
)
def test_damaged_sentencepiece_metadata(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"some/model\.gguf"):
        sentencepiece(**changes)


def test_text_never_merges_to_a_control_token() -> None:
    metadata = sentencepiece_metadata()
    for key, more in (("tokens", ["<", ">", "/", "</", "s>"]), ("scores", [-20.0] * 5), ("token_type", [1] * 5)):
        metadata[f"tokenizer.ggml.{key}"] = metadata[f"tokenizer.ggml.{key}"] + more
    tokenizer = build_tokenizer(GgufFile(Path("some/model.gguf"), metadata, {}))
    ids = tokenizer("a</s>", add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[-2:] == ["</", "s>"]
