"""Records in, a store of states out: the target's taps of every token, so that training needs the target no more.

Which records a shard holds, how they are batched and in which order they lie follows from records and options alone,
so a shard made again is the same shard.

Memory: the target, one shard, the activations of one batch, and about 0.3 KB a record of bookkeeping.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from eyas import batches, files, taps
from eyas.capture.config import CaptureConfig, Listener, Silent
from eyas.capture.part import Part, StatesOf
from eyas.capture.source import RecordFiles, Split, survey
from eyas.engines import vllm
from eyas.errors import EnvironmentFault, RecordsError, UsageError
from eyas.records import Record
from eyas.render import Renderer
from eyas.states.manifest import Facts, part_name, target_facts
from eyas.target import Target

__all__ = ["CaptureConfig", "Listener", "RecordFiles", "Silent", "capture", "text_hashes"]


def capture(
    source: Iterable[Split],
    target: Target,
    out: Path,
    config: CaptureConfig,
    *,
    engine_python: Path | None = None,
    text_hashes: Mapping[str, str] | None = None,
    arguments: Mapping[str, object] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    listener: Listener | None = None,
) -> dict[str, Any]:
    """Write one part of the store ``out``. ``source`` gives (split, record) and is iterated twice.

    With ``engine_python`` the target runs in a vLLM of that environment, else here.
    """
    listener = listener or Silent()
    tap_list = taps.validate(config.taps, target.num_layers)
    found = survey(source, config.part)
    hashes = text_hashes or {}
    facts = Facts(
        taps=tap_list,
        last=target.num_layers,
        dtype=config.dtype,
        computed=f"{'vLLM' if engine_python else 'transformers'} {precision(target)}",
        target=target_facts(target),
        tokenizer_sha256=hashes.get("tokenizer_sha256"),
        template_sha256=hashes.get("template_sha256"),
        records=found.records,
        tokens=found.tokens,
        records_sha256=found.sha256,
        batch=config.batch,
        shard_bytes=config.shard_bytes,
    )
    refuse_other_parts(out, config.part)
    folder = out / part_name(config.part)
    with explained(folder), files.only_writer(folder):
        part = Part(folder, facts, config.part, found)
        part.begin(resume=resume, overwrite=overwrite)
        listener.starting(part.plan())
        with states_source(target, facts, engine_python, found.longest) as states_of:
            part.go(source, states_of, listener)
        part.finish(arguments or {})
    return part.result()


@contextmanager
def states_source(target: Target, facts: Facts, engine_python: Path | None, longest: int) -> Iterator[StatesOf]:
    """The target here, in batches that lie in one shard; or a vLLM, record by record."""
    if engine_python is None:
        yield partial(run_here, target, facts)
        return
    place = str(target.folder) if target.folder is not None else target.spec
    width = target.hidden_size
    with vllm.Engine(
        engine_python, place, facts.stored, width=width, longest=longest, dtype=precision(target)
    ) as engine:
        yield partial(run_there, engine)


def run_here(target: Target, facts: Facts, group: Sequence[Record]) -> Iterator[tuple[int, torch.Tensor]]:
    for batch in batches.in_order(group, facts.batch):
        found = taps.run(target, batch.input_ids, batch.lengths, facts.stored).taps.cpu()
        for states, i in zip(found, batch.index, strict=True):
            yield i, states[: group[i].seq_len]


def run_there(engine: vllm.Engine, group: Sequence[Record]) -> Iterator[tuple[int, torch.Tensor]]:
    for i, record in enumerate(group):
        yield i, torch.from_numpy(engine.states(record.input_ids.tolist()))


def precision(target: Target) -> str:
    return str(target.dtype).removeprefix("torch.")


def text_hashes(manifest: Mapping[str, Any], target: Target) -> dict[str, str]:
    """How the records' text became ids, as their manifest says; refused where it was not by the target's tokenizer."""
    hashes = {key: str(manifest[key]) for key in ("template_sha256", "tokenizer_sha256") if key in manifest}
    if target.tokenizer is None:
        return hashes
    ours = Renderer(target.tokenizer, frozenset(), "any").hashes()["tokenizer_sha256"]
    if hashes.setdefault("tokenizer_sha256", ours) != ours:
        raise RecordsError(
            "These records were tokenised by another tokenizer than the target's "
            f"({hashes['tokenizer_sha256'][:12]} there, {ours[:12]} here).",
            way_out="Name the target they were prepared for, or prepare them again with this one.",
        )
    return hashes


def refuse_other_parts(out: Path, part: tuple[int, int]) -> None:
    others = sorted(p.name for p in out.glob("part-*-of-*") if not p.name.endswith(f"-of-{part[1]}"))
    if others:
        raise UsageError(
            f"{out} holds {others[0]}, part of another cut than {part[0]}/{part[1]}.",
            way_out="Choose another --out, or remove the old parts.",
        )


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Errors of the file system in our words."""
    try:
        yield
    except EnvironmentFault:
        raise
    except OSError as error:
        raise files.explain_os_error(error, path) from error
