"""What a decode step computes of numbers, before and after the forward pass (`octile.serve.runner.decode_loop`).

    continued_tokens   tokens and first positions of the requests, of the step before or as given
    text_rows          a row for each token: its position, where its latent is written, to how many positions it attends
    accepted_rows      what multi-token prediction reads: the choices, and the last row of each request that counts
    record_choices     what a step leaves to the next one and to the host

Each is one kernel on a GPU: torch's operators would be some fifty launches a step of a few numbers each.

Numbers from the host and results for it are in its memory, which kernels of a GPU read and write themselves: a copy and
its gaps in the stream take longer than the kernel. Both are double-buffered, so the host writes the numbers of the next
step, and reads the results of the one before, while a step is computed. `parity` counts the steps on the device,
because a CUDA graph has the same arguments each time.

Shapes: B requests, k tokens of each (the last one and n = k − 1 drafts), R requests of the step before, M pages of a
text at most, T = B · k rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from octile.ops.latent_cache import PAGE
from octile.ops.operator import operator
from octile.ops.quantize import check_device
from octile.ops.sample_tokens import NO_TOKEN

# Before the tokens: source, position, end, seed, top_k, drafts, and bits of temperature, top_p and min_p in float64.
FIELDS, DRAFTS, TEMPERATURE = 9, 5, 6
NO_DRAFT = min(NO_TOKEN) - 1  # nothing that a row chooses equals it


@operator(writes=("parity",), pinned=("host",))
def continued_tokens(
    host: Tensor, parity: Tensor, last: Tensor, advance: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Find the tokens of requests, the position of the first one, and where their rows end.

    Args:
        host: int64 [2, 9 + k, B], rows contiguous, on the device or in pinned memory; the buffer parity[0] is read.
            Its rows are source, position, end, seed, top_k, drafts, bits of temperature, top_p and min_p, and k tokens.
            The source is a request of the step before, whose tokens follow; negative: the given tokens count. Tokens
            after the first and as many drafts become NO_DRAFT.
        parity: int64 [2], contiguous: of this step, 0 or 1, and of the next one, which is written.
        last: int64 [R, m], m at least k, rows contiguous, the tokens that the step before has left.
        advance: int64 [R], contiguous, the positions by which it has advanced.

    Returns:
        tokens int64 [B, k]; first positions int64 [B]: the given one, plus what the source has advanced; ends of the
        rows int64 [B]: the text's, or the position after the request's last draft if that comes before; temperatures
        float32 [B]; the rows of the buffer before its tokens, int64 [9, B].

    Raises:
        TypeError: a tensor is not int64.
        ValueError: shapes, strides or devices do not fit together.
    """
    _check_continued(host, parity, last, advance)
    current = int(parity[0])
    parity[1] = 1 - current
    numbers = host[current]
    source_B, position_B, heat_B = numbers[0], numbers[1], numbers[TEMPERATURE]
    drafts_B, k = numbers[DRAFTS], len(numbers) - FIELDS
    is_given_B, before_B = source_B < 0, source_B.clamp(min=0)
    tokens_Bk = torch.where(is_given_B[:, None], numbers[FIELDS:].T, last[before_B, :k])
    tokens_Bk = tokens_Bk.masked_fill(torch.arange(k, device=numbers.device) > drafts_B[:, None], NO_DRAFT)
    first_B = position_B + advance[before_B].masked_fill(is_given_B, 0)
    end_B = torch.minimum(numbers[2], first_B + 1 + drafts_B)
    fields = numbers[:FIELDS].clone(memory_format=torch.contiguous_format)
    return tokens_Bk.contiguous(), first_B, end_B, heat_B.view(torch.float64).float(), fields


@continued_tokens.register_fake
def _(host, parity, last, advance):
    k, b = host.shape[1] - FIELDS, host.shape[2]
    temperatures = last.new_empty(b, dtype=torch.float32)
    return last.new_empty(b, k), last.new_empty(b), last.new_empty(b), temperatures, last.new_empty(FIELDS, b)


@continued_tokens.register_kernel("cuda")
def _(host, parity, last, advance):
    from octile.kernels.triton import decode_step as kernel  # late: a machine without a GPU has no Triton

    _check_continued(host, parity, last, advance)
    return kernel.launch_continued(host, parity, last, advance, FIELDS, DRAFTS, TEMPERATURE, NO_DRAFT)


@operator()
def text_rows(tokens: Tensor, first: Tensor, end: Tensor, pages: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make the rows of requests: consecutive positions of a text each.

    Args:
        tokens: int64 [B, k], rows contiguous; a negative one, of a row whose logits choose no token, counts as 0.
        first: int64 [B], position of the first token.
        end: int64 [B], of the text. Rows from it on are written nowhere and attend to nothing.
        pages: int32 [B, M], rows contiguous, of the text; each with at least one.

    Returns:
        tokens, positions and slots int64 [T], slots negative where a row is written nowhere; lengths int32 [T].

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes, strides or devices do not fit together.
    """
    _check_rows(tokens, first, end, pages)
    position_Bk = first[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
    is_inside_Bk = position_Bk < end[:, None]
    at_Bk = torch.minimum(position_Bk, end[:, None] - 1).clamp(min=0)
    slots_Bk = pages.gather(1, at_Bk // PAGE).long() * PAGE + at_Bk % PAGE
    lengths_Bk = torch.where(is_inside_Bk, at_Bk + 1, 0).to(torch.int32)
    rows = tokens.clamp(min=0), at_Bk, slots_Bk.masked_fill(~is_inside_Bk, -1), lengths_Bk
    return tuple(t.flatten() for t in rows)  # type: ignore[return-value]


@text_rows.register_fake
def _(tokens, first, end, pages):
    t = tokens.numel()
    return *(tokens.new_empty(t) for _ in range(3)), tokens.new_empty(t, dtype=torch.int32)


@text_rows.register_kernel("cuda")
def _(tokens, first, end, pages):
    from octile.kernels.triton import decode_step as kernel

    _check_rows(tokens, first, end, pages)
    return kernel.launch_rows(tokens, first, end, pages, PAGE)


@operator()
def accepted_rows(chosen: Tensor, tokens: Tensor, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the last row of each request whose choice counts: that after its accepted drafts.

    A draft is accepted if it and those before it are what the rows before them have chosen.

    Args:
        chosen: int64 [B, k], contiguous, what each row has chosen.
        tokens: int64 [B, k], contiguous, of the rows: the last token and the drafts.
        first: int64 [B], contiguous, position of the first row.

    Returns:
        tokens int64 [T], the choices, where a negative one, which is none, is 0; positions int64 [B] and indices
        among the T rows int64 [B] of the last rows that count.

    Raises:
        TypeError: a tensor is not int64.
        ValueError: shapes, strides or devices do not fit together.
    """
    _check_accepted(chosen, tokens, first)
    b, k = chosen.shape
    accepted_B = _count_accepted(chosen, tokens)
    return chosen.clamp(min=0).flatten(), first + accepted_B, torch.arange(b, device=chosen.device) * k + accepted_B


@accepted_rows.register_fake
def _(chosen, tokens, first):
    return chosen.new_empty(chosen.numel()), first.new_empty(first.shape), first.new_empty(first.shape)


@accepted_rows.register_kernel("cuda")
def _(chosen, tokens, first):
    from octile.kernels.triton import decode_step as kernel

    _check_accepted(chosen, tokens, first)
    return kernel.launch_accepted(chosen, tokens, first)


@operator(writes=("parity", "last", "advance", "results"), pinned=("results",))
def record_choices(
    chosen: Tensor, tokens: Tensor, drafts: Tensor, parity: Tensor, last: Tensor, advance: Tensor, results: Tensor
) -> None:
    """Count accepted drafts, and write what the next step and the host read.

    A draft is accepted if it and those before it are what the rows before them have chosen.

    Args:
        chosen: int64 [B, k], contiguous, what the rows have chosen.
        tokens: int64 [B, k], contiguous, what they have read: the last token and its drafts.
        drafts: int64 [B, n], contiguous, new drafts.
        parity: int64 [2], contiguous, as `continued_tokens` has left it; the next step's becomes the first.
        last: int64 [B, k], rows contiguous, becomes the choice after the accepted drafts, and the new ones.
        advance: int64 [B], contiguous, becomes accepted drafts + 1.
        results: int64 [2, B, 2 + 2n], each buffer contiguous, on the device or in pinned memory. That of this step's
            parity becomes what was chosen, the number of accepted drafts, and the new ones.

    Raises:
        TypeError: a tensor is not int64.
        ValueError: shapes, strides or devices do not fit together.
    """
    _check_choices(chosen, tokens, drafts, parity, last, advance, results)
    accepted_B1 = _count_accepted(chosen, tokens)[:, None]
    last.copy_(torch.cat((chosen.gather(1, accepted_B1), drafts), dim=1))
    advance.copy_(accepted_B1[:, 0] + 1)
    results[1 - int(parity[1])] = torch.cat((chosen, accepted_B1, drafts), dim=1)
    parity[0] = parity[1]


@record_choices.register_fake
def _(chosen, tokens, drafts, parity, last, advance, results):
    return None


@record_choices.register_kernel("cuda")
def _(chosen, tokens, drafts, parity, last, advance, results):
    from octile.kernels.triton import decode_step as kernel

    _check_choices(chosen, tokens, drafts, parity, last, advance, results)
    kernel.launch_choices(chosen, tokens, drafts, parity, last, advance, results)


def _count_accepted(chosen: Tensor, tokens: Tensor) -> Tensor:
    """Count the drafts of each request before the first that is not what the row before it has chosen: [B]."""
    return (chosen[:, :-1] == tokens[:, 1:]).cumprod(1).sum(1)


def _check_continued(host: Tensor, parity: Tensor, last: Tensor, advance: Tensor) -> None:
    _check_int64("last", last, {"parity": parity, "advance": advance})
    _check_host("host", host, "last", last)
    if host.dim() != 3 or last.dim() != 2 or len(host) != 2 or not FIELDS < host.shape[1] <= FIELDS + last.shape[1]:
        raise ValueError(
            f"host and last must be [2, {FIELDS} + k, B] and [R, m], m at least k and k at least 1, not "
            f"{tuple(host.shape)} and {tuple(last.shape)}"
        )
    _check_parity(parity)
    if advance.shape != last.shape[:1]:
        raise ValueError(f"advance must be ({len(last)},), one for each row of last, not {tuple(advance.shape)}")
    if (host.shape[2] and host.stride(2) != 1) or not _has_contiguous_rows(last) or not advance.is_contiguous():
        raise ValueError("the rows of host, last and advance must be contiguous")


def _check_rows(tokens: Tensor, first: Tensor, end: Tensor, pages: Tensor) -> None:
    _check_int64("tokens", tokens, {"first": first, "end": end})
    if pages.dtype != torch.int32:
        raise TypeError(f"pages must be int32, not {pages.dtype}")
    check_device("tokens", tokens, "pages", pages)
    if tokens.dim() != 2 or not _has_contiguous_rows(tokens):
        raise ValueError(f"tokens must be [B, k], rows contiguous, not {tuple(tokens.shape)}, {tokens.stride()}")
    for name, t in (("first", first), ("end", end)):
        if t.shape != tokens.shape[:1]:
            raise ValueError(f"{name} must be ({len(tokens)},), one for each request, not {tuple(t.shape)}")
    if pages.dim() != 2 or len(pages) != len(tokens) or not pages.shape[1] or pages.stride(1) != 1:
        raise ValueError(f"pages must be ({len(tokens)}, M), M at least 1, rows contiguous, not {tuple(pages.shape)}")


def _check_choices(
    chosen: Tensor, tokens: Tensor, drafts: Tensor, parity: Tensor, last: Tensor, advance: Tensor, results: Tensor
) -> None:
    others = {"tokens": tokens, "drafts": drafts, "parity": parity, "last": last, "advance": advance}
    b, k = _check_of_chosen(chosen, others)
    _check_host("results", results, "chosen", chosen)
    _check_shapes(chosen, others | {"results": results}, ((b, k), (b, k - 1), (2,), (b, k), (b,), (2, b, 2 * k)))
    if not _has_contiguous_rows(others.pop("last")):
        raise ValueError(f"the rows of last must be contiguous, not have strides {last.stride()}")
    _check_contiguous({"chosen": chosen, **others, "each buffer of results": results[0]})


def _check_accepted(chosen: Tensor, tokens: Tensor, first: Tensor) -> None:
    others = {"tokens": tokens, "first": first}
    b, k = _check_of_chosen(chosen, others)
    _check_shapes(chosen, others, ((b, k), (b,)))
    _check_contiguous({"chosen": chosen, **others})


def _check_of_chosen(chosen: Tensor, others: dict[str, Tensor]) -> tuple[int, int]:
    """Check dtypes and devices, and return the requests and the rows of each."""
    _check_int64("chosen", chosen, others)
    if chosen.dim() != 2 or not chosen.shape[1]:
        raise ValueError(f"chosen must be [B, k], k at least 1, not {tuple(chosen.shape)}")
    b, k = chosen.shape
    return b, k


def _check_host(name: str, t: Tensor, device_name: str, on_device: Tensor) -> None:
    """Check memory that the host shares with a device."""
    if t.dtype != torch.int64:
        raise TypeError(f"{name} must be int64, not {t.dtype}")
    if t.device != on_device.device and not t.is_pinned():
        raise ValueError(
            f"{name} must be on {on_device.device}, where {device_name} is, or in pinned memory, not on {t.device}"
        )


def _check_parity(parity: Tensor) -> None:
    if parity.shape != (2,) or not parity.is_contiguous():
        raise ValueError(f"parity must be (2,), contiguous, not {tuple(parity.shape)}, {parity.stride()}")


def _check_shapes(chosen: Tensor, others: dict[str, Tensor], shapes: Sequence[tuple[int, ...]]) -> None:
    for (name, t), shape in zip(others.items(), shapes, strict=True):
        if t.shape != shape:
            raise ValueError(f"{name} must be {shape} for chosen {tuple(chosen.shape)}, not {tuple(t.shape)}")


def _check_contiguous(tensors: dict[str, Tensor]) -> None:
    for name, t in tensors.items():
        if not t.is_contiguous():
            raise ValueError(f"{name} must be contiguous, not have strides {t.stride()}")


def _has_contiguous_rows(t: Tensor) -> bool:
    return t.shape[1] < 2 or t.stride(1) == 1


def _check_int64(name: str, first: Tensor, others: dict[str, Tensor]) -> None:
    for other, t in {name: first, **others}.items():
        if t.dtype != torch.int64:
            raise TypeError(f"{other} must be int64, not {t.dtype}")
        check_device(name, first, other, t)
