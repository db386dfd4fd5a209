"""WordPiece: hand-written cases that the tokenizer of BERT fixes, a naive reference, and files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anytime.data import WordPiece
from anytime.errors import DtypeError, FormatError, MissingExtraError, MissingFileError, OptionError

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
TOKENS = [
    *SPECIAL,
    "un",
    "##aff",
    "##able",
    "want",
    "##ed",
    "the",
    "runn",
    "##ing",
    ",",
    "!",
    "'",
    "a",
    "##a",
    "b",
    "##b",
    "中",
]
NUMBERS = {name: number for number, name in enumerate(TOKENS)}


def tokenizer(**options: Any) -> WordPiece:
    return WordPiece(NUMBERS, **options)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("UNwantéd,running", ["unwanted", ",", "running"]),
        (" \tHeLLo!how  \n Are yoU?  ", ["hello", "!", "how", "are", "you", "?"]),
        ("ah\u535a\u63a8zz", ["ah", "\u535a", "\u63a8", "zz"]),
        ("a\u00a0b\u3000c\u2028d", ["a", "b", "c", "d"]),
        ("a\0b\ufffdc\x1bd\u200be\x0bf\ud800g", ["abcdefg"]),
        ("don't $5 a_b", ["don", "'", "t", "$", "5", "a", "_", "b"]),
        ("«¿no?»", ["«", "¿", "no", "?", "»"]),
        ("ÀÉÎ ñ ß İ ΟΔΟΣ", ["aei", "n", "ß", "i", "οδοσ"]),
        ("[PAD]", ["[", "pad", "]"]),
        ("", []),
        (" \n", []),
        ("\u0301", []),
    ],
)
def test_words_are_those_of_bert_uncased(text: str, words: list[str]) -> None:
    assert tokenizer().words(text) == words


def test_cased_text_keeps_its_letters_and_accents() -> None:
    assert tokenizer(lower=False).words("UNwantéd") == ["UNwantéd"]
    assert tokenizer(lower=False, accents=False).words("UNwantéd") == ["UNwanted"]
    assert tokenizer(accents=True).words("UNwantéd") == ["unwantéd"]
    assert tokenizer(chinese=False).words("ah\u535a") == ["ah\u535a"]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("unaffable", ["un", "##aff", "##able"]),
        ("unwanted running", ["[UNK]", "runn", "##ing"]),
        ("unaffablex!", ["[UNK]", "!"]),
        ("the中the", ["the", "中", "the"]),
        ("a" * 100, ["a", *["##a"] * 99]),
        ("a" * 101, ["[UNK]"]),
        ("[CLS]", ["[UNK]", "[UNK]", "[UNK]"]),
    ],
)
def test_words_are_cut_into_their_longest_tokens(text: str, tokens: list[str]) -> None:
    assert tokenizer().tokens(text) == tokens


def naive_cut(word: str, known: set[str]) -> list[str]:
    """The definition: the longest known beginning, then the same of the rest."""
    pieces: list[str] = []
    while word:
        mark = "##" if pieces else ""
        best = max((mark + word[:end] for end in range(1, len(word) + 1) if mark + word[:end] in known), key=len, default=None)
        if best is None:
            return ["[UNK]"]
        pieces.append(best)
        word = word[len(best) - len(mark) :]
    return pieces


@given(
    st.sets(st.text("ab", min_size=1, max_size=4)),
    st.sets(st.text("ab", min_size=1, max_size=4)),
    st.lists(st.text("abc", min_size=1, max_size=12)),
)
def test_cutting_is_greedy_from_the_left(whole: set[str], inner: set[str], words: list[str]) -> None:
    pieces = [*SPECIAL, *sorted(whole), *sorted(f"##{piece}" for piece in inner)]
    made = WordPiece({name: number for number, name in enumerate(pieces)})
    expected = [piece for word in words for piece in naive_cut(word, set(pieces[4:]))]
    assert made.tokens(" ".join(words)) == expected


@given(st.lists(st.text(max_size=30), max_size=5), st.integers(2, 9))
def test_rows_begin_and_end_with_their_marks_and_padding_stands_at_the_end_alone(texts: list[str], length: int) -> None:
    ids, lengths = tokenizer().encode(texts, length=length)
    assert ids.shape == (len(texts), length)
    assert ids.dtype == lengths.dtype == torch.int64
    for row, size, text in zip(ids.tolist(), lengths.tolist(), texts, strict=True):
        assert row[0] == NUMBERS["[CLS]"]
        assert row[size - 1] == NUMBERS["[SEP]"]
        assert 0 not in row[:size]
        assert set(row[size:]) <= {0}
        assert [TOKENS[number] for number in row[1 : size - 1]] == tokenizer().tokens(text)[: length - 2]


@pytest.mark.parametrize("text", ["a " * 10**6, "a" * 10**6, "\0" * 10**6], ids=["words", "word", "control"])
def test_huge_texts_are_encoded(text: str) -> None:
    _, lengths = tokenizer().encode([text], length=16)
    assert lengths.tolist() == [{" ": 16, "a": 3, "\0": 2}[text[1]]]


def test_without_tokenizers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r"anytime-nn\[text\]"):
        tokenizer().tokens("a")


def test_a_vocabulary_comes_from_lines_or_from_json(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(TOKENS) + "\n")
    assert WordPiece.load(tmp_path / "vocab.txt").vocabulary == NUMBERS
    assert not WordPiece.load(tmp_path / "vocab.txt", lower=False).lower
    (tmp_path / "tokenizer.json").write_text(json.dumps(document(normalizer={"lowercase": False, "strip_accents": True})))
    made = WordPiece.load(tmp_path / "tokenizer.json")
    assert made.vocabulary == NUMBERS
    assert made.words("Él") == ["El"]
    assert len(made) == len(TOKENS)
    assert made.pad == 0


def document(**changes: dict[str, Any]) -> dict[str, Any]:
    parts: dict[str, Any] = {
        "model": {"type": "WordPiece", "vocab": NUMBERS, "continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
        "normalizer": {"type": "BertNormalizer", "lowercase": True, "strip_accents": None, "handle_chinese_chars": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
    }
    return {name: {**part, **changes.get(name, {})} for name, part in parts.items()}


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(document(model={"type": "BPE"})),
        json.dumps(document(normalizer={"type": "NFC"})),
        json.dumps(document(model={"vocab": [1]})),
        json.dumps(document(model={"vocab": {"a": 0}})),
        json.dumps(document(model={"vocab": {**NUMBERS, "b": 0}})),
        json.dumps(document(model={"vocab": {**NUMBERS, "b": "x"}})),
        json.dumps({"model": [], "normalizer": 3}),
        "[]",
        "{",
        "[" * 100_000,
        b"\xff",
    ],
    ids=lambda content: str(content[:40]),
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(FormatError) as caught:
        WordPiece.load(path)
    assert caught.value.fix


def test_a_missing_file_or_a_text_without_special_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        WordPiece.load(tmp_path / "vocab.txt")
    (tmp_path / "vocab.txt").write_text("just\nwords\n")
    with pytest.raises(FormatError, match=r"lacks \[PAD\]"):
        WordPiece.load(tmp_path / "vocab.txt")


def test_wrong_calls_are_named() -> None:
    with pytest.raises(DtypeError, match="texts is a str"):
        tokenizer().encode("text", length=8)
    with pytest.raises(DtypeError, match="a text is a NoneType"):
        tokenizer().encode([None], length=8)  # type: ignore[list-item]
    with pytest.raises(OptionError, match="length is 1"):
        tokenizer().encode(["text"], length=1)
    for texts in (None, 5, b"text"):
        with pytest.raises(DtypeError, match=f"texts is a {type(texts).__name__}"):
            tokenizer().encode(texts, length=8)  # type: ignore[arg-type]
    for name, value in (("longest", 0), ("longest", 2**70), ("lower", "no"), ("accents", 1), ("chinese", None), ("prefix", 5)):
        with pytest.raises(OptionError, match=f"{name} is"):
            tokenizer(**{name: value})
    special = {piece: number for number, piece in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])}
    wrong: list[Any] = [None, list(special), {**special, 5: 4}, {**special, "[PAD]": 0.0}, {**special, "[PAD]": []}]
    for vocabulary in wrong:
        with pytest.raises(OptionError, match="not a mapping of strings to integers"):
            WordPiece(vocabulary)
