"""WordPiece, the tokenizer of BERT, by the package `tokenizers`; it is imported when the first text is encoded.

Names of special tokens in a text, such as `[PAD]`, are text like any other: no text can put padding or a separator into its
own row.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from anytime.checks import check_count
from anytime.errors import DtypeError, FormatError, MissingExtraError, OptionError
from anytime.reading import parsing, read_file

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
_LARGEST_FILE = 1 << 28
# A text is encoded as a whole before it is truncated. No language needs this many characters per token.
_CHARACTERS_PER_TOKEN = 1000


@dataclass(frozen=True, eq=False)
class WordPiece:
    """A tokenizer for one vocabulary; `WordPiece.load` reads it from a file.

    Args:
        vocabulary: The id of each token, counted from 0; `[PAD]`, `[UNK]`, `[CLS]` and `[SEP]` are required.
        lower: Whether to lower-case text.
        accents: Whether to keep accents; by default they are kept unless text is lower-cased.
        chinese: Whether each Chinese character is a word of its own.
        prefix: The prefix of tokens that continue a word.
        longest: Words with more characters become `[UNK]`.

    Example:
        >>> words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "play", "##ing", "!"]
        >>> tokenizer = WordPiece({word: number for number, word in enumerate(words)})
        >>> tokenizer.tokens("Playing, play!")
        ['play', '##ing', '[UNK]', 'play', '!']
        >>> ids, lengths = tokenizer.encode(["Playing!", "play"], length=6)
        >>> ids.tolist(), lengths.tolist()
        ([[2, 4, 5, 6, 3, 0], [2, 4, 3, 0, 0, 0]], [5, 3])
    """

    vocabulary: Mapping[str, int] = field(repr=False)
    lower: bool = True
    accents: bool | None = None
    chinese: bool = True
    prefix: str = "##"
    longest: int = 100

    def __post_init__(self) -> None:
        kinds: dict[str, Any] = {"lower": bool, "accents": bool | None, "chinese": bool, "prefix": str}
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                expected = f"a {getattr(kind, '__name__', kind)}"
                raise OptionError(f"{name} is {getattr(self, name)!r}", expected=expected, fix=f"leave {name} at its default")
        check_count(self.longest, "longest", most=1 << 20)
        expected, fix = "a mapping of tokens to ids 0, 1, 2, …, with " + ", ".join(SPECIAL_TOKENS), "use WordPiece.load(file)"
        tokens: Any = self.vocabulary
        if not isinstance(tokens, Mapping) or not all(type(name) is str and type(at) is int for name, at in tokens.items()):
            raise OptionError("the vocabulary is not a mapping of strings to integers", expected=expected, fix=fix)
        missing = [name for name in SPECIAL_TOKENS if name not in tokens]
        if missing or set(tokens.values()) != set(range(len(tokens))):
            problem = f"lacks {', '.join(missing)}" if missing else "has repeated or missing ids"
            raise OptionError(f"the vocabulary of {len(tokens)} tokens {problem}", expected=expected, fix=fix)

    @classmethod
    def load(cls, path: str | Path, *, lower: bool | None = None) -> Self:
        """Load a `vocab.txt` (one token per line) or a `tokenizer.json` written by Hugging Face.

        Args:
            path: The file.
            lower: Whether to lower-case; by default what a `tokenizer.json` says, and True for a `vocab.txt`.
        """
        path = Path(path)
        expected = "one token per line, or the JSON of a WordPiece tokenizer, with " + ", ".join(SPECIAL_TOKENS)
        fix, what = "use the file that was published with the weights", "is not a vocabulary"
        data = read_file(path, most=_LARGEST_FILE, expected=expected, fix=fix)
        try:
            with parsing(path, expected=expected, fix=fix, kind=FormatError, what=what):
                text = data.decode()
                settings = _read_json(text, path) if path.suffix == ".json" else {"vocabulary": _read_lines(text)}
                return cls(**settings if lower is None else {**settings, "lower": lower})
        except OptionError as error:
            raise FormatError(f"{path} {what}: {error.got}", expected=expected, fix=fix, path=path) from error

    def __len__(self) -> int:
        """The size of the vocabulary."""
        return len(self.vocabulary)

    @property
    def pad(self) -> int:
        """The id of the padding token."""
        return self.vocabulary["[PAD]"]

    def words(self, text: str) -> list[str]:
        """Normalize a text and split it at white space and around punctuation.

        >>> WordPiece({name: number for number, name in enumerate(SPECIAL_TOKENS)}).words("Él said: don't!")
        ['el', 'said', ':', 'don', "'", 't', '!']
        """
        normalized = self._tokenizer.normalizer.normalize_str(_check_text(text))
        return [word for word, _ in self._tokenizer.pre_tokenizer.pre_tokenize_str(normalized)]

    def tokens(self, text: str) -> list[str]:
        """Split a text into tokens, without `[CLS]` and `[SEP]`."""
        found: list[str] = self._tokenizer.encode(_check_text(text), add_special_tokens=False).tokens
        return found

    def encode(self, texts: Iterable[str], *, length: int) -> tuple[Tensor, Tensor]:
        """Encode texts as rows of token ids, truncated and padded to one length.

        Args:
            texts: The texts.
            length: Tokens per row, `[CLS]` and `[SEP]` included.

        Returns:
            The token ids, `(N, length)`, and the number of tokens before the padding, `(N,)`; both int64.
        """
        if isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
            raise DtypeError(
                f"texts is a {type(texts).__name__}", expected="a list of str", fix="wrap a single text in a list: [text]"
            )
        check_count(length, "length", low=2)
        first, last = self.vocabulary["[CLS]"], self.vocabulary["[SEP]"]
        parts = [_check_text(text)[: _CHARACTERS_PER_TOKEN * length] for text in texts]
        encoded = self._tokenizer.encode_batch_fast(parts, add_special_tokens=False)
        rows = [[first, *each.ids[: length - 2], last] for each in encoded]
        ids = np.full((len(rows), length), self.pad, dtype=np.int64)
        for row, numbers in zip(ids, rows, strict=True):
            row[: len(numbers)] = numbers
        return torch.from_numpy(ids), torch.tensor([len(numbers) for numbers in rows], dtype=torch.int64)

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            tokenizers = importlib.import_module("tokenizers")
        except ImportError as error:
            raise MissingExtraError(
                "the package tokenizers is not installed", expected="tokenizers", fix="pip install 'anytime-nn[text]'"
            ) from error
        model = tokenizers.models.WordPiece(
            dict(self.vocabulary),
            unk_token="[UNK]",
            continuing_subword_prefix=self.prefix,
            max_input_chars_per_word=self.longest,
        )
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(
            lowercase=self.lower,
            strip_accents=None if self.accents is None else not self.accents,
            handle_chinese_chars=self.chinese,
        )
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        tokenizer.encode_special_tokens = True
        return tokenizer


def _check_text(text: Any) -> str:
    if not isinstance(text, str):
        raise DtypeError(f"a text is a {type(text).__name__}", expected="a str", fix="decode bytes; drop missing texts")
    return text.encode("utf-8", "ignore").decode()  # without lone surrogates, which are not text


def _read_lines(text: str) -> dict[str, int]:
    lines = text.removesuffix("\n").split("\n")
    return {line.removesuffix("\r"): number for number, line in enumerate(lines)}


def _read_json(text: str, path: Path) -> dict[str, Any]:
    document = json.loads(text)
    model, normalizer, splitter = (_section(document, name) for name in ("model", "normalizer", "pre_tokenizer"))
    kinds = (model.get("type"), normalizer.get("type"), splitter.get("type"))
    vocabulary = model.get("vocab")
    if kinds != ("WordPiece", "BertNormalizer", "BertPreTokenizer") or not isinstance(vocabulary, dict):
        raise FormatError(
            f"{path} describes a tokenizer of type {kinds[0]!r} with {kinds[1]!r} and {kinds[2]!r}",
            expected="'WordPiece' with 'BertNormalizer' and 'BertPreTokenizer'",
            fix="use an encoder with the tokenizer of BERT",
            path=path,
        )
    strip = normalizer.get("strip_accents")
    return {
        "vocabulary": vocabulary,
        "lower": bool(normalizer.get("lowercase", True)),
        "accents": None if strip is None else not strip,
        "chinese": bool(normalizer.get("handle_chinese_chars", True)),
        "prefix": str(model.get("continuing_subword_prefix", "##")),
        "longest": model.get("max_input_chars_per_word", 100),
    }


def _section(document: Any, name: str) -> dict[str, Any]:
    section = document.get(name) if isinstance(document, dict) else None
    return section if isinstance(section, dict) else {}
