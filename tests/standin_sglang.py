"""A stand-in for SGLang's server as a real process: bodies in the shapes of 0.5.23, or one that goes wrong.

    python standin_sglang.py [flags of sglang, of which --port is read]

``EYAS_STANDIN`` holds JSON: {"fault": one of FAULTS, "info": /server_info, "model": /model_info, "children": n,
"play": settings of ``Player``, "answers": a list of {"prompt", "tokens", "histogram"}, "chats": what /tokenize gives,
"asked": a file for what was asked}. Without "play" only the standard library is needed; without "answers" too, every
answer is the same.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FAULTS = ("dies", "hangs", "garbage", "older", "oldest", "other id", "no rounds", "no histogram", "stuck",
          "dies in between", "half", "begun anew")  # fmt: skip
SETTINGS: dict[str, Any] = json.loads(os.environ.get("EYAS_STANDIN", "{}"))
FAULT = SETTINGS.get("fault")
META = {"finish_reason": {"type": "length", "length": 6}, "completion_tokens": 6, "cached_tokens": 0,
        "spec_num_correct_drafts": 3, "spec_num_proposed_drafts": 6, "spec_verify_ct": 2, "num_retractions": 0,
        "spec_correct_drafts_histogram": [0, 1, 1], "spec_accept_length": 3.0}  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    player: Any = None

    def log_message(self, *_: Any) -> None:
        pass

    def give(self, body: Any, status: int = 200) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self) -> None:
        self.note()
        path = self.path.split("?")[0]
        if path == "/health":
            return self.give({}) if FAULT != "hangs" else time.sleep(600)
        if FAULT == "garbage":
            return self.give(b"<html>\xff\x00 not json")
        names = {"older": ("/get_server_info", "/get_model_info"), "oldest": ()}
        infos = names.get(FAULT or "", ("/server_info", "/model_info"))
        if path not in infos:
            return self.give({"detail": "Not Found"}, 404)
        return self.give(SETTINGS["info"] if "server_info" in path else SETTINGS["model"])

    def do_POST(self) -> None:
        self.note()
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            if "chats" not in SETTINGS:
                return self.give({"error": {"message": "Invalid prompt type"}}, 400)
            return self.give({"tokens": SETTINGS["chats"], "count": len(SETTINGS["chats"]), "max_model_len": 512})
        if self.path != "/generate":
            return self.give({"detail": "Not Found"}, 404)
        if FAULT == "stuck":
            return time.sleep(600)
        if FAULT == "dies in between":
            print("torch.OutOfMemoryError: the last words of a stand-in", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.player is not None:
            answer = self.player.answered(body)
        else:
            answer = self.known(body) if "answers" in SETTINGS else self.canned(body)
        if FAULT == "half":
            raw = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(2 * len(raw)))
            self.end_headers()
            return self.wfile.write(raw) and None
        self.note("answered")
        return self.give(answer)

    def canned(self, body: dict[str, Any]) -> dict[str, Any]:
        meta = {**META, "id": "eyas-other" if FAULT == "other id" else body["rid"]}
        meta["prompt_tokens"] = len(body["input_ids"])
        if FAULT == "begun anew":
            meta["num_retractions"] = 1
        if FAULT == "no rounds":
            meta = {name: value for name, value in meta.items() if not name.startswith("spec_")}
        if FAULT == "no histogram":
            del meta["spec_correct_drafts_histogram"]
        return {"text": "", "output_ids": [7, 8, 9, 10, 11, 12], "meta_info": meta}

    def known(self, body: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.02)  # so that two at a time would be seen
        one = next(one for one in SETTINGS["answers"] if one["prompt"] == body["input_ids"])
        return answered(body, one["tokens"], one["histogram"])

    def note(self, what: str | None = None) -> None:
        """What was asked, for tests to read."""
        if "asked" in SETTINGS:
            with open(SETTINGS["asked"], "a", encoding="utf-8") as file:
                file.write(f"{what or self.command} {self.path}\n")


def answered(body: dict[str, Any], tokens: list[int], histogram: list[int]) -> dict[str, Any]:
    """A body of /generate; ``histogram[j]``: rounds that kept j drafts, of a chain of one fewer than its entries."""
    rounds, kept, K = sum(histogram), sum(j * n for j, n in enumerate(histogram)), len(histogram) - 1
    most = max(j for j, n in enumerate(histogram) if n)
    meta = {
        **META, "id": body["rid"], "prompt_tokens": len(body["input_ids"]), "completion_tokens": len(tokens),
        "spec_verify_ct": rounds, "spec_num_correct_drafts": kept, "spec_num_proposed_drafts": rounds * K,
        "spec_correct_drafts_histogram": histogram[: most + 1], "spec_accept_length": len(tokens) / rounds,
    }  # fmt: skip
    return {"text": "", "output_ids": tokens, "meta_info": meta}


class Player:
    """Requests as SGLang plays them, with the drafter of a checkpoint in SGLang's own shape of one.

    ``play``: "case" (a folder with ``target`` and ``trained``), "texts" (token ids of each text, the target's own,
    which goes on past what is served), "K", "facts" (as the engine reads the drafter, where otherwise than trained),
    "wheel" (its methods run in place of the stand-in's). Plugins are loaded as SGLang does.
    """

    def __init__(self, play: dict[str, Any]) -> None:
        here = Path(__file__).parent
        sys.path[:0] = [str(here), str(here.parent / "src")]
        import torch

        import sglang_standins as small
        from sglang_drafter import Shell, drafter_of, states_of

        self.torch, self.small, self.K = torch, small, play["K"]
        small.K, small.W = self.K, self.K + 1
        found, worker, registry = small.modules(_source(play.get("wheel")))
        sys.modules.update(found)
        for plugin in entry_points(group="sglang.srt.plugins"):
            plugin.load()()
        registry.apply_hooks()
        target, drafter, facts = drafter_of(Path(play["case"]), play.get("facts", {}))
        self.worker = worker(hot=False)
        self.worker.hot_token_id = drafter.draft_to_target
        self.worker.draft_runner.model = Shell(drafter)
        self.states = lambda ids: states_of(target, ids, facts["taps"])
        self.texts = play["texts"]
        self.lock, self.random = threading.Lock(), torch.Generator().manual_seed(0)

    def answered(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt, most = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        text = next(t for t in self.texts if t[: len(prompt)] == prompt)
        with self.lock:
            tokens, histogram = self.played(body["rid"], text, len(prompt), most)
        return answered(body, tokens, histogram)

    def played(self, rid: str, text: list[int], P: int, most: int) -> tuple[list[int], list[int]]:
        """One request: the tokens of its answer, and rounds by how many drafts each kept."""
        torch, small = self.torch, self.small
        assert len(text) > P + most + self.K, "the text must go on past what is served"
        states, ids, reqs = self.states(text), torch.tensor(text), [SimpleNamespace(rid=rid)]
        lengths, histogram = torch.tensor([P]), [0] * (self.K + 1)
        batch = small.Batch(reqs, ids[:P], lengths, [P])
        spec = self.worker._draft_extend_for_prefill(batch, states[:P], ids[P : P + 1])
        while (L := int(lengths[0])) < P + most - 1:  # the token of position L is the last of the answer so far
            made = small.forward_batch([rid], None, lengths, spec.hidden_states, slice(None), "decode")
            made.spec_info = spec
            drafts = self.worker.draft_forward(made)[2][0].tolist()
            kept = next((k for k, draft in enumerate(drafts) if draft != text[L + 1 + k]), self.K)
            histogram[kept] += 1
            result = self.verified(states[L : L + self.K + 1], ids[L + 1 : L + self.K + 2], kept)
            self.worker._draft_extend_for_decode(small.Batch(reqs, None, lengths, []), result)
            spec, lengths = result.next_draft_input, lengths + kept + 1
        return text[P : P + most], histogram

    def verified(self, states: Any, predicted: Any, kept: int) -> Any:
        """Rows behind the last that was kept are those of other tokens, which nothing may read."""
        states, predicted = states.clone(), predicted.clone()
        states[kept + 1 :] = self.torch.randn(states[kept + 1 :].shape, generator=self.random)
        predicted[kept + 1 :] = 1
        return SimpleNamespace(
            accept_lens=self.torch.tensor([kept + 1]), next_token_ids=predicted, prepared_draft_extend_inputs=None,
            logits_output=SimpleNamespace(hidden_states=states), next_draft_input=SimpleNamespace(), new_seq_lens=None,
        )  # fmt: skip


def _source(wheel: str | None) -> Any:
    if wheel is None:
        return None
    path = Path(__file__).parents[1] / "runs" / "sglang_probe.py"
    spec = importlib.util.spec_from_file_location("runs_sglang_probe", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("sglang_probe", "sglang_rounds"):  # it imports the plugin, which is to come from where it is laid out
        sys.modules.pop(name, None)
    return module.Source(Path(wheel))


def main() -> None:
    if FAULT == "dies":
        print("INFO loading", flush=True)
        print("RuntimeError: the drafter's fc takes 192 columns and is given 64", flush=True)
        sys.exit(3)
    for _ in range(SETTINGS.get("children", 0)):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if "play" in SETTINGS:
        Handler.player = Player(SETTINGS["play"])
    port = int(sys.argv[sys.argv.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
