"""The linear layers of public model families, from their published configurations (Hugging Face, `config.json`).

`octile bench gemm` draws shapes from them, so that it does not only measure what its kernels were tuned for.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FAMILIES", "Model"]

# of DeepSeek's latent attention, the same in all its models
LATENT, ROTARY, NOPE, VALUE = 512, 64, 128, 128


@dataclass(frozen=True)
class Model:
    """Sizes of a model.

    Attributes:
        name: the published name.
        hidden: width of the residual stream.
        heads, kv_heads, head_dim: sizes of attention; with latent attention the last two are 0.
        intermediate: width inside the dense feed-forward network; 0 if all layers have experts.
        n_experts, expert_intermediate, per_token: routed experts of a layer, their intermediate size, and how many a
            token goes to; 0 in a dense model.
        q_lora: rank of the queries of latent attention; 0 if they are not compressed.
    """

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    n_experts: int = 0
    expert_intermediate: int = 0
    per_token: int = 0
    q_lora: int = 0

    @property
    def weights(self) -> list[tuple[int, int]]:
        """[N, K] of the dense weights of a layer. Those that share an input are joined."""
        found = self._latent_attention() if self.kv_heads == 0 else self._attention()
        return [*found, *(_feed_forward(self.hidden, self.intermediate) if self.intermediate else [])]

    @property
    def expert_weights(self) -> list[tuple[int, int]]:
        """[N, K] of the weights of one routed expert; none in a dense model."""
        return _feed_forward(self.hidden, self.expert_intermediate) if self.n_experts else []

    def _attention(self) -> list[tuple[int, int]]:
        return [
            ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            (self.hidden, self.heads * self.head_dim),
        ]

    def _latent_attention(self) -> list[tuple[int, int]]:
        queries = (self.heads * (NOPE + ROTARY), self.q_lora or self.hidden)
        down = (self.q_lora + LATENT + ROTARY, self.hidden)
        return [down, queries, (self.heads * (NOPE + VALUE), LATENT), (self.hidden, self.heads * VALUE)]


def _feed_forward(hidden: int, intermediate: int) -> list[tuple[int, int]]:
    return [(2 * intermediate, hidden), (hidden, intermediate)]


FAMILIES = {
    "Llama 3": (
        Model("Llama-3.2-1B", 2048, 32, 8, 64, 8192),
        Model("Llama-3.2-3B", 3072, 24, 8, 128, 8192),
        Model("Llama-3.1-8B", 4096, 32, 8, 128, 14336),
        Model("Llama-3.1-70B", 8192, 64, 8, 128, 28672),
        Model("Llama-3.1-405B", 16384, 128, 8, 128, 53248),
    ),
    "Qwen2.5": (
        Model("Qwen2.5-1.5B", 1536, 12, 2, 128, 8960),
        Model("Qwen2.5-7B", 3584, 28, 4, 128, 18944),
        Model("Qwen2.5-14B", 5120, 40, 8, 128, 13824),
        Model("Qwen2.5-72B", 8192, 64, 8, 128, 29568),
    ),
    "Qwen3": (
        Model("Qwen3-4B", 2560, 32, 8, 128, 9728),
        Model("Qwen3-8B", 4096, 32, 8, 128, 12288),
        Model("Qwen3-14B", 5120, 40, 8, 128, 17408),
        Model("Qwen3-32B", 5120, 64, 8, 128, 25600),
        Model("Qwen3-30B-A3B", 2048, 32, 4, 128, 0, 128, 768, 8),
        Model("Qwen3-235B-A22B", 4096, 64, 4, 128, 0, 128, 1536, 8),
    ),
    "Mistral": (
        Model("Mistral-7B", 4096, 32, 8, 128, 14336),
        Model("Mistral-Nemo-12B", 5120, 32, 8, 128, 14336),
        Model("Mistral-Small-24B", 5120, 32, 8, 128, 32768),
        Model("Mixtral-8x7B", 4096, 32, 8, 128, 0, 8, 14336, 2),
        Model("Mixtral-8x22B", 6144, 48, 8, 128, 0, 8, 16384, 2),
    ),
    "Gemma": (
        Model("Gemma-2-2B", 2304, 8, 4, 256, 9216),
        Model("Gemma-2-9B", 3584, 16, 8, 256, 14336),
        Model("Gemma-2-27B", 4608, 32, 16, 128, 36864),
        Model("Gemma-3-12B", 3840, 16, 8, 256, 15360),
        Model("Gemma-3-27B", 5376, 32, 16, 128, 21504),
    ),
    "Phi": (
        Model("Phi-3-mini", 3072, 32, 32, 96, 8192),
        Model("phi-4", 5120, 40, 10, 128, 17920),
        Model("Phi-3.5-MoE", 4096, 32, 8, 128, 0, 16, 6400, 2),
    ),
    "GLM": (
        Model("GLM-4-9B", 4096, 32, 2, 128, 13696),
        Model("GLM-4.5-Air", 4096, 96, 8, 128, 10944, 128, 1408, 8),
        Model("GLM-4.5", 5120, 96, 8, 128, 12288, 160, 1536, 8),
    ),
    "DeepSeek": (
        Model("DeepSeek-V2-Lite", 2048, 16, 0, 0, 10944, 64, 1408, 6),
        Model("DeepSeek-V2", 5120, 128, 0, 0, 12288, 160, 1536, 6, q_lora=1536),
        Model("DeepSeek-V3", 7168, 128, 0, 0, 18432, 256, 2048, 8, q_lora=1536),
    ),
    "Kimi": (Model("Kimi-K2", 7168, 64, 0, 0, 18432, 384, 2048, 8, q_lora=1536),),
    "gpt-oss": (
        Model("gpt-oss-20b", 2880, 64, 8, 64, 0, 32, 2880, 4),
        Model("gpt-oss-120b", 2880, 64, 8, 64, 0, 128, 2880, 4),
    ),
    "OLMo": (
        Model("OLMo-2-7B", 4096, 32, 32, 128, 11008),
        Model("OLMo-2-13B", 5120, 40, 40, 128, 13824),
        Model("OLMo-2-32B", 5120, 40, 8, 128, 27648),
        Model("OLMoE-1B-7B", 2048, 16, 16, 128, 0, 64, 1024, 8),
    ),
    "MiniMax": (
        Model("MiniMax-Text-01", 6144, 64, 8, 128, 0, 32, 9216, 2),
        Model("MiniMax-M2", 3072, 48, 8, 128, 0, 256, 1536, 8),
    ),
    "Yi": (Model("Yi-34B", 7168, 56, 8, 128, 20480),),
    "Granite": (Model("Granite-3.1-8B", 4096, 32, 8, 128, 12800),),
}
