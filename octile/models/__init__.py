"""Models: DeepSeek-V3, and DeepSeek-V2 as a configuration of it.

config.py        `ModelConfig` and the presets, without torch
hf_config.py     reading a Hugging Face `config.json`
deepseek_v3.py   `DeepseekV3`, the whole model
meta.py          its shapes, without values
stages.py        the model in stages, for pipeline parallelism
division.py      which layers each stage has, so that all take about as long
names.py         its weights under Hugging Face's names
counts.py        parameters of a configuration
flops.py         floating-point operations of a training step, and the peak of a GPU
"""
