"""What engines' own code printed for known rounds (runs/engine_metrics.py), read back; and the identities.

The recordings hold the truth beside the text: counts must come back exactly where the text has them, within the
printed digits where not, and never where nothing was given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.engines import scrape
from eyas.engines.scrape import identities
from eyas.errors import InputError, UsageError
from eyas.results import Finding
from eyas.results.observed import Counts

RECORDED = Path(__file__).parent / "fixtures" / "engines"
SGLANG = ("0.4.9", "0.5.8", "0.5.10", "0.5.23")


def cases(engine: str, version: str) -> list[Any]:
    told = json.loads((RECORDED / f"metrics-{engine}-{version}.json").read_text(encoding="utf-8"))
    assert (told["engine"], told["version"]) == (engine, version)
    return [pytest.param(case, id=f"{version}: {case['name']}") for case in told["cases"]]


def read(*lines: str) -> tuple[list[Counts], list[Finding]]:
    reading = scrape.read(["\n".join(lines).encode() + b"\n"], "engine.log")
    return reading.observed, reading.findings


def one(*lines: str) -> Counts:
    """The only run, in which nothing is more than a note."""
    runs, findings = read(*lines)
    assert len(runs) == 1
    assert [f for f in findings if f.severity != "note"] == []
    return runs[0]


def slugs(findings: Iterable[Finding], *, notes: bool = True) -> set[str]:
    return {finding.cause for finding in findings if notes or finding.severity != "note"}


def hits(counts: Counts) -> list[int | None] | None:
    return None if counts.depths is None else [depth.joint.hits for depth in counts.depths]


def joint(counts: Counts) -> list[float]:
    assert counts.depths is not None
    return [depth.joint.rate or 0.0 for depth in counts.depths]


# -- recordings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases("vllm", "0.32.0"))
def test_vllm_lines(case: Any) -> None:
    truth, counts = case["truth"], one(*case["lines"])
    rounds = truth["rounds"]
    assert (counts.engine, counts.draft_tokens, counts.drafted) == ("vllm", truth["draft_tokens"], truth["drafted"])
    assert (counts.rounds, counts.accepted, counts.lines) == (rounds, truth["accepted"], len(case["lines"]))
    assert counts.accept_length is not None
    assert counts.accept_length.value == 1 + truth["accepted"] / rounds
    assert joint(counts) == pytest.approx([hit / rounds for hit in truth["hits"]], abs=6e-4)
    if case["name"] == "busy server":  # three digits do not tell hits apart in thousands of rounds: not invented
        assert hits(counts) == [None] * 5
        assert all(
            d.joint.low <= h / rounds <= d.joint.high for d, h in zip(counts.depths or (), truth["hits"], strict=True)
        )
    else:
        assert hits(counts) == truth["hits"]


@pytest.mark.parametrize("case", cases("vllm", "0.32.0"))
@pytest.mark.parametrize("kind", ["page", "bodies", "array of bodies"])
def test_vllm_counters_and_bodies(case: Any, kind: str) -> None:
    if kind == "page":
        lines = case["page"]
    elif kind == "bodies":
        lines = [json.dumps(body) for body in case["bodies"]]
    else:
        lines = json.dumps(case["bodies"], indent=2).splitlines()
    truth, counts = case["truth"], one(*lines)
    found = (counts.draft_tokens, counts.rounds, counts.drafted, counts.accepted, hits(counts))
    assert found == (truth["draft_tokens"], truth["rounds"], truth["drafted"], truth["accepted"], truth["hits"])
    if kind != "page":
        assert counts.emitted == truth["accepted"] + truth["rounds"] + len(case["bodies"])


def test_old_names_of_vllm_counters() -> None:
    page = cases("vllm", "0.32.0")[0].values[0]["page"]
    bare = [re.sub(r"^(\S+?)_total(?=[{ ])", r"\1", row) for row in page if "_created" not in row]
    assert one(*bare) == one(*[row for row in page if "_created" not in row])


@pytest.mark.parametrize("case", [case for version in SGLANG for case in cases("sglang", version)])
def test_sglang_lines(case: Any, request: pytest.FixtureRequest) -> None:
    """The rate's definition comes out of the lines, which do not say their version, wherever they settle it."""
    version = re.search(r"(0\.\d+\.\d+)", request.node.name)
    assert version is not None
    truth, (runs, findings) = case["truth"], read(*case["lines"])
    (counts,) = runs
    assert (counts.rounds, counts.accepted, counts.drafted, counts.depths) == (None, None, None, None)
    assert counts.accept_length is not None
    assert counts.accept_length.value == pytest.approx(1 + truth["accepted"] / truth["rounds"], abs=0.03)
    assert counts.accept_length.interval == "rounding"
    old, told = version.group(1) in ("0.5.8", "0.5.10"), "accept rate" in case["lines"][0]
    definition = None if not told or counts.rate_definition is None else "length" in counts.rate_definition
    if told and case["name"] not in ("always right", "never right", "one token"):
        assert definition is old
        assert counts.per_round == truth["draft_tokens"] + old
        assert ("rate-definition-old" in slugs(findings)) is old
    else:
        assert definition in (None, old)
    assert slugs(findings, notes=False) == set()


@pytest.mark.parametrize("case", [case for version in SGLANG[1:] for case in cases("sglang", version)])
def test_sglang_lines_with_their_configuration(case: Any, request: pytest.FixtureRequest) -> None:
    """Knowing D settles it but where every token was kept, when both definitions say 1."""
    verified = case["truth"]["draft_tokens"] + 1
    start = f"server_args=ServerArgs(speculative_eagle_topk=1, speculative_num_draft_tokens={verified})"
    runs, findings = read(start, *case["lines"])
    old = "0.5.8" in request.node.name or "0.5.10" in request.node.name
    assert (runs[0].draft_tokens, runs[0].top_k) == (verified - 1, 1)
    if case["name"] != "always right" and not (case["name"] == "never right" and not old):
        assert runs[0].rate_definition is not None
        assert ("length" in runs[0].rate_definition) is old
    assert slugs(findings, notes=False) == set()


@pytest.mark.parametrize("case", [case for version in SGLANG[1:] for case in cases("sglang", version)])
@pytest.mark.parametrize("spelt", ["json", "python"])
def test_sglang_request_fields(case: Any, spelt: str) -> None:
    """The rate of a request never had the bonus token in it, in no release."""
    finish = "[2026-11-30 01:00:00] Finish: obj=GenerateReqInput(rid='1'), out="
    rows = [json.dumps(body) if spelt == "json" else finish + repr(body) for body in case["bodies"]]
    truth, counts = case["truth"], one(*rows)
    assert (counts.rounds, counts.drafted, counts.accepted) == (truth["rounds"], truth["drafted"], truth["accepted"])
    assert counts.per_round == truth["draft_tokens"]
    assert counts.draft_tokens is None  # a tree of as many nodes would look the same
    assert counts.rate_definition == "correct drafts / (rounds x per_round)"
    if {"spec_correct_drafts_histogram", "spec_accept_histogram"} & set(case["bodies"][0]["meta_info"]):
        start = f"speculative_eagle_topk=1, speculative_num_draft_tokens={truth['draft_tokens'] + 1}"
        assert hits(one(start, *rows)) == truth["hits"]
    else:
        assert counts.depths is None


def test_sglang_gauges() -> None:
    page = [
        "# TYPE sglang:spec_accept_length gauge",
        'sglang:spec_accept_length{engine_type="unified",model_name="m",tp_rank="0"} 2.8',
        'sglang:spec_accept_rate{engine_type="unified",model_name="m",tp_rank="0"} 0.6',
        'sglang:spec_num_steps{engine_type="unified",model_name="m",tp_rank="0"} 3.0',
        'sglang:spec_num_draft_tokens{engine_type="unified",model_name="m",tp_rank="0"} 4.0',
    ]
    counts = one(*page)
    assert (counts.per_round, counts.rounds, counts.kind) == (3, None, "metrics page")
    old, findings = read(*[row.replace(" 0.6", " 0.7") for row in page])
    assert (old[0].per_round, slugs(findings)) == (4, {"rate-definition-old"})
    assert slugs(read(*[row.replace(" 0.6", " 0.65") for row in page])[1]) == {"counts-inconsistent"}


def test_llama_cpp() -> None:
    """Lines of llama.cpp's pull request 24536, numbers its author measured."""
    slot = "0.06.896.015 I slot print_timing: id  1 | task 0 | "
    rates = "acceptance rate per position = (0.805, 0.632, 0.483)"
    total = (
        "0.06.896.057 I statistics     draft-eagle3: #calls(b,g,a) =    1     87     87, #gen drafts =     87, "
        "#acc drafts =    70, #gen tokens =    259, #acc tokens =   167, #mean acc len = 2.92, "
        "#acc rate/pos = (0.805, 0.632, 0.483), dur(b,g,a) = 0.005, 325.555, 0.114 ms"
    )
    request = (
        slot + "draft acceptance = 0.64479 (  167 accepted /   259 generated), mean acceptance length =  2.92, " + rates
    )
    whole = one(request, total)
    assert (whole.rounds, whole.drafted, whole.accepted, hits(whole)) == (87, 259, 167, [70, 55, 42])
    assert whole.drafter == "draft-eagle3"
    alone = one(request)
    assert (alone.rounds, alone.accepted, alone.depths) == (None, 167, None)
    assert alone.accept_length is not None
    assert alone.accept_length.low <= 1 + 167 / 87 <= (alone.accept_length.high or 0)
    old = one(slot + "draft acceptance rate = 0.64479 (  167 accepted /   259 generated)")
    assert (old.accepted, old.drafted, old.rounds, old.accept_length) == (167, 259, None, None)
    short = slot + "draft acceptance = 0.64479 (  167 accepted /   259 generated), mean len =  2.92"
    assert one(short, slot + "    acc per pos = (0.805, 0.632, 0.483)").accept_length == alone.accept_length
    body = json.dumps({"timings": {"predicted_n": 255, "draft_n": 259, "draft_n_accepted": 167}}, indent=1)
    assert (one(body).emitted, one(body).accepted) == (255, 167)
    restarted = [total, "main: loading model", total.replace("259", "130").replace("167", "84").replace("87", "43")]
    assert [run.drafted for run in read(*restarted)[0]] == [259, 130]


def test_tensorrt_llm_iterations() -> None:
    row = {"numDraftTokens": 12, "numAcceptedTokens": 7, "numRequestsWithDraftTokens": 4, "acceptanceLength": 2.75}
    counts = one(*[json.dumps({"iter": i, "specDecodingStats": row}) for i in range(3)])
    assert (counts.engine, counts.rounds, counts.drafted, counts.accepted) == ("tensorrt-llm", 12, 36, 21)
    assert slugs(read(json.dumps({"specDecodingStats": row | {"acceptanceLength": 1.75}}))[1]) == {"bonus-dropped"}


def test_server_info_of_sglang() -> None:
    info = {"version": "0.5.23", "speculative_num_draft_tokens": 4, "speculative_eagle_topk": 1}
    counts = one(json.dumps(info | {"internal_states": [{"avg_spec_accept_length": 2.5}]}))
    assert (counts.version, counts.draft_tokens, counts.kind) == ("0.5.23", 3, "server info")
    assert counts.accept_length is not None
    assert counts.accept_length.value == 2.5


# -- identities -----------------------------------------------------------------------------------------------

USUAL = cases("vllm", "0.32.0")[0].values[0]


@pytest.mark.parametrize(
    ("old", "new", "causes"),
    [
        ("length: 2.70", "length: 1.70", {"bonus-dropped"}),
        ("length: 2.70", "length: 2.80", {"counts-inconsistent"}),
        ("Accepted: 68", "Accepted: 78", {"counts-inconsistent"}),
        ("rate: 56.7%", "rate: 66.7%", {"counts-inconsistent"}),
        ("0.800, 0.550, 0.350", "0.550, 0.800, 0.350", {"counts-inconsistent"}),
        ("0.800, 0.550, 0.350", "1.200, 0.300, 0.200", {"counts-inconsistent"}),
        ("0.800, 0.550, 0.350", "0.800, 0.550, 0.450", {"counts-inconsistent"}),
        ("0.800, 0.550, 0.350", "0.800, 0.550, 0.350, 0.000, 0.000", {"rates-padded"}),
    ],
)
def test_a_broken_number_of_vllm_is_named(old: str, new: str, causes: set[str]) -> None:
    line = USUAL["lines"][0]
    assert old in line
    assert read(line)[1] == []
    assert slugs(read(line.replace(old, new))[1]) == causes


def test_padding_is_left_off() -> None:
    line = USUAL["lines"][0].replace("0.350", "0.350, 0.000, 0.000")
    counts = one(line)
    assert (counts.draft_tokens, counts.rounds, hits(counts)) == (3, 40, [32, 22, 14])


@pytest.mark.parametrize(
    ("field", "value", "cause"),
    [
        ("num_accepted_draft_tokens", 69, "counts-inconsistent"),
        ("num_spec_steps", 41, "counts-inconsistent"),
        ("num_draft_tokens", 400, "counts-inconsistent"),
        ("mean_acceptance_length", 1.7, "bonus-dropped"),
    ],
)
def test_a_broken_body_of_vllm_is_named(field: str, value: float, cause: str) -> None:
    metrics = USUAL["bodies"][0]["metrics"]["speculative_decoding"]
    assert read(json.dumps(metrics))[1] == []
    assert cause in slugs(read(json.dumps(metrics | {field: value}))[1])


@pytest.mark.parametrize(
    ("field", "value", "cause"),
    [
        ("spec_accept_rate", 0.675, "rate-definition-old"),
        ("spec_accept_rate", 0.3, "counts-inconsistent"),
        ("spec_num_correct_drafts", 69, "counts-inconsistent"),
        ("completion_tokens", 200, "counts-inconsistent"),
        ("completion_tokens", 106, "tokens-after-end-counted"),
    ],
)
def test_a_broken_request_of_sglang_is_named(field: str, value: float, cause: str) -> None:
    meta = cases("sglang", "0.5.23")[0].values[0]["bodies"][0]["meta_info"]
    assert read(json.dumps(meta))[1] == []
    assert cause in slugs(read(json.dumps(meta | {field: value}))[1])


def test_trees_are_told_and_refused() -> None:
    start = "server_args=ServerArgs(speculative_eagle_topk=4, speculative_num_draft_tokens=16, speculative_num_steps=3)"
    runs, findings = read(start, "Decode batch, #running-req: 1, accept len: 3.10, accept rate: 0.14, cuda graph: True")
    assert (runs[0].draft_tokens, runs[0].top_k, runs[0].per_round) == (None, 4, 15)
    assert slugs(findings) == {"tree-denominator"}
    for convert in (identities.length_from_rate, identities.rate_from_length, identities.rate_from_old_rate):
        with pytest.raises(UsageError, match="top-k 4"):
            convert(0.5, 3, top_k=4)


@pytest.mark.parametrize(
    ("start", "setting"),
    [
        ("export SGLANG_SIMULATE_ACC_LEN=2.5", "SGLANG_SIMULATE_ACC_LEN=2.5"),
        (
            "non-default args: {'speculative_config': {'method': 'eagle3', 'num_speculative_tokens': 3, "
            "'rejection_sample_method': 'synthetic', 'synthetic_acceptance_length': 2.5}}",
            "rejection_sample_method=synthetic, synthetic_acceptance_length=2.5",
        ),
    ],
)
def test_faked_acceptance_is_said(start: str, setting: str) -> None:
    lines = cases("sglang", "0.5.23")[0].values[0]["lines"] if "SGLANG" in start else USUAL["lines"]
    runs, findings = read(start, *lines)
    assert runs[0].faked == setting
    assert [(f.cause, f.severity) for f in findings] == [("acceptance-faked", "fatal")]
    unset = start.replace("2.5", "-1").replace("'synthetic',", "'standard',")
    assert "acceptance-faked" not in slugs(read(unset, *lines)[1])


def test_lines_that_never_differ_are_a_note() -> None:
    line = cases("sglang", "0.5.23")[0].values[0]["lines"][0]
    assert [(f.cause, f.severity) for f in read(*[line] * 20)[1]] == [("acceptance-faked", "note")]
    assert read(*[line] * 19)[1] == []
    assert slugs(read(*[USUAL["lines"][0]] * 20)[1]) == {"acceptance-faked"}


RATES = st.lists(st.floats(0, 1), min_size=1, max_size=8).map(lambda rates: sorted(rates, reverse=True))


@given(RATES, st.integers(1, 9))
def test_definitions_turn_into_each_other(rates: list[float], k: int) -> None:
    conditional = identities.conditional_from_joint(rates)
    assert identities.joint_from_conditional([c or 0.0 for c in conditional]) == pytest.approx(rates)
    length = identities.length_from_joint(rates)
    assert identities.length_from_rate(identities.rate_from_length(length, k), k) == pytest.approx(length)
    old = identities.old_rate_from_length(length, k)
    assert identities.length_from_old_rate(old, k) == pytest.approx(length)
    assert identities.rate_from_old_rate(old, k) == pytest.approx((length - 1) / k)


HISTOGRAMS = st.lists(st.integers(0, 400), min_size=2, max_size=7).filter(lambda h: sum(h) > 0)


def vllm_line(histogram: Sequence[int]) -> str:
    """As vLLM formats it; that this is vLLM's own format the recordings show."""
    rounds, k = sum(histogram), len(histogram) - 1
    kept = identities.hits_from_histogram(histogram)
    accepted, drafted = sum(kept), rounds * k
    rates = ", ".join(f"{hit / rounds:.3f}" for hit in kept)
    return (
        f"SpecDecoding metrics: Mean acceptance length: {1 + accepted / rounds:.2f}, "
        "Accepted throughput: 1.00 tokens/s, Drafted throughput: 2.00 tokens/s, "
        f"Accepted: {accepted} tokens, Drafted: {drafted} tokens, "
        f"Per-position acceptance rate: {rates}, Avg Draft acceptance rate: {100 * accepted / drafted:.1f}%"
    )


@given(st.lists(HISTOGRAMS, min_size=1, max_size=4).filter(lambda hs: len({len(h) for h in hs}) == 1))
def test_vllm_counts_come_back(histograms: list[list[int]]) -> None:
    counts = one(*[vllm_line(histogram) for histogram in histograms])
    assert counts.rounds == sum(map(sum, histograms))
    kept = [sum(column) for column in zip(*map(identities.hits_from_histogram, histograms), strict=True)]
    found = hits(counts)
    assert found is not None
    if None not in found:
        assert found == kept
    assert joint(counts) == pytest.approx([hit / counts.rounds for hit in kept], abs=6e-4)


@given(HISTOGRAMS, st.integers(1, 40))
def test_a_changed_count_of_vllm_never_passes(histogram: list[int], more: int) -> None:
    rounds, kept = sum(histogram), identities.hits_from_histogram(histogram)
    drafted = rounds * len(kept)
    off = max(more, rounds // 50 + len(kept) + 1)  # beyond what three digits hide
    line = vllm_line(histogram)
    broken = line.replace(f"Accepted: {sum(kept)} tokens", f"Accepted: {sum(kept) + off} tokens")
    assert broken != line
    assert drafted > 0
    assert "counts-inconsistent" in slugs(read(broken)[1])


@given(
    st.integers(1, 7),
    st.lists(st.tuples(st.integers(20, 300), st.floats(0.1, 0.9)), min_size=8, max_size=12),
    st.booleans(),
)
def test_either_rate_of_sglang_agrees_with_its_own_definition(k: int, rows: list[tuple[int, float]], old: bool) -> None:
    lines = []
    for rounds, share in rows:
        accepted = round(share * rounds * k)
        rate = (accepted + rounds) / (rounds * (k + 1)) if old else accepted / (rounds * k)
        lines.append(
            f"Decode batch, #running-req: 2, accept len: {1 + accepted / rounds:.2f}, accept rate: {rate:.2f}, x"
        )
    start = f"server_args=ServerArgs(speculative_eagle_topk=1, speculative_num_draft_tokens={k + 1})"
    counts = one(start, *lines)
    if counts.rate_definition is not None:
        assert ("length" in counts.rate_definition) is old
        assert counts.per_round == k + old
    wrong, findings = read(start.replace(f"tokens={k + 1}", f"tokens={3 * k + 9}"), *lines)
    assert wrong[0].rate_definition is None
    assert "counts-inconsistent" in slugs(findings)


def test_nothing_to_read_says_what_was_looked_for() -> None:
    with pytest.raises(InputError, match=r"says nothing of speculation \(2 lines read\).*accept len"):
        read("one", "two")
