"""A model whose logits are a hash of all tokens before, as its pages hold them: a wrong page gives another text."""

import random

import torch

from octile.serve.engine.drafts import count_accepted
from octile.serve.engine.request import Request, Sampling
from octile.serve.engine.sampler import Row, choose
from octile.serve.runner.batch import Batch, Chunk, DecodedTokens, Results

EMPTY = -1


class FakeRunner:
    """Writes tokens, not latents, into its pages; the draft layer has pages of its own and is wrong now and then.

    Attributes:
        drafts_well: whether it is right after these tokens.
    """

    can_draft = True
    device = torch.device("cpu")
    expert_tokens = None
    end_tokens = ()

    def __init__(
        self, n_pages=64, page_size=4, vocab_size=320, max_position=10_000, scale=1.0, max_ahead=0, n_drafts=0
    ):
        self.n_pages, self.page_size = n_pages, page_size
        self.vocab_size, self.max_position, self.scale = vocab_size, min(max_position, n_pages * page_size), scale
        self.pages = [[EMPTY] * page_size for _ in range(n_pages)]
        self.draft_pages = [[EMPTY] * page_size for _ in range(n_pages)]
        self.batches: list[Batch] = []
        self.max_ahead, self.n_drafts, self.runs_ahead = max_ahead, n_drafts, max_ahead > 0
        self.decode_steps = self.divided_steps = self.scored_steps = self.continued_passes = self.version = 0
        self.prefixes: list[list[int]] = []  # of the rows of the last pass
        self.last = torch.zeros(max_ahead, dtype=torch.int64)  # token of each request of the last decode step
        self.before: list[tuple[int, list[int]]] = []  # the last decode step: positions and tokens of its requests
        self.begun: list[tuple] = []  # the decode step whose logits were computed last
        self.drafts_well = lambda tokens: random.Random(hash(tuple(tokens))).random() < 0.7

    def logits_after(self, tokens):
        """The logits of the token after these, [V], which each version of the weights changes."""
        generator = torch.Generator().manual_seed(
            hash((self.version, *tokens) if self.version else tuple(tokens)) % 2**63
        )
        return self.scale * torch.randn(self.vocab_size, generator=generator)

    def text_of(self, prompt, sampling, end_tokens=()):
        """The new tokens of a request that is alone, by the definition, which no token ends."""
        request = Request(0, prompt, sampling, sampling.seed)
        tokens = request.tokens
        for _ in range(sampling.max_new_tokens):
            row = Row(sampling, sampling.seed, len(tokens), request.histories(end_tokens)[0])
            tokens.append(choose(self.logits_after(tokens)[None], [row]).item())
        return tokens[len(prompt) :].tolist()

    def run(self, batch):
        self.batches.append(batch)
        logits, hidden, self.prefixes = [], [], []
        for chunk in batch.chunks:
            if batch.chosen is not None and min(chunk.tokens) < 0:
                (token,) = chunk.tokens
                chunk = chunk._replace(tokens=[max(0, batch.chosen[-1 - token].item())])
            self._write(self.pages, chunk)
            for i in range(len(chunk.tokens)):
                prefix = self._read(self.pages, chunk.pages, chunk.start + i + 1)
                hidden.append([float(chunk.start + i), float(len(self.prefixes))])
                self.prefixes.append(prefix)
                if i >= len(chunk.tokens) - chunk.n_logits:
                    logits.append(self.logits_after(prefix))
        return Results(torch.stack(logits) if logits else torch.empty(0, self.vocab_size), torch.tensor(hidden))

    def logits(self, hidden):
        return torch.stack([self.logits_after(self.prefixes[int(row)]) for row in hidden[:, 1]])

    def step_costs(self, n_requests, n_drafts):
        return (1.0, *(1.45 + 0.3 * i for i in range(n_drafts)))

    def check_weights(self):
        pass

    def update_weights(self):
        self.version += 1

    def decode(self, requests, n_drafts, log_probs=False, chosen=None):
        """As the definition of a decode step says, by `run` and `draft`, request after request."""
        assert not (log_probs and self.n_drafts)
        assert chosen is None or (not self.n_drafts and len(chosen) <= self.max_ahead)
        self.scored_steps += log_probs
        self.continued_passes += chosen is not None
        if chosen is not None:
            self.before = [(1, [max(0, token)]) for token in chosen.tolist()]
        logits = self._begin(requests, n_drafts)
        rows = [
            Row(self._sampling(request), request.seed, position + i + 1)
            for request, position, *_ in self.begun
            for i in range(1 + n_drafts)
        ]
        chosen = choose(logits, rows)
        scores = logits[:: 1 + n_drafts].log_softmax(-1).gather(1, chosen[:: 1 + n_drafts, None].clamp(min=0))[:, 0]
        return self._end(chosen, n_drafts, scores if log_probs else None)

    def decode_logits(self, requests, n_drafts):
        self.divided_steps += 1
        assert self.n_drafts
        return self._begin(requests, n_drafts)

    def decode_chosen(self, chosen):
        return self._end(chosen, len(chosen) // len(self.begun) - 1)

    def _begin(self, requests, n_drafts):
        """Compute logits of a decode step's rows; zeros after those that are inside of a text and verify a draft."""
        self.decode_steps += 1
        assert 0 <= n_drafts <= self.n_drafts
        self.begun, logits = [], torch.zeros(len(requests), 1 + n_drafts, self.vocab_size)
        for i, request in enumerate(requests):
            position, tokens, hidden = request.position, request.tokens, None
            if request.source >= 0:
                advance, tokens = self.before[request.source]
                position += advance
            assert request.n_drafts <= n_drafts
            assert request.n_drafts < len(tokens) or position + len(tokens) >= request.end
            inside = tokens[: min(1 + request.n_drafts, request.end - position)] if position < request.end else []
            if inside:  # otherwise its text has ended in the step before
                logits[i, : len(inside)], hidden = self.run(
                    Batch([Chunk(inside, position, request.pages, len(inside))])
                )
            pages = request.pages[:]  # the request may end before its tokens are chosen
            self.begun.append((request._replace(pages=pages), position, inside, hidden))
        return logits.flatten(0, 1)

    def _end(self, chosen, n_drafts, scores=None):
        """Accept drafts of the step whose logits were computed last, and draft anew."""
        after, rows = [], []
        for (request, position, inside, hidden), own in zip(self.begun, chosen.view(-1, 1 + n_drafts), strict=True):
            own, pages, end = own.tolist(), request.pages, request.end
            accepted = count_accepted(inside[1:], own)
            drafts: list[int] = []
            if self.n_drafts and inside and position + accepted + 1 < end:
                chunk = Chunk(own[: accepted + 1], position, pages, min(n_drafts, 1))
                logits, hidden = self.draft(Batch([chunk]), hidden[: accepted + 1])
                last = position + accepted
                while n_drafts:
                    row = Row(self._sampling(request), request.seed, last + 2 + len(drafts))
                    drafts += choose(logits, [row]).tolist()
                    if len(drafts) == n_drafts or last + len(drafts) >= end:
                        break
                    logits, hidden = self.draft(Batch([Chunk(drafts[-1:], last + len(drafts), pages, 1)]), hidden[-1:])
            after.append((accepted + 1, [own[accepted], *drafts]))
            rows.append([*own, accepted, *drafts, *[0] * (n_drafts - len(drafts))])
        self.before = after
        last = self.last[: len(after)]  # as on a GPU, the next step writes it
        last.copy_(torch.tensor([tokens[0] for _, tokens in after]))
        return DecodedTokens(torch.tensor(rows), None, n_drafts, log_probs=scores, on_device=last)

    @staticmethod
    def _sampling(request):
        _, top_k, _, temperature, top_p, min_p = request[3:9]
        return Sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)

    def draft(self, batch, hidden):
        logits = []
        positions = [chunk.start + i for chunk in batch.chunks for i in range(len(chunk.tokens))]
        assert hidden[:, 0].tolist() == positions, "the hidden states are those of other positions"
        for chunk in batch.chunks:
            self._write(self.draft_pages, chunk)
            if chunk.n_logits:
                end = chunk.start + len(chunk.tokens)
                first = self.pages[chunk.pages[0]][0]
                prefix = [first, *self._read(self.draft_pages, chunk.pages, end)]
                logits.append(self.logits_after(prefix if self.drafts_well(prefix) else [EMPTY]))
        next_hidden = hidden + 1  # a draft of the draft is at the next position
        return Results(torch.stack(logits) if logits else torch.empty(0, self.vocab_size), next_hidden)

    def _write(self, pages, chunk):
        for i, token in enumerate(chunk.tokens):
            page, place = divmod(chunk.start + i, self.page_size)
            pages[chunk.pages[page]][place] = token

    def _read(self, pages, of_request, n):
        return [pages[of_request[i // self.page_size]][i % self.page_size] for i in range(n)]
