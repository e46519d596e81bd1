"""A diagnosis cut to what one page shows: the page is drawn from this, and this travels inside it.

What was left out is said in ``page.left_out``. No text, list or table of the result can make the page large.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from eyas.report import diagnosis_text, sweep, words
from eyas.report.terminal import as_json

Json = Mapping[str, Any]

CONVERSATIONS = 24
CONVERSATION_BYTES = 700_000  # of the page, all conversations together, their JSON counted
REST_BYTES = 150_000  # of everything else as JSON; as HTML it is at most a few times that
TOKEN, PROMPT = 64, 2_000  # letters of one token, of one prompt
# Letters of a text, entries of a list; tightened until the rest fits.
_CAPS = ((2_000, 256), (600, 128), (200, 64), (80, 24), (40, 8))
_DEEPEST = 12
_KEYS = 48  # of one object, at the least: no object of the schema has as many, so only lists of settings lose any


def bounded(result: Json) -> dict[str, Any]:
    """A copy of ``result``, plain JSON, with what a page does not show left out and counted."""
    told: dict[str, Any] = json.loads(as_json(result))
    left_out: list[str] = []
    conversations = told.pop("conversations", None) or []
    if told.pop("slices", None):
        left_out.append("slices")
    if told.get("sweep"):
        left_out += _only_shown(told["sweep"])
    rest, cut = _fitted(told)
    left_out += cut
    shown = _conversations(conversations)
    rest["conversations"] = shown
    rest["page"] = {
        "left_out": left_out,
        "conversations": {"shown": len(shown), "of": len(conversations)},
    }
    return rest


def embedded(value: Json) -> Markup:
    """JSON for a ``<script>``: nothing in it can end the element, open a comment or break a line of a reader's."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(_UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text))


def _only_shown(told: dict[str, Any]) -> list[str]:
    """The sweep with the readings that its section names: the first pass's best."""
    passes = told.get("passes") or []
    tried = sum(len(done.get("variants") or []) for done in passes)
    kept = sweep.confirmed(passes[0])[: sweep.SHOWN] if passes else []
    told["passes"] = [{**passes[0], "variants": kept}] if passes else []
    more = tried - len(kept)
    return [f"{more:,} readings of the sweep"] if more > 0 else []


_UNSAFE = re.compile(f"[<>&]|{words.OBEYED.pattern}")


@dataclass
class _Cutter:
    letters: int
    entries: int
    cuts: int = field(default=0)

    def cut(self, value: Any, depth: int = 0) -> Any:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping | list) and depth >= _DEEPEST:
            self.cuts += 1
            return None
        if isinstance(value, Mapping):
            items, room = list(value.items()), max(self.entries, _KEYS)
            self.cuts += max(0, len(items) - room)
            return {self._text(k): self.cut(v, depth + 1) for k, v in items[:room]}
        if isinstance(value, list):
            self.cuts += max(0, len(value) - self.entries)
            return [self.cut(item, depth + 1) for item in value[: self.entries]]
        return value

    def _text(self, text: str) -> str:
        self.cuts += len(text) > self.letters
        return cut_text(text, self.letters)


def cut_text(text: str, letters: int) -> str:
    return text if len(text) <= letters else f"{text[:letters]}… ({len(text) - letters:,} more)"


def _fitted(told: Json) -> tuple[dict[str, Any], list[str]]:
    for letters, entries in _CAPS:
        cutter = _Cutter(letters, entries)
        cut: dict[str, Any] = cutter.cut(told)
        if size(cut) <= REST_BYTES:
            break
    return cut, [f"{cutter.cuts:,} long texts or entries of long lists, cut short"] if cutter.cuts else []


def size(value: Any) -> int:
    return len(embedded(value).encode())


def _conversations(conversations: Sequence[Json]) -> list[dict[str, Any]]:
    """The first ones, with as many whole rounds as there is room for."""
    room, shown = CONVERSATION_BYTES, []
    for told in conversations[:CONVERSATIONS]:
        kept, room = _conversation(told, room)
        if not kept["rounds"] and told.get("rounds"):
            break
        shown.append(kept)
    return shown


def _conversation(told: Json, room: int) -> tuple[dict[str, Any], int]:
    kept: dict[str, Any] = {
        "id": cut_text(str(told.get("id") or ""), TOKEN),
        "prompt": None if told.get("prompt") is None else cut_text(str(told["prompt"]), PROMPT),
        "first": None if told.get("first") is None else cut_text(str(told["first"]), TOKEN),
        "rounds": [],
    }
    room -= size(kept) + len(diagnosis_text.as_said(kept["prompt"] or "").encode())
    rounds = told.get("rounds") or []
    for one in rounds:
        short = _round(one)
        room -= _cost(short)
        if room < 0:
            break
        kept["rounds"].append(short)
    return kept | {"rounds_left_out": len(rounds) - len(kept["rounds"])}, room


def _round(told: Json) -> dict[str, Any]:
    drafted = [
        {
            "text": cut_text(str(d.get("text") or ""), TOKEN),
            "kept": bool(d.get("kept")),
            "wanted": None if d.get("wanted") is None else cut_text(str(d["wanted"]), TOKEN),
            "rank": d.get("rank"),
        }
        for d in told.get("drafted") or []
    ]
    return {"drafted": drafted, "bonus": cut_text(str(told.get("bonus") or ""), TOKEN)}


def _cost(told: Json) -> int:
    """Bytes of a round in the page: as text, as rows of rejected tokens, as JSON."""
    rows = diagnosis_text.rejected_rows({"rounds": [told]})
    html = diagnosis_text.round_html(told) + Markup("").join(map(diagnosis_text.row_html, rows))
    return len(html.encode()) + size(told)
