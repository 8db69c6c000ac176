"""Tokens without a model: a reversible tokenizer, and the rule that invents the next token.

The vocabulary: a few specials, 256 single bytes, 65,536 pairs of bytes, and pseudo-words of three
syllables. Text becomes pseudo-words where it has them and bytes elsewhere; `decode(encode(text))` is `text`.

The next token is a hash of every token before it, so a prompt followed by the tokens kept of an interrupted
answer goes on exactly as the uninterrupted answer did: what greedy decoding gives on a real model.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Sequence

BOS, EOS = 1, 2
_BYTE0 = 3
_PAIR0 = _BYTE0 + 256
WORD0 = _PAIR0 + 65536
"""First pseudo-word. All invented tokens are at or above it, save the end of sequence."""
VOCAB_SIZE = 128_256
"""As Llama 3's, so that token-id prompts made for it are valid here."""
_WORDS = VOCAB_SIZE - WORD0

_SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"][:40]
_BASE = len(_SYLLABLES)
_FIRST_TWO = [f" {a}{b}".encode() for a in _SYLLABLES for b in _SYLLABLES]
_LAST = [s.encode() for s in _SYLLABLES]
_VALUE = {s: i for i, s in enumerate(_SYLLABLES)}
_WORD = re.compile(" ((?:" + "|".join(_SYLLABLES) + "){3})(?![a-z])")

_MASK = (1 << 64) - 1
_MULTIPLIER, _INCREMENT = 6364136223846793005, 1442695040888963407
"""Knuth's MMIX constants."""

MEAN_OUTPUT = 256
"""Expected tokens of an answer that ends by itself: our choice, of the order of ShareGPT's answers."""


def chain(previous: int, block: tuple[int, ...]) -> int:
    """Hash of a full block given the hash of everything before it. 0 stands before the first block."""
    return hash((previous, block))


def fold(state: int, token: int) -> int:
    """State after `token`, within a block. A block's first state is its `chain` value."""
    return ((state & _MASK) * _MULTIPLIER + token + _INCREMENT) & _MASK


def choose(state: int) -> int:
    """The token that follows `state`: usually a pseudo-word, once in `MEAN_OUTPUT` the end of sequence."""
    mixed = (((state ^ (state >> 29)) & _MASK) * _MULTIPLIER & _MASK) >> 20
    if mixed % MEAN_OUTPUT == 0:
        return EOS
    return WORD0 + (mixed >> 8) % _WORDS


def _piece(token: int) -> bytes:
    if token >= WORD0:
        number = token - WORD0
        return _FIRST_TWO[number // _BASE] + _LAST[number % _BASE]
    if token >= _PAIR0:
        return (token - _PAIR0).to_bytes(2, "big")
    if token >= _BYTE0:
        return bytes((token - _BYTE0,))
    return b""


def _encode_bytes(raw: bytes, out: list[int]) -> None:
    even = len(raw) & ~1
    pairs = array("H", raw[:even])
    if sys.byteorder == "little":
        pairs.byteswap()
    out.extend(p + _PAIR0 for p in pairs)
    if even != len(raw):
        out.append(raw[-1] + _BYTE0)


def encode(text: str) -> list[int]:
    """Token ids of `text`, without a beginning-of-sequence token."""
    out: list[int] = []
    at = 0
    for match in _WORD.finditer(text):
        syllables = match.group(1)
        number = 0
        for i in (0, 2, 4):
            number = number * _BASE + _VALUE[syllables[i : i + 2]]
        if number >= _WORDS:
            continue
        if match.start() > at:
            _encode_bytes(text[at : match.start()].encode("utf-8", "surrogatepass"), out)
        out.append(WORD0 + number)
        at = match.end()
    if at < len(text):
        _encode_bytes(text[at:].encode("utf-8", "surrogatepass"), out)
    return out


def decode(tokens: Sequence[int]) -> str:
    """Text of token ids; specials are left out, bytes that are no UTF-8 become the replacement character."""
    return b"".join(map(_piece, tokens)).decode("utf-8", "replace")


def chat_prompt(messages: Sequence[tuple[str, str]], *, add_generation_prompt: bool = True) -> list[int]:
    """Token ids of a conversation. Each message is encoded by itself, so a longer conversation has the
    shorter one as its prefix."""
    out = [BOS]
    for role, content in messages:
        out += encode(f"<|{role}|>\n{content}\n")
    if add_generation_prompt:
        out += encode("<|assistant|>\n")
    return out
