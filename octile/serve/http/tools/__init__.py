"""Calls of functions in what the model writes in a chat.

parser.py     a parser of calls, while the text comes
deepseek.py   the formats of DeepSeek-V3, R1 and V3.1
kimi.py       the format of Kimi-K2
formats.py    all formats, by vLLM's names
"""
