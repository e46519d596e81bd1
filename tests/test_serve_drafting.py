"""How much a server drafts: what pays, by one chooser for all, or ``--fixed``; a seed means the same answer again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import serving
from eyas import target as targets
from eyas.answers import Sampling
from eyas.cli import serve as verb
from eyas.decode.adaptive import Adaptive
from eyas.decode.chain import Chain
from eyas.decode.loop import chooser, generate
from eyas.decode.plain import plain
from eyas.decode.siblings import Siblings, by_worth
from eyas.decode.worth import ByWorth
from eyas.serve import Answering
from eyas.serve.answering import Choosers, Request
from folders import call, write_drafter, write_target
from serving import Hinted, Running
from serving import serving as served

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return serving.load(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def drafter(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafter(tmp_path_factory.mktemp("drafter") / "made", targets.load(str(target)))


class Turning:
    """Chooses 0, 1, 2 … in turn, and keeps what it was told."""

    def __init__(self, most: int = 3) -> None:
        self.most, self.asked = most, 0
        self.seen: list[tuple[int, int, float]] = []

    def choose(self) -> int:
        self.asked += 1
        return (self.asked - 1) % (self.most + 1)

    def saw(self, drafted: int, accepted: int, seconds: float) -> None:
        self.seen.append((drafted, accepted, seconds))


class Chosen(Hinted):
    """A server whose chooser is the test's; ``Hinted`` has some of what is drafted kept."""

    def __init__(self, *args: Any, says: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._says = says

    def _measured(self) -> Any:
        return Choosers(self._says, self._says)


@pytest.fixture
def turning(tiny: Any) -> Iterator[tuple[Running, Turning]]:
    says = Turning()
    with served(Chosen(*tiny, draft_tokens=3, adaptive=True, says=says)) as server:
        yield server, says


def ask(server: Running, **body: Any) -> Any:
    told = server.ask(**{"prompt": "once", "max_tokens": 24, "return_token_ids": True, **body})
    assert told.status_code == 200, told.text
    return told.json()


# -- one chooser -----------------------------------------------------------------------------------------------


def test_one_chooser_is_asked_and_told_by_all_answers(turning: tuple[Running, Turning], tiny: Any) -> None:
    """Every round of every answer, with what it drafted and kept; the answers are the greedy ones."""
    server, says = turning
    prompts = ["once", "twice", "more often"]
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda prompt: ask(server, prompt=prompt, temperature=0), prompts))
    for prompt, told in zip(prompts, answers, strict=True):
        ids = tiny[0].tokenizer(prompt)["input_ids"]
        assert told["choices"][0]["token_ids"] == list(plain(tiny[0], ids, max_new_tokens=24))
    counts = [told["usage"]["eyas"] for told in answers]
    assert len(says.seen) == says.asked == sum(c["rounds"] for c in counts)
    assert [drafted for drafted, _, _ in says.seen] == [i % 4 for i in range(says.asked)]
    for k in range(3):
        assert sum(drafted > k for drafted, _, _ in says.seen) == sum(c["drafted"][k] for c in counts)
        assert sum(kept > k for _, kept, _ in says.seen) == sum(c["accepted"][k] for c in counts)
    assert all(seconds > 0 for _, _, seconds in says.seen)


def test_plain_rounds_can_be_told_from_the_metrics(turning: tuple[Running, Turning]) -> None:
    server, says = turning
    ask(server, temperature=0)
    server.idle()
    lines = (line.rpartition(" ") for line in server.service.metrics.page().decode().splitlines() if line[0] != "#")
    values = {name: float(value) for name, _, value in lines}
    bare = sum(drafted == 0 for drafted, _, _ in says.seen)
    assert bare > 0
    assert values["eyas_serve_rounds_total"] - values['eyas_serve_drafted_at_depth_total{depth="0"}'] == bare


@pytest.mark.parametrize(
    ("body", "chosen"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 0, "seed": 5}, True),  # greedy: the same whatever is drafted
        ({"temperature": 1}, True),
        ({"temperature": 1, "seed": 5}, False),
        ({"seed": 5}, False),  # the usual temperature is 1
    ],
)
def test_a_sampled_answer_with_a_seed_has_no_chooser(
    body: dict[str, Any], chosen: bool, turning: tuple[Running, Turning]
) -> None:
    server, says = turning
    counts = ask(server, **body)["usage"]["eyas"]
    assert bool(says.asked) == chosen
    assert (counts["drafted"] == [counts["rounds"]] * 3) == (not chosen)


def test_a_seed_gives_the_same_answer_on_two_servers_under_other_load(tiny: Any) -> None:
    """One alone, one with a chooser of other views and with three more answers in turn; and the decoder's own."""
    body = {"prompt": "once upon", "max_tokens": 60, "temperature": 0.9, "top_p": 0.95, "seed": 11}
    with served(Answering(*tiny, draft_tokens=3, adaptive=True)) as quiet:
        alone = [ask(quiet, **body)["choices"] for _ in range(2)]
    busy = Chosen(*tiny, draft_tokens=3, adaptive=True, says=Turning(0))
    with served(busy) as server, ThreadPoolExecutor(5) as pool:
        others = [pool.submit(ask, server, prompt="x" * i, max_tokens=150, temperature=1) for i in (1, 2, 3)]
        same = pool.submit(ask, server, **body).result()["choices"]
        assert [other.result()["usage"]["eyas"]["drafted"] for other in others] == [[0, 0, 0]] * 3
    assert alone[0] == alone[1] == same
    with served(Answering(*tiny, draft_tokens=2, adaptive=True)) as other:
        assert ask(other, **body)["choices"] != same, "the draft does not matter here, so nothing is shown"


def test_greedy_answers_are_drafted_by_worth_and_sampled_ones_in_chains(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind by its own chooser, which is told of its rounds; a seed has neither. Greedy is what plain says."""
    answering = Answering(*tiny, draft_tokens=3, adaptive=True)
    greedy, sampled = Sampling(), Sampling(temperature=1.0)
    seen, saw = list[ByWorth](), ByWorth.saw
    monkeypatch.setattr(ByWorth, "saw", lambda self, *told: (seen.append(self), saw(self, *told))[1])
    with served(answering) as server:
        assert answering.choosers is not None
        for sampling, repeatable, side, chooses in (
            (greedy, False, Siblings, answering.choosers.greedy),
            (greedy, True, Siblings, answering.choosers.greedy),
            (sampled, False, Chain, answering.choosers.sampled),
            (sampled, True, Chain, None),
        ):
            request = Request((1, 2), 3, sampling, repeatable=repeatable)
            assert isinstance(answering.side(request), side)
            assert answering.chooser_for(request) is chooses
        prompts = ["once", "twice", "more often"]
        with ThreadPoolExecutor(6) as pool:
            drawn = [pool.submit(ask, server, prompt=prompt, temperature=1) for prompt in prompts]
            answers = list(pool.map(lambda prompt: ask(server, prompt=prompt, temperature=0), prompts))
            assert all(one.result()["choices"][0]["token_ids"] for one in drawn)
        for prompt, told in zip(prompts, answers, strict=True):
            ids = tiny[0].tokenizer(prompt)["input_ids"]
            assert told["choices"][0]["token_ids"] == list(plain(tiny[0], ids, max_new_tokens=24))
        server.idle()
        assert len(seen) == sum(told["usage"]["eyas"]["rounds"] for told in answers)
        assert set(map(id, seen)) == {id(answering.choosers.greedy)}


# -- measured once, at the start -------------------------------------------------------------------------------


def test_costs_are_measured_when_it_opens_and_said(tiny: Any, caplog: pytest.LogCaptureFixture) -> None:
    answering = Answering(*tiny, draft_tokens=3, adaptive=True)
    assert answering.choosers is None
    with caplog.at_level("INFO", logger="eyas.serve"), answering.open():
        made = answering.choosers
        assert made is not None
        assert isinstance(made.greedy, ByWorth)
        assert isinstance(made.sampled, Adaptive)
        assert answering.choosers is made
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith("event=measuring "), "before it is done, for it may take a while"
    costs = dict(word.split("=") for word in said[1].split(" "))["round_costs"].split(",")
    assert len(costs) == 4
    assert costs[0] == "1.00"


@pytest.mark.parametrize("bare", [False, True])
def test_fixed_or_without_a_drafter_nothing_is_measured(bare: bool, tiny: Any) -> None:
    answering = Answering(tiny[0], None if bare else tiny[1], draft_tokens=3, adaptive=bare)
    with answering.open():
        assert answering.choosers is None
        assert not answering.adaptive


def test_a_round_cut_by_the_end_of_the_context_teaches_nothing(tiny: Any) -> None:
    """One shorter than chosen costs and says something else than was asked for."""
    says = Turning()
    says.choose = lambda: 3  # type: ignore[method-assign]
    prompt = [1 + i % 250 for i in range(tiny[0].max_positions - 9)]
    run = generate(*tiny, prompt, max_new_tokens=9, draft_tokens=3, chooser=says)  # type: ignore[arg-type]
    rounds = list(run)
    cut = [len(one.drafted) for one in rounds if len(one.drafted) < 3]
    assert cut
    assert len(says.seen) == len(rounds) - len(cut) > 0
    assert {drafted for drafted, _, _ in says.seen} == {3}


# -- the command line ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "draft_tokens", "how"),
    [
        ([], 4, "0 to 4 tokens drafted a round, as many as pay"),
        (["-k", "3"], 3, "0 to 3 tokens drafted a round, as many as pay"),
        (["--fixed"], 2, "2 tokens drafted a round"),
        (["--fixed", "-k", "3"], 3, "3 tokens drafted a round"),
        (["--plain"], 4, "without a drafter"),
    ],
)
def test_what_the_words_make(
    words: list[str], draft_tokens: int, how: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch, target: Path,
    drafter: Path,
) -> None:  # fmt: skip
    made: list[Answering] = []
    monkeypatch.setattr(verb, "_serve", lambda answering, *_: made.append(answering))
    ran = call(capsys, "serve", "--target", target, "--drafter", drafter, "--port", 0, *words)
    assert ran.code == 0, ran.err
    assert made[0].draft_tokens == draft_tokens
    assert made[0].adaptive == ("as many as pay" in how)
    assert verb._how(made[0]) == how


def test_an_engine_drafts_two_as_ever(capsys: Capture, monkeypatch: pytest.MonkeyPatch, target: Path) -> None:
    counts: list[int] = []
    monkeypatch.setattr(verb, "_engine", lambda *words: counts.append(words[4]) or 0)
    for words in ([], ["-k", "5"]):
        call(capsys, "serve", "--engine", "vllm", "--engine-python", "/p", "--target", target, *words)
    assert counts == [2, 5]


def test_generate_adaptive(capsys: Capture, monkeypatch: pytest.MonkeyPatch, target: Path, drafter: Path) -> None:
    """The same greedy answer, drafted by worth; a sampled one by a chain's chooser. Measured after the prompt."""
    made: list[tuple[int, int, Any]] = []

    def noted(target: Any, drafter: Any, prompt_ids: list[int], most: int) -> Any:
        made.append((len(prompt_ids), most, chooser(target, drafter, prompt_ids, most)))
        return Turning(1)

    def noted_worth(target: Any, drafter: Any, prompt_ids: list[int], most: int) -> Any:
        made.append((len(prompt_ids), most, by_worth(target, drafter, prompt_ids, most)))
        return made[-1][2]

    monkeypatch.setattr("eyas.decode.loop.chooser", noted)
    monkeypatch.setattr("eyas.decode.siblings.by_worth", noted_worth)

    def told(*words: object) -> Any:
        ran = call(
            capsys, "generate", "hello", "--target", target, "--drafter", drafter, "-k", 3, *words, "--json", "-"
        )
        assert ran.code == 0, ran.err
        return json.loads(ran.out)

    fixed, adaptive = told(), told("--adaptive")
    assert adaptive["token_ids"] == fixed["token_ids"]
    assert fixed["drafted"][0] == fixed["rounds"]
    ((length, most, real),) = made
    assert (length, most) == (len(adaptive["prompt_ids"]), 3) == (length, len(adaptive["drafted"]))
    assert isinstance(real, ByWorth)
    sampled = told("--adaptive", "--temperature", 1)
    assert sampled["drafted"] == [sampled["rounds"] // 2, 0, 0]
    assert isinstance(made[1][2], Adaptive)
    assert len(made) == 2
    refused = call(capsys, "generate", "hello", "--target", target, "--plain", "--adaptive")
    assert (refused.code, "--adaptive" in refused.err) == (2, True)
