"""Kernels that test the emulator itself: each file's text by its name, as headers that `jit.source` finds them in."""

from pathlib import Path

SOURCES = {path.name: path.read_text() for path in Path(__file__).parent.glob("*.cu")}
