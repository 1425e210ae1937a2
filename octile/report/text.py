"""Makes text from elsewhere safe to show: generated text, samples of a corpus, names of files."""

import unicodedata

ESCAPED_CATEGORIES = frozenset({"Cc", "Cs", "Zl", "Zp"})  # controls, lone surrogates, line and paragraph separators
BIDIRECTIONAL = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def escape_control_characters(text: str) -> str:
    r"""Replace characters that control a terminal or the direction of text by their escapes: ESC → \x1b.

    Line feeds and tabs stay. HTML cannot contain most of the others.
    """
    return "".join(_escape(character) for character in text)


def _escape(character: str) -> str:
    if character in "\n\t" or (
        unicodedata.category(character) not in ESCAPED_CATEGORIES and character not in BIDIRECTIONAL
    ):
        return character
    return character.encode("unicode_escape").decode()
