"""All formats of calls, by vLLM's names."""

from __future__ import annotations

from octile.serve.http.config import ToolCallFormat
from octile.serve.http.tools import deepseek, kimi
from octile.serve.http.tools.parser import CallFormat

FORMATS: dict[ToolCallFormat, CallFormat] = {
    "deepseek_v3": deepseek.V3,
    "deepseek_v31": deepseek.V31,
    "kimi_k2": kimi.K2,
}
