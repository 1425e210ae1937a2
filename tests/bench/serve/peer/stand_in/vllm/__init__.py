"""A stand-in for vLLM: the names that octile's benchmark uses, with an engine that computes nothing."""

import threading
from types import SimpleNamespace

from vllm.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams"]
__version__ = "0.0"


class LLM:
    """Prefills prompts within the tokens of a step, as it is asked to, and gives one token of a step to each request.

    As with asynchronous scheduling, a step returns what the step before it has computed.
    """

    def __init__(
        self,
        model: str,
        *,
        skip_tokenizer_init: bool,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool,
        compilation_config: dict,
        gpu_memory_utilization: float,
        moe_backend: str,
    ):
        if moe_backend == "deep_gemm":
            raise RuntimeError("this GPU has no DeepGEMM")
        assert (skip_tokenizer_init, enable_prefix_caching) == (True, False)
        assert gpu_memory_utilization < 1
        self.max_model_len, self.max_num_seqs, self.moe_backend = max_model_len, max_num_seqs, moe_backend
        self.step_tokens, self.waiting, self.running, self.computed = max_num_batched_tokens, [], {}, []
        self.llm_engine = self
        print("INFO starting", model, compilation_config, flush=True)
        if moe_backend == "never starts":
            threading.Event().wait()

    def add_request(self, request_id: str, prompt: dict[str, list[int]], sampling: SamplingParams) -> None:
        assert len(prompt["prompt_token_ids"]) + sampling.max_tokens <= self.max_model_len
        self.waiting.append([request_id, len(prompt["prompt_token_ids"]), sampling.max_tokens])

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting or self.running or self.computed)

    def step(self) -> list[SimpleNamespace]:
        if self.moe_backend == "hangs at batch 2" and len(self.running) > 1:
            threading.Event().wait()
        outputs, budget = self.computed, self.step_tokens - len(self.running)
        while self.waiting and self.waiting[0][1] <= budget and len(self.running) < self.max_num_seqs:
            request_id, length, new_tokens = self.waiting.pop(0)
            self.running[request_id], budget = new_tokens, budget - length
        self.computed = [SimpleNamespace(request_id=i, outputs=[SimpleNamespace(token_ids=[7])]) for i in self.running]
        self.running = {request_id: left - 1 for request_id, left in self.running.items() if left > 1}
        return outputs
