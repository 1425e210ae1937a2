"""The safetensors files of a folder, read as one: `model.safetensors`, or several shards with an index.

    model-00001-of-00003.safetensors …      each holds some of the tensors
    model.safetensors.index.json            {"metadata": {"total_size": bytes}, "weight_map": {tensor: file}}
    octile.json                             {"files": {file: {"bytes": …, "sha256": …}}}, where octile wrote them

The files' headers decide which tensors there are; the index is checked against them.
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from torch import Tensor

from octile.atomic_files import write_json
from octile.checkpoint.files import RECORD, finish_interrupted, read_record, verify
from octile.checkpoint.tensor_file import TensorFile, TensorSpec
from octile.validation import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"  # of peft
MAX_SHARD = 5_000_000_000  # bytes, the limit of transformers


class Shards:
    """The tensors of a Hugging Face folder, read on demand.

    All headers are checked when the folder is opened. A file's checksum, if octile.json has one, is checked before the
    file's first tensor is read.

    Attributes:
        folder: where the files lie.
        files: file name → TensorFile, in the order of their names.
        specs: tensor name → TensorSpec, over all files.

    Raises:
        FileNotFoundError: the folder, its weights, or a file that the index names is missing.
        PermissionError: a save was interrupted, and the folder is not writable.
        ValueError: a file is damaged, the index does not fit the files, two files hold one tensor, or there is none.
    """

    def __init__(self, folder: Path):
        finish_interrupted(folder)
        self.folder = folder
        self._unverified = read_record(folder)
        weight_map = _read_index(folder)
        self.files = {name: TensorFile(folder / name) for name in _weight_files(folder, weight_map)}
        self._file_of: dict[str, str] = {}
        self.specs: dict[str, TensorSpec] = {}
        for name, file in self.files.items():
            for tensor, spec in file.specs.items():
                if tensor in self.specs:
                    raise ValueError(f"{tensor} is in two files of {folder}: {self._file_of[tensor]} and {name}")
                self._file_of[tensor], self.specs[tensor] = name, spec
        if not self.specs:
            raise ValueError(f"{folder} holds no tensors in {', '.join(self.files)}")
        for tensor, name in (weight_map or {}).items():
            if self._file_of.get(tensor) != name:
                raise ValueError(f"{folder / name} is damaged or of another checkpoint: {INDEX} expects {tensor} in it")

    def path_of(self, tensor: str) -> Path:
        """Return the path of the file that holds a tensor."""
        return self.folder / self._file_of[tensor]

    def read(self, tensor: str) -> Tensor:
        """Read a whole tensor, to the CPU."""
        return self._file(tensor).read(tensor)

    def rows(self, tensor: str, start: int, stop: int) -> Tensor:
        """Read rows start … stop − 1 of a tensor, fewer if it ends before."""
        return self._file(tensor).rows(tensor, start, stop)

    def columns(self, tensor: str, start: int, stop: int) -> Tensor:
        """Read columns start … stop − 1 of a matrix, fewer if it ends before."""
        return self._file(tensor).columns(tensor, start, stop)

    def read_bytes(self, tensor: str, start: int, stop: int) -> Tensor:
        """Read bytes start … stop − 1 of a tensor of any dtype, uint8."""
        return self._file(tensor).read_bytes(tensor, start, stop)

    def verify_other_files(self) -> None:
        """Compare the files without tensors, such as config.json and tokenizer.json, with the checksums of octile.json.

        Raises:
            ValueError: one is damaged or was changed.
        """
        for name, expected in self._unverified.items():
            if name not in self.files and (self.folder / name).exists():
                try:
                    verify(self.folder / name, expected)
                except ValueError as error:
                    raise ValueError(
                        f"{error}; if it was changed on purpose, remove its entry from {self.folder / RECORD}"
                    ) from None

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors, `total_size` in an index."""
        return sum(spec.nbytes for spec in self.specs.values())

    def _file(self, tensor: str) -> TensorFile:
        name = self._file_of[tensor]
        if name in self._unverified:
            verify(self.folder / name, self._unverified[name])
            del self._unverified[name]
        return self.files[name]


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights, in a file or in several, under the names that transformers gives them."""
    return any((folder / name).exists() for name in (SINGLE, INDEX))


def tensor_names(folder: Path) -> Collection[str]:
    """Return the names of the tensors in a folder's index, or its only file; none where it has no weights.

    Raises:
        ValueError: the index or the file is damaged.
    """
    if (weight_map := _read_index(folder)) is not None:
        return weight_map.keys()
    return TensorFile(folder / SINGLE).specs.keys() if has_weights(folder) else ()


def check_no_adapter(folder: Path) -> None:
    """Raise ValueError if a folder holds a LoRA adapter, and not the weights of a model."""
    if (folder / ADAPTER).exists() and not has_weights(folder):
        raise ValueError(
            f"{folder} is a LoRA adapter ({ADAPTER}): merge it into its model first, with peft's merge_and_unload, as "
            'the section "With SFTTrainer, full and LoRA" of docs/fine_tuning.md shows'
        )


def plan_shards(sizes: Mapping[str, int], max_bytes: int = MAX_SHARD) -> dict[str, list[str]]:
    """Distribute tensors over files, in order.

    Args:
        sizes: name → bytes of each tensor.
        max_bytes: the most bytes of a file, unless it holds a single tensor that is larger.

    Returns:
        file name → tensors: `model.safetensors` alone, or `model-00001-of-0000n.safetensors` and so on.
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for tensor, size in sizes.items():
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, 1)}


def write_index(folder: Path, files: Mapping[str, Iterable[str]], total_size: int) -> None:
    """Write the index of a checkpoint in shards. A checkpoint of one file has no index, and nothing is written."""
    if set(files) != {SINGLE}:
        weight_map = {tensor: file for file, tensors in files.items() for tensor in tensors}
        write_json(folder / INDEX, {"metadata": {"total_size": total_size}, "weight_map": weight_map})


def _weight_files(folder: Path, weight_map: Mapping[str, str] | None) -> list[str]:
    """Return the names of the weight files: those of the index, if there is one."""
    if weight_map is None:
        if not folder.is_dir():
            raise FileNotFoundError(f"no checkpoint folder at {folder}")
        if not (folder / SINGLE).exists():
            raise FileNotFoundError(f"{folder} holds neither {SINGLE} nor {INDEX}{_other_weights(folder)}")
        return [SINGLE]
    names = sorted(set(weight_map.values()))
    for name in names:
        if not name or Path(name).name != name or (folder / name).is_dir():
            raise ValueError(f"{folder / INDEX} is damaged: {name!r} is not a file in its folder")
        if not (folder / name).exists():
            raise FileNotFoundError(f"{folder / name} is missing, but {INDEX} names it")
    return names


def _other_weights(folder: Path) -> str:
    """Return what a message adds on a folder's weights that are not read: what to do with them; or nothing."""
    if shard := next(folder.glob("model-*-of-*.safetensors"), None):
        return f": download {INDEX}, too, which says which tensors {shard.name} and the others hold"
    if other := next(folder.glob("*.bin"), None):
        return (
            f", and {other.name} is not read: load the model in transformers, and write it as safetensors with "
            "save_pretrained"
        )
    return ""


def _read_index(folder: Path) -> dict[str, str] | None:
    """Read which file holds each tensor; None where there is no index."""
    if not (folder / INDEX).exists():
        return None
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(n, str) for n in weight_map.values()):
        raise ValueError(f"{folder / INDEX} is damaged: it must map each tensor to its file under 'weight_map'")
    return weight_map
