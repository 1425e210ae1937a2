"""Model weights on disk in the layout that other engines read, and the checkpoints that training resumes from.

hugging_face.py   `save`, `load`, `load_weights`: a model as a Hugging Face folder, in FP8, BF16 or FP32
convert/          `convert_checkpoint`, `predict_size`: any Hugging Face folder to FP8 and back, file by file
training.py       `save_checkpoint`, `latest_checkpoint`, `load_checkpoint`: what a run resumes from

fp8_layout.py     which weights a checkpoint stores in FP8, under which names, in which blocks
shards.py         a folder of safetensors files, read as one
tensor_file.py    one safetensors file, read and written by ranges of rows
files.py          files that appear whole or not at all, and their checksums
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
