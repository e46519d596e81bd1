"""Whether stored states are sound, and the states of these very tokens. Only what is proven is said without a rival.

Letters: T rows, D target width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from eyas.check.case import Case
from eyas.check.placing import (
    ENOUGH,
    OPERATIONS,
    ROWS,
    SAME,
    Live,
    Placement,
    Rows,
    predictions,
)
from eyas.compare import Rotation, median_error, rotation, row_order
from eyas.records import Record
from eyas.results import Evidence, Finding, NotChecked, Rival
from eyas.states.embedded import embedding_rows
from eyas.states.stock import Stock, Tap
from eyas.target import Target

LOOKED_AT = 64  # records whose rows are counted
SOME = 0.01  # share of zero or repeated rows from which it is more than a note; sound states have none of either
MOST = 0.5
# Error of a tap against itself run again: stored in bf16 0.002, in fp8 0.02 to 0.03, in int4 0.11 to 0.17.
ROUNDED = 0.012
FITS = 0.95  # share of a record's tokens that the head gives from its rows, in whichever order
SHORTEST = 3  # records whose rows are all put to the head where tap n is not known
CUT = 2  # tokens that a record of the stock may lack without being truncated: shifts take that many


def look_at_states(
    case: Case,
    stock: Stock,
    placement: Placement,
    target: Target,
    live: bool,
    records: Sequence[Record] = (),
) -> None:
    """``placement`` is that of ``stock`` as it is stored, not shifted; ``records`` are those that it should be of,
    whole; ``live``: the target may run, as it may have for the placement."""
    embedded = [t for t, p in placement.placed.items() if p.tap == 0]  # one token twice has one row there
    sound = count_rows(case, stock, embedded)
    compare_lengths(case, stock, records)
    if not sound:
        return
    rows = placement.rows or Rows.of(stock)
    look = Look(stock, placement, target, rows)
    if live:
        against_target(look)
    else:
        against_ends(look)
        case.not_checked.append(
            NotChecked("states against the target", "the target does not run, so taps between its ends are not known")
        )
    conclude_order(case, look)
    conclude_rotation(case, look)
    conclude_shift(case, placement)
    if live and not look.wrong:
        compare_layers(case, stock, placement)
        measure_rounding(case, placement)


# -- rows by themselves -----------------------------------------------------------------------------------------


def count_rows(case: Case, stock: Stock, embedded: Sequence[Tap]) -> bool:
    """Rows of zeros, of no number, and such as repeat the row before them. False where nothing is left to look at."""
    total, bad = 0, Counter[tuple[str, Tap]]()
    for i, record in enumerate(stock.records[:LOOKED_AT]):
        states = stock.states(i, stock.taps)
        ids = torch.from_numpy(record.input_ids.astype(np.int64))[: len(states)]
        total += len(states)
        for tap, held in zip(stock.taps, states.chunk(len(stock.taps), -1), strict=True):
            zero, finite = (held == 0).all(-1), torch.isfinite(held).all(-1)
            again = (held[1:] == held[:-1]).all(-1) & (ids[1:] != ids[:-1]) & ~zero[1:]
            again[:CUT], again[max(len(again) - CUT, 0) :] = False, False  # a shift pads its ends
            bad["zero", tap] += int(zero.sum())
            bad["nan", tap] += int((~finite).sum())
            bad["again", tap] += 0 if tap in embedded else int(again.sum())
    left = True
    for kind, cause, what in (
        ("zero", "states-zero", "are zero"),
        ("nan", "states-not-finite", "hold NaN or infinite values"),
        ("again", "states-repeated", "repeat the row before them though the token is another"),
    ):
        worst = max(stock.taps, key=lambda t: bad[kind, t])
        share = bad[kind, worst] / total if total else 0.0
        left &= share <= MOST
        if not share or (kind == "again" and share < SOME):
            continue
        severity = "fatal" if share > MOST else "likely" if share >= SOME or kind == "nan" else "note"
        counts = {str(t): bad[kind, t] for t in stock.taps if bad[kind, t]}
        case.findings.append(
            Finding(
                cause,
                severity,  # type: ignore[arg-type]
                f"{share:.1%} of the stored rows {what} ({worst}: {bad[kind, worst]} of {total}).",
                [Evidence(f"rows that {what}", counts, 0, f"{total} rows of {len(stock.records[:LOOKED_AT])} records")],
            )
        )
    return left


def compare_lengths(case: Case, stock: Stock, records: Sequence[Record]) -> None:
    """Records of the stock that are no more than the beginning of one of ``records``."""
    by_start: dict[bytes, list[Record]] = {}
    for whole in records:
        by_start.setdefault(whole.input_ids[:8].tobytes(), []).append(whole)
    cut: list[tuple[int, int]] = []
    for i, held in enumerate(stock.records):
        T = held.seq_len
        like = by_start.get(held.input_ids[:8].tobytes(), [])
        same = [w for w in like if w.seq_len >= T and np.array_equal(w.input_ids[:T], held.input_ids)]
        if same and all(w.seq_len > T + CUT for w in same):
            cut.append((T, min(w.seq_len for w in same)))
        elif i < LOOKED_AT and (rows := len(stock.states(i, stock.taps[:1]))) < T:
            cut.append((rows, T))
    if not cut:
        return
    limit, times = Counter(rows for rows, _ in cut).most_common(1)[0]
    alike = f", {times} of them after {limit} rows" if times > 1 else ""
    case.findings.append(
        Finding(
            "states-truncated",
            "likely",
            f"{len(cut)} of {len(stock.records)} records have more tokens than stored rows{alike}.",
            [Evidence("rows and tokens", [list(pair) for pair in cut[:5]], "equal", f"{len(stock.records)} records")],
        )
    )


# -- whose rows they are ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Look:
    """What each tensor's rows turned out to be, record by record: "home", "shifted", "permuted", "other" or the
    number of the record that they are of."""

    stock: Stock
    placement: Placement
    target: Target
    rows: Rows
    seen: dict[Tap, list[str | int]] = field(default_factory=dict)
    how: dict[Tap, str] = field(default_factory=dict)
    turned: dict[Tap, tuple[int, Rotation]] = field(default_factory=dict)

    @property
    def wrong(self) -> bool:
        return bool(self.turned) or any(v not in ("home", "shifted") for seen in self.seen.values() for v in seen)


def against_target(look: Look) -> None:
    live = look.placement.live or Live.of(look.rows, look.target)
    every = range(look.target.num_layers + 1)
    for tap in look.stock.taps:
        held = [states[tap] for states in look.rows.states[: len(live.taps)]]
        p = look.placement.placed.get(tap)
        normed = look.placement.post_norm and tap == look.placement.last
        if p is None or p.tap is None or p.error is None:
            turned = {t: rotation(torch.cat(held), torch.cat([x[t] for x in live.taps])) for t in every}
            best = min(every, key=lambda t: turned[t].angles)
            if turned[best].proven:
                look.turned[tap] = best, turned[best]
                continue
            number = max(every, key=lambda t: row_order(held[0], live.taps[0][t]).found)
        else:
            number = p.tap
        true = [live.normed[i] if normed else x[number] for i, x in enumerate(live.taps)]
        look.seen[tap] = _whose(held, true)
        look.how[tap] = f"tap {number} as the target gives it"


def _whose(held: Sequence[Tensor], true: Sequence[Tensor]) -> list[str | int]:
    """For each record's rows: how they stand to its own true ones, or the number of the record that they are of."""
    seen: list[str | int] = []
    for i, rows in enumerate(held):
        order = row_order(rows, true[i])
        if order.kind != "other":
            seen.append(order.kind)
            continue
        whose = [q for q in range(len(true)) if q != i and _is_of(rows, true[q])]
        seen.append(whose[0] if len(whose) == 1 else "other")
    return seen


def _is_of(rows: Tensor, true: Tensor) -> bool:
    n = min(len(rows), len(true))
    order = row_order(rows[:n], true[:n])
    return n >= 8 and order.kind in ("home", "shifted") and float(median_error(rows[:n], true[:n])) < SAME


def against_ends(look: Look) -> None:
    """Tap 0 against the embedding, tap n (or what may be it) against the tokens that the head gives."""
    true = [embedding_rows(look.target, look.rows.ids(i)) for i in range(len(look.rows.records))]
    for tap, p in look.placement.placed.items():
        if p.tap == 0 and p.confidence == "certain" and isinstance(tap, str):
            held = [states[tap] for states in look.rows.states]
            pool = torch.cat(true)
            factor = (torch.cat(held).norm(dim=-1).median() / pool.norm(dim=-1).median()).clamp(min=1e-12)
            look.seen[tap] = _whose([h / factor for h in held], true)
            look.how[tap] = "the embedding of the ids"
    if look.placement.last is None and not look.seen:
        by_tokens(look)


def by_tokens(look: Look) -> None:
    """Where no tensor gives the next tokens in order: one that gives all of them in another order, or another's."""
    chosen = [i for i, r in enumerate(look.stock.records) if r.n_response_tokens >= ENOUGH]
    chosen = sorted(chosen, key=lambda i: look.stock.records[i].seq_len)[:SHORTEST]
    size = sum(look.stock.records[i].seq_len for i in chosen) * look.target.vocab_size * look.target.hidden_size
    if len(chosen) < 2 or size * len(look.stock.taps) > OPERATIONS:
        return
    for tap in look.stock.taps:
        for normed in (False, True):
            said = [predictions(look.stock.states(i, (tap,)), look.target, normed) for i in chosen]
            seen = [_whose_tokens(s, n, [look.stock.records[i] for i in chosen]) for n, s in enumerate(said)]
            known = [s if isinstance(s, str) else chosen[s] for s in seen]
            if any(s != "other" for s in known):
                look.seen[tap] = list(known)
                look.how[tap] = "the tokens that the head makes of it"


def _whose_tokens(said: Tensor, own: int, records: Sequence[Record]) -> str | int:
    """``said`` [T]: what the head makes of each row of record ``own``."""
    next_of = [_next_tokens(r) for r in records]
    wanted = Counter(next_of[own][1].tolist())
    given = Counter(said.tolist())
    there = sum(min(n, given[token]) for token, n in wanted.items()) / max(wanted.total(), 1)
    for q, (at, tokens) in enumerate(next_of):
        good = at < len(said)
        if int(good.sum()) >= ENOUGH // 2 and float((said[at[good]] == tokens[good]).float().mean()) >= FITS:
            return "home" if q == own else q
    return "permuted" if there >= FITS else "other"


def _next_tokens(record: Record) -> tuple[Tensor, Tensor]:
    """Positions before supervised tokens, and those tokens: [S] each."""
    at = np.flatnonzero(record.loss_mask[1:])
    return torch.from_numpy(at), torch.from_numpy(record.input_ids[at + 1].astype(np.int64))


# -- conclusions ------------------------------------------------------------------------------------------------


def conclude_order(case: Case, look: Look) -> None:
    shuffled = {t: s for t, s in look.seen.items() if s.count("permuted") > len(s) * MOST}
    others = {t: [w for w in s if isinstance(w, int)] for t, s in look.seen.items()}
    others = {t: w for t, w in others.items() if w}
    strange = {t: s for t, s in look.seen.items() if t not in shuffled and t not in others and "other" in s}
    if shuffled:
        case.findings.append(
            Finding(
                "states-rows-shuffled",
                "fatal",
                f"The rows of {_named(shuffled)} are all there, but not in the order of the tokens.",
                [
                    _evidence(look, t, "rows of the record itself, in another order", s.count("permuted"))
                    for t, s in shuffled.items()
                ],
            )
        )
    if others:
        tap, whose = next(iter(others.items()))
        first = ", all of them record 0's" if set(whose) == {0} and len(whose) > 1 else ""
        case.findings.append(
            Finding(
                "states-of-other-request",
                "fatal",
                f"{len(whose)} of {len(look.seen[tap])} records hold the states of another of these records{first}.",
                [_evidence(look, t, "rows of another record", len(w)) for t, w in others.items()],
            )
        )
    if not strange or others:  # what is proven of one tensor explains the others
        return
    bad = {t: s.count("other") for t, s in strange.items()}
    tap = max(bad, key=lambda t: bad[t])
    apart = "which other text's they are: name more records, or the target's revision that made them"
    case.findings.append(
        Finding(
            "states-of-other-request",
            "likely",
            f"{bad[tap]} of {len(strange[tap])} records hold rows that are not those of their tokens ({_named(bad)}).",
            [_evidence(look, t, "rows that are not the record's", n) for t, n in bad.items()],
            rivals=[
                Rival("target-differs", apart),
                Rival("states-rows-shuffled", f"records of at most {ROWS} tokens, which are looked at whole"),
            ],
        )
    )


def _evidence(look: Look, tap: Tap, what: str, count: int) -> Evidence:
    return Evidence(f"{tap}: {what}", f"{count} of {len(look.seen[tap])} records", 0, look.how[tap])


def _named(taps: Iterable[Tap]) -> str:
    return ", ".join(map(str, taps))


def conclude_rotation(case: Case, look: Look) -> None:
    if not look.turned:
        return
    told = ", ".join(f"{t} (tap {number})" for t, (number, _) in look.turned.items())
    evidence = []
    for t, (number, turn) in look.turned.items():
        source = f"{turn.rows} rows, against tap {number} as the target gives it"
        evidence += [
            Evidence(f"{t}: cosine with the target's state, median", round(turn.cosine, 3), "near 1", source),
            Evidence(f"{t}: norms differ by, median", round(turn.norms, 4), "< 0.02", source),
            Evidence(f"{t}: cosines between rows differ by, median", round(turn.angles, 4), "< 0.012", source),
        ]
        if turn.unexplained is not None:
            measure = f"{t}: error of the rotation fitted to half of the rows, on the other half"
            evidence.append(Evidence(measure, round(turn.unexplained, 3), "< 0.3", source))
    case.findings.append(
        Finding(
            "states-rotated",
            "fatal",
            f"Stored states are this target's, rotated: {told} has the same lengths and angles in other directions.",
            evidence,
        )
    )


def conclude_shift(case: Case, placement: Placement) -> None:
    moved = {t: p for t, p in placement.placed.items() if p.shift and p.confidence == "certain"}
    if not moved:
        return
    by = Counter(p.shift for p in moved.values()).most_common(1)[0][0]
    late = f"{abs(by)} row{'s' if abs(by) > 1 else ''} {'late' if by > 0 else 'early'}"
    cause = "token-shift-two" if by > 0 else "token-shift-missing"
    case.findings.append(
        Finding(
            cause,
            "likely",
            f"Stored states stand {late} against the ids: row t + {by} is the state of position t "
            f"({_named(list(moved))}).",
            [Evidence(f"{t}: shift", p.shift, 0, p.how) for t, p in moved.items()],
            rivals=[Rival("training-shift-twice", "whether training paired rows and ids as stored, or shifted back")],
        )
    )


def compare_layers(case: Case, stock: Stock, placement: Placement) -> None:
    """Taps as computed again against those that are declared: by the store, or else by the drafter's files."""
    sure = {t: p.tap for t, p in placement.placed.items() if p.error is not None and p.confidence == "certain"}
    own = {t: n for t, n in sure.items() if isinstance(t, int)}
    if own:
        declared, found, said = list(own), [n for n in own.values() if n is not None], "the store"
    else:
        if case.told is None:
            return
        found = sorted(n for t, n in sure.items() if n is not None and t != placement.last)
        lists = [case.told.declared["taps"], *(t for all_ in case.told.taps_by_reader.values() for t in all_)]
        declared, said = list(lists[0]), case.told.by
        if len(found) < len(declared) or any(set(found) >= set(taps) for taps in lists):
            return
    by = {n - k for n, k in zip(found, declared, strict=True)} if len(found) == len(declared) else set()
    if by not in ({1}, {-1}):
        return
    beside = "above" if by == {1} else "below"
    rivals = [Rival("taps-off-by-one", "which states the weights fit: the sweep")] if not own else []
    case.findings.append(
        Finding(
            "states-off-by-one-layer",
            "likely",
            f"Stored states are taps {found}, one layer {beside} the declared {declared}.",
            [
                Evidence(f"{t}: tap", p.tap, None, p.how)
                for t, p in placement.placed.items()
                if p.tap in found and t in sure
            ]
            + [Evidence("taps declared", declared, found, said)],
            rivals=rivals,
        )
    )


def measure_rounding(case: Case, placement: Placement) -> None:
    errors = {str(t): round(p.error, 4) for t, p in placement.placed.items() if p.error is not None}
    if not errors or (middle := float(np.median(list(errors.values())))) < ROUNDED:
        return
    case.findings.append(
        Finding(
            "target-quantised",
            "note",
            f"Stored states differ from the target's own by {middle:.1%}: stored in, or made with, fewer bits.",
            [Evidence("relative error, median over rows", errors, f"< {ROUNDED}", "states computed again")],
        )
    )
