"""Conversion of any Hugging Face checkpoint to FP8, or back to BF16 or FP32.

folder.py    `convert_checkpoint`: a folder, file by file, with checksums and resumption
plan.py      `ConversionPlan`: what happens to each tensor, decided from the headers
tensor.py    the conversion of one tensor, and the comparison of the result with its source
share.py     `Share`: how much of a model's parameters and FLOPs some weights are
config_check.py    the check of a config.json, before anything is written
architectures.py   the tensors of Llama, Mistral, Mixtral and Qwen models, from a configuration alone
size.py      `predict_size`: how large a checkpoint will be
"""

from octile.checkpoint.convert.folder import ConversionReport, convert_checkpoint

__all__ = ["ConversionReport", "convert_checkpoint"]
