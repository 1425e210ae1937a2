"""Engines in threads and processes of their own.

async_engine.py   an engine in a thread of its own, whose outputs an event loop reads
commands.py       commands of other threads for the thread that steps an engine, and what wakes a thread
sent_requests.py  the requests that another process has sent, by its numbers
messages.py       what a process sends to the process of an engine, and what that sends back
engine_end.py     the end of a pipe at which an engine is stepped
connection.py     the other end, which is an engine for another process
signals.py        signals of processes that another one ends, and garbage collections
"""
