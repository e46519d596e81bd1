"""Targets of every architecture: their parts against transformers' own, their ends alone, their files checked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny
from eyas import resolve, starts, taps, unpack
from eyas import target as targets
from eyas.decode.cache import TargetCache
from eyas.dialects import sglang, vllm
from eyas.errors import TargetError, UsageError
from eyas.target import Target
from folders import call, conversation, tokenizer, write_drafter, write_lines, write_target

torch.set_num_threads(1)


def write(folder: Path, kind: str, *, tied: bool | None = None, shard: str = "40KB") -> Path:
    """A tiny target on disk in several files, tied or not as its config says or as asked; its norm has gains."""
    model = tiny.model(kind, tied=tied)
    with torch.no_grad(), targets.quiet():
        norm = targets.decoder_of(model).get_parameter("norm.weight")
        norm.uniform_(0.2, 0.9, generator=torch.Generator().manual_seed(1))
        model.save_pretrained(folder, max_shard_size=shard)
    return folder


# -- the parts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_logits_are_transformers_own_caps_included(kind: str) -> None:
    target = tiny.target(kind)
    ids = torch.tensor([tiny.prompt(24)])
    with torch.no_grad():
        wanted = target.model(input_ids=ids, use_cache=False).logits
        last = target.decoder(input_ids=ids, use_cache=False).last_hidden_state
    found = target.logits(last)
    assert torch.allclose(found, wanted, atol=1e-4)
    if kind == "gemma3":
        assert float((found - target.head(last)).abs().max()) > 1e-2, "the cap shows"


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_norm_gain_is_what_the_norm_multiplies_by(kind: str) -> None:
    """Gains that are not one, so that Gemma's minus-one way of storing them shows."""
    target = tiny.target(kind)
    n = target.num_layers
    states = taps.run(target, torch.tensor([tiny.prompt(20)]), torch.tensor([20]), [n])
    norm = target.norm
    kept = norm.weight.detach().clone()
    try:
        with torch.no_grad():
            norm.weight.uniform_(0.3, 1.7, generator=torch.Generator().manual_seed(3))
            x = states.taps[0]
            unit = x * (x.pow(2).mean(-1, keepdim=True) + targets.norm_eps(norm)).rsqrt()
            assert torch.allclose(unit * target.norm_gain, norm(x), rtol=1e-4, atol=1e-5)
            assert float(target.norm_gain.std()) > 0.1
    finally:
        with torch.no_grad():
            norm.weight.copy_(kept)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_greedy_text_is_that_of_transformers_generate(kind: str) -> None:
    """More than a window past the prompt, on transformers' own cache, which drops what has left the window."""
    from eyas.decode.plain import plain

    target, ids = tiny.target(kind), tiny.prompt(2 * tiny.WINDOW + 3)
    gaps: list[float] = []
    ours = list(plain(target, ids, max_new_tokens=2 * tiny.WINDOW, gaps=gaps))
    with torch.inference_mode():
        theirs = target.model.generate(  # type: ignore[operator]
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), do_sample=False, max_new_tokens=len(ours)
        )[0, len(ids) :].tolist()
    assert min(gaps) > 1e-3, "a tie would excuse anything"
    assert len(set(ours)) > 3
    assert ours == theirs


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_what_a_drafter_is_shaped_like(kind: str) -> None:
    """Every engine's Llama layer must take it: whole groups, an even width, projections that fit the hidden size."""
    target = tiny.target(kind)
    shape = starts.config_for(target, (1, 2, 4), tiny.DRAFT_VOCAB)
    assert shape.num_attention_heads % shape.num_key_value_heads == 0
    assert shape.head_dim % 2 == 0
    assert shape.hidden_size == shape.target_hidden_size == target.hidden_size
    assert isinstance(shape.rope_parameters["rope_theta"], float | int)
    if kind == "deepseek":
        assert (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim) == (3, 1, 16)


def test_deepseek_at_its_real_size_gets_the_drafter_others_give_it() -> None:
    from transformers import DeepseekV3Config

    target = SimpleNamespace(config=DeepseekV3Config(), hidden_size=7168, vocab_size=129280)
    shape = starts.config_for(target, (2, 30, 58), 32000)  # type: ignore[arg-type]
    assert (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim) == (56, 8, 128)


def test_taps_of_deepseek_are_spelt_by_its_own_rule() -> None:
    """SGLang shifts a DeepSeek list only if it begins with 1, so taps from 1 on cannot be had; vLLM counts taps."""
    target = tiny.target("deepseek")
    assert target.architecture in sglang.FIRST_ID_RULE
    n = target.num_layers
    assert sglang.spell([2, 3, 4], target.architecture, n) == [1, 2, 3]
    assert sglang.spell([0, 2, 4], target.architecture, n) == [0, 2, 4]
    assert sglang.spell([3, 4], target.architecture, n) == [3, 4]
    assert sglang.spell([1, 3], target.architecture, n) is None
    assert sglang.spell([2, n], target.architecture, n) is None
    for wanted in ([2, 3, 4], [0, 2, 4], [1, 3]):
        assert vllm.captured({"eagle_aux_hidden_state_layer_ids": vllm.spell(wanted)}, n, "v2") == wanted


# -- the ends alone ----------------------------------------------------------------------------------------------


def same_ends(ends: Target, whole: Target) -> None:
    numbers = ("num_layers", "hidden_size", "vocab_size", "architecture", "max_positions", "folder", "gguf_sha256")
    for name in numbers:
        assert getattr(ends, name) == getattr(whole, name), name
    assert torch.equal(ends.embedding, whole.embedding)
    assert torch.equal(ends.head_weight, whole.head_weight)
    assert torch.equal(ends.norm_gain, whole.norm_gain)
    assert (ends.head.bias is None) == (whole.head.bias is None)
    assert ends.fingerprint() == whole.fingerprint()
    assert ends.eos_ids() == whole.eos_ids()
    normed = torch.randn(7, whole.hidden_size, generator=torch.Generator().manual_seed(0), dtype=whole.embedding.dtype)
    assert torch.equal(ends.logits(normed), whole.logits(normed))
    assert ends.config.to_dict() == whole.config.to_dict()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_the_ends_are_those_of_the_whole(tmp_path: Path, kind: str, tied: bool) -> None:
    folder = write(tmp_path / "target", kind, tied=tied)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 3, "several shards were wanted"
    assert ("lm_head.weight" in index) is not tied
    ends, whole = targets.load_ends(str(folder)), targets.load(str(folder))
    same_ends(ends, whole)
    shape = starts.config_for(ends, (1, 2, 4), tiny.DRAFT_VOCAB)
    assert shape == starts.config_for(whole, (1, 2, 4), tiny.DRAFT_VOCAB)
    assert sum(p.numel() for p in ends.model.parameters()) <= 2 * ends.embedding.numel() + ends.hidden_size


def test_the_ends_in_bf16_are_those_of_the_whole_in_bf16(tmp_path: Path) -> None:
    folder = str(write(tmp_path / "target", "gemma3"))
    ends, whole = (load(folder, dtype=torch.bfloat16) for load in (targets.load_ends, targets.load))
    same_ends(ends, whole)
    assert ends.embedding.dtype == torch.bfloat16
    full = targets.load_ends(folder)
    assert ends.fingerprint() == full.fingerprint(), "the same weights in another precision"
    stored = full.norm_gain - 1  # as Gemma keeps it
    assert torch.allclose(ends.norm_gain, 1 + stored.bfloat16().float(), rtol=1e-6), "rounded once, as stored"


def test_no_layer_is_read_for_the_ends(tmp_path: Path) -> None:
    """The shards that hold layers alone may even be missing."""
    folder = write(tmp_path / "target", "llama")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    layers = {file for name, file in index.items() if ".layers." in name}
    ends = {file for name, file in index.items() if ".layers." not in name}
    assert layers - ends
    whole = targets.load(str(folder))
    for file in layers - ends:
        tensors = load_file(folder / file)
        save_file({name: torch.full_like(t, torch.nan) for name, t in tensors.items()}, folder / file, {"format": "pt"})
    same_ends(targets.load_ends(str(folder)), whole)


def test_the_ends_cannot_run_and_say_so(tmp_path: Path) -> None:
    ends = targets.load_ends(str(write(tmp_path / "target", "llama")))
    for run in (
        lambda: taps.run(ends, torch.tensor([[1, 2]]), torch.tensor([2]), (1, 2)),
        lambda: TargetCache(ends),
        lambda: ends.decoder,
    ):
        with pytest.raises(UsageError, match="without its decoder layers"):
            run()


@pytest.mark.real
def test_the_ends_of_smollm2() -> None:
    same_ends(targets.load_ends("smollm2"), targets.load("smollm2"))


# -- a text model inside another ---------------------------------------------------------------------------------


def test_a_text_model_nested_in_a_multimodal_one(tmp_path: Path) -> None:
    """The wrapper's language model is the target: the same taps, logits and ends as the text model alone."""
    inner = tiny.target("gemma3")
    wrapper = tiny.wrapped(inner)
    with targets.quiet():
        wrapper.save_pretrained(tmp_path / "target")
    whole = targets.load(str(tmp_path / "target"))
    assert whole.architecture == "Gemma3ForConditionalGeneration"
    assert (whole.num_layers, whole.hidden_size, whole.vocab_size) == (5, 48, tiny.VOCAB)
    same_ends(targets.load_ends(str(tmp_path / "target")), whole)
    ids, length = torch.tensor([tiny.prompt(24)]), torch.tensor([24])
    ours, theirs = (taps.run(t, ids, length, range(6)) for t in (whole, inner))
    assert torch.allclose(ours.taps, theirs.taps, atol=1e-5)
    assert torch.allclose(whole.logits(ours.last), inner.logits(theirs.last), atol=1e-4)
    assert targets.describe(str(tmp_path / "target"))["num_layers"] == 5


# -- files that are not whole, code that is not ours -------------------------------------------------------------


@pytest.mark.parametrize("load", [targets.load, targets.load_ends])
def test_a_missing_weight_is_an_error_not_random_numbers(tmp_path: Path, load: Callable[[str], Target]) -> None:
    folder = write(tmp_path / "target", "llama", shard="1GB")
    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(TargetError, match=r"lack lm_head\.weight"):
        load(str(folder))


OWN_CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({ran!r}).touch()

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A target whose architecture comes as Python code, which leaves ``ran`` when it is run."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = write_target(tmp_path / "own")
    (folder / "own.py").write_text(OWN_CODE.format(ran=str(tmp_path / "ran")))
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "own",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("load", [targets.load, targets.load_text_side, targets.describe])
def test_code_that_comes_with_a_target_is_run_only_when_asked(
    own: Path, tmp_path: Path, load: Callable[..., object]
) -> None:
    with pytest.raises(TargetError, match="Python code of its own") as caught:
        load(str(own))
    assert "--trust-remote-code" in caught.value.way_out
    assert not (tmp_path / "ran").exists()
    load(str(own), trust_remote_code=True)
    assert (tmp_path / "ran").exists()


def test_every_tensor_verb_knows_the_flag(own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = tmp_path / "records.jsonl"
    records.write_text('{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "prompt": "hello"}\n')
    shutil.copy(records, tmp_path / "heldout.jsonl")
    for verb in (
        ("target", own),
        ("prepare", records, "--target", own, "-o", tmp_path / "out"),
        ("train", "-r", records, "--target", own, "-o", tmp_path / "out"),
        ("check", "smollm2-eagle3", "--target", own),
        ("generate", "hello", "--target", own),
        ("bench", "--target", own, "-p", records),
    ):
        ran = call(capsys, *verb)
        assert ran.code == 2, verb
        assert "--trust-remote-code" in ran.err, verb
    assert not (tmp_path / "ran").exists()
    ran = call(capsys, "generate", "hello", "--target", own, "--trust-remote-code", "--plain", "-n", "3")
    assert ran.code == 0, ran.err
    assert (tmp_path / "ran").exists()


# -- a base model ------------------------------------------------------------------------------------------------


def test_without_a_template_a_prompt_is_text_to_go_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_target(tmp_path / "base", template=None)
    ask = ("generate", "ab c", "--target", folder, "--plain", "-n", "4", "--json", "-")
    ran, raw = call(capsys, *ask), call(capsys, *ask, "--raw")
    assert ran.code == raw.code == 0
    assert json.loads(ran.out)["prompt_ids"] == json.loads(raw.out)["prompt_ids"] == tokenizer()("ab c")["input_ids"]
    assert "has no chat template" in ran.err
    assert "has no chat template" not in raw.err

    prompts = write_lines(tmp_path / "prompts.jsonl", [{"prompt": "one"}, {"prompt": "two"}])
    drafter = write_drafter(tmp_path / "drafter", targets.load(str(folder)))
    ran = call(capsys, "bench", "-p", prompts, "--target", folder, "--drafter", drafter, "-n", "4", "-k", "1")
    assert ran.code == 0
    assert "has no chat template" in ran.err

    chats = write_lines(tmp_path / "chats.jsonl", [conversation(f"Is {i}", f"It is {i}.") for i in range(20)])
    make = ("prepare", chats, "--target", folder, "--out", tmp_path / "records")
    ran = call(capsys, *make)
    assert ran.code == 2
    assert "--raw" in ran.err
    assert call(capsys, *make, "--raw").code == 0


# -- a GGUF file, unpacked once ----------------------------------------------------------------------------------


def test_a_gguf_file_is_unpacked_once_and_what_a_killed_run_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "own.gguf").write_bytes(b"GGUF and so on")
    source = resolve.target(str(tmp_path / "own.gguf"))
    assert source.path is not None
    assert source.sha256 is not None
    folder = resolve.unpacked_folder(source.path, source.sha256)
    left = folder.with_name(f".{folder.name}.abc.part")
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    made = []

    def dequantise(gguf: Path, folder: Path) -> None:
        assert not left.exists()
        made.append(gguf)
        folder.mkdir()

    monkeypatch.setattr(unpack, "dequantise", dequantise)
    assert unpack.materialise(source) == unpack.materialise(source) == str(folder)
    assert made == [source.path]
