from __future__ import annotations

import sys
import unicodedata

import pytest

from covey.config import toml_value
from covey.escape import printable, printable_data, printable_line

# C0 but line end and tab, DEL, C1, and what turns the direction of text around.
ORDERS = {
    *map(chr, range(32)), *map(chr, range(0x7F, 0xA0)), *map(chr, range(0x202A, 0x202F)),
    *map(chr, range(0x2066, 0x206A)), "\u200e", "\u200f", "\u061c", "\u2028", "\u2029",
} - {"\n", "\t"}  # fmt: skip


def test_orders_to_a_terminal_become_visible_and_all_else_stays() -> None:
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    shown = printable(everything)
    assert not ORDERS & set(shown)
    kept = [c for c in everything if unicodedata.category(c)[0] in "LMNPS" or c in "\n\t \u200d"]
    assert [c for c in kept if printable(c) != c] == []
    shown.encode()  # no lone surrogate is left


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("a\u202eb\u2066c", r"a\u202eb\u2066c"),
        ("a\r\nb\x9b1m", "a\\r\nb\\x9b1m"),
        ("\ud800\U000e0041", r"\ud800\U000e0041"),
        ("naïve 文 👩\u200d🚀\tx", "naïve 文 👩\u200d🚀\tx"),
    ],
)
def test_an_escape_says_which_character_it_was(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown


def test_a_line_is_one_line_and_bounded() -> None:
    assert printable_line("a\nb\x1b") == r"a b\x1b"
    assert len(printable_line("\x1b" * 10**6)) == 504
    assert "\n" not in printable_line("x\n" * 1000)


def test_texts_within_data_are_printable() -> None:
    assert printable_data({"\x1b": ["\u202e", 1, None, ("\x00",)]}) == {
        r"\x1b": [r"\u202e", 1, None, [r"\x00"]]
    }


def test_a_configuration_is_written_without_anything_hidden_and_reads_back() -> None:
    import tomllib

    text = "".join(sorted(ORDERS)) + '\U000e0041 ünï\n\t"\\'
    written = toml_value(text)
    assert not ORDERS & set(written)
    assert tomllib.loads(f"a = {written}") == {"a": text}
