"""``eyas show``: the contract, what engines make of it, and the fix, from files alone."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import drafts
from eyas.dialects import engines
from eyas.dialects.wiring import TargetFacts
from eyas.engines.ask import Answer
from eyas.show import show
from folders import call

LLAMA = drafts.target()
KIMI = TargetFacts("KimiK25ForConditionalGeneration", 61, 7168, 163840)
CONFIGS = Path(__file__).parent / "fixtures" / "configs"
KEY = "eagle_aux_hidden_state_layer_ids"


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    ran = call(capsys, "show", *arguments, "--json", "-")
    return ran.code, json.loads(ran.out)


def write_target(folder: Path, target: TargetFacts) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [target.architecture],
        "num_hidden_layers": target.num_layers,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        **target.config,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return drafts.write(tmp_path / "drafter", drafts.shape((0, 2, 15)), LLAMA)


def test_a_drafter_saved_here_is_wired_as_made_by_both_runners_and_sglang(
    capsys: pytest.CaptureFixture[str], drafter: Path
) -> None:
    code, shown = told(capsys, drafter, "--engine", "sglang", "--engine", "vllm==0.32.0")
    assert code == 0
    assert [(e["name"], e["version"], e["runner"], e["source"]) for e in shown["engines"]] == [
        ("sglang", "0.5.23", None, "table"),
        ("vllm", "0.32.0", "v1", "table"),
        ("vllm", "0.32.0", "v2", "table"),
    ]
    assert [e["taps"] for e in shown["engines"]] == [[0, 2, 15]] * 3
    assert shown["contract"]["taps"] == {"value": [0, 2, 15], "origin": "declared"}
    assert [f for f in shown["findings"] if f["severity"] != "note"] == []


def test_keys_of_the_result_are_those_of_the_design(capsys: pytest.CaptureFixture[str], drafter: Path) -> None:
    _, shown = told(capsys, drafter, "-e", "sglang", "--flags", "--speculative-num-steps 3 "
                    "--speculative-num-draft-tokens 4 --speculative-eagle-topk 1")  # fmt: skip
    assert shown["schema"] == 1
    keys = {"name", "version", "runner", "source", "taps", "ignored_keys", "shared", "unfilled", "dropped", "flags"}
    assert keys <= set(shown["engines"][0])
    assert {"flag", "requested", "resolved", "rule", "loudness"} <= set(shown["engines"][0]["flags"][0])
    assert {"kind", "cause", "severity", "summary", "evidence", "fix", "rivals"} <= set(
        told(capsys, drafter, "-e", "llama.cpp")[1]["findings"][0]
    )


def edited(drafter: Path, **changes: Any) -> Path:
    config = json.loads((drafter / "config.json").read_text()) | changes
    (drafter / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return drafter


def test_an_edited_key_is_named_and_the_fix_puts_it_right(capsys: pytest.CaptureFixture[str], drafter: Path) -> None:
    edited(drafter, eagle_config={KEY: [0, 2, 15], "use_aux_hidden_state": True})
    code, shown = told(capsys, drafter, "-e", "sglang")
    assert code == 1
    first = shown["findings"][0]
    assert (first["cause"], first["severity"], first["rivals"]) == ("taps-off-by-one", "likely", [])
    assert shown["engines"][0]["taps"] == [1, 3, 16]
    assert f"eagle_config.{KEY} to [-1, 1, 14] (now [0, 2, 15])" in first["fix"]
    assert "contract-edited" in [f["cause"] for f in shown["findings"]]
    edited(drafter, eagle_config={KEY: [-1, 1, 14], "use_aux_hidden_state": True})
    assert told(capsys, drafter, "-e", "sglang")[0] == 0


def test_without_a_contract_a_difference_is_never_confident(capsys: pytest.CaptureFixture[str], drafter: Path) -> None:
    """SpecForge's way of writing, non-default layers, under the runner that takes ids as they stand."""
    config = json.loads((CONFIGS / "specforge-qwen3-8b.json").read_text())
    config["eagle_config"] = {KEY: [1, 17, 32], "use_aux_hidden_state": True}
    (drafter / "config.json").write_text(json.dumps(config))
    target = write_target(drafter.parent / "target", drafts.target("Qwen3ForCausalLM", 36))
    code, shown = told(capsys, drafter / "config.json", "-e", "vllm", "--runner", "v1", "--target", target)
    taps = [f for f in shown["findings"] if f["cause"].startswith("taps-")]
    assert taps
    assert all(f["severity"] == "note" or f["rivals"] for f in taps)
    assert shown["contract"]["taps"] == {"value": [2, 18, 33], "origin": "inferred"}
    assert code == 1


def test_the_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """[2, 30, 58] on Kimi-K2.5, trained on taps (0, 3, 31): wired three ways by three builds of one engine."""
    target = write_target(tmp_path / "kimi", KIMI)
    config = json.loads((CONFIGS / "case-kimi-k2.5.json").read_text())
    folder = tmp_path / "drafter"
    folder.mkdir()
    wired = {}
    for version in ("0.5.23", engines.VERSIONS["sglang"][0], f"{engines.VERSIONS['sglang'][0]}+minus-one"):
        for ids in ([2, 30, 58], [-1, 2, 30], [0, 3, 31]):
            config["eagle_config"][KEY] = ids
            (folder / "config.json").write_text(json.dumps(config))
            _, shown = told(capsys, folder, "-e", f"sglang=={version}", "--target", target)
            wired[version.partition("+")[0] != "0.5.23", "+" in version, tuple(ids)] = shown["engines"][0]["taps"]
    assert wired[False, False, (2, 30, 58)] == [2, 30, 58]
    assert wired[False, False, (0, 3, 31)] == [0, 3, 31]
    assert wired[True, False, (2, 30, 58)] == [3, 31, 59]
    assert wired[True, True, (-1, 2, 30)] == [0, 3, 31]
    assert wired[True, True, (2, 30, 58)] == [3, 31, 59]


def test_sixteen_draft_tokens_of_one_step_are_two(capsys: pytest.CaptureFixture[str], drafter: Path) -> None:
    flags = "--speculative-num-steps 1 --speculative-num-draft-tokens 16 --speculative-eagle-topk 1"
    code, shown = told(capsys, drafter, "-e", "sglang==0.5.23", "--flags", flags)
    assert code == 1
    (row,) = [f for f in shown["engines"][0]["flags"] if f["flag"] == "--speculative-num-draft-tokens"]
    assert (row["requested"], row["resolved"], row["loudness"]) == (16, 2, "warning")
    assert shown["findings"][0]["cause"] == "draft-tokens-lowered"


def test_what_the_installed_engine_says_wins(drafter: Path) -> None:
    asked = engines.asked("vllm", "v1")
    answer = Answer("vllm", "9.9.9", "v1", {"v1": (15, 0, 2, 30)}, (), None, None, {})
    shown = show(drafter, [asked], target=LLAMA, answers={"vllm": answer})
    assert [(w.source, w.version, w.taps) for w in shown.engines] == [
        ("table", "0.32.0", (0, 2, 15)),
        ("installed", "9.9.9", (0, 2, 15, 30)),
    ]
    causes = [f.cause for f in shown.findings]
    assert "table-outdated" in causes
    assert causes[0] in ("taps-differ", "taps-too-few")
    agreeing = Answer("vllm", "0.32.0", "v1", {"v1": (0, 2, 15)}, (), None, None, {})
    shown = show(drafter, [asked], target=LLAMA, answers={"vllm": agreeing})
    assert [f.cause for f in shown.findings if f.severity != "note"] == []
    assert "table-outdated" not in [f.cause for f in shown.findings]
    refusing = Answer("vllm", "0.32.0", "v1", {}, (), None, "ValueError: no such flag", {})
    shown = show(drafter, [asked], target=LLAMA, answers={"vllm": refusing})
    assert (shown.findings[0].cause, shown.findings[0].severity) == ("flag-refused", "fatal")


def test_weights_that_are_not_the_contracts_leave_it_inferred(drafter: Path) -> None:
    config = json.loads((drafter / "config.json").read_text())
    config["eyas"]["weights_sha256"] = "0" * 64
    config["eagle_config"][KEY] = [0, 2, 15]
    (drafter / "config.json").write_text(json.dumps(config))
    shown = show(drafter, [engines.asked("sglang")], target=LLAMA)
    assert {fact.origin for fact in shown.meaning.contract.facts.values()} == {"inferred"}
    assert "weights-changed" in [f.cause for f in shown.findings]
    assert all(f.rivals for f in shown.findings if f.severity == "likely")


def test_a_second_layer_normed_under_both_names_is_the_same_to_all(tmp_path: Path) -> None:
    shape = drafts.shape((0, 2, 15), num_hidden_layers=2)
    one = drafts.write(tmp_path / "one", shape, LLAMA)
    both = {"layers.1.hidden_norm.weight": (drafts.H,)}
    two = drafts.write(tmp_path / "two", shape, LLAMA, tensors=both)
    causes = [[f.cause for f in show(d, [engines.asked("sglang")], target=LLAMA).findings] for d in (one, two)]
    assert "later-norm-differs" in causes[0]
    assert "later-norm-differs" not in causes[1]


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.json")))
def test_public_configs_are_shown_for_every_engine(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """A lone config, no weights, no target: every engine answers something and nothing is a bug of ours."""
    code, shown = told(capsys, CONFIGS / name, *(x for e in engines.ENGINES for x in ("-e", e)))
    assert code in (0, 1)
    assert {e["name"] for e in shown["engines"]} == set(engines.ENGINES)
    assert shown["spelled_by"] == name.split("-")[0] or shown["spelled_by"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "broken JSON"),
        ("[]", "an object was expected"),
        (
            '{"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 3, "hidden_size": 8, "vocab_size": 9}',
            "target",
        ),
        ("{}", "drafter"),
    ],
)
def test_a_config_that_is_none_is_said_to_be(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, words: str
) -> None:
    (tmp_path / "config.json").write_text(content)
    ran = call(capsys, "show", tmp_path, "-e", "vllm")
    assert ran.code == 2
    assert words in ran.err.replace("\n", " ")


WRONG = [
    {"eagle_config": "x"},
    {"eagle_config": {KEY: "1,2,3"}},
    {"eagle_config": {KEY: [1.5, 2]}},
    {KEY: 3},
    {"draft_vocab_size": "many"},
    {"rope_scaling": 4},
    {"num_hidden_layers": "one"},
    {"hidden_size": -8},
    {"architectures": "LlamaForCausalLMEagle3"},
    {"norm_before_fc": "yes"},
    {"torch_dtype": 5},
    {"vocab_size": None},
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: json.dumps(wrong))
@pytest.mark.parametrize("engine", sorted(engines.ENGINES))
def test_keys_of_the_wrong_type_are_an_error_or_an_answer_never_a_traceback(
    capsys: pytest.CaptureFixture[str], drafter: Path, wrong: dict[str, Any], engine: str
) -> None:
    for keep in (True, False):  # with our contract and without
        config = json.loads((drafter / "config.json").read_text()) | wrong
        if not keep:
            config.pop("eyas", None)
        (drafter / "config.json").write_text(json.dumps(config))
        ran = call(capsys, "show", drafter, "-e", engine)
        assert ran.code in (0, 1, 2)
        assert ran.code != 2 or "→" in ran.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-e", "tgi"], "no engine known here"),
        (["-e", "sglang==latest"], "no version of sglang"),
        (["-e", "sglang", "-e", "vllm", "--flags", "--a 1"], "2 were named"),
        (["--flags", "--a 1"], "0 were named"),
        (["-e", "vllm", "--engine-python", "/nowhere/python"], "whole config.json"),
        (["-e", "vllm", "--target", "/nowhere"], "no target whose config.json"),
        (["-e", "sglang", "--flags", "--speculative-num-steps many"], "many"),
    ],
)
def test_wrong_use(capsys: pytest.CaptureFixture[str], drafter: Path, arguments: list[str], words: str) -> None:
    ran = call(capsys, "show", drafter, *arguments)
    assert ran.code == 2
    assert words in ran.err.replace("\n", " ")


def test_an_unknown_version_says_which_one_stands_in(capsys: pytest.CaptureFixture[str], drafter: Path) -> None:
    for engine in ("sglang==0.9.0", "vllm==0.99", "tensorrt-llm==9.9"):
        _, shown = told(capsys, drafter, "-e", engine)
        assert all(e["assumed"] for e in shown["engines"]), engine


def test_the_terminal_shows_the_same_and_obeys_no_control_characters(
    capsys: pytest.CaptureFixture[str], drafter: Path
) -> None:
    edited(drafter, eagle_config={KEY: [0, 2, 15]}, architectures=["Llama\x1b[31mForCausalLMEagle3"])
    ran = call(capsys, "show", drafter, "-e", "sglang")
    assert "\x1b[31m" not in ran.out
    ran = call(capsys, "show", edited(drafter, architectures=["LlamaForCausalLMEagle3"]), "-e", "sglang", "-e", "vllm")
    assert "taps-off-by-one" in ran.out
    assert "sglang 0.5.23" in ran.out
    assert "vllm 0.32.0 v2" in ran.out


def test_it_takes_no_torch_and_under_a_second_of_cpu(drafter: Path) -> None:
    code = (
        "import sys, time\n"
        f"sys.argv = ['eyas', 'show', {str(drafter)!r}, '-e', 'sglang', '-e', 'vllm', '--json', '-']\n"
        "from eyas.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = [m for m in ('torch', 'transformers', 'safetensors', 'numpy', 'scipy') if m in sys.modules]\n"
        "print(heavy, time.process_time(), file=sys.stderr)\n"
    )
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    heavy, seconds = done.stderr.strip().splitlines()[-1].rsplit(" ", 1)
    assert heavy == "[]"
    print(f"{float(seconds):.2f} s of CPU, {time.perf_counter() - began:.2f} s in all")  # timed in docs, not here
