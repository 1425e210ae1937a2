"""The prompts of chats, for serving and training.

template.py   the chat template: messages to tokens
thought.py    whether a message has a thought
"""
