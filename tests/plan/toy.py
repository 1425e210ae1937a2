"""A small model and a cluster with round numbers, of which tests compute each term of a plan by hand."""

from dataclasses import asdict

from octile.models.config import ModelConfig
from octile.plan.hardware import Cluster, Gpu, Link, read_efficiencies
from octile.plan.work import Work

# hidden d 256, latents 96 (queries) and 128, 4 heads of 32 + 16 channels and 40 of values; 16 experts in 4 groups
TOY = ModelConfig(
    vocab_size=1000,
    hidden_size=256,
    intermediate_size=320,
    moe_intermediate_size=192,
    num_hidden_layers=5,
    first_k_dense_replace=2,
    num_nextn_predict_layers=1,
    num_attention_heads=4,
    q_lora_rank=96,
    kv_lora_rank=128,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=40,
    n_routed_experts=16,
    n_shared_experts=2,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    max_position_embeddings=4096,
    rope_scaling=None,
)
SHARES = {  # all different
    name: round(0.3 + 0.0125 * i, 4)
    for i, name in enumerate(name for name, value in asdict(read_efficiencies()).items() if 0 < value <= 1)
}
LATENCIES = {"gemm_latency": 0.25, "operator_latency": 0.125, "attention_keys": 8.0}
EFFICIENCIES = SHARES | LATENCIES | {"dispatch_rate": 300.0, "combine_rate": 200.0, "expert_deviation": 0.1}
CLUSTER = Cluster(
    name="toy",
    gpus=32,
    gpus_per_node=4,
    gpu=Gpu("Toy", multiprocessors=100, bf16_peak=1e6, fp8_peak=3e6, memory=1e9, memory_bandwidth=1e4),
    nvlink=Link(bandwidth=1000.0, latency=0.5),
    network=Link(bandwidth=100.0, latency=0.75),
    exchange_multiprocessors=20,
    dollars_per_gpu_hour=3.0,
    efficiencies=EFFICIENCIES,
)


def duration(work: Work, share: float = 1.0) -> float:
    """Seconds of work on the cluster's GPU with a share of its SMs, by the formulas of efficiencies.toml."""
    e, gpu = EFFICIENCIES, CLUSTER.gpu
    moved = work.bytes / gpu.memory_bandwidth
    if work.unit in ("attention_forward", "attention_backward"):
        keys = work.flops / work.keys * (work.keys + e["attention_keys"])  # FLOPs of a key, times all keys
        return keys / gpu.bf16_peak / e[work.unit] / share
    if work.unit == "latent_attention":
        compute = work.flops / gpu.bf16_peak / e["latent_attention"] / share
        return max(compute, moved / e["latent_attention_bandwidth"])
    peaks = {"fp8_gemm": gpu.fp8_peak, "fp8_wgrad": gpu.fp8_peak, "bf16_gemm": gpu.bf16_peak}
    if work.unit not in peaks:
        return e["operator_latency"] * work.calls + moved / e[work.unit]
    compute = work.flops / peaks[work.unit] / e[work.unit] / e["gemm_in_step"] / share
    longer, shorter = sorted((compute, moved / e["copy"]), reverse=True)
    unhidden = 0.0 if work.unit == "bf16_gemm" else e[f"{work.unit}_unhidden"]
    return e["gemm_latency"] * work.calls + longer + unhidden * shorter
