"""Asked conversations are answered, journalled and given back, whatever happens; records come from the ids."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import folders
from eyas import target as targets
from eyas.answerers import InProcess, Remote
from eyas.answers import Answer, Ask, Refusal, Sampling
from eyas.decode.plain import plain
from eyas.endpoint import Endpoint
from eyas.errors import EnvironmentFault, InputError, UsageError
from eyas.journal import NAME
from eyas.regenerate import Answered, Asked, Plan, Progress, record_from_answer, regenerate
from eyas.render import Renderer
from servers import Exchange, completion, serving

END = 257
RENDERER = Renderer(folders.tokenizer(), frozenset({END}))
MAX_POSITIONS = 512


def asked(n: int = 6) -> list[Asked]:
    made = [Asked(f"c{i}", "made", tuple(f"question {i} {t}" for t in range(1 + i % 3))) for i in range(n)]
    return [*made[:-1], Asked("last", "other", ("Hello?",), system="Be brief.")]


def bytes_said(ask: Ask) -> tuple[int, ...]:
    """Some letters that depend on the prompt alone."""
    digest = hashlib.sha256(repr(ask.prompt_ids).encode()).digest()
    return tuple(RENDERER.tokenizer("".join(chr(97 + b % 26) for b in digest[: 3 + digest[0] % 9]))["input_ids"])


class Fake:
    """Answers without a model: one ask at a time, newest first."""

    def __init__(self, seconds: float = 0.0, fail_after: int | None = None, **pins: object) -> None:
        self.seconds, self.fail_after, self._pins = seconds, fail_after, {"max_new_tokens": 50, **pins}
        self.waiting: list[Ask] = []
        self.heard: list[Ask] = []

    model = "fake"

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def wants(self) -> int:
        return max(0, 3 - len(self.waiting))

    def submit(self, ask: Ask) -> None:
        self.waiting.append(ask)
        self.heard.append(ask)

    def take(self) -> list[Answer | Refusal]:
        time.sleep(self.seconds)
        if self.fail_after is not None and len(self.heard) > self.fail_after:
            raise EnvironmentFault("The server is gone.", way_out="Start it.")
        return [self.answer(self.waiting.pop())] if self.waiting else []

    def answer(self, ask: Ask) -> Answer | Refusal:
        return Answer(ask.id, (*bytes_said(ask), END), "stop")

    def pins(self) -> dict[str, Any]:
        return self._pins

    def rate(self, ask: Ask) -> float | None:
        return 100.0


def run(folder: Path, answerer: Any = None, questions: Iterable[Asked] | None = None, **more: Any) -> list[Answered]:
    questions = asked() if questions is None else questions
    settings = {"max_positions": MAX_POSITIONS, **more}
    return list(regenerate(questions, answerer or Fake(), RENDERER, folder, **settings))


# -- conversations ------------------------------------------------------------------------------------------


def test_every_turn_is_asked_with_the_answers_before_it(tmp_path: Path) -> None:
    fake = Fake()
    done = run(tmp_path, fake)
    assert [a.id for a in done] == [a.id for a in asked()]
    assert [a.source for a in done] == ["made"] * 5 + ["other"]
    by_id = {ask.id: ask for ask in fake.heard}
    assert len(by_id) == len(fake.heard) == sum(len(a.turns) for a in asked())
    for one, question in zip(done, asked(), strict=True):
        users = [m["content"] for m in one.messages if m["role"] == "user"]
        assert tuple(users) == question.turns
        assert one.messages[0] == {"role": "system", "content": "Be brief."} or question.system is None
        last = by_id[f"{one.id}#{len(question.turns) - 1}"]
        assert one.prompt_ids == list(last.prompt_ids) == RENDERER.ids(one.messages[:-1], prompt=True)
        assert one.messages[-1]["content"] == RENDERER.tokenizer.decode(one.token_ids[:-1])
        assert (one.finish_reason, one.model, one.ids, one.unmatched) == ("stop", "fake", "target", 0)


def test_records_equal_the_renderers_where_text_goes_round(tmp_path: Path) -> None:
    for one in run(tmp_path):
        made = record_from_answer(one)
        rendered = RENDERER.record(one.messages, one.source, cut=False, where="here")
        assert made.to_json() == rendered.to_json()
        assert len(made.spans()) == sum(m["role"] == "assistant" for m in one.messages)


class Cut(Fake):
    """Cuts the second turn of every conversation, in the middle of a character."""

    def answer(self, ask: Ask) -> Answer | Refusal:
        if ask.id.endswith("#1"):
            return Answer(ask.id, tuple(RENDERER.tokenizer("né")["input_ids"][:-1]), "length")
        return super().answer(ask)


def test_a_cut_answer_ends_its_conversation_and_supervises_no_end(tmp_path: Path) -> None:
    done = {a.id: a for a in run(tmp_path, Cut())}
    cut = done["c2"]  # three turns asked
    assert cut.finish_reason == "length"
    assert [m["role"] for m in cut.messages] == ["user", "assistant"] * 2
    assert cut.messages[-1]["content"] == "n"
    record = record_from_answer(cut)
    assert record.input_ids[-1] != END
    assert record.n_response_tokens == len(cut.token_ids) + cut.spans[0][1] - cut.spans[0][0]
    first = Fake().answer(Ask("c2#0", tuple(cut.prompt_ids[: cut.spans[0][0]])))
    assert isinstance(first, Answer)
    assert record.input_ids[slice(*cut.spans[0])].tolist() == list(first.token_ids)


class Odd(Fake):
    """Says bytes that are no text, so that the next prompt renders them otherwise."""

    def answer(self, ask: Ask) -> Answer | Refusal:
        said = super().answer(ask)
        assert isinstance(said, Answer)
        broken = RENDERER.tokenizer("é")["input_ids"][:1]
        return Answer(ask.id, (*broken, *said.token_ids), "stop") if ask.id.endswith("#0") else said


def test_an_earlier_answer_that_renders_otherwise_is_in_no_span_and_counted(tmp_path: Path) -> None:
    seen: list[Progress] = []
    done = {a.id: a for a in run(tmp_path, Odd(), progress=seen.append)}
    for one in done.values():
        turns = sum(m["role"] == "assistant" for m in one.messages)
        assert one.unmatched == (1 if turns > 1 else 0)
        assert len(one.spans) == turns - one.unmatched
    # Of three turns the second was asked after the same text as rendered now, so it counts.
    assert len(done["c2"].spans) == 2
    assert seen[-1].unmatched == sum(a.unmatched for a in done.values()) > 0


# -- nothing lost -------------------------------------------------------------------------------------------


def child(folder: Path, questions: list[Asked]) -> None:
    run(folder, Fake(seconds=0.002), questions)


def test_killed_at_any_moment_it_goes_on_and_ends_with_the_same(tmp_path: Path) -> None:
    questions = asked(40)
    expected = run(tmp_path / "undisturbed", questions=questions)
    fork, moments = multiprocessing.get_context("fork"), random.Random(0)
    partly = kills = 0
    for attempt in range(20):
        folder = tmp_path / f"killed{attempt % 4}"
        process = fork.Process(target=child, args=(folder, questions))
        process.start()
        time.sleep(moments.uniform(0.0, 0.12))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills += process.exitcode == -signal.SIGKILL
        journal = folder / NAME
        partly += journal.exists() and 1 < journal.read_bytes().count(b"\n") < len(questions) + 1
    assert kills >= 10
    assert partly >= 3
    for attempt in range(4):
        folder = tmp_path / f"killed{attempt}"
        fake = Fake()
        assert run(folder, fake, questions) == expected
        assert len(fake.heard) <= sum(len(q.turns) for q in questions)
        again = Fake()
        assert run(folder, again, questions) == expected
        assert again.heard == []


def test_a_resume_asks_only_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"The server is gone. \d of 6 conversations are in .*journal.jsonl"):
        run(tmp_path, Fake(fail_after=5))
    plans: list[Plan] = []
    fake = Fake()
    done = run(tmp_path, fake, say=plans.append)
    assert done == run(tmp_path / "whole")
    assert 0 < plans[0].done < 6
    assert len({ask.id.partition("#")[0] for ask in fake.heard}) == 6 - plans[0].done
    assert plans[0].turns == len(fake.heard)


def test_the_cost_is_said_before_anything_is_asked(tmp_path: Path) -> None:
    fake, plans = Fake(), list[Plan]()

    def say(plan: Plan) -> None:
        assert fake.heard == []
        plans.append(plan)

    run(tmp_path, fake, say=say)
    (plan,) = plans
    turns = sum(len(a.turns) for a in asked())
    assert (plan.conversations, plan.done, plan.turns, plan.most_tokens) == (6, 0, turns, turns * 50)
    assert plan.most_seconds == turns * 50 / 100.0
    assert f"{turns} turns to answer, at most {turns * 50:,} tokens" in str(plan)


def test_progress_counts_what_came(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    done = run(tmp_path, progress=lambda p: seen.append((p.done, p.tokens)))
    assert seen == sorted(seen)
    assert seen[-1][0] == 6
    assert seen[-1][1] >= sum(len(a.token_ids) for a in done)


@pytest.mark.parametrize(
    ("fake", "questions", "key"),
    [
        (Fake(target="other"), asked(), "target"),
        (Fake(max_new_tokens=51), asked(), "max_new_tokens"),
        (Fake(), [*asked(), Asked("more", "made", ("grown",))], "input_sha256"),
        (Fake(), asked()[:-1], "input_sha256"),
        (Fake(), [Asked("c0", "made", ("other words",)), *asked()[1:]], "input_sha256"),
    ],
)
def test_another_journal_is_refused(fake: Fake, questions: list[Asked], key: str, tmp_path: Path) -> None:
    before = run(tmp_path)
    with pytest.raises(UsageError, match=f"another {key}"):
        run(tmp_path, fake, questions)
    assert fake.heard == []
    assert run(tmp_path) == before


# -- what cannot be answered --------------------------------------------------------------------------------


class Picky(Fake):
    def answer(self, ask: Ask) -> Answer | Refusal:
        return Refusal(ask.id, "too odd") if "question 1" in ask.messages[0]["content"] else super().answer(ask)


def test_refused_conversations_are_counted_kept_and_left_out(tmp_path: Path) -> None:
    seen: list[Progress] = []
    done = run(tmp_path, Picky(), progress=seen.append)
    assert [a.id for a in done] == ["c0", "c2", "c3", "c4", "last"]
    assert (seen[-1].refused, seen[-1].first_refusal) == (1, "too odd")
    again = Picky()
    assert run(tmp_path, again) == done
    assert again.heard == []


def test_too_long_a_prompt_is_refused_and_too_long_a_follow_up_left_out(tmp_path: Path) -> None:
    first = len(RENDERER.ids([{"role": "user", "content": "question 2 0"}], prompt=True))
    done = {a.id: a for a in run(tmp_path, max_positions=first + 40)}
    assert len(done["c2"].messages) == 2  # the second turn's prompt no longer fits
    assert done["c2"].finish_reason == "stop"
    with pytest.raises(InputError, match=r"None of 6 conversations.*positions"):
        run(tmp_path / "none", max_positions=first - 30)


def test_when_most_are_refused_it_ends(tmp_path: Path) -> None:
    class Never(Fake):
        def answer(self, ask: Ask) -> Answer | Refusal:
            return Refusal(ask.id, "never")

    with pytest.raises(UsageError, match="8 of 8 conversations were refused: never"):
        run(tmp_path, Never(), asked(30))


def test_wrong_questions_are_refused(tmp_path: Path) -> None:
    for questions, words in (
        ([], "nothing to answer"),
        ([asked()[0], asked()[0]], "Two conversations have the id 'c0'"),
        ([Asked("x", "y", ())], "asks nothing"),
    ):
        with pytest.raises(InputError, match=words):
            run(tmp_path, questions=questions)
    assert not (tmp_path / NAME).exists()


# -- in process ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> targets.Target:
    return targets.load(str(folders.write_target(tmp_path_factory.mktemp("target"))))


def test_the_target_answers_itself(target: targets.Target, tmp_path: Path) -> None:
    plans: list[Plan] = []
    answerer = InProcess(target, max_new_tokens=12, batch_size=4)
    done = run(tmp_path, answerer, max_positions=target.max_positions, say=plans.append)
    assert plans[0].tokens_per_second is not None
    assert plans[0].tokens_per_second > 0
    for one in done:
        assert one.token_ids == list(plain(target, one.prompt_ids, max_new_tokens=12))
        assert record_from_answer(one).input_ids.tolist() == one.prompt_ids + one.token_ids


def test_sampled_in_two_parts_it_equals_one(target: targets.Target, tmp_path: Path) -> None:
    def answerer() -> InProcess:
        warm = Sampling(temperature=0.8, top_p=0.95, seed=4)
        return InProcess(target, max_new_tokens=8, batch_size=3, sampling=warm)

    whole = run(tmp_path / "whole", answerer(), max_positions=target.max_positions)

    class StopsEarly(RuntimeError):
        pass

    def stop(progress: Progress) -> None:
        if progress.done >= 2:
            raise StopsEarly

    with pytest.raises(StopsEarly):
        run(tmp_path / "parts", answerer(), max_positions=target.max_positions, progress=stop)
    parts = run(tmp_path / "parts", answerer(), max_positions=target.max_positions)
    assert parts == whole
    cold = InProcess(target, max_new_tokens=8, batch_size=3, sampling=Sampling(temperature=0.8, seed=5))
    with pytest.raises(UsageError, match="another sampling"):
        run(tmp_path / "parts", cold, max_positions=target.max_positions)


# -- through an endpoint ------------------------------------------------------------------------------------


def served(exchange: Exchange, *, prompt: str = "given", ids: str = "given", text: str | None = None) -> None:
    """What a server of the fake target says."""
    prompt_ids = RENDERER.ids(exchange.request["messages"], prompt=True)
    said = bytes_said(Ask("", tuple(prompt_ids)))
    body = completion(RENDERER.tokenizer.decode(said) if text is None else text, "stop")
    if ids != "none":
        body["choices"][0]["token_ids"] = list(said) if ids == "no end" else [*said, END]
    if ids == "foreign":
        body["choices"][0]["token_ids"][1] = folders.VOCAB + 5
    if prompt != "none":
        body["prompt_token_ids"] = [*prompt_ids[:4], 65, *prompt_ids[5:]] if prompt == "other" else prompt_ids
    exchange.send(200, body)


def remote(folder: Path, answer: Any, **more: Any) -> list[Answered]:
    with serving(answer, ["fake"]) as server:
        there = Endpoint(server.url, max_new_tokens=50, concurrency=3, pause=lambda seconds: False)
        return run(folder, Remote(there, RENDERER, folders.VOCAB), **more)


@pytest.mark.parametrize("how", [{}, {"ids": "no end"}, {"prompt": "none"}, {"ids": "none", "prompt": "none"}])
def test_an_endpoint_gives_what_the_target_gives(how: dict[str, str], tmp_path: Path) -> None:
    done = remote(tmp_path / "far", lambda e: served(e, **how))
    near = run(tmp_path / "near")
    ids = "text" if how.get("ids") == "none" else "target"
    assert {a.ids for a in done} == {ids}
    for mine, theirs in zip(near, done, strict=True):
        assert record_from_answer(mine).to_json() == record_from_answer(theirs).to_json()
        assert mine.messages == theirs.messages


def test_another_template_is_refused_at_its_first_differing_token(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"at position 4 it has 65 '.*', we have \d+ '.*'"):
        remote(tmp_path, lambda e: served(e, prompt="other"))


def test_another_models_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"token id {folders.VOCAB + 5}.*another model"):
        remote(tmp_path, lambda e: served(e, ids="foreign"))


def test_text_that_its_ids_do_not_say_is_refused_one_by_one_and_then_as_a_whole(tmp_path: Path) -> None:
    def answer(exchange: Exchange) -> None:
        served(exchange, text="something else" if exchange.request["messages"][-1]["content"] == "Hello?" else None)

    seen: list[Progress] = []
    assert [a.id for a in remote(tmp_path / "one", answer, progress=seen.append)] == ["c0", "c1", "c2", "c3", "c4"]
    assert "text is not what its token ids say" in str(seen[-1].first_refusal)
    with pytest.raises(UsageError, match="conversations were refused"):
        remote(tmp_path / "all", lambda e: served(e, text="something else"), questions=asked(30))


def test_text_whose_ids_do_not_give_it_back_is_counted(tmp_path: Path) -> None:
    seen: list[Progress] = []
    odd = "a<|im_start|>b"  # becomes a special token, which decoding leaves out
    done = remote(tmp_path, lambda e: served(e, ids="none", text=odd), progress=seen.append)
    assert {a.ids for a in done} == {"text-differs"}
    assert seen[-1].differing == len(done)
    assert {m["content"] for a in done for m in a.messages if m["role"] == "assistant"} == {odd}


@pytest.mark.parametrize("reason", ["content_filter", "tool_calls", "abort"])
def test_another_end_is_no_answer(reason: str, tmp_path: Path) -> None:
    def answer(exchange: Exchange) -> None:
        if exchange.request["messages"][-1]["content"] == "Hello?":
            exchange.say("I", reason)
        else:
            served(exchange)

    assert len(remote(tmp_path, answer)) == 5


def test_a_server_that_dies_midway_is_told_with_what_is_done(tmp_path: Path) -> None:
    def answer(exchange: Exchange) -> None:
        served(exchange) if exchange.count <= 6 else exchange.drop()

    with pytest.raises(EnvironmentFault, match=r"does not answer.*of 6 conversations are in") as caught:
        remote(tmp_path, answer)
    assert "same command" in caught.value.way_out
    assert [a.id for a in remote(tmp_path, served)] == [a.id for a in asked()]


@pytest.mark.real
def test_vllms_own_bodies_are_the_targets_answers(tmp_path: Path) -> None:
    """Recorded from vLLM 0.32.0 serving SmolLM2-135M-Instruct (greedy, 24 and 64 tokens at most)."""
    bodies = json.loads((Path(__file__).parent / "fixtures" / "endpoint" / "vllm-0.32.0.json").read_text())
    text = targets.load_text_side("smollm2")
    renderer = Renderer(text.tokenizer, text.eos_ids)
    questions = [Asked("length", "v", ("What is a comet?",)), Asked("stop", "v", ("Say only: yes",))]

    def replay(exchange: Exchange) -> None:
        (name,) = [q.id for q in questions if q.turns[0] == exchange.request["messages"][0]["content"]]
        exchange.send(200, bodies[name]["body"])

    with serving(replay, ["smollm2"]) as server:
        answerer = Remote(Endpoint(server.url, max_new_tokens=24), renderer, text.vocab_size)
        done = list(regenerate(questions, answerer, renderer, tmp_path, max_positions=text.max_positions))
    for one in done:
        choice = bodies[one.id]["body"]["choices"][0]
        assert (one.ids, one.finish_reason) == ("target", one.id)
        assert one.messages[-1]["content"] == choice["message"]["content"]
        assert one.token_ids == choice["token_ids"]
        rendered = renderer.record(one.messages, "v", cut=one.id == "length", where="here")
        assert record_from_answer(one).to_json() == rendered.to_json()


# -- the journal itself --------------------------------------------------------------------------------------------


def test_the_journal_is_json_lines_that_say_it_all(tmp_path: Path) -> None:
    done = run(tmp_path)
    header, *rows = [json.loads(line) for line in (tmp_path / NAME).read_text().splitlines()]
    assert set(header) == {"schema", "max_new_tokens", "template_sha256", "tokenizer_sha256", "input_sha256"}
    assert {row["id"]: row["token_ids"] for row in rows} == {a.id: a.token_ids for a in done}
    needed = {"id", "source", "messages", "prompt_ids", "token_ids", "finish_reason", "model", "spans"}
    assert all(needed <= set(row) for row in rows)
