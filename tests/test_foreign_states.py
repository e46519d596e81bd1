"""States in other programs' layouts: the same tensors come back, whoever wrote them and however they lie."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import tiny
from eyas.errors import InputError
from eyas.states.foreign import load, open_states
from eyas.states.foreign.sample import EITHER_LAST, LAST, NORMED_LAST
from eyas.states.live import LiveStock

torch.set_num_threads(1)

RECORDS = tiny.tiny_records(4)
TARGET = tiny.target("llama")
D = TARGET.hidden_size
TAPS = (1, 2, 4, 5)
STOCK = LiveStock(TARGET, RECORDS)


def taps_of(index: int) -> list[Tensor]:
    """[T, D] in bf16, of each of TAPS."""
    return list(STOCK.states(index, TAPS).bfloat16().split(D, dim=-1))


def ids_of(index: int) -> Tensor:
    return torch.from_numpy(RECORDS[index].input_ids).long()


def mask_of(index: int) -> Tensor:
    return torch.from_numpy(RECORDS[index].loss_mask).long()


def specforge(folder: Path, index: int) -> None:
    low, mid, high, last = taps_of(index)
    with torch.no_grad():
        normed = TARGET.norm(last.float()).bfloat16()
    held = {"input_ids": ids_of(index), "loss_mask": mask_of(index), "hidden_state": normed[None]}
    torch.save(held | {"aux_hidden_state": torch.cat((low, mid, high), -1)[None]}, folder / f"data_{index}.ckpt")


def specforge_gz(folder: Path, index: int) -> None:
    specforge(folder, index)
    plain = folder / f"data_{index}.ckpt"
    (folder / f"data_{index}.ckpt.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()


def speculators(folder: Path, index: int) -> None:
    held = {"hidden_states": torch.stack(taps_of(index), 1).contiguous(), "token_ids": ids_of(index)}
    save_file(held, folder / f"hs_{index}.safetensors")


def modelopt(folder: Path, index: int) -> None:
    *aux, last = taps_of(index)
    held = {"input_ids": ids_of(index), "loss_mask": mask_of(index), "conversation_id": f"conv-{index}"}
    torch.save(held | {"hidden_states": last, "aux_hidden_states": torch.cat(aux, -1)}, folder / f"conv-{index}.pt")


def baldeagle(folder: Path, index: int) -> None:
    held = {"input_ids": ids_of(index), "loss_mask": mask_of(index), "hidden_state": torch.stack(taps_of(index)[:3])}
    torch.save(held, folder / f"data_{index}.ckpt")


AUX = ["aux_hidden_state[0]", "aux_hidden_state[1]", "aux_hidden_state[2]"]
LAYOUTS: dict[str, tuple[Callable[[Path, int], None], str, list[str], list[str | None]]] = {
    "specforge": (specforge, "SpecForge", [*AUX, "hidden_state"], [None, None, None, NORMED_LAST]),
    "specforge gz": (specforge_gz, "SpecForge", [*AUX, "hidden_state"], [None, None, None, NORMED_LAST]),
    "speculators": (speculators, "speculators", [f"hidden_states[{i}]" for i in range(4)], [None, None, None, LAST]),
    "modelopt": (
        modelopt,
        "ModelOpt",
        [f"aux_hidden_states[{i}]" for i in range(3)] + ["hidden_states"],
        [None, None, None, EITHER_LAST],
    ),
    "baldeagle": (baldeagle, "BaldEagle", [f"hidden_state[{i}]" for i in range(3)], [None, None, None]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_trainers_tensors_come_back_whole(tmp_path: Path, layout: str) -> None:
    write, name, fields, claims = LAYOUTS[layout]
    for index in range(3):
        write(tmp_path, index)
    foreign = open_states(tmp_path)
    assert (foreign.format, len(foreign)) == (name, 3)
    for index in range(3):
        sample, wanted = foreign.sample(index), taps_of(index)
        if name == "SpecForge":
            with torch.no_grad():
                wanted[3] = TARGET.norm(wanted[3].float()).bfloat16()
        assert [s.field for s in sample.tensors] == fields
        assert [s.claimed for s in sample.tensors] == claims
        for stored, values in zip(sample.tensors, wanted, strict=False):
            assert stored.values.dtype == torch.bfloat16
            assert torch.equal(stored.values, values)
        assert sample.input_ids is not None
        assert torch.equal(sample.input_ids, ids_of(index))
        if name != "speculators":
            assert sample.loss_mask is not None
            assert torch.equal(sample.loss_mask, mask_of(index))


FORMS: dict[str, Callable[[list[Tensor]], Any]] = {
    "list": lambda t: t,
    "tuple": tuple,
    "dict": lambda t: {f"layer_{i}": x for i, x in enumerate(t)},
    "nested": lambda t: {"taps": t},
    "stacked on 0": torch.stack,
    "stacked on 1": lambda t: torch.stack(t, 1),
    "concatenated": lambda t: torch.cat(t, -1),
    "batch of one": lambda t: [x[None] for x in t],
    "columns": lambda t: [x.T.contiguous() for x in t],
    "stacked columns": lambda t: torch.stack([x.T for x in t]).contiguous(),
    "float16": lambda t: [x.half() for x in t],
}


@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize("with_ids", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_loose_tensors_in_any_form(tmp_path: Path, form: str, with_ids: bool, count: int) -> None:
    wanted = taps_of(1)[:count]
    held = FORMS[form](wanted)
    if with_ids and not (isinstance(held, dict)):
        held = {"input_ids": ids_of(1)[None], "states": held}
    elif with_ids:
        held["token_ids"] = ids_of(1)
    torch.save(held, tmp_path / "a.pt")
    sample = open_states(tmp_path / "a.pt", width=D).sample(0)
    assert len(sample.tensors) == count
    for stored, values in zip(sample.tensors, wanted, strict=True):
        assert torch.equal(stored.values.float(), values.to(stored.values.dtype).float())
    assert (sample.input_ids is not None) == with_ids
    told = " ".join(sample.notes)
    assert ("swapped" in told) == ("columns" in form)
    assert ("float16" in told) == (form == "float16")
    assert (f"stacked on dimension {1 if '1' in form else 0}" in told) == ("stacked" in form)


def test_a_square_sample_is_ambiguous_unless_another_tells(tmp_path: Path) -> None:
    square = torch.randn(D, D)
    torch.save([square], tmp_path / "a_0.pt")
    with pytest.raises(InputError, match=r"\[48, 48\] can be read in 2 ways"):
        open_states(tmp_path, width=D).sample(0)
    torch.save([x.T.contiguous() for x in taps_of(0)[:1]], tmp_path / "a_1.pt")
    assert torch.equal(open_states(tmp_path, width=D).sample(0).tensors[0].values, square.T)


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def spoilt(folder: Path, what: str) -> Path:
    path = folder / "a.pt"
    torch.save(taps_of(0), path)
    whole = path.read_bytes()
    if what == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif what == "empty":
        path.write_bytes(b"")
    elif what == "no zip":
        path.write_bytes(b"hello, world")
    elif what == "integers":
        torch.save({"states": ids_of(0)[None].repeat(3, 1)}, path)
    elif what == "no rows":
        torch.save([torch.zeros(0, D)], path)
    elif what == "repeated":
        torch.save([torch.zeros(1).expand(100_000, 100_000)], path)
    elif what == "a cut gzip":
        path = folder / "a.ckpt.gz"
        path.write_bytes(gzip.compress(whole)[:-20])
    elif what == "a bomb":
        torch.save({"states": Bomb(folder / "ran")}, path)
    elif what == "other keys":
        torch.save({"logits": 3, "labels": "x"}, path)
    return path


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("truncated", "damaged or cut short"),
        ("empty", "is empty"),
        ("no zip", "no file of torch.save"),
        ("integers", "holds no states that are understood; there: keys states"),
        ("no rows", "is empty"),
        ("repeated", "repeats the numbers"),
        ("a cut gzip", "not a whole gzip file"),
        ("a bomb", "could run code"),
        ("other keys", "there: keys labels, logits"),
    ],
)
def test_what_is_not_states_is_refused_in_words(tmp_path: Path, what: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        open_states(spoilt(tmp_path, what), width=D).sample(0)
    assert caught.value.way_out
    assert not (tmp_path / "ran").exists()


def test_unpacking_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specforge_gz(tmp_path, 0)
    monkeypatch.setattr(load, "MAX_UNPACKED", 1000)
    with pytest.raises(InputError, match="unpacks to more than"):
        open_states(tmp_path)


def test_a_mixed_folder_is_refused(tmp_path: Path) -> None:
    specforge(tmp_path, 0)
    modelopt(tmp_path, 1)
    foreign = open_states(tmp_path)
    with pytest.raises(InputError, match="the folder mixes formats"):
        [foreign.sample(i) for i in range(2)]


def test_states_of_another_width_are_refused(tmp_path: Path) -> None:
    specforge(tmp_path, 0)
    with pytest.raises(InputError, match=f"states of width {D}, the target's is 64"):
        open_states(tmp_path, width=64).sample(0)
