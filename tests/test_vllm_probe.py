"""The probe inside vLLM's worker, on a proposer in miniature with the V1 runner's names; real vLLM: tests/engines."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from eyas.engines import recording, vllm_live
from eyas.errors import InputError

sys.path.insert(0, str(vllm_live.INSIDE))
import vllm_probe  # type: ignore[import-not-found]

H, C, V, K = 6, 3, 20, 3


class Model(nn.Module):
    """Names and shapes of vLLM's Eagle3LlamaForCausalLM, and numbers that tell where they come from."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(C * H, H)
        self.lm_head = nn.Linear(H, V)
        self.model = SimpleNamespace(
            norm_output=False, norm_before_fc=False, fc_norm=None, layers=[1], embed_tokens=None
        )
        self.config = SimpleNamespace(rope_parameters={"rope_theta": 1e4}, max_position_embeddings=64)

    def combine_hidden_states(self, states: Tensor) -> Tensor:
        return self.fc(states)

    def compute_logits(self, states: Tensor) -> Tensor:
        return self.lm_head(states)

    def forward(self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor, inputs_embeds: Any = None) -> Any:
        pre = hidden_states + (input_ids[:, None] + positions[:, None] / 100).to(hidden_states.dtype)
        return pre / pre.norm(dim=-1, keepdim=True), pre


class Proposer:
    method, num_speculative_tokens, dtype = "eagle3", K, torch.float32

    def __init__(self) -> None:
        self.model = Model()

    @torch.no_grad()
    def propose(
        self,
        num_speculative_tokens: int,
        target_token_ids: Tensor,
        target_positions: Tensor,
        target_hidden_states: Tensor,
        next_token_ids: Tensor,
        token_indices_to_sample: Tensor | None,
        common_attn_metadata: Any,
        num_rejected_tokens_gpu: Tensor | None = None,
    ) -> Tensor:
        hidden = self.model.combine_hidden_states(target_hidden_states)
        sample = (
            common_attn_metadata.query_start_loc[1:] - 1 if token_indices_to_sample is None else token_indices_to_sample
        )
        ids = torch.cat((target_token_ids[1:], target_token_ids[-1:])).clone()
        ids[sample] = next_token_ids
        post, pre = self.model(input_ids=ids, positions=target_positions, hidden_states=hidden, inputs_embeds=None)
        drafted = [self.model.compute_logits(post[sample]).argmax(-1)]
        state, positions = pre[sample], target_positions[sample]
        for _ in range(num_speculative_tokens - 1):
            positions = positions + 1
            post, state = self.model(
                input_ids=drafted[-1], positions=positions, hidden_states=state, inputs_embeds=None
            )
            drafted.append(self.model.compute_logits(post).argmax(-1))
        return torch.stack(drafted, 1)


class Worker(vllm_probe.Probe):  # type: ignore[misc]
    def __init__(self, drafter: Any) -> None:
        target = SimpleNamespace(model=SimpleNamespace(aux_hidden_state_layers=(2, 5, 8)), lm_head=None)
        self.rank = 0
        self.model_runner = SimpleNamespace(
            drafter=drafter, get_model=lambda: target, input_batch=SimpleNamespace(req_ids=["a", "b"])
        )


def call(worker: Worker, seed: int = 1, rejected: list[int] | None = None) -> tuple[dict[str, Any], Tensor]:
    """Two requests, of four rows and of three."""
    generator = torch.Generator().manual_seed(seed)
    given = {
        "num_speculative_tokens": K,
        "target_token_ids": torch.arange(7),
        "target_positions": torch.tensor([0, 1, 2, 3, 10, 11, 12]),
        "target_hidden_states": torch.randn(7, C * H, generator=generator),
        "next_token_ids": torch.tensor([15, 16]),
        "token_indices_to_sample": None if rejected is None else torch.tensor([3 - rejected[0], 6 - rejected[1]]),
        "common_attn_metadata": SimpleNamespace(query_start_loc=torch.tensor([0, 4, 7])),
        "num_rejected_tokens_gpu": None if rejected is None else torch.tensor(rejected),
    }
    return given, worker.model_runner.drafter.propose(**given)


def start(worker: Worker, folder: Path, most: int = 1 << 20) -> None:
    assert worker.eyas_probe_start(json.dumps({"folder": str(folder), "most_bytes": most})) == {"started": True}


def test_what_is_written_is_what_was_fed_and_given(tmp_path: Path) -> None:
    worker = Worker(Proposer())
    start(worker, tmp_path)
    given, drafted = call(worker)
    rejected = [1, 2]
    again, drafted_again = call(worker, 2, rejected)
    assert worker.eyas_probe_stop()["passes"] == 2
    turns = recording.read(tmp_path)
    assert sorted(turns) == ["a", "b"]
    model = worker.model_runner.drafter.model
    for b, (name, rows) in enumerate((("a", slice(0, 4)), ("b", slice(4, 7)))):
        first, second = turns[name]
        fed = given["target_hidden_states"][rows]
        np.testing.assert_allclose(first.taps, fed)
        np.testing.assert_allclose(first.fused, model.fc(fed).detach(), rtol=1e-5)
        assert first.positions.tolist() == given["target_positions"][rows].tolist()
        assert first.token_ids[-1] == given["next_token_ids"][b] == first.next_token
        assert first.draft_ids.tolist() == drafted[b].tolist()
        assert first.fed_ids.tolist() == [first.next_token, *drafted[b].tolist()[:-1]]
        assert np.diff(first.fed_positions).tolist() == [1, 1]
        np.testing.assert_allclose(first.fed[1:], first.pre[:-1])
        np.testing.assert_allclose(first.post, first.pre / np.linalg.norm(first.pre, axis=-1, keepdims=True), rtol=1e-5)
        assert first.top_ids[:, 0].tolist() == first.draft_ids.tolist()
        assert (first.top_logits[:, 0] >= first.top_logits[:, 1]).all()
        assert first.rejected == -1
        assert second.rejected == rejected[b]
        assert len(second.token_ids) == len(first.token_ids) - rejected[b]  # rows of rejected tokens are left out
        assert second.rows == len(first.token_ids)
        assert second.draft_ids.tolist() == drafted_again[b].tolist()
    assert again is not given


def test_files_are_ours_alone(tmp_path: Path) -> None:
    worker = Worker(Proposer())
    start(worker, tmp_path)
    call(worker)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {0o600}


def test_nothing_is_hooked_before_and_after(tmp_path: Path) -> None:
    worker = Worker(Proposer())
    drafter = worker.model_runner.drafter
    assert "propose" not in vars(drafter)
    start(worker, tmp_path)
    assert "propose" in vars(drafter)
    assert worker.eyas_probe_start(json.dumps({"folder": str(tmp_path), "most_bytes": 1}))["error"]
    worker.eyas_probe_stop()
    assert "propose" not in vars(drafter)
    assert not {"combine_hidden_states", "compute_logits"} & set(vars(drafter.model))
    assert not drafter.model._forward_hooks
    call(worker)
    assert list(tmp_path.iterdir()) == []
    assert worker.eyas_probe_stop() == {"passes": 0}


def test_it_is_bounded_and_says_what_it_left_out(tmp_path: Path) -> None:
    worker = Worker(Proposer())
    start(worker, tmp_path, most=1)
    for seed in range(4):
        call(worker, seed)
    told = worker.eyas_probe_stop()
    assert (told["passes"], told["dropped"], told["error"]) == (1, 3, None)


def test_bf16_keeps_its_bits(tmp_path: Path) -> None:
    drafter = Proposer()
    drafter.model.to(torch.bfloat16)
    worker = Worker(drafter)
    start(worker, tmp_path)
    rows = torch.randn(7, C * H).to(torch.bfloat16)
    given = {
        "num_speculative_tokens": K, "target_token_ids": torch.arange(7), "target_positions": torch.arange(7),
        "target_hidden_states": rows, "next_token_ids": torch.tensor([1, 2]), "token_indices_to_sample": None,
        "common_attn_metadata": SimpleNamespace(query_start_loc=torch.tensor([0, 4, 7])),
    }  # fmt: skip
    drafter.propose(**given)
    turn = recording.read(tmp_path)["b"][0]
    assert torch.equal(torch.from_numpy(np.asarray(turn.taps)), rows[4:].float())


def test_the_engine_goes_on_when_the_disk_does_not(tmp_path: Path) -> None:
    """A real limit on what a file may hold, in a process of its own."""
    script = textwrap.dedent(f"""
        import json, resource, signal, sys
        sys.path[:0] = {[str(Path(__file__).parent), str(vllm_live.INSIDE)]!r}
        from pathlib import Path
        import test_vllm_probe as t
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        worker = t.Worker(t.Proposer())
        t.start(worker, Path({str(tmp_path)!r}))
        before = t.call(worker)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
        assert (t.call(worker)[1] == before).all()
        assert (t.call(worker)[1] == before).all()
        print(json.dumps(worker.eyas_probe_stop()))
    """)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "src")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-1500:]
    told = json.loads(done.stdout)
    assert told["passes"] == 1
    assert "OSError" in told["error"]
    assert told["dropped"] >= 1


def test_what_cannot_be_probed_is_said(tmp_path: Path) -> None:
    settings = json.dumps({"folder": str(tmp_path), "most_bytes": 1})
    assert "no drafter" in Worker(None).eyas_probe_start(settings)["error"]
    plain = Proposer()
    plain.model = nn.Linear(2, 2)  # type: ignore[assignment]
    assert "fuses no taps" in Worker(plain).eyas_probe_start(settings)["error"]
    assert Worker(None).eyas_probe_facts()["drafter"] is None


def test_facts_of_the_running_drafter() -> None:
    told = Worker(Proposer()).eyas_probe_facts()
    assert told["taps"] == [2, 5, 8]
    assert told["drafter"] == "Model"
    assert told["rope"] == {"rope_theta": 1e4}
    assert told["parameters"]["fc.weight"]["shape"] == [H, C * H]
    broken = Worker(Proposer())
    broken.model_runner.get_model = lambda: 1 / 0
    assert "ZeroDivisionError" in broken.eyas_probe_facts()["error"]  # an exception would end the engine


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sample": np.array([3, 99])}, "row 99"),
        ({"token_ids": np.arange(3)}, "do not fit"),
        ({"depth_fed": np.zeros((1, 1, 1))}, "depths do not fit"),
        ({"draft_ids": np.zeros((2, 3))}, "is not a pass"),
    ],
)
def test_a_file_that_is_no_pass(change: dict[str, np.ndarray], words: str, tmp_path: Path) -> None:
    worker = Worker(Proposer())
    start(worker, tmp_path)
    call(worker)
    path = tmp_path / "pass-000000000.npz"
    with np.load(path, allow_pickle=False) as kept:
        arrays = {name: kept[name] for name in kept.files}
    np.savez(path, **{**arrays, **change})
    with pytest.raises(InputError, match=words):
        recording.read(tmp_path)


def test_a_file_cut_short_and_a_pickle(tmp_path: Path) -> None:
    (tmp_path / "pass-000000000.npz").write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(InputError, match="cannot be read"):
        recording.read(tmp_path)
    np.savez(tmp_path / "pass-000000000.npz", requests=np.array([{"a": 1}], dtype=object), starts=np.arange(2))
    with pytest.raises(InputError, match="cannot be read"):
        recording.read(tmp_path)
