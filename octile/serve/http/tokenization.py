"""The tokens of a text or a conversation, and the text of tokens: `/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

import json
from typing import Any

from octile.serve.http.protocol import DetokenizeBody, TokenizeChat, TokenizeText, parse
from octile.serve.http.responses import ApiError
from octile.serve.http.service import Service


def tokenize(service: Service, content: bytes) -> dict[str, Any]:
    """Answer POST /tokenize.

    Raises:
        ApiError: 400, the body is wrong, or the chat template refuses the messages; 404, it is for another model.
    """
    body = parse(TokenizeChat if _has_messages(content) else TokenizeText, content)
    if body.model is not None:
        service.check_model(body.model)
    if isinstance(body, TokenizeText):
        tokenizer = service.tokenizer
        encode = tokenizer.encode if body.add_special_tokens is False else tokenizer.encode_prompt
        tokens = encode(body.prompt)
    else:
        tokens = service.render(body).tokens
    texts = [service.tokenizer.decode([token]) for token in tokens] if body.return_token_strs else None
    return {"count": len(tokens), "max_model_len": service.context, "tokens": tokens, "token_strs": texts}


def _has_messages(content: bytes) -> bool:
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):
        return False  # the parser says what is wrong
    return isinstance(fields, dict) and "messages" in fields


def detokenize(service: Service, content: bytes) -> dict[str, Any]:
    """Answer POST /detokenize.

    Raises:
        ApiError: 400, the body is wrong, or a token is not in the vocabulary; 404, it is for another model.
    """
    body: DetokenizeBody = parse(DetokenizeBody, content)
    if body.model is not None:
        service.check_model(body.model)
    if any(token >= service.tokenizer.vocab_size for token in body.tokens):
        most = service.tokenizer.vocab_size - 1
        raise ApiError(400, f"tokens must be from 0 to {most}, not {max(body.tokens)}", "tokens")
    return {"prompt": service.tokenizer.decode(body.tokens)}
