"""States as a reading feeds them, in the form a curve asks for. B batch, T positions, D target width, C taps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eyas import taps
from eyas.records import Record
from eyas.states.stock import Stock, Tap
from eyas.target import Target
from eyas.variants.parts import Facts
from eyas.variants.scores import arranged, needed, tapped


def from_stock(stock: Stock, facts: Facts) -> taps.Run:
    """The states of ``stock`` under ``facts``. Where it has no last tap the text's own next token is the truth."""
    index = {record.id: i for i, record in enumerate(stock.records)}

    def run(target: Target, input_ids: Tensor, lengths: Tensor, _: Sequence[int]) -> taps.States:
        which = [
            index[Record(row[:n].cpu().numpy().astype(np.int32), np.zeros(n, bool), "").id]
            for row, n in zip(input_ids, lengths.tolist(), strict=True)
        ]
        fed = pad_sequence([tapped(stock, target, i, facts) for i in which], batch_first=True).to(target.device)
        if stock.last is None:
            truth = torch.cat((input_ids[:, 1:], input_ids[:, -1:]), 1)
            return taps.States(fed, torch.zeros(*input_ids.shape, target.hidden_size, device=target.device), truth)
        last = pad_sequence([stock.states(i, (stock.last,)) for i in which], batch_first=True)
        normed = target.norm(last.to(target.device, target.dtype))
        known = [stock.truth(i) for i in which]
        if any(one is None for one in known):
            return taps.States(fed, normed)
        truth = pad_sequence([one for one in known if one is not None], batch_first=True, padding_value=-1)
        return taps.States(fed, normed, truth.to(target.device))

    return run


def from_run(run: taps.Run, facts: Facts) -> taps.Run:
    """What ``run`` gives, such as the target's own pass, arranged as ``facts`` feed it."""

    def arranged_run(target: Target, input_ids: Tensor, lengths: Tensor, _: Sequence[int]) -> taps.States:
        numbers = sorted(int(t) for t in needed(facts, target.num_layers))
        states = run(target, input_ids, lengths, numbers)
        held: dict[Tap, Tensor] = dict(zip(numbers, torch.split(states.taps, target.hidden_size, -1), strict=True))
        fed = arranged(held, target, facts, target.num_layers, input_ids.shape[1])
        return taps.States(fed, states.last, states.truth)

    return arranged_run
