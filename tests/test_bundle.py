"""A bundle for a bug report: what may be in it, what must not, and what is read back from a strange one."""

from __future__ import annotations

import copy
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eyas.diagnose import bundle
from eyas.errors import InputError
from folders import call
from test_diagnose import CASE, Faults, grave, healthy, judged

CANARIES = ("canaryprompt", "canarykey", "canaryuser", "canaryhost", "canarypath", "canaryanswer")
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    return judged(Faults(healthy(taps=(2, 3, 6))))


def planted(told: dict[str, Any]) -> dict[str, Any]:
    """A result as a careless engine and a careless user would make it."""
    found = copy.deepcopy(told)
    found["conversations"][0]["prompt"] = "my canaryprompt"
    found["conversations"][0]["rounds"][0]["drafted"][0]["text"] = "canaryanswer"
    found["engine"]["url"] = "http://canaryhost.corp:8000"
    found["engine"]["command"] += ["--api-key", "canarykey", "--model", "/home/canaryuser/canarypath/model"]
    found["engine"]["resolved"]["served_model"] = "/home/canaryuser/canarypath/model"
    found["provenance"]["arguments"] |= {"api_key": "canarykey", "records": "/home/canaryuser/canarypath/x.jsonl"}
    found["not_checked"].append(
        {"what": "log", "why": "Authorization: Bearer canarykey in /home/canaryuser/log", "needed": False}
    )
    found["probes"]["prompt"] = {
        "status": "differs", "requests": 1, "equal": 0, "cause": "template-differs",
        "first": {"request": 0, "position": 3, "fed": 31337, "expected": 31338},
    }  # fmt: skip
    return found


def unpacked(path: Path) -> str:
    with zipfile.ZipFile(path) as archive:
        return "\n".join(archive.read(name).decode() for name in archive.namelist())


def test_no_canary_leaves_the_machine(told: dict[str, Any], tmp_path: Path) -> None:
    result = planted(told)
    assert all(canary in json.dumps(result) for canary in CANARIES)
    bundle.write(result, CASE / "trained", tmp_path / "b.zip")
    text = unpacked(tmp_path / "b.zip")
    assert [canary for canary in CANARIES if canary in text] == []
    assert "31337" not in text  # an id is text
    assert "tokens.json" not in zipfile.ZipFile(tmp_path / "b.zip").namelist()


def test_it_holds_numbers_and_no_rows(told: dict[str, Any], tmp_path: Path) -> None:
    bundle.write(told, CASE / "trained", tmp_path / "b.zip")
    text = unpacked(tmp_path / "b.zip")
    assert '"cosine"' in text
    assert '"by_text"' in text
    assert "fc.weight" in text
    result = json.loads(zipfile.ZipFile(tmp_path / "b.zip").read("result.json"))
    longest = max(len(v) for v in lists(result))
    assert longest < 64, "a list as long as a row of states or a text has no place in it"
    ids = [int(i) for i in np.array(told["observed"]["by_text"]["hits"]).flatten()]
    assert max(ids) < 512


def lists(value: Any) -> list[list[Any]]:
    """Every list of numbers."""
    if isinstance(value, dict):
        return [one for item in value.values() for one in lists(item)]
    if isinstance(value, list):
        mine = [value] if value and all(isinstance(v, int | float) for v in value) else []
        return mine + [one for item in value for one in lists(item)]
    return []


def test_tokens_only_when_asked_for(told: dict[str, Any], tmp_path: Path) -> None:
    bundle.write(planted(told), None, tmp_path / "b.zip", with_tokens=True)
    text = unpacked(tmp_path / "b.zip")
    assert "canaryprompt" in text
    assert "canarykey" not in text


def test_the_same_bundle_is_the_same_bytes(told: dict[str, Any], tmp_path: Path) -> None:
    for name in ("a", "b"):
        bundle.write(told, CASE / "trained", tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_verbs(told: dict[str, Any], tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "d.json").write_text(json.dumps(told), encoding="utf-8")
    out = tmp_path / "b.zip"
    assert call(capsys, "bundle", tmp_path / "d.json", CASE / "trained", "-o", out).code == 0
    assert call(capsys, "bundle", tmp_path / "d.json", "-o", out).code == 2  # it exists
    ran = call(capsys, "diagnose", "--bundle", out, "--json", "-", "--html", tmp_path / "page.html")
    assert ran.code == 1
    again = json.loads(ran.out)
    assert grave(again) == grave(told)
    assert again["engine"]["mode"] == "bundle"
    assert again["observed"] == told["observed"]
    assert (tmp_path / "page.html").stat().st_size > 10_000


def test_findings_are_judged_anew(told: dict[str, Any], tmp_path: Path) -> None:
    """What stands in the bundle as a finding of the probe is not believed: the numbers are."""
    sound = copy.deepcopy(told)
    sound["probes"]["faults"] = {}
    sound["probes"]["taps"] |= {"status": "equal", "kind": "equal", "observed": sound["probes"]["taps"]["configured"]}
    sound["findings"] = []
    bundle.write(sound, None, tmp_path / "b.zip")
    assert grave(bundle.judged(tmp_path / "b.zip")) == []
    worse = copy.deepcopy(sound)
    worse["probes"]["acceptance"] = {
        "status": "differs", "rounds": 100, "as_greedy": 20, "more": 80, "fewer": 0, "sampled": [], "z": None,
    }  # fmt: skip
    bundle.write(worse, None, tmp_path / "c.zip")
    assert grave(bundle.judged(tmp_path / "c.zip")) == ["acceptance-faked"]


def pack(path: Path, **members: Any) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, value in members.items():
            archive.writestr(name.replace("_", "."), value if isinstance(value, str) else json.dumps(value))
    return path


@pytest.mark.parametrize("bad", ["no zip", "strange member", "no result", "other schema", "no finding", "not there"])
def test_what_is_no_bundle(bad: str, told: dict[str, Any], tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "b.zip"
    if bad == "no zip":
        path.write_bytes(b"nothing")
    elif bad == "strange member":
        pack(path, result_json=told, evil_py="print(1)")
    elif bad == "no result":
        pack(path, config_json={})
    elif bad == "other schema":
        pack(path, result_json={**told, "schema": 99})
    elif bad == "no finding":
        pack(path, result_json={**told, "findings": [{"cause": "no-such-cause"}]})
    ran = call(capsys, "diagnose", "--bundle", path)
    assert ran.code == 2
    assert "eyas bundle" in ran.err or "this version" in ran.err


def test_one_that_unpacks_to_gigabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "MOST", 1000)
    with pytest.raises(InputError, match="unpacks to more"):
        bundle.read(pack(tmp_path / "b.zip", result_json="x" * 2000))


def test_what_is_no_diagnosis(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "c.json").write_text('{"verdict": "healthy"}', encoding="utf-8")
    ran = call(capsys, "bundle", tmp_path / "c.json", "-o", tmp_path / "b.zip")
    assert ran.code == 2
    assert not (tmp_path / "b.zip").exists()
