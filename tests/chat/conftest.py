"""Shared by the tests of chats: the tokenizer of those of serving."""

from tests.serve.conftest import tokenizer

__all__ = ["tokenizer"]
