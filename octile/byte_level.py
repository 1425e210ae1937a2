"""The characters by which byte-level tokenizers represent bytes.

Printable ones represent themselves.  Source: `bytes_to_unicode` of GPT-2.
"""


def byte_of_character() -> dict[str, int]:
    """Map each of the 256 characters to the byte that it represents."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
