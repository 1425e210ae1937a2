"""Text for people: numbers with their units, and text from elsewhere made safe to show."""

import math
import re
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


def format_quantity(value: float) -> str:
    """A number with three significant digits: 512 → "512", 8_131_072 → "8.13M", 671e9 → "671B", 2⁵⁴ → "1.80·10¹⁶"."""
    if value >= 1e15:
        digits, _, exponent = f"{value:.2e}".partition("e")
        return f"{digits}·10{superscript(int(exponent))}"
    for factor, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if value >= factor:
            scaled = value / (1e3 if unit == "k" else factor)
            return f"{scaled:.{max(0, 2 - int(math.log10(scaled)))}f}{unit}"
    return f"{value:,.0f}"


def superscript(exponent: int) -> str:
    """A whole number in superscript: −12 → "⁻¹²"."""
    return str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def format_flops(per_second: float) -> str:
    """FLOPs per second: 23.4e9 → "23.4 GFLOP/s", 1.5e15 → "1.5 PFLOP/s"."""
    units = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"))
    factor, unit = next((u for u in units if round(per_second / u[0], 1) >= 1), units[-1])
    return f"{per_second / factor:,.1f} {unit}FLOP/s"


def format_count(number: int, noun: str) -> str:
    """A number with its noun: "1 row", "1,024 rows"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_bytes(value: float) -> str:
    """Bytes in decimal units: 1_240_000 → "1.24 MB"."""
    for factor, unit in ((1e18, "EB"), (1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= factor:
            number = value / factor
            return f"{number:,.0f} {unit}" if number >= 999.5 else f"{number:.3g} {unit}"  # .3g would write 1e+03
    return f"{value:.0f} B"


def format_duration(seconds: float) -> str:
    """A duration in its two largest units: 192.4 → "3 min 12 s"."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def format_signed(value: float, form: str) -> str:
    """A number with its sign and a typographic minus sign; a number that rounds to zero has no sign.

    Args:
        value: the number.
        form: its format without the sign: (−0.154, ".3f") → "−0.154", (−0.0004, ".2f") → "0.00".
    """
    text = f"{value:+{form}}"
    return text.replace("-", "−") if re.search("[1-9i]", re.split("[eE]", text)[0]) else text[1:]


def format_percent(fraction: float, digits: int = 2) -> str:
    """A signed fraction in percent: 0.00113 → "+0.11%", −0.00001 → "0.00%"."""
    return format_signed(fraction, f".{digits}%")
