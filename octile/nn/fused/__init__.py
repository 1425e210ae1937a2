"""The autograd functions behind the modules of `octile.nn`, one data flow a file.

linear.py                one linear layer, or those of all experts, and its GEMMs
high_precision.py        the same in BF16, FP16 or FP32
projections.py           linear layers that read one input
feed_forward.py          SwiGLU, dense or of experts: behind `MLP` and `MoE`
mla.py, mha.py           attention with its projections: behind `MLA` and `MHA`
sparse_latent_attention.py   attention to top-k keys in the absorbed form: behind `MLA` with an indexer
top_k_attention.py       the same of keys and values of all heads, where the absorbed form cannot be
index_alignment.py       the loss that trains an indexer
attention_output.py      the projection of attention's output, which is saved once, in E5M6
pre_norm.py              the norm before a layer, with the residual addition
elementwise.py           SwiGLU and RMSNorm in high precision
rotary.py                rotary positions in high precision

fusion.py                whether the layers of a module are one function
block_input.py           an input that is quantized and saved once for several layers
shared_quantization.py   the same for layers that are called one after the other
layers.py                weights of a function's layers, joined where they read one input, and what it saves
quantize.py              the operands of a layer's GEMMs
"""
