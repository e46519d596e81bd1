"""A bench and a prediction in words and rows of cells: what the terminal, the Markdown file and the page all show.

Everything is made from the JSON alone, so that no number can differ between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eyas.report import words

Json = Mapping[str, Any]
Rows = list[list[str]]

SIDE_HEAD = (
    "side", "tokens/s", "median", "middle half", "ratio", "bound", "accept length", "joint by depth", "first token",
    "equal texts", "repeated 8-grams",
)  # fmt: skip
CATEGORY_HEAD = ("category", "side", "prompts", "tokens/s", "ratio", "accept length")
FLAG_HEAD = ("engine", "flags")
PREDICTED_HEAD = (
    "drafted tokens", "verify", "one depth", "accept length", "expected ratio", "breaks even at", "each depth right",
    "perfect drafter",
)  # fmt: skip


def side_rows(part: Json, baseline: str) -> Rows:
    return [_side_row(name, side, baseline) for name, side in part["sides"].items()]


def _side_row(name: str, side: Json, baseline: str) -> list[str]:
    low, high = side["quartiles_tokens_per_second"]
    return [
        words.plain(name),
        f"{side['tokens_per_second']:.1f}",
        f"{side['median_tokens_per_second']:.1f}",
        f"{low:.1f}–{high:.1f}",
        ratio(side["ratio"], alone=name == baseline),
        _or_dash(side["bound"]),
        length(side["accept_length"]),
        " ".join(words.number(depth["joint"]["rate"], 2) for depth in side["depths"]) or "–",
        milliseconds(side["first_token_seconds"]),
        f"{side['equal']['hits']}/{side['equal']['n']}" if side["equal"]["n"] else "–",
        f"{side['repeated_8grams']['share'] or 0:.1%}",
    ]


def category_rows(told: Json) -> Rows:
    """The baseline's speed and every other side's, category by category."""
    return [
        [
            words.plain(part["category"]),
            words.plain(name),
            str(side["prompts"]),
            f"{side['tokens_per_second']:.1f}",
            ratio(side["ratio"], alone=name == told["baseline"]),
            length(side["accept_length"]),
        ]
        for part in told["categories"]
        for name, side in part["sides"].items()
    ]


def flag_rows(told: Json) -> Rows:
    recommended = told.get("recommendation")
    return [[engine(each), each["flags"] or each["why"]] for each in recommended["engines"]] if recommended else []


def engine(each: Json) -> str:
    return words.plain(f"{each['engine']} {each['version']}".strip())


def ratio(value: Json, *, alone: bool = False) -> str:
    """``1.25 (1.20–1.31)``; the baseline's own has no interval."""
    if value["value"] is None:
        return "–"
    if alone or value["low"] is None or value["high"] is None:
        return f"{value['value']:.2f}"
    return f"{value['value']:.2f} ({value['low']:.2f}–{value['high']:.2f})"


def length(value: Json | None) -> str:
    if value is None or value["value"] is None:
        return "–"
    return f"{value['value']:.3f} ({value['rounds']:,} rounds)"


def milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.1f} ms"


def _or_dash(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def pass_costs(cost: Json) -> str:
    """``one plain step 45.0 ms; verify K=1 50.0 ms, K=4 60.0 ms; one draft depth 4.0 ms``."""
    verify = ", ".join(f"K={k} {milliseconds(seconds)}" for k, seconds in cost["verify_seconds"].items())
    plain, depth = milliseconds(cost["plain_seconds"]), milliseconds(cost["draft_depth_seconds"])
    return f"one plain step {plain}; verify {verify}; one draft depth {depth}"


def recommended(told: Json) -> list[str]:
    """What to run with, how sure that is, and what it rests on."""
    found = told.get("recommendation")
    if not found:
        return []
    shares, side = found["fastest_share"], words.plain(found["side"])
    over = "without looping answers" if found["over"] == "without_loops" else "all"
    of = f"{found['prompts']} prompt{'s' * (found['prompts'] != 1)}, {over}"
    if found["setting"]["draft_tokens"] == 0:
        said = [f"Recommended: no speculation. Of the settings tried none was faster than {side} ({of})."]
    else:
        bound = found["bound"]
        at_most = f"; by step times alone {ratio(bound)}" if bound["value"] is not None else ""
        said = [f"Recommended: {side}, {ratio(found['ratio'])} times as fast as {told['baseline']} ({of}){at_most}."]
    if shares is None:
        return [*said, "One prompt tells nothing about how sure that is."]
    rest = ", ".join(f"{words.plain(name)} {share:.0%}" for name, share in shares.items())
    sure = "The" if found["sure"] else "Not sure: the"
    return [*said, f"{sure} fastest on resampled prompts is {rest}.", _ELSEWHERE]


_ELSEWHERE = (
    "That holds for the sides that were timed, on this machine. An engine has step times of its own: time it with "
    "--url, or give them to --predict."
)


def ties(told: Json) -> list[str]:
    """Texts that differ, and those of them that do so at a near tie; said only where precision makes ties."""
    found = told.get("ties")
    if not found:
        return []
    parts = ", ".join(f"{words.plain(name)} {n['excused']} of {n['differ']}" for name, n in found["sides"].items())
    return [f"Texts that differ only from where the two best logits are closer than {found['tie']:.3g}: {parts}."]


def faults(told: Json) -> list[str]:
    said = []
    for fault in told["faults"]:
        end = " It is not asked again." if fault["given_up"] else ""
        said.append(words.plain(f"{fault['side']} did not answer {fault['prompt']}: {fault['why']}{end}"))
    if told["interrupted"]:
        said.append(f"Interrupted: {told['all']['prompts']} prompts are measured.")
    return said


def servers(told: Json) -> list[str]:
    """What is worth knowing of the URLs: repeated requests, answers under another name, other models side by side."""
    said, models = [], set()
    for name, server in (told.get("servers") or {}).items():
        models.add(server["model"])
        if server["retries"]:
            said.append(f"{name}: {server['retries']} requests had to be repeated; only the last try is timed.")
        if others := [m for m in server["answered_as"] if m != server["model"]]:
            said.append(f"{name}: asked for {server['model']}, answers came from {', '.join(others)}.")
    if len(models) > 1:
        said.append(f"The servers have different models: {', '.join(sorted(map(str, models)))}.")
    return [words.plain(line) for line in said]


# -- a prediction ---------------------------------------------------------------------------------------------


def predicted_rows(told: Json) -> Rows:
    return [
        [
            str(row["draft_tokens"]),
            f"{row['verify']:.2f}" + ("" if row["timed"] else " (between)"),
            f"{row['draft']:.3f}",
            _or_dash(row["accept_length"] and row["accept_length"]["value"]),
            ratio(row["ratio"]) if row["ratio"] else "–",
            f"{row['break_even']:.2f}" + (" (out of reach)" if row["break_even_rate"] is None else ""),
            "–" if row["break_even_rate"] is None else f"{row['break_even_rate']:.0%}",
            f"{row['perfect']:.2f}",
        ]
        for row in told["by_draft_tokens"]
    ]


def predicted(told: Json) -> list[str]:
    """The conclusion first, then what it rests on."""
    best, ceiling, easiest = told["best"], told["ceiling"], told["easiest"]
    at_most = f"a drafter of this cost that is always right would reach {ceiling['ratio']:.2f} times plain decoding, "
    at_most += f"with {_drafted(ceiling['draft_tokens'])}"
    if told["conclusion"] == "cannot":
        return [f"Speculation cannot pay here: {at_most}.", _PASSES]
    said = {
        "can": "Speculation can pay here, if the drafter is good enough.",
        "loses": "Speculation loses here with this accept length.",
        "may": "Speculation may pay here: the interval does not tell.",
        "pays": "Speculation pays here.",
    }[told["conclusion"]]
    if best:
        said += (
            f" Expected at best: {ratio(best['ratio'])} times plain decoding, with {_drafted(best['draft_tokens'])}."
        )
    lines = [said, f"At most, {at_most}."]
    if easiest["break_even_rate"] is not None:
        lines.append(
            f"It breaks even most easily with {_drafted(easiest['draft_tokens'])}: at an accept length of "
            f"{easiest['break_even']:.2f}, each depth right {easiest['break_even_rate']:.0%} of the time."
        )
    if told["accept_length_from"] == "teacher_forced":
        lines.append("The accept lengths follow from a teacher-forced curve; a walk mostly gives less.")
    return [*lines, _PASSES]


_PASSES = "Passes alone are counted; what a loop spends between them comes on top."


def _drafted(tokens: int) -> str:
    return f"{tokens} drafted token{'s' * (tokens != 1)}"


def step_times(told: Json) -> str:
    times = told["step_times"]
    verify = ", ".join(f"{each['rows']} rows {milliseconds(each['seconds'])}" for each in times["verify"])
    return f"target pass: {verify}; one draft depth {milliseconds(times['draft_depth_seconds'])}".replace(
        " 1 rows", " 1 row"
    )


def columns_used(head: Sequence[str], rows: Rows) -> tuple[list[str], Rows]:
    """Without the columns that say nothing in any row."""
    used = [i for i in range(len(head)) if not rows or any(row[i] != "–" for row in rows)]
    return [head[i] for i in used], [[row[i] for i in used] for row in rows]
