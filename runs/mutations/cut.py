"""``python -m runs.mutations.cut HELD_OUT... --out FOLDER``: the records of the bench, out of held-out ones.

128 answers, each cut to its first 64 tokens: what varies between records is what readings are told apart by, so many
short ones say more for their price than few long ones. Those that end sooner keep their end.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
from pathlib import Path

import numpy as np

from eyas import records as reading
from eyas.records import Record

RECORDS, TOKENS = 128, 64


def cut(record: Record) -> Record:
    """Up to and with the ``TOKENS``-th supervised token."""
    end = int(np.searchsorted(np.cumsum(record.loss_mask), TOKENS)) + 1
    return Record(record.input_ids[:end], record.loss_mask[:end], record.source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("held_out", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--manifest", type=Path, help="of the first file, where it does not lie beside it")
    options = parser.parse_args()
    read = [cut(record) for path in options.held_out for record in reading.stream(path)]
    chosen = list({record.id: record for record in read}.values())[:RECORDS]
    options.out.mkdir(parents=True, exist_ok=True)
    with gzip.GzipFile(options.out / "heldout.jsonl.gz", "wb", mtime=0) as file:
        file.writelines(json.dumps(record.to_json()).encode() + b"\n" for record in chosen)
    shutil.copy(options.manifest or options.held_out[0].parent / "manifest.json", options.out / "manifest.json")
    print(f"{len(chosen)} records, {sum(r.n_response_tokens for r in chosen)} supervised tokens, {options.out}")


if __name__ == "__main__":
    main()
