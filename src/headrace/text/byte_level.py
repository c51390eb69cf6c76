"""The alphabet of byte-level BPE: each byte is written as one printable character (GPT-2's vocabulary format)."""

from __future__ import annotations

__all__ = ["BYTE_OF_CHARACTER", "CHARACTER_OF_BYTE", "bytes_of_token"]


def _alphabet() -> list[str]:
    """Printable Latin-1 bytes stand for themselves, the others for the characters from 256 on, in order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


CHARACTER_OF_BYTE: tuple[str, ...] = tuple(_alphabet())
BYTE_OF_CHARACTER: dict[str, int] = {character: byte for byte, character in enumerate(CHARACTER_OF_BYTE)}


def bytes_of_token(token: str) -> bytes:
    """The bytes a token stands for; one that isn't wholly in the alphabet (an added token) stands for its own text."""
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode("utf-8")
