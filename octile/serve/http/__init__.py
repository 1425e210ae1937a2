"""An HTTP server with OpenAI's protocol, on FastAPI and uvicorn: `octile serve`.

command.py          binds the address, loads the model, and serves it until a signal comes
address.py          the server's address
process.py          the process of the server, seen from that of the engine
worker.py           what runs in it
server.py           the server, which drains before it ends
service.py          from the body of a request to its response
connection.py       what uvicorn's HTTP/1.1 protocol lacks: a time limit for the head of a request, abort, flow control
app.py              the paths: completions, chat completions, models, health, metrics and the page
access_log.py       a line for each response
page.html           the page at /
protocol.py         the bodies of requests, as OpenAI defines them, and what of them is not supported
response_body.py    the body of /v1/responses, and the chat that it asks for
response_object.py  its answer: items, whole or in events
neutral.py          fields of other servers, with the values that change nothing
message.py          what the model writes in a chat, as the parts of a message
reasoning.py        the thought in a text
grammars.py         the grammars that requests ask for
message_grammar.py  that of a message: a thought, and calls or content
tools/              calls of functions in what the model writes in a chat
tags.py             tags in a text that comes in pieces
tokenization.py     the tokens of a text or a conversation, and the text of tokens
config.py           `Limits`: what a server takes at most, and time limits; which keys it can have; `Parsers` of chats
tls.py              the certificate and key for HTTPS
responses.py        bodies and errors in OpenAI's format, and responses that are written as fast as their client reads
metrics.py          what Prometheus reads, under vLLM's names
sender.py           sends the weights of a trainer to a server
stress.py           many clients that stream completions and time them
"""
