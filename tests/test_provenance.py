"""What leaves the machine with a result, and what must not."""

import getpass
import hashlib
import json
import math
import platform
import socket
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import pytest

from eyas import provenance


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home/alice"
    (home / "work").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home / "work")
    return home / "work"


def cleaned(value: object) -> object:
    arguments = provenance.collect({"x": value})["arguments"]
    assert isinstance(arguments, dict)
    return arguments["x"]


def test_versions_time_and_machine() -> None:
    found = provenance.collect({})
    assert set(found) == {"eyas", "python", "packages", "time", "machine", "arguments"}
    assert found["python"] == platform.python_version()
    packages, machine = found["packages"], found["machine"]
    assert isinstance(packages, dict)
    assert isinstance(machine, dict)
    assert set(packages) == {"torch", "transformers", "numpy", "safetensors"}
    assert packages["numpy"][0].isdigit()
    age = datetime.now(UTC) - datetime.fromisoformat(str(found["time"]))
    assert -1 <= age.total_seconds() < 60
    assert set(machine) == {"cpu", "cores", "memory_gb", "os"}
    assert machine["cpu"]
    assert machine["cores"] >= 1
    assert 0.1 < machine["memory_gb"] < 100_000
    assert socket.gethostname() not in json.dumps(machine).split('"')
    assert getpass.getuser() not in json.dumps(machine).split('"')


def test_versions_are_those_of_the_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: f"{name} 9")
    found = provenance.collect({})
    assert found["eyas"] == "eyas 9"
    assert found["packages"] == {name: f"{name} 9" for name in provenance.PACKAGES}


def test_a_package_that_is_not_there_is_null() -> None:
    assert provenance._version("no-such-package-at-all") is None


def test_torch_is_not_imported() -> None:
    script = "import sys; from eyas import provenance; provenance.collect({}); assert 'torch' not in sys.modules"
    source = str(Path(provenance.__file__).parents[1])
    subprocess.run([sys.executable, "-c", script], env={"PYTHONPATH": source}, check=True)


@pytest.mark.parametrize(
    "key",
    [
        "token",
        "HF_TOKEN",
        "hf-token",
        "apiKey",
        "api_keys",
        "apikey",
        "client_secret",
        "Password",
        "authorization",
        "hub_tokens",
    ],
)
def test_secret_keys_are_masked(key: str) -> None:
    assert provenance.collect({key: "abc"})["arguments"] == {key: "***"}
    assert provenance.collect({"deep": [{key: "abc"}]})["arguments"] == {"deep": [{key: "***"}]}


def test_what_only_sounds_like_a_secret_is_kept() -> None:
    arguments = {
        "draft_tokens": 4,
        "tokenizer": "x",
        "token": None,
        "keyboard": "y",
        "max_tokens": 5,
        "p": 0.5,
    }
    assert provenance.collect(arguments)["arguments"] == arguments


def test_a_numeric_secret_is_masked_too() -> None:
    assert provenance.collect({"password": 1234})["arguments"] == {"password": "***"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("hf_abcDEF123456", "***"),
        ("use sk-proj-abc_123456 here", "use *** here"),
        ("https://bob:hunter2@example.org/x", "https://***@example.org/x"),
        ("https://example.org/x?a=1&api_key=hunter2&b=2", "https://example.org/x?a=1&api_key=***&b=2"),
        ("--port 80 --api-key hunter2 --tp 2", "--port 80 --api-key *** --tp 2"),
        ("--api-key=hunter2", "--api-key=***"),
        ("HF_TOKEN=hunter2", "HF_TOKEN=***"),
        ("Authorization: Bearer hunter2", "Authorization: Bearer ***"),
        ("bearer hunter2", "bearer ***"),
        ('{"auth_token": "hunter2"}', '{"auth_token": "***"}'),
        (["serve", "--api-key", "hunter2", "--tp", "2"], ["serve", "--api-key", "***", "--tp", "2"]),
        ('{"num_speculative_tokens": 4}', '{"num_speculative_tokens": 4}'),
        ("--max-tokens 4", "--max-tokens 4"),
        ("risk-assessment", "risk-assessment"),
    ],
)
def test_secrets_inside_values_are_masked(value: object, expected: object) -> None:
    assert cleaned(value) == expected


def test_paths_are_relative_or_only_a_last_component(here: Path) -> None:
    assert cleaned(here / "runs/a.json") == "runs/a.json"
    assert cleaned(str(here)) == "."
    assert cleaned(f"{here}more/a") == "a"
    assert cleaned(here.parent / "models/own") == "own"
    assert cleaned("~/models/own") == "own"
    assert cleaned("~/work/deep/own") == "deep/own"
    assert cleaned(here.parent) == "~"
    assert cleaned(Path("a/b")) == "a/b"
    assert cleaned("/") == "/"
    assert cleaned("http://127.0.0.1:8000/v1") == "http://127.0.0.1:8000/v1"
    assert cleaned("org/model") == "org/model"
    assert cleaned(f"--model {here}/m --draft=/opt/d/e --tp 2") == "--model m --draft=e --tp 2"
    assert cleaned(here.parent / "my models/a b") == "a b"
    assert cleaned(f"{here}/my models/a b") == "my models/a b"


@pytest.mark.parametrize(
    "form", ["{}/a b/c", "file://{}/x", "x:{}/y", '{{"model": "{}/z"}}', "--a={}", "{}", "~alice/x"]
)
def test_no_home_in_any_output(here: Path, form: str) -> None:
    text = json.dumps(provenance.collect({"x": form.format(here.parent)}))
    assert "alice" not in text
    assert str(here.parent) not in text


def test_a_home_with_a_blank_in_its_name(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/alice smith")
    assert cleaned("--model '/home/alice smith/m' -x") == "--model 'm' -x"


def test_the_root_is_nobodys_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/")
    assert cleaned("org/model") == "org/model"


def test_the_outcome_is_plain_json() -> None:
    assert cleaned(math.nan) == "nan"
    assert cleaned(math.inf) == "inf"
    assert cleaned({"b", "a"}) == ["a", "b"]
    assert cleaned((1, True, None, 2.5)) == [1, True, None, 2.5]
    assert cleaned({1: Path("a")}) == {"1": "a"}
    assert cleaned(ValueError("odd")) == "odd"


def test_hashes(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes("é".encode())
    expected = hashlib.sha256(b"\xc3\xa9").hexdigest()
    assert provenance.sha256_file(tmp_path / "f") == provenance.sha256_text("é") == expected
