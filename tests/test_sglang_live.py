"""An SGLang as a process: started, asked, dying, hanging, older, talking garbage; a stand-in, but a real process."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from eyas.dialects.sglang.flags import parse
from eyas.engines import child, sglang_live
from eyas.engines.live import Answer, Counters
from eyas.engines.sglang_bodies import identify
from eyas.engines.sglang_live import Meant, Sglang, by_depth, settings
from eyas.errors import EnvironmentFault, InputError, UsageError
from sglang_server import NAMES, attached, engine, running, shim
from test_engines_sglang import INFO, MODEL

# -- start -----------------------------------------------------------------------------------------------------------


def test_a_start_without_the_plugin_goes_on_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary")
    with engine(tmp_path, monkeypatch, flags=("--mem-fraction-static", "0.7")) as live:
        live.ready()
        assert (live.about.version, live.about.resolved["model.dtype"]) == ("0.5.23", "bfloat16")
        assert live.about.resolved["cache.enable_prefix_caching"] is False
        assert not any(str(tmp_path) in word for word in live.about.command)
        assert [*live.about.flags[-2:]] == ["--mem-fraction-static", "0.7"]
        assert live.metrics() == Counters(0, 0, (0, 0, 0), 0)
        (tmp_path / "rounds").mkdir()
        with live.probe(tmp_path / "rounds", 10**6) as summary:
            first, second = live.generate([[1, 2, 3], [4]], 6)
        assert summary["error"] == "this SGLang did not take the plugin up"
        assert (first.prompt_ids, second.prompt_ids) == ((1, 2, 3), (4,))
        assert (first.rounds, first.accepted, first.token_ids[:2]) == (2, (2, 1, 0), (7, 8))
        assert live.metrics() == Counters(4, 12, (4, 2, 0), 12)
        around = Path(f"/proc/{live._process._process.pid}/environ").read_text()  # type: ignore[union-attr]
        assert "sk-canary" not in around
        assert "EYAS_SGLANG_PROBE=" in around
        plugin = live._probing.folder  # type: ignore[union-attr]
        assert plugin.is_dir()
    assert not plugin.exists()


def test_one_that_dies_at_start_is_told_by_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(tmp_path, monkeypatch, "dies") as live:
        with pytest.raises(EnvironmentFault, match=r"SGLang ended with 3 while it started.*fc takes 192") as caught:
            live.ready()
        assert "--engine sglang" in caught.value.way_out


def test_one_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_live, "START_SECONDS", 2.0)
    monkeypatch.setattr(sglang_live, "PATIENCE", 0.5)
    with engine(tmp_path, monkeypatch, "hangs", children=1) as live:
        group = live._process._process.pid  # type: ignore[union-attr]
        with pytest.raises(EnvironmentFault, match="was not ready after 2 s"):
            live.ready()
    assert child.members(group) == []


def test_one_that_dies_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(tmp_path, monkeypatch, "dies in between") as live:
        live.ready()
        with pytest.raises(EnvironmentFault, match="OutOfMemoryError: the last words"):
            live.generate([[1, 2, 3]], 6)


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        port = one.getsockname()[1]
        with pytest.raises(EnvironmentFault, match=f"Port {port} is taken"):
            Sglang.launch(shim(tmp_path), tmp_path, tmp_path, draft_tokens=4, port=port)


@pytest.mark.parametrize("flag", ["--port", "--host=0.0.0.0", "--model-path", "--speculative_draft_model_path"])
def test_flags_that_are_ours(flag: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is set by eyas"):
        Sglang.launch(shim(tmp_path), tmp_path, tmp_path, draft_tokens=4, flags=[flag, "1"])


def test_what_cannot_start_leaves_no_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(EnvironmentFault, match="could not be started"):
        Sglang.launch(tmp_path / "no-python", tmp_path, tmp_path, draft_tokens=4)
    assert list(tmp_path.iterdir()) == []


def test_the_users_steps_count_and_what_they_contradict_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("SGLANG_SIMULATE_ACC_LEN=2", "--speculative-num-steps", "2")
    with engine(tmp_path, monkeypatch, flags=flags) as live:
        live.ready()
        assert live.notes == ("SGLANG_SIMULATE_ACC_LEN is set: what is kept of a draft is made up.",)
        assert live.about.flags[0] == "SGLANG_SIMULATE_ACC_LEN=2"
        around = Path(f"/proc/{live._process._process.pid}/environ").read_text()  # type: ignore[union-attr]
        assert "SGLANG_SIMULATE_ACC_LEN=2" in around


# -- who it is, and answers that are none ----------------------------------------------------------------------------


def test_an_older_one_has_other_routes() -> None:
    with attached("older") as live:
        live.ready()
        assert live.about.version == "0.5.23"
        assert live.generate([[1, 2]], 6)[0].accepted == (2, 1, 0)
    with attached("oldest") as live, pytest.raises(EnvironmentFault, match="knows neither /server_info nor"):
        live.ready()


def test_garbage_is_no_engine() -> None:
    with attached("garbage") as live, pytest.raises(EnvironmentFault, match="no object of JSON"):
        live.ready()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"speculative_algorithm": None}, "without speculation"),
        ({"speculative_algorithm": "NGRAM"}, "drafts by NGRAM"),
        ({"speculative_eagle_topk": 4}, "drafts a tree"),
    ],
)
def test_what_cannot_be_compared_is_refused(changes: dict[str, Any], words: str) -> None:
    with attached(info={**INFO, **changes, "internal_states": []}) as live, pytest.raises(InputError, match=words):
        live.ready()


def test_another_target_is_told_by_its_class_and_another_name_is_a_doubt() -> None:
    words = "a LlamaForCausalLM; target is a Qwen3ForCausalLM"
    other = Meant("target", "drafter", "Qwen3ForCausalLM")
    with attached(meant=other) as live, pytest.raises(InputError, match=words):
        live.ready()
    with attached(meant=Meant("SmolLM2", "mine", "LlamaForCausalLM")) as live:
        live.ready()
        unseen = " ".join(live.about.unseen)
        assert "is SmolLM2: it tells a path only" in unseen
        assert "is mine: it tells a path only" in unseen


def test_what_a_user_knows_of_its_flags_yields_to_what_it_says() -> None:
    with running() as url:
        live = Sglang.attach(url, NAMES, ["--tp", "2", "--speculative-num-steps", "7"])
        live.ready()
        live.stop()
    told = parse(live.about.flags).values
    assert list(live.about.flags[:2]) == ["--tp", "2"]
    assert (told["--speculative-num-steps"], told["--speculative-draft-model-path"]) == (3, "drafter")


def test_the_wrong_algorithm_has_a_name_of_its_own() -> None:
    from eyas.diagnose.stage_findings import of_resolved

    who = identify({**INFO, "speculative_algorithm": "EAGLE", "internal_states": []}, MODEL)
    assert [f.cause for f in of_resolved(settings(INFO, who))] == ["algorithm-eagle"]
    assert list(of_resolved(settings(INFO, identify(INFO, MODEL)))) == []


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("other id", InputError, "answered 3 as eyas-other"),
        ("no rounds", InputError, "counts no round of drafts"),
        ("no histogram", InputError, "does not say at which depth"),
        ("half", EnvironmentFault, "does not answer"),
        ("dies in between", EnvironmentFault, "does not answer"),
    ],
)
def test_answers_that_are_none(fault: str, error: type[Exception], words: str) -> None:
    with attached(fault) as live:
        live.ready()
        with pytest.raises(error, match=words) as caught:
            live.generate([[1, 2, 3]], 6)
        assert caught.value.way_out  # type: ignore[attr-defined]


def test_its_own_rendering_is_asked_as_for_a_chat() -> None:
    chat = [{"role": "user", "content": "hello"}]
    with attached(chats=[5, 6, 7]) as live:
        assert live.rendered(chat) == (5, 6, 7)
    with attached() as live:
        assert live.rendered(chat) is None


def test_a_request_begun_anew_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rounds").mkdir()
    with engine(tmp_path, monkeypatch, "begun anew") as live:
        live.ready()
        with live.probe(tmp_path / "rounds", 10**6):
            live.generate([[1, 2, 3], [4]], 6)
        assert "rounds of 2 requests that the engine began anew" in live.about.unseen


def test_kept_drafts_by_depth() -> None:
    assert by_depth([4, 3, 2, 1], 4) == (6, 3, 1, 0)
    assert by_depth([5], 2) == (0, 0)
    assert by_depth(None, 2) is None
    with pytest.raises(InputError, match="kept 3 drafts of 2"):
        by_depth([0, 0, 0, 1], 2)


def test_answers_keep_the_order_of_their_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(tmp_path, monkeypatch) as live:
        live.ready()
        heard: list[int] = []
        answers: list[Answer] = live.generate([[i] * (i + 1) for i in range(12)], 6, heard=heard.append)
        assert [a.prompt_ids for a in answers] == [(i,) * (i + 1) for i in range(12)]
        assert heard == list(range(1, 13))
        again = live.generate([[1]], 6)
        assert again[0].request not in {a.request for a in answers}
