"""What a running SGLang says over HTTP, and what it must be asked. Bodies are data to be doubted.

From the source of 0.5.23 (srt/):
    /server_info    entrypoints/http_server.py:863, utils/common.py:3584: every setting by its name, flat, as resolved;
                    ``version``, ``launch_command``, ``internal_states`` (a dict each scheduler, with the settings as
                    they are now). Before 0.5.12 or so only as /get_server_info
    /model_info     entrypoints/http_server.py:812: ``model_path``, which a change of weights moves
    /generate       ``output_ids`` and ``meta_info`` (managers/tokenizer_manager.py:2507, 3138)
Which taps its target captures no body says, but for those named by ``--return-aux-hidden-state-layer-ids``.

Letters: T positions, C taps, D target width.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, TypeVar

import httpx
import numpy as np

from eyas.endpoint import KEYS
from eyas.engines.http import Asker
from eyas.errors import EnvironmentFault, InputError
from eyas.provenance import publishable

MOST_BYTES = 2**26
MOST_BYTES_OF_STATES = 2**30  # numbers in decimal: about 20 bytes each
SHOWN = 300
_GARBAGE = "See that it is an SGLang, 0.5.12 or later, and that nothing stands between."
Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Identity:
    """None wherever the engine does not say. ``capture`` and ``capture_ids``: a server without drafter that hands
    over taps, and the ids it was given, in the target class's spelling. ``accept_length``: mean of its whole life."""

    version: str
    model_path: str
    served_name: str | None
    architectures: tuple[str, ...]
    algorithm: str | None
    drafter: str | None
    steps: int | None
    top_k: int | None
    draft_tokens: int | None
    capture: str | None
    capture_ids: tuple[int, ...] | None
    returns_states: bool
    caches_prefixes: bool | None
    overlaps: bool | None
    graphs: bool | None
    dtype: str | None
    accept_length: float | None


@dataclass(frozen=True)
class Answer:
    """``rounds`` and what follows are None where the engine did not speculate (a text of one token has no round).

    ``histogram[j]``: rounds in which j drafts were kept; it ends with the most that were. ``accept_length`` is the
    engine's own, tokens of the text / rounds: with the first token, without what the end cut off.
    """

    id: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    finish: str
    rounds: int | None = None
    accepted: int | None = None
    drafted: int | None = None
    histogram: tuple[int, ...] | None = None
    accept_length: float | None = None


@dataclass(frozen=True)
class Taps:
    """``rows[i]`` [C*D] in fp32 is the state of position ``positions[i]``, that is of the token there: prompt first,
    then output; of the last token of the output there is none, for it was never fed."""

    rows: np.ndarray
    positions: np.ndarray


class Attach:
    """A running SGLang by its URL."""

    def __init__(self, url: str, *, timeout: float = 600.0) -> None:
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise InputError(
                f"{url!r} is no URL ({error}).", way_out="Write it like http://127.0.0.1:30000."
            ) from error
        if parsed.scheme not in ("http", "https") or not parsed.host or parsed.userinfo or parsed.query:
            raise InputError(
                f"{parsed.copy_with(userinfo=b'', query=None)} is no bare http URL.",
                way_out=f"Write it like http://127.0.0.1:30000; a key is read from {KEYS[0]}.",
            )
        self.url = str(parsed).rstrip("/").removesuffix("/metrics").removesuffix("/v1")
        self.asker = Asker(self.url, "SGLang", seconds=timeout)

    def __enter__(self) -> Attach:
        return self

    def __exit__(self, *_: object) -> None:
        self.asker.close()

    def identity(self) -> Identity:
        return identify(*self.infos())

    def infos(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """The bodies of /server_info and /model_info."""
        return self._told("server_info"), self._told("model_info")

    def generate(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The raw body of /generate for ``request(…)``."""
        status, said = self._ask("/generate", body)
        if status != 200:
            raise self._refused("/generate", status, said)
        return said

    def _told(self, what: str) -> Mapping[str, Any]:
        for path in (f"/{what}", f"/get_{what}"):  # the second is the old name
            status, said = self._ask(path, None)
            if status == 200:
                return said
            if status != 404:
                raise self._refused(path, status, said)
        raise EnvironmentFault(f"{self.url} knows neither /{what} nor /get_{what}.", way_out=_GARBAGE)

    def _refused(self, path: str, status: int, said: Mapping[str, Any]) -> EnvironmentFault:
        way_out = f"Put its key into {KEYS[0]}." if status in (401, 403) else "See its log."
        return EnvironmentFault(f"{self.url}{path} says HTTP {status}: {_words(said)}", way_out=way_out)

    def _ask(self, path: str, body: Mapping[str, Any] | None) -> tuple[int, Mapping[str, Any]]:
        most = MOST_BYTES_OF_STATES if body and body.get("return_hidden_states") else MOST_BYTES
        status, raw = self.asker.body(path, body, most=most)
        try:
            said = json.loads(raw)
        except (ValueError, RecursionError):
            said = None
        if not isinstance(said, dict):
            if status != 200:
                return status, {}
            raise EnvironmentFault(f"{self.url}{path} answers with what is no object of JSON.", way_out=_GARBAGE)
        return status, said


def _words(said: Any) -> str:
    error = said.get("error", said.get("message", said)) if isinstance(said, Mapping) else said
    text = str(error.get("message", error)) if isinstance(error, Mapping) else str(error)
    return " ".join(text.split())[:SHOWN] or "nothing"


# -- who it is -------------------------------------------------------------------------------------------------------


def identify(info: Mapping[str, Any], model_info: Mapping[str, Any] | None = None) -> Identity:
    """Of the bodies of /server_info and /model_info. Raises EnvironmentFault where they are not SGLang's."""
    model = {} if model_info is None else model_info
    states = info.get("internal_states")
    now = states[0] if isinstance(states, Sequence) and states and isinstance(states[0], Mapping) else {}
    settings = {**info, **{key: value for key, value in now.items() if key.startswith("speculative_")}}
    mode = _field(settings, "return_hidden_states_mode", str)
    ids = _field(settings, "return_aux_hidden_state_layer_ids", list)
    cached, overlap = (_field(settings, name, bool) for name in ("disable_radix_cache", "disable_overlap_schedule"))
    return Identity(
        _needed(info, "version", str, "/server_info"),
        _needed({**info, **model}, "model_path", str, "/model_info"),
        _field({**info, **model}, "served_model_name", str),
        tuple(str(name) for name in _field(model, "architectures", list) or ()),
        _field(settings, "speculative_algorithm", str),
        _field(settings, "speculative_draft_model_path", str),
        _field(settings, "speculative_num_steps", int),
        _field(settings, "speculative_eagle_topk", int),
        _field(settings, "speculative_num_draft_tokens", int),
        _field(settings, "aux_hidden_state_capture", str),
        None if ids is None else tuple(_counts(ids, "return_aux_hidden_state_layer_ids")),
        mode == "full" or _field(settings, "enable_return_hidden_states", bool) is True,
        None if cached is None else not cached,
        None if overlap is None else not overlap,
        _graphs(settings),
        _field(settings, "dtype", str),
        _field(now, "avg_spec_accept_length", float),
    )


def _graphs(settings: Mapping[str, Any]) -> bool | None:
    """0.5.23 resolves every flag into one object by phase; before it there is a switch."""
    config = _field(settings, "cuda_graph_config", dict)
    if config is not None:
        phases = [phase for phase in config.values() if isinstance(phase, Mapping)]
        return any(str(phase.get("backend")) != "disabled" for phase in phases)
    off = _field(settings, "disable_cuda_graph", bool)
    return None if off is None else not off


def check(identity: Identity, target: str, drafter: str | None, architecture: str | None = None) -> list[str]:
    """What remains in doubt of the two models, in words. Raises InputError where the engine serves a target of another
    ``architecture``, or does not draft a chain as EAGLE does.

    SGLang tells paths alone, and an engine elsewhere keeps the same model in another place: the last parts are
    compared, and where they differ too it may still be the same model.
    """
    if architecture is not None and identity.architectures and architecture not in identity.architectures:
        raise InputError(
            f"The engine serves {identity.model_path}, a {', '.join(identity.architectures)}; {target} is a "
            f"{architecture}.",
            way_out="Name the target that it serves.",
        )
    doubts = []
    if _last(target) not in (_last(identity.model_path), _last(identity.served_name or "")):
        doubts.append(f"whether its target {publishable(identity.model_path)} is {_last(target)}: it tells a path only")
    if drafter is None:
        return doubts
    if identity.algorithm is None:
        raise InputError(
            "The engine runs without speculation.",
            way_out="Start it with --speculative-algorithm EAGLE3 and the drafter's path.",
        )
    if identity.algorithm not in ("EAGLE3", "EAGLE"):  # the second is a fault that has its own name
        raise InputError(f"The engine drafts by {identity.algorithm}, not EAGLE3.", way_out="Start it with EAGLE3.")
    if identity.top_k is not None and identity.top_k > 1:
        raise InputError(
            f"The engine drafts a tree (top-k {identity.top_k}); what is compared here is a chain.",
            way_out="Start it with --speculative-eagle-topk 1, or give its log to `eyas read`.",
        )
    if _last(identity.drafter or "") != _last(drafter):
        doubts.append(f"whether its drafter {publishable(identity.drafter)} is {_last(drafter)}: it tells a path only")
    return doubts


def _last(path: str) -> str:
    return PurePath(path.rstrip("/")).name


# -- one text --------------------------------------------------------------------------------------------------------


def request(
    ids: Sequence[int],
    max_new_tokens: int,
    *,
    states: bool = False,
    name: str | None = None,
    whole: bool = False,
    sampling: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """The body of /generate for a prompt of token ids, greedily unless ``sampling`` says otherwise. ``name`` is the
    request's id in the probe's rounds; ``whole`` goes on past the end of the text; ``states`` needs a server with
    --enable-return-hidden-states."""
    sampled: dict[str, Any] = {"temperature": 0, "max_new_tokens": max_new_tokens, **sampling}
    body: dict[str, Any] = {"input_ids": list(ids), "sampling_params": sampled, "return_logprob": False}
    body["stream"] = False
    if whole:
        sampled["ignore_eos"] = True
    if states:
        body["return_hidden_states"] = True
    if name is not None:
        body["rid"] = name
    return body


def answer(body: Mapping[str, Any]) -> Answer:
    """Of a body of /generate. Raises EnvironmentFault where it is none, or where its counts contradict each other."""
    if "meta_info" not in body and ("error" in body or "message" in body):
        raise EnvironmentFault(f"The engine refuses: {_words(body)}", way_out="See its log.")
    meta = _needed(body, "meta_info", dict, "/generate")
    tokens = tuple(_counts(_needed(body, "output_ids", list, "/generate"), "output_ids"))
    said = _needed(meta, "completion_tokens", int, "/generate")
    if said != len(tokens):
        raise _contradiction(f"{said} completion tokens", f"{len(tokens)} output ids")
    finish = meta.get("finish_reason")
    kind = finish.get("type") if isinstance(finish, Mapping) else finish
    if kind == "abort":
        raise EnvironmentFault(f"The engine gave the text up: {_words(finish)}", way_out="See its log.")
    if kind not in ("stop", "length"):
        raise EnvironmentFault(f"/generate has a finish_reason of {kind!r}.", way_out=_GARBAGE)
    prompt, cached = _needed(meta, "prompt_tokens", int, "/generate"), _field(meta, "cached_tokens", int) or 0
    plain = Answer(_needed(meta, "id", str, "/generate"), tokens, prompt, cached, str(kind))
    return _speculated(plain, meta)


def _speculated(plain: Answer, meta: Mapping[str, Any]) -> Answer:
    rounds = _field(meta, "spec_verify_ct", int)
    if not rounds:
        return plain
    accepted = _first(meta, "spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
    drafted = _first(meta, "spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
    listed = _field(meta, "spec_correct_drafts_histogram", list) or _field(meta, "spec_accept_histogram", list)
    histogram = tuple(_counts(listed, "the histogram")) if listed else None
    if histogram is not None:
        if sum(histogram) != rounds:
            raise _contradiction(f"{rounds} rounds", f"{sum(histogram)} in the histogram")
        kept = sum(j * n for j, n in enumerate(histogram))
        if accepted is not None and kept != accepted:
            raise _contradiction(f"{accepted} drafts kept", f"{kept} in the histogram")
    if accepted is not None and drafted is not None and accepted > drafted:
        raise _contradiction(f"{accepted} drafts kept", f"{drafted} made")
    if accepted is not None and len(plain.token_ids) > 1 + rounds + accepted:
        raise _contradiction(f"{len(plain.token_ids)} tokens", f"at most {1 + rounds + accepted} of {rounds} rounds")
    length = _field(meta, "spec_accept_length", float)
    return Answer(
        plain.id, plain.token_ids, plain.prompt_tokens, plain.cached_tokens, plain.finish,
        rounds, accepted, drafted, histogram, length,
    )  # fmt: skip


def taps_of(body: Mapping[str, Any], width: int | None = None) -> Taps:
    """The states in a body of /generate that was asked for ``states``; ``width`` is C*D.

    ``meta_info.hidden_states`` is a list of one list of rows, the prompt's (its last chunk's, less what a cache held),
    and then of rows, one an output token but the first (managers/scheduler_components/batch_result_processor.py:641,
    676). In a round the rows kept are those of the tokens kept, so drafting or not changes nothing in the order. With
    EAGLE3 a row is the taps one after the other (layers/logits_processor.py, ``_get_hidden_states_to_store``); without
    it, the target's last state after its norm, which is no tap.
    """
    told = answer(body)
    given = body["meta_info"].get("hidden_states")
    if given is None:
        raise EnvironmentFault(
            "The engine gave no hidden states.", way_out="Start it with --enable-return-hidden-states and ask for them."
        )
    if not isinstance(given, list) or not given or not isinstance(given[0], list):
        raise EnvironmentFault("hidden_states is no list of rows.", way_out=_GARBAGE)
    if not given[0] or not isinstance(given[0][0], list):
        raise EnvironmentFault(
            "The engine gave the last state alone.", way_out="Start it with --return-hidden-states-mode full."
        )
    before, after = given[0], given[1 : len(told.token_ids)]
    if len(before) > told.prompt_tokens:
        raise _contradiction(f"{told.prompt_tokens} prompt tokens", f"{len(before)} rows of states")
    if len(after) != len(told.token_ids) - 1:
        raise _contradiction(f"{len(told.token_ids)} output tokens", f"{len(after)} rows of states after the prompt's")
    rows = _rows([*before, *after], width)
    first = told.prompt_tokens - len(before)
    return Taps(rows, np.arange(first, first + len(rows)))


def _rows(given: Sequence[Any], width: int | None) -> np.ndarray:
    wide = width if width is not None else len(given[0])
    for at, row in enumerate(given):
        if not isinstance(row, list) or len(row) != wide:
            found = len(row) if isinstance(row, list) else "no"
            raise InputError(
                f"Row {at} of the hidden states has {found} numbers, {wide} were expected.",
                way_out="Look at which taps it captures: their count times the target's width is a row's.",
            )
    try:
        rows = np.array(given, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise EnvironmentFault("hidden_states holds what is no number.", way_out=_GARBAGE) from error
    if not np.isfinite(rows).all():
        raise EnvironmentFault("hidden_states holds numbers that are not finite.", way_out="See the engine's log.")
    return rows


# -- fields ----------------------------------------------------------------------------------------------------------


def _field(of: Mapping[str, Any], name: str, kind: type[Kind]) -> Kind | None:
    """None where it is absent or null. Raises EnvironmentFault where it is something else."""
    value: Any = of.get(name)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    wrong = not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
    if value is not None and (wrong or (isinstance(value, float) and not math.isfinite(value))):
        raise EnvironmentFault(f"The engine's {name} is {str(value)[:60]!r}, no {kind.__name__}.", way_out=_GARBAGE)
    if isinstance(value, int) and not isinstance(value, bool) and value < 0:
        raise EnvironmentFault(f"The engine's {name} is {value}, below zero.", way_out=_GARBAGE)
    return value  # type: ignore[no-any-return]


def _needed(of: Mapping[str, Any], name: str, kind: type[Kind], where: str) -> Kind:
    value = _field(of, name, kind)
    if value is None:
        raise EnvironmentFault(f"{where} has no {name}.", way_out=_GARBAGE)
    return value


def _counts(values: Sequence[Any], name: str) -> list[int]:
    if any(isinstance(value, bool) or not isinstance(value, int) or value < 0 for value in values):
        raise EnvironmentFault(f"{name} holds what is no count.", way_out=_GARBAGE)
    return list(values)


def _first(of: Mapping[str, Any], *names: str) -> int | None:
    return next((value for name in names if (value := _field(of, name, int)) is not None), None)


def _contradiction(one: str, other: str) -> EnvironmentFault:
    return EnvironmentFault(f"The engine's answer contradicts itself: {one}, but {other}.", way_out="See its log.")
