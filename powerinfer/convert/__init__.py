"""Hugging Face model folders to GGUF files: one file a family, beside what they share.

`source` and its readers give tensors by name, `families` what a family makes of them, `vocabulary` the tokenizer, and
`conversion` writes the file. Imports formats, quantization and tokenizers only.
"""

from __future__ import annotations

from powerinfer.convert.conversion import ConvertOptions, ConvertStep, ConvertSummary, convert_folder

__all__ = ["ConvertOptions", "ConvertStep", "ConvertSummary", "convert_folder"]
