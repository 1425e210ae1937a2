"""Kernels that test the emulator: the text of each file by its name, as `specialize.source` takes headers."""

from pathlib import Path

SOURCES = {path.name: path.read_text("utf-8") for path in Path(__file__).parent.glob("*.cu")}
