"""Weights on disk: the layout that other engines read, and the state that training resumes from.

hugging_face.py   `save`, `load` and `load_weights`: a model as a Hugging Face folder, in FP8, BF16 or FP32
convert.py        `convert_checkpoint`: any Hugging Face folder to FP8 and back, file by file
size.py           `predict_size`: how large a checkpoint will be, from its configuration
training.py       `save_checkpoint`, `latest_checkpoint`, `load_checkpoint`: what a run resumes from

fp8_layout.py     which weights are FP8 in a checkpoint, under which names, in which blocks
plan.py           what a conversion will do with every tensor
recode.py         one tensor's way through a conversion, in pieces, and the proof that it arrived
shares.py         how much of a model a set of weights is
shards.py         a folder of safetensors files read as one
tensor_file.py    one safetensors file, read and written in pieces
files.py          whole or absent: written beside, renamed, with checksums
"""

from octile.checkpoint.convert import ConversionReport, convert_checkpoint
from octile.checkpoint.convert.share import Share
from octile.checkpoint.convert.size import SizePrediction, predict_size
from octile.checkpoint.hugging_face import load, load_weights, save
from octile.checkpoint.training import latest_checkpoint, load_checkpoint, save_checkpoint

__all__ = [
    "ConversionReport",
    "Share",
    "SizePrediction",
    "convert_checkpoint",
    "latest_checkpoint",
    "load",
    "load_checkpoint",
    "load_weights",
    "predict_size",
    "save",
    "save_checkpoint",
]
