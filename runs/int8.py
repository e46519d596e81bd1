"""What rounding a target's weights to eight bits costs in quality: on held-out records, with and without.

    python runs/int8.py                        # two minutes: 24 records that ship with the drafter
    python runs/int8.py --limit 48 --json int8.json

Told: the mean negative log probability of the records' response tokens (nats), how often the most likely token is the
same, and the mean divergence of the rounded law from the exact one. Speed is ``eyas bench --int8``'s business.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas import provenance, records
from eyas import target as targets
from eyas.decode import int8
from eyas.target import Target

SHIPPED = Path(__file__).parent.parent / "models" / "smollm2-135m-eagle3" / "heldout.jsonl.gz"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--records", type=Path, default=SHIPPED)
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    target = targets.load(options.target)
    texts = list(records.read(options.records))[: options.limit]
    exact = [log_probs(target, text) for text in texts]
    found = int8.rounded(target.model)
    counts = {"tokens": 0, "nll": 0.0, "nll_rounded": 0.0, "same_best": 0, "divergence": 0.0}
    for text, before in zip(texts, exact, strict=True):
        after, said = log_probs(target, text), answered(text)
        counts["tokens"] += len(said)
        counts["nll"] -= float(before.gather(1, said[:, None]).sum())
        counts["nll_rounded"] -= float(after.gather(1, said[:, None]).sum())
        counts["same_best"] += int((before.argmax(1) == after.argmax(1)).sum())
        counts["divergence"] += float(F.kl_div(after, before, reduction="sum", log_target=True))
    n = counts["tokens"]
    print(f"{len(texts)} records, {n} response tokens; {found.modules} layers, {found.bytes / 1e6:.0f} MB")
    print(f"nats a token {counts['nll'] / n:.4f} exact, {counts['nll_rounded'] / n:.4f} rounded")
    print(f"most likely token the same: {counts['same_best'] / n:.2%}; divergence {counts['divergence'] / n:.5f} nats")
    if options.json:
        told = {"schema": 1, "counts": counts, "provenance": provenance.collect(vars(options))}
        options.json.write_text(json.dumps(told, indent=2, default=str) + "\n", encoding="utf-8")


def answered(text: records.Record) -> Tensor:
    """The response tokens [n]."""
    return torch.from_numpy(text.input_ids).long()[1:][torch.from_numpy(text.loss_mask)[1:]]


@torch.inference_mode()
def log_probs(target: Target, text: records.Record) -> Tensor:
    """The target's law of each response token [n, V]."""
    states = target.decoder(input_ids=torch.from_numpy(text.input_ids).long()[None]).last_hidden_state[0, :-1]
    return target.logits(states[torch.from_numpy(text.loss_mask)[1:]]).log_softmax(-1)


if __name__ == "__main__":
    main()
