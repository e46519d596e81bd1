"""A diagnosis to attach to a bug report: counts, cosines, norms, ranks and hits, and none of the text.

    eyas-bundle.zip
      result.json       the diagnosis without conversations
      config.json       the drafter's
      header.json       names, shapes, dtypes of its tensors
      tokens.json       only with --with-tokens: the conversations

States, logits and ids give a text back, so none of them leaves the machine unless asked for. What is written goes
through ``provenance.publishable``: no secrets, no folders, no host. Reading takes nothing on trust: sizes are bounded,
and the findings are judged anew from the numbers.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from eyas import files, inventory
from eyas.diagnose import findings, stage_findings
from eyas.diagnose.probes import first_apart
from eyas.diagnose.result import divergence, ruled_out
from eyas.errors import InputError
from eyas.provenance import publishable
from eyas.results import SCHEMA, Evidence, Finding, Rival, eyas_version, graver_first, judge

MOST = 64 << 20  # bytes that a member may unpack to
MEMBERS = ("result.json", "config.json", "header.json", "tokens.json")
SECRET = ("conversations",)  # holds text
HOSTS = ("url",)


def write(result: Mapping[str, Any], folder: Path | None, path: Path, *, with_tokens: bool = False) -> None:
    """``result`` is what `eyas diagnose --json` wrote, ``folder`` the drafter's."""
    if "probes" not in result or "findings" not in result:
        raise InputError(
            "This is no result of `eyas diagnose`.", way_out="Write one with `eyas diagnose … --json FILE`."
        )
    members: dict[str, Any] = {"result.json": _without_text(result)}
    if folder is not None:
        found = inventory.read(folder)
        members["config.json"] = publishable(found.config)
        members["header.json"] = {
            name: {"shape": list(t.shape), "dtype": t.dtype} for name, t in sorted(found.tensors.items())
        }
    if with_tokens:
        members["tokens.json"] = result.get("conversations") or []
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, value in members.items():
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))  # the same bundle is the same bytes
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, json.dumps(value, indent=1, ensure_ascii=False, sort_keys=True))
    with files.atomic_file(path, "wb") as handle:
        handle.write(packed.getvalue())


def _without_text(result: Mapping[str, Any]) -> Any:
    """The numbers. What could hold text, a host or a folder is cut or masked."""
    kept = {key: value for key, value in result.items() if key not in SECRET}
    engine = dict(kept.get("engine") or {})
    for key in HOSTS:
        if engine.get(key):
            engine[key] = "***"
    kept["engine"] = engine or None
    kept["conversations"] = []
    probes = json.loads(json.dumps(kept.get("probes")))
    if probes and (prompt := probes.get("prompt")) and prompt.get("first"):
        prompt["first"] = {"request": prompt["first"]["request"], "position": prompt["first"]["position"]}
    kept["probes"] = probes
    kept["engine"], kept["provenance"] = publishable(kept["engine"]), publishable(kept.get("provenance"))
    return _clean(kept)


def _clean(value: Any) -> Any:
    """Texts without secrets or folders; names are ours, so none of them makes a secret of what stands under it."""
    if isinstance(value, Mapping):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return publishable(value) if isinstance(value, str | float) else value


def judged(path: Path) -> dict[str, Any]:
    """The result in a bundle, its findings drawn anew from its numbers by this version."""
    told = read(path)
    engine = dict(told.get("engine") or {})
    engine["mode"] = "bundle"
    told["engine"] = engine
    probes = told.get("probes")
    if probes:
        old = [_finding(f) for f in told["findings"]]
        known = {f.cause: f for f in old}
        obeyed = {fact: known[cause] for fact, cause in (told.get("by_files") or {}).items() if cause in known}
        live = [
            *stage_findings.of_resolved(engine.get("resolved") or {}),
            *findings.of_probes(
                probes,
                told.get("trained") or {},
                num_layers=_layers(probes),
                by_files=obeyed,
                short=((told.get("gap") or {}).get("low") or 0) > 0,
            ),
        ]
        proven = first_apart(probes) in (None, "metrics")
        ordered = findings.in_order(_with_costs(live, old), told.get("repairs") or [])
        merged = findings.merged(ordered, old, [], proven)
        told["findings"] = [f.to_json() for f in graver_first(merged)]
        told["divergence"], told["ruled_out"] = divergence(probes), ruled_out(probes)
        told["verdict"] = _verdict(told, merged)
    told["schema"], told["eyas"] = SCHEMA, eyas_version()
    return told


def read(path: Path) -> dict[str, Any]:
    """InputError for what is no bundle."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = {info.filename: info.file_size for info in archive.infolist()}
            strange = sorted(set(names) - set(MEMBERS))
            if strange or "result.json" not in names:
                raise InputError(
                    f"{path} is no bundle: it holds {', '.join(strange) or 'no result.json'}.",
                    way_out="Give the file that `eyas bundle` wrote.",
                )
            if max(names.values()) > MOST:
                raise InputError(f"{path} unpacks to more than {MOST >> 20} MB.", way_out="Ask for another one.")
            told = json.loads(archive.read("result.json"))
    except (OSError, zipfile.BadZipFile, ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{path} cannot be read: {error}.", way_out="Give the file that `eyas bundle` wrote."
        ) from error
    needed = ("findings", "verdict", "not_checked", "probes", "checkpoint")
    if not isinstance(told, dict) or any(key not in told for key in needed) or told.get("schema") != SCHEMA:
        raise InputError(
            f"{path}: result.json is no diagnosis of schema {SCHEMA}.",
            way_out="Write the bundle with this version of eyas.",
        )
    return told


def _with_costs(live: list[Finding], old: list[Finding]) -> list[Finding]:
    """Costs were measured by running the reference, which a bundle cannot: they are taken over."""
    known = {f.cause: f for f in old}
    return [
        replace(f, severity=known[f.cause].severity, summary=known[f.cause].summary, evidence=known[f.cause].evidence,
                fix=known[f.cause].fix)
        if f.cause in known
        else f
        for f in live
    ]  # fmt: skip


def _finding(told: Mapping[str, Any]) -> Finding:
    try:
        return Finding(
            told["cause"],
            told["severity"],
            str(told["summary"]),
            [Evidence(str(e["measure"]), e["value"], e["expected"], str(e["source"])) for e in told["evidence"]],
            fix=told["fix"],
            rivals=[Rival(r["cause"], str(r["would_separate"])) for r in told["rivals"]],
        )
    except (KeyError, TypeError, AssertionError) as error:
        raise InputError(
            f"The bundle holds a finding that is none: {str(error)[:200]}.",
            way_out="Write it with this version of eyas.",
        ) from error


def _layers(probes: Mapping[str, Any]) -> int:
    columns = [t for t in ((probes.get("taps") or {}).get("taps") or []) if isinstance(t, int)]
    return max(columns, default=0)


def _verdict(told: Mapping[str, Any], merged: list[Finding]) -> str:
    """Graver findings decide; else it is what it was, for walks are not played again."""
    if any(f.severity != "note" for f in merged):
        return judge(merged, length_at_4=None)
    return str(told["verdict"])
