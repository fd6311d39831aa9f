"""GGUF files: reading (memory-mapped, every field checked) and writing (streamed, atomic)."""

from __future__ import annotations

from powerinfer.formats.gguf_reader import GGUFFile, open_gguf
from powerinfer.formats.gguf_writer import GGUFWriter
from powerinfer.formats.metadata import Metadata
from powerinfer.formats.output_file import OutputFile
from powerinfer.formats.string_array import StringArray
from powerinfer.formats.tensor_info import I32, Layout, TensorInfo, layout_of
from powerinfer.formats.value_types import ValueType

__all__ = [
    "I32",
    "GGUFFile",
    "GGUFWriter",
    "Layout",
    "Metadata",
    "OutputFile",
    "StringArray",
    "TensorInfo",
    "ValueType",
    "layout_of",
    "open_gguf",
]
