from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from eyas.cli import common


def records(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Records as JSON lines (.gz too).")],
    show: Annotated[int, typer.Option("--show", "-n", help="How many to print.")] = 1,
    target: common.TargetOption = "smollm2",
    trust_remote_code: common.TrustOption = False,
) -> None:
    """Print records with their mask in colour: what is supervised is green and bold."""
    common.quiet_threads()
    from eyas import records as reading
    from eyas import target as targets

    with common.err.status(f"loading the tokenizer of {target} …"):
        side = targets.load_text_side(target, trust_remote_code=trust_remote_code)
    for record in reading.read(file, vocab_size=side.vocab_size, limit=show):
        common.out.rule(f"{record.id}  {record.source}  {record.seq_len} tokens, {record.n_response_tokens} supervised")
        common.out.print(_coloured(record, side.tokenizer), soft_wrap=True)


def _coloured(record: object, tokenizer: object) -> Text:
    """Stretches of equal mask, decoded whole so that characters of several tokens stay whole."""
    from itertools import pairwise

    import numpy as np

    ids, mask = record.input_ids, record.loss_mask  # type: ignore[attr-defined]
    text = Text()
    edges = [0, *(np.flatnonzero(np.diff(mask.astype(int))) + 1).tolist(), len(ids)]
    for start, end in pairwise(edges):
        style = "bold green" if mask[start] else "dim"
        text.append(tokenizer.decode(ids[start:end].tolist()), style=style)  # type: ignore[attr-defined]
    return text
