"""A stand-in for vLLM's server as a real process: answers with what a real one was recorded to say, or goes wrong.

    python standin_vllm.py [flags of vllm, of which --port is read]

``EYAS_STANDIN`` holds JSON: {"fault": one of FAULTS, "fixture": path, "children": n}. Standard library only.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FAULTS = ("dies", "hangs", "garbage", "no version", "no models", "no ids", "other prompt", "no speculation", "stuck",
          "dies in between", "no rpc")  # fmt: skip
SETTINGS: dict[str, Any] = json.loads(os.environ.get("EYAS_STANDIN", "{}"))
FAULT = SETTINGS.get("fault")
with open(SETTINGS["fixture"], encoding="utf-8") as _handle:
    SAID: dict[str, Any] = json.load(_handle)


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass

    def give(self, body: Any, status: int = 200) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path == "/health":
            return self.give({}) if FAULT != "hangs" else time.sleep(600)
        if path == "/version":
            if FAULT == "garbage":
                return self.give(b"<html>\xff\x00 not json")
            return self.give({"detail": "Not Found"}, 404) if FAULT == "no version" else self.give(SAID["/version"])
        if path == "/v1/models":
            return self.give({"data": []} if FAULT == "no models" else SAID["/v1/models"])
        if path == "/server_info":
            return self.give(SAID["/server_info"])
        if path == "/metrics":
            text = SAID["/metrics after"]
            if FAULT == "no speculation":
                text = "\n".join(line for line in text.splitlines() if "spec_decode" not in line)
            return self.give((text + "\n").encode())
        return self.give({}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/collective_rpc":
            if FAULT == "no rpc":
                return self.give({"detail": "Not Found"}, 404)
            told = {"eyas_probe_facts": SAID["eyas_probe_facts"], "eyas_probe_start": {"started": True}}
            return self.give({"results": [told.get(body["method"], SAID["eyas_probe_stop"])]})
        if self.path == "/tokenize":
            return self.give(SAID["/tokenize"])
        if FAULT == "stuck":
            return time.sleep(600)
        if FAULT == "dies in between":
            print("torch.OutOfMemoryError: the last words of a stand-in", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        answer = json.loads(json.dumps(SAID["/v1/completions"]))
        choice = answer["choices"][0]
        choice["prompt_token_ids"] = [9, 9] if FAULT == "other prompt" else body["prompt"]
        if FAULT == "no ids":
            choice["token_ids"] = None
        return self.give(answer)


def main() -> None:
    if FAULT == "dies":
        print("INFO loading", flush=True)
        print("ValueError: There is no module or parameter named 'q_prj' in Eagle3LlamaForCausalLM", flush=True)
        sys.exit(3)
    for _ in range(SETTINGS.get("children", 0)):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    port = int(sys.argv[sys.argv.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
