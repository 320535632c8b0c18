"""The bytes that each token of a vocabulary stands for."""

import json
import re
from functools import cache

import tokenizers

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Token id -> bytes, by the kind of decoder in `tokenizer.json`.

    Examples: byte-level `"Ġthe"` is `b" the"`; SentencePiece's `"▁the"` is `b" the"` and its `"<0xE6>"` is `b"\\xe6"`.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        decoder = json.loads(tokenizer.to_str()).get("decoder")
        kinds = _decoder_kinds(decoder)
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._metaspace = "Metaspace" in kinds or "▁" in json.dumps(decoder, ensure_ascii=False)

    def __getitem__(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            table = byte_level_table()
            return b"".join(bytes([table[char]]) if char in table else char.encode() for char in token)
        if self._byte_fallback and (match := _BYTE_FALLBACK.fullmatch(token)):
            return bytes.fromhex(match.group(1))
        if self._metaspace:
            return token.replace("▁", " ").encode()
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()


def _decoder_kinds(decoder: object) -> set[str]:
    if not isinstance(decoder, dict):
        return set()
    return {str(decoder.get("type"))}.union(*(_decoder_kinds(part) for part in decoder.get("decoders", [])))


@cache
def byte_level_table() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for the characters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
