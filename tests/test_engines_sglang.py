"""SGLang asked over real HTTP by a server that answers in its shape, and every way an answer can be none.

With EYAS_SGLANG_WHEEL (a wheel, or where one is unpacked) the counts and states of answers are made by its own code.
"""

from __future__ import annotations

import ast
import copy
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from eyas.engines import sglang
from eyas.errors import EnvironmentFault, InputError, UsageError
from servers import Exchange, serving
from test_sglang_probe import runs

WHEEL = os.environ.get("EYAS_SGLANG_WHEEL")
wheel_only = pytest.mark.skipif(not WHEEL, reason="EYAS_SGLANG_WHEEL names no wheel")
PYTHON = Path("/env/bin/python")
DRAFT, ALGORITHM = "--speculative-draft-model-path", "--speculative-algorithm"

SETTINGS = {
    "model_path": "/models/target", "served_model_name": "target", "dtype": "bfloat16",
    "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "/models/drafter",
    "speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4,
    "enable_return_hidden_states": False, "return_hidden_states_mode": "full", "aux_hidden_state_capture": None,
    "return_aux_hidden_state_layer_ids": None, "disable_radix_cache": True, "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "cuda_graph_config": {"decode": {"backend": "disabled"}, "prefill": {"backend": "disabled"}},
}  # fmt: skip
INFO = {
    **SETTINGS, "launch_command": "python -m sglang.launch_server …", "status": "ready", "startup_time": 3.5,
    "internal_states": [{**SETTINGS, "avg_spec_accept_length": 2.5, "world_size": 1}],
    "version": "0.5.23", "frontend": "python",
}  # fmt: skip
MODEL = {"model_path": "/models/target", "served_model_name": "target", "architectures": ["LlamaForCausalLM"]}
META = {
    "id": "eyas-1", "finish_reason": {"type": "length", "length": 6}, "prompt_tokens": 4, "completion_tokens": 6,
    "cached_tokens": 0, "weight_version": "default", "num_retractions": 0, "e2e_latency": 0.2,
    "spec_accept_rate": 3 / 6, "spec_accept_length": 3.0, "spec_num_correct_drafts": 3, "spec_num_proposed_drafts": 6,
    "spec_verify_ct": 2, "spec_correct_drafts_histogram": [0, 1, 1],
}  # fmt: skip
BODY = {"text": "", "output_ids": [7, 8, 9, 10, 11, 12], "meta_info": META}


def with_meta(**changes: Any) -> dict[str, Any]:
    body = copy.deepcopy(BODY)
    for name, value in changes.items():
        if value is ...:
            del body["meta_info"][name]  # type: ignore[attr-defined]
        else:
            body["meta_info"][name] = value  # type: ignore[index]
    return body


# -- the command line ------------------------------------------------------------------------------------------------


def words(*flags: str, drafter: str | None = "/d") -> list[str]:
    return sglang.command(PYTHON, "/t", drafter, port=31000, draft_tokens=3, flags=flags)


def test_a_launch_for_probing() -> None:
    assert words() == [
        "/env/bin/python", "-m", "sglang.launch_server", "--model-path", "/t", "--host", "127.0.0.1", "--port", "31000",
        "--enable-metrics", "--disable-radix-cache", "--disable-overlap-schedule", "--disable-cuda-graph",
        "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "/d", "--speculative-num-steps", "3",
        "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4",
    ]  # fmt: skip
    assert not any("speculative" in word for word in words(drafter=None))


def test_a_users_flags_win_and_stay_as_they_are() -> None:
    asked = ("--tp", "2", "--speculative-num-steps=5", "--mem-fraction-static", "0.7", "--trust-remote-code")
    made = sglang.launch(PYTHON, "/t", "/d", port=31000, draft_tokens=3, flags=("NCCL_DEBUG=INFO", *asked))
    assert tuple(made.command[-len(asked) :]) == asked
    assert "--speculative-num-steps" not in made.command
    assert made.command[made.command.index("--speculative-num-draft-tokens") + 1] == "6"
    assert made.environment == {"NCCL_DEBUG": "INFO"}
    assert made.url == "http://127.0.0.1:31000"
    assert made.told == ("--speculative-num-steps 5 among the flags takes the place of the 3 draft tokens asked for.",)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--model", "/other"), "--model-path /other among the flags takes the place of /t."),
        (("--speculative-draft-model", "/e"), f"{DRAFT} /e among the flags takes the place of /d."),
        ((ALGORITHM, "EAGLE"), f"{ALGORITHM} EAGLE among the flags takes the place of EAGLE3."),
        (("--port", "5"), "--port 5 among the flags takes the place of 31000."),
        (("--host", "0.0.0.0"), "--host 0.0.0.0 among the flags opens the engine to other machines."),
        (("--speculative-eagle-topk", "4"), "--speculative-eagle-topk 4 drafts a tree, of which nothing is recorded."),
        (("--speculative-num-draft-tokens", "8"), "--speculative-num-draft-tokens 8 will be 4: a chain of 3 and one."),
        (
            ("--cuda-graph-backend-decode", "full"),
            "--cuda-graph-backend-decode among the flags may turn CUDA graphs on, inside which nothing is recorded.",
        ),
        (("SGLANG_SIMULATE_ACC_LEN=2",), "SGLANG_SIMULATE_ACC_LEN is set: what is kept of a draft is made up."),
    ],
)  # fmt: skip
def test_contradictions_are_told(flags: tuple[str, ...], said: str) -> None:
    made = sglang.launch(PYTHON, "/t", "/d", port=31000, draft_tokens=3, flags=flags)
    assert made.told == (said,)
    assert made.command.count(flags[0]) == (0 if "=" in flags[0] else 1)


def test_where_it_will_listen() -> None:
    made = sglang.launch(PYTHON, "/t", "/d", port=1, draft_tokens=3, flags=("--host", "0.0.0.0", "--port", "77"))
    assert made.url == "http://127.0.0.1:77"
    assert "--model-path" not in words("--model", "/t")


def test_flags_that_are_none() -> None:
    with pytest.raises(UsageError, match="belongs to no flag"):
        words("oops")
    with pytest.raises(UsageError, match="whole number"):
        words("--speculative-num-steps", "many")
    with pytest.raises(UsageError, match="0 draft tokens"):
        sglang.command(PYTHON, "/t", "/d", port=1, draft_tokens=0)


def test_a_launch_without_a_drafter_that_hands_over_taps() -> None:
    made = sglang.capture_command(PYTHON, "/t", port=31000, layer_ids=[1, 13, 22], flags=["--tp", "2"])
    assert made[-4:] == ["--return-aux-hidden-state-layer-ids", "1", "13", "22"]
    assert made[-6:-4] == ["--tp", "2"]
    assert "--enable-return-aux-hidden-states" in made
    assert made[made.index("--speculative-algorithm") + 1] == "EAGLE3"
    assert "--speculative-draft-model-path" not in made
    assert "--return-aux-hidden-state-layer-ids" not in sglang.capture_command(PYTHON, "/t", port=1)


@pytest.mark.parametrize("ids", [[], [-1, 2], [3, 3]])
def test_layers_that_cannot_be_asked_for(ids: list[int]) -> None:
    with pytest.raises(UsageError, match="cannot be asked for layers"):
        sglang.capture_command(PYTHON, "/t", port=1, layer_ids=ids)


@pytest.mark.parametrize("flags", [["--speculative-draft-model-path", "/d"], ["--pp-size", "2"]])
def test_a_capture_contradicted(flags: list[str]) -> None:
    with pytest.raises(UsageError, match="one pipeline stage only"):
        sglang.capture_command(PYTHON, "/t", port=1, flags=flags)


@wheel_only
def test_every_flag_is_one_of_the_wheels() -> None:
    source = runs.Source(Path(str(WHEEL)))
    fields = ("device", "exec_", "memory", "model", "observability", "parallel", "schedule", "serving", "spec")
    text = source.text("server_args.py") + "".join(source.text(f"arg_groups/fields/{name}.py") for name in fields)
    made = words() + (
        sglang.capture_command(PYTHON, "/t", port=1, layer_ids=[1]) if "enable_return_aux_hidden_states" in text else []
    )
    for flag in {word for word in made if word.startswith("--")}:
        assert f"    {flag[2:].replace('-', '_')}:" in text or f'"{flag}"' in text, flag


# -- who it is -------------------------------------------------------------------------------------------------------


def refusing(exchange: Exchange) -> None:
    exchange.send(500, {"error": {"message": "asked for nothing"}})


@pytest.mark.parametrize("old", [False, True])
def test_an_engine_says_who_it_is(old: bool) -> None:
    prefix = "/get_" if old else "/"
    with (
        serving(refusing, pages={f"{prefix}server_info": INFO, f"{prefix}model_info": MODEL}) as server,
        sglang.Attach(server.url.removesuffix("/v1")) as engine,
    ):
        who = engine.identity()
    assert (who.version, who.model_path, who.architectures) == ("0.5.23", "/models/target", ("LlamaForCausalLM",))
    assert (who.algorithm, who.drafter) == ("EAGLE3", "/models/drafter")
    assert (who.steps, who.top_k, who.draft_tokens) == (3, 1, 4)
    assert (who.caches_prefixes, who.overlaps, who.graphs, who.returns_states) == (False, False, False, True)
    assert (who.capture, who.capture_ids, who.accept_length) == (None, None, 2.5)
    assert sglang.check(who, "elsewhere/target", "drafter/", "LlamaForCausalLM") == []


def test_an_older_engine_says_less() -> None:
    """No modes of states, no phases of graphs, no internal settings."""
    older = {k: v for k, v in INFO.items() if k not in ("cuda_graph_config", "return_hidden_states_mode")}
    who = sglang.identify({**older, "internal_states": [], "disable_cuda_graph": False})
    assert (who.graphs, who.returns_states, who.accept_length, who.architectures) == (True, False, None, ())
    bare = sglang.identify({"version": "0.5.12", "model_path": "/t"})
    assert (bare.graphs, bare.caches_prefixes, bare.steps) == (None, None, None)


def test_what_was_changed_while_it_ran_counts() -> None:
    now = [{**SETTINGS, "speculative_num_steps": 1, "speculative_num_draft_tokens": 2}]
    who = sglang.identify({**INFO, "internal_states": now}, {**MODEL, "model_path": "/models/newer"})
    assert (who.steps, who.draft_tokens, who.model_path) == (1, 2, "/models/newer")


def test_an_engine_that_hands_over_taps_says_the_ids() -> None:
    info = {**INFO, "speculative_algorithm": None, "internal_states": [], "aux_hidden_state_capture": "eagle3"}
    who = sglang.identify({**info, "return_aux_hidden_state_layer_ids": [1, 13, 22]}, MODEL)
    assert (who.algorithm, who.capture, who.capture_ids) == (None, "eagle3", (1, 13, 22))


@pytest.mark.parametrize(
    ("changes", "architecture", "words"),
    [
        ({}, "Qwen3ForCausalLM", "serves /models/target, a LlamaForCausalLM; target is a Qwen3ForCausalLM"),
        ({"speculative_algorithm": None}, None, "without speculation"),
        ({"speculative_algorithm": "NGRAM"}, None, "drafts by NGRAM"),
        ({"speculative_eagle_topk": 4}, None, "drafts a tree"),
    ],
)
def test_another_engine_than_was_meant(changes: dict[str, Any], architecture: str | None, words: str) -> None:
    who = sglang.identify({**INFO, **changes, "internal_states": []}, MODEL)
    with pytest.raises(InputError, match=words) as caught:
        sglang.check(who, "target", "/d/drafter", architecture)
    assert caught.value.way_out


def test_another_name_is_no_proof_of_another_model() -> None:
    who = sglang.identify({**INFO, "speculative_draft_model_path": "/models/else", "internal_states": []}, MODEL)
    target, drafter = sglang.check(who, "/models/other", "/d/drafter")
    assert "is other" in target
    assert "else is drafter" in drafter


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ([1, 2], "no object of JSON"),
        (b"<html>", "no object of JSON"),
        ({}, "/server_info has no version"),
        ({"version": 5}, "version is '5', no str"),
        ({"version": "0.5.23"}, "/model_info has no model_path"),
        ({**INFO, "speculative_num_steps": "three", "internal_states": []}, "speculative_num_steps is 'three', no int"),
        ({**INFO, "speculative_num_steps": True, "internal_states": []}, "speculative_num_steps is 'True', no int"),
        ({**INFO, "speculative_eagle_topk": -1, "internal_states": []}, "below zero"),
        ({**INFO, "return_aux_hidden_state_layer_ids": [1, "2"]}, "no count"),
        ((503, {"error": {"message": "loading"}}), "HTTP 503: loading"),
        ((401, b"no"), "HTTP 401"),
    ],
)
def test_no_sglang_at_all(page: object, words: str) -> None:
    pages = {"/server_info": page, "/model_info": {}}
    with serving(refusing, pages=pages) as server, sglang.Attach(server.url) as engine:
        with pytest.raises(EnvironmentFault, match=words) as caught:
            engine.identity()
        assert caught.value.way_out


def test_nothing_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(refusing) as server, sglang.Attach(server.url) as engine:
        with pytest.raises(EnvironmentFault, match="knows neither /server_info nor /get_server_info"):
            engine.identity()
        url = server.url
    with sglang.Attach(url) as engine, pytest.raises(EnvironmentFault, match="cannot be reached"):
        engine.identity()
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # of this machine no proxy is asked
    pages = {"/server_info": INFO, "/model_info": MODEL}
    with serving(refusing, pages=pages) as server, sglang.Attach(server.url) as engine:
        assert engine.identity().version == "0.5.23"


@pytest.mark.parametrize(
    "url", ["localhost:30000", "ftp://x", "http://", "http://me:secret@x:1", "http://x:1/?a=b", "http://[::"]
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(InputError) as caught:
        sglang.Attach(url)
    assert "secret" not in str(caught.value)


# -- one text --------------------------------------------------------------------------------------------------------


def test_a_request_and_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYAS_API_KEY", "k")
    asked = sglang.request([1, 2, 3, 4], 6, states=True, name="eyas-1", whole=True)
    with serving(lambda exchange: exchange.send(200, BODY)) as server, sglang.Attach(server.url) as engine:
        told = sglang.answer(engine.generate(asked))
    assert server.requests == [
        {
            "input_ids": [1, 2, 3, 4], "return_logprob": False, "stream": False, "rid": "eyas-1",
            "sampling_params": {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True},
            "return_hidden_states": True,
        }
    ]  # fmt: skip
    assert server.headers[0]["Authorization"] == "Bearer k"
    assert told.token_ids == (7, 8, 9, 10, 11, 12)
    assert (told.id, told.finish, told.prompt_tokens, told.cached_tokens) == ("eyas-1", "length", 4, 0)
    assert (told.rounds, told.accepted, told.drafted, told.histogram) == (2, 3, 6, (0, 1, 1))
    assert told.accept_length == 3.0
    assert "return_hidden_states" not in sglang.request([1], 1)


def test_without_speculation_there_are_no_rounds() -> None:
    told = sglang.answer(with_meta(**{name: ... for name in META if name.startswith("spec_")}))
    assert (told.rounds, told.accepted, told.histogram, told.accept_length) == (None, None, None, None)
    assert len(told.token_ids) == 6


def test_the_names_of_older_releases() -> None:
    old = {"spec_accept_token_num": 3, "spec_draft_token_num": 6, "spec_accept_histogram": [0, 1, 1]}
    gone = dict.fromkeys(("spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_correct_drafts_histogram"), ...)
    told = sglang.answer(with_meta(**gone, **old))
    assert (told.accepted, told.drafted, told.histogram) == (3, 6, (0, 1, 1))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "/generate has no meta_info"),
        ({"error": {"message": "too long"}}, "refuses: too long"),
        ({"meta_info": META}, "no output_ids"),
        ({**BODY, "output_ids": [1, "x"]}, "no count"),
        ({**BODY, "output_ids": [1, -1]}, "no count"),
        ({**BODY, "output_ids": "7 8"}, "output_ids is '7 8', no list"),
        ({**BODY, "meta_info": []}, "meta_info is"),
        (with_meta(id=...), "no id"),
        (with_meta(completion_tokens=5), "5 completion tokens, but 6 output ids"),
        (with_meta(finish_reason=None), "finish_reason of None"),
        (with_meta(finish_reason={"type": "abort", "message": "no memory"}), "gave the text up: no memory"),
        (with_meta(prompt_tokens=2.5), "prompt_tokens is '2.5', no int"),
        (with_meta(spec_verify_ct=-1), "below zero"),
        (with_meta(spec_verify_ct=3), "3 rounds, but 2 in the histogram"),
        (with_meta(spec_num_correct_drafts=4), "4 drafts kept, but 3 in the histogram"),
        (with_meta(spec_num_proposed_drafts=2), "3 drafts kept, but 2 made"),
        (with_meta(spec_correct_drafts_histogram=[1, 1, 0], spec_num_correct_drafts=1), "at most 4 of 2 rounds"),
        (
            {"output_ids": list(range(7)), "meta_info": {**META, "completion_tokens": 7}},
            "7 tokens, but at most 6 of 2 rounds",
        ),
        (with_meta(spec_correct_drafts_histogram=[0, 1.5]), "no count"),
        (with_meta(spec_accept_length=float("nan")), "spec_accept_length is 'nan'"),
    ],
)
def test_an_answer_that_is_none(body: dict[str, Any], words: str) -> None:
    with pytest.raises(EnvironmentFault, match=words) as caught:
        sglang.answer(body)
    assert caught.value.way_out


def test_a_refusal_over_http() -> None:
    def refuse(exchange: Exchange) -> None:
        exchange.send(400, {"error": {"message": "The server is not configured to return hidden states."}})

    with (
        serving(refuse) as server,
        sglang.Attach(server.url) as engine,
        pytest.raises(EnvironmentFault, match="HTTP 400: The server is not configured"),
    ):
        engine.generate(sglang.request([1], 1, states=True))


def test_half_an_answer() -> None:
    with (
        serving(lambda exchange: exchange.cut()) as server,
        sglang.Attach(server.url) as engine,
        pytest.raises(EnvironmentFault, match="does not answer"),
    ):
        engine.generate(sglang.request([1], 1))


def test_an_endless_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.engines.sglang_bodies.MOST_BYTES", 100)
    with (
        serving(lambda exchange: exchange.send(200, BODY)) as server,
        sglang.Attach(server.url) as engine,
        pytest.raises(InputError, match="more than 0 MB"),
    ):
        engine.generate(sglang.request([1], 1))


# -- states ----------------------------------------------------------------------------------------------------------


def states(count: int, width: int = 6) -> list[list[float]]:
    return [[float(row * 10 + column) for column in range(width)] for row in range(count)]


def test_states_know_their_positions() -> None:
    rows = states(9)
    taps = sglang.taps_of(with_meta(hidden_states=[rows[:4], *rows[4:]]), 6)
    np.testing.assert_array_equal(taps.rows, np.array(rows, np.float32))
    assert taps.positions.tolist() == list(range(9))


def test_states_behind_a_cached_prefix() -> None:
    rows = states(7)
    taps = sglang.taps_of(with_meta(hidden_states=[rows[:2], *rows[2:]], cached_tokens=2))
    assert taps.positions.tolist() == list(range(2, 9))


def test_states_of_a_round_that_ran_past_the_end() -> None:
    rows = states(11)
    assert sglang.taps_of(with_meta(hidden_states=[rows[:4], *rows[4:]])).positions.tolist() == list(range(9))


@pytest.mark.parametrize(
    ("hidden", "words"),
    [
        (..., "no hidden states"),
        ("x", "no list of rows"),
        ([], "no list of rows"),
        ([0.5, 0.5], "no list of rows"),
        (states(3), "last state alone"),
        ([states(5), *states(5)], "4 prompt tokens, but 5 rows"),
        ([states(4), *states(3)], "6 output tokens, but 3 rows"),
        ([states(4), *states(4), states(1)[0][:5]], "Row 8 of the hidden states has 5 numbers, 6 were expected"),
        ([states(4), *states(4), states(1)], "Row 8 of the hidden states has 1 numbers"),
        ([[[0.5] * 5 + ["x"]] * 4, *states(5)], "no number"),
        ([[[0.5] * 5 + [None]] * 4, *states(5)], "not finite|no number"),
    ],
)
def test_states_that_are_none(hidden: Any, words: str) -> None:
    body = with_meta(hidden_states=[]) if hidden is ... else with_meta(hidden_states=hidden)
    if hidden is ...:
        del body["meta_info"]["hidden_states"]
    with pytest.raises((EnvironmentFault, InputError), match=words) as caught:
        sglang.taps_of(body)
    assert caught.value.way_out


def test_states_of_another_width() -> None:
    with pytest.raises(InputError, match="has 6 numbers, 18 were expected"):
        sglang.taps_of(with_meta(hidden_states=[states(4), *states(5)]), 18)


# -- bodies made by the wheel's own code -----------------------------------------------------------------------------


def method(file: str, of: str, name: str, within: dict[str, Any]) -> Any:
    source = runs.Source(Path(str(WHEEL)))
    node = runs.methods(source.classes(file)[of])[name]
    node.decorator_list, node.returns = [], None
    for argument in (*node.args.args, *node.args.kwonlyargs):
        argument.annotation = None
    exec(compile(ast.Module([node], []), "<sglang>", "exec"), within)
    return within[name]


@wheel_only
def test_counts_as_the_wheel_makes_them() -> None:
    """A text of rounds with 2, 0 and 3 drafts kept, the last cut by the end."""
    spec = SimpleNamespace(speculative_num_draft_tokens=4)
    within: dict[str, Any] = {"get_spec": lambda: spec, "_ragged_verify_cap_accept": lambda: False}
    count = method("managers/tokenizer_manager.py", "TokenizerManager", "_calculate_spec_decoding_metrics", within)
    histogram = method("managers/schedule_batch.py", "Req", "update_spec_correct_drafts_histogram", {})
    request = SimpleNamespace(spec_correct_drafts_histogram=[])
    for kept in (2, 0, 3):
        histogram(request, kept)
    received = SimpleNamespace(
        spec_verify_ct=[3], spec_num_correct_drafts=[5], completion_tokens=[7],
        spec_correct_drafts_histogram=[request.spec_correct_drafts_histogram],
    )  # fmt: skip
    bare = {name: value for name, value in META.items() if not name.startswith("spec_")}
    meta = {**bare, "completion_tokens": 7}
    self = SimpleNamespace(server_args=spec)
    count(self, meta, received, 0)
    told = sglang.answer({"output_ids": list(range(7)), "meta_info": meta})
    assert (told.rounds, told.accepted, told.drafted, told.histogram) == (3, 5, 9, (1, 0, 1, 1))
    assert told.accept_length == pytest.approx(7 / 3)


@wheel_only
def test_states_as_the_wheel_lays_them_out() -> None:
    """Prompt of 4, then rounds of W = 4 rows of which 3 and 2 are kept."""
    file, of = "managers/scheduler_components/batch_result_processor.py", "SchedulerBatchResultProcessor"
    source = runs.Source(Path(str(WHEEL)))
    if of not in source.classes(file):
        of = next(iter(source.classes(file)))
    if "_append_decode_hidden_states" not in runs.methods(source.classes(file)[of]):
        pytest.skip("this release has no such method; how it lays states out is not known here")
    prefill, decode = (method(file, of, f"_append_{kind}_hidden_states", {}) for kind in ("prefill", "decode"))
    truth = torch.arange(9 * 6, dtype=torch.float32).reshape(9, 6)
    junk = torch.full((4, 6), -1.0)
    request = SimpleNamespace(return_hidden_states=True, hidden_states=[], finished_len=None)
    full = SimpleNamespace(is_full=lambda: True)
    output = SimpleNamespace(hidden_states=torch.cat([junk, truth[:4]]))  # another request's rows come before
    assert prefill(
        None, req=request, logits_output=output, hidden_state_offset=4, capture_hidden_mode=full, extend_input_len=4
    ) == 8  # fmt: skip
    decode(req=request, hidden_states=torch.cat([junk, truth[4:7], junk[:1]]), start=4, accept_len=3)
    decode(req=request, hidden_states=torch.cat([truth[7:9], junk[:2]]), start=0, accept_len=2)
    taps = sglang.taps_of(with_meta(hidden_states=request.hidden_states))
    np.testing.assert_array_equal(taps.rows, truth.numpy())
    assert taps.positions.tolist() == list(range(9))
