"""Model weights on disk in the layout that other engines read, and the checkpoints that training resumes from.

hugging_face.py   `save`, `load`, `load_weights`: a model as a Hugging Face folder, in FP8, BF16 or FP32
convert/          `convert_checkpoint`, `predict_size`: any Hugging Face folder to FP8 and back, file by file
training.py       `save_checkpoint`, `latest_checkpoint`, `load_checkpoint`: what a run resumes from
distributed.py    `DistributedCheckpoints`, `load_tensors`: the same of many ranks, each with its part
sharded.py        `ShardedCheckpoint`, `Chunk`: tensors in pieces, and torch.distributed.checkpoint's view of them

fp8_layout.py     which weights a checkpoint stores in FP8, under which names, in which blocks
shards.py         a folder of safetensors files, read as one
packed.py         tensors in one buffer of memory, laid out as in such a file
tensor_file.py    one safetensors file, read and written by ranges of rows
export.py         `export_hugging_face`: the weights of such a checkpoint as a Hugging Face folder
step_folders.py   the folders of checkpoints: which are whole, which are removed
store.py          a folder on a POSIX file system or in an object store
files.py          files that appear whole or not at all, and their checksums
"""

from typing import TYPE_CHECKING

from octile.lazy import attach

if TYPE_CHECKING:
    from octile.checkpoint.convert import ConversionReport, convert_checkpoint
    from octile.checkpoint.convert.share import Share
    from octile.checkpoint.convert.size import SizePrediction, predict_size
    from octile.checkpoint.distributed import DistributedCheckpoints, load_tensors
    from octile.checkpoint.export import export_hugging_face
    from octile.checkpoint.hugging_face import load, load_weights, save
    from octile.checkpoint.sharded import Chunk, ShardedCheckpoint
    from octile.checkpoint.training import latest_checkpoint, load_checkpoint, save_checkpoint

__getattr__, __dir__, __all__ = attach(
    __name__,
    {  # `octile.checkpoint.files` needs no torch
        "convert": ("ConversionReport", "convert_checkpoint"),
        "convert.share": ("Share",),
        "convert.size": ("SizePrediction", "predict_size"),
        "distributed": ("DistributedCheckpoints", "load_tensors"),
        "export": ("export_hugging_face",),
        "hugging_face": ("load", "load_weights", "save"),
        "sharded": ("Chunk", "ShardedCheckpoint"),
        "training": ("latest_checkpoint", "load_checkpoint", "save_checkpoint"),
    },
)
