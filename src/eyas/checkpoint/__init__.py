"""A drafter on disk: read, compared, loaded and saved.

Nothing is filled in silently: a tensor that is missing, too much, of another shape or not finite is a finding, and
loading raises on the first that is fatal. The names may be those of any trainer or engine (``dialects/layouts.py``),
the files safetensors or what ``torch.save`` wrote, in shards or not.
"""

from eyas.checkpoint.findings import inspect
from eyas.checkpoint.folder import Checkpoint, expected_shapes, read, shape_for
from eyas.checkpoint.weights import (
    NotFinite,
    every_tensor,
    finite_tensors,
    load,
    read_tensors,
    save,
    vocab_sha256,
    write_tensors,
)

__all__ = [
    "Checkpoint",
    "NotFinite",
    "every_tensor",
    "expected_shapes",
    "finite_tensors",
    "inspect",
    "load",
    "read",
    "read_tensors",
    "save",
    "shape_for",
    "vocab_sha256",
    "write_tensors",
]
