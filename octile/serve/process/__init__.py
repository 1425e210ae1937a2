"""An engine and those who use it, in processes of their own.

messages.py  what a process sends to the process of an engine, what that sends back
server.py    `EngineServer`: steps an engine for the process at the other end of a pipe
updates.py   `WeightsUpdates`: new weights of that engine, between its steps
client.py    `EngineClient`: that other end, for an event loop, whose readers get the outputs of their requests
signals.py   signals of processes that another one ends, and garbage collections
"""
