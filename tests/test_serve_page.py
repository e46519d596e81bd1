"""The page of ``eyas serve`` in a real browser: it chats, tints what was drafted, obeys no text, fits a phone."""

from __future__ import annotations

import html
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import serving
from serving import Scripted
from serving import serving as served
from test_diagnosis_browser import CHROMIUM, FLAGS, Opened

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH: the page is not opened in a browser")

HOSTILE = "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'</script>&amp;"
ANSWER = [("Blue, ", False), (HOSTILE, True), (" and", False), (" green.", True)]
# Types questions, sends them, and tells the test what came of it.
DRIVE = """
  var tell = function () {
    var spans = Array.from(document.querySelectorAll(".assistant span"));
    var texts = function (name) { return Array.from(document.querySelectorAll(name)).map(function (e) {
      return e.textContent; }); };
    fetch("/told", {method: "POST", body: JSON.stringify({
      title: document.title, answers: texts(".assistant"), kept: texts(".assistant .kept"), facts: texts(".facts"),
      status: document.getElementById("status").textContent, width: innerWidth,
      scroll: document.documentElement.scrollWidth, paper: getComputedStyle(document.body).backgroundColor,
      tint: getComputedStyle(document.querySelector(".kept")).backgroundColor, dom: document.documentElement.outerHTML
    })});
  };
  var key = document.getElementById("key"), asked = 0;
  if (key && KEY) { key.value = KEY; }
  var timer = setInterval(function () {
    if (document.getElementById("send").disabled) { return; }
    if (asked === TURNS) { clearInterval(timer); setTimeout(tell, 100); return; }
    asked += 1;
    document.getElementById("words").value = "Which <b>colours</b>?";
    document.getElementById("ask").requestSubmit();
  }, 20);
"""
FRAME = b'<!doctype html><body><iframe src="/" width="360" height="800" style="border:0"></iframe>'


class Driven:
    """Around the application: its page gets a second script, with the nonce that it was sent with, and may be put into
    a frame; the script tells what it saw, and what was sent is kept."""

    def __init__(self, app: Any, script: str, *, framed: bool = False) -> None:
        self._app, self._script, self._framed = app, script.encode(), framed
        self.bodies: list[Any] = []
        self.told: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def heard() -> Any:
            message = await receive()
            if message["type"] == "http.request" and message.get("body"):
                self.bodies.append(json.loads(message["body"]))
            return message

        if scope["path"] == "/told":
            raw = b""
            while (message := await receive()) and message["type"] == "http.request":
                raw += message.get("body", b"")
                if not message.get("more_body"):
                    break
            self.told = json.loads(raw)
            await _send(send, b"")
        elif scope["path"] == "/framed":
            await _send(send, FRAME)
        else:
            await self._app(scope, heard, self._changing(send) if scope["path"] == "/" else send)

    def _changing(self, send: Any) -> Any:
        held: list[Any] = []

        async def changed(message: Any) -> None:
            held.append(message)
            if message["type"] != "http.response.body":
                return
            headers = dict(held[0]["headers"])
            nonce = re.search(rb'<script nonce="([^"]+)">', message["body"])
            assert nonce is not None
            more = b'<script nonce="' + nonce[1] + b'">' + self._script + b"</script></body>"
            body = message["body"].replace(b"</body>", more)
            if self._framed:
                policy = headers[b"content-security-policy"]
                headers[b"content-security-policy"] = policy.replace(b"; frame-ancestors 'none'", b"")
            await _send(send, body, headers)

        return changed


async def _send(send: Any, body: bytes, headers: dict[bytes, bytes] | None = None) -> None:
    head = {b"content-type": b"text/html", **(headers or {}), b"content-length": str(len(body)).encode()}
    await send({"type": "http.response.start", "status": 200, "headers": list(head.items())})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return serving.load(tmp_path_factory.mktemp("tiny"))


@dataclass
class Seen:
    """``told`` by the page's second script, the page as it was then, the console, and what was sent."""

    told: Any
    page: Opened
    bodies: list[Any]


Chat = Callable[..., Seen]


@pytest.fixture(scope="module")
def chat(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Chat:
    """Open the page in a browser, ask in it, and see."""

    def chat(
        *flags: str,
        answer: Sequence[tuple[str, bool]] = ANSWER,
        framed: bool = False,
        key: str = "",
        turns: int = 1,
        script: str = DRIVE,
        **settings: Any,
    ) -> Seen:
        made: list[Driven] = []

        def wrap(app: Any) -> Driven:
            made.append(Driven(app, f"var KEY = {json.dumps(key)}, TURNS = {turns};{script}", framed=framed))
            return made[0]

        with served(Scripted(tiny[0], lambda _: answer), wrap=wrap, **settings) as server:
            console = browse(server.url + ("/framed" if framed else "/"), flags, lambda: made[0].told is not None)
        told = made[0].told
        return Seen(told, Opened(told["dom"], console), made[0].bodies)

    def browse(url: str, flags: Sequence[str], done: Callable[[], bool]) -> list[str]:
        folder = tmp_path_factory.mktemp("browser")
        known = [f for f in FLAGS if "host-resolver" not in f]
        known += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--no-proxy-server"]
        command = [str(CHROMIUM), *known, f"--user-data-dir={folder / 'profile'}", *flags, url]
        with open(folder / "said", "wb") as said:
            process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
        try:
            until = time.monotonic() + 240
            while not done():
                assert process.poll() is None, (folder / "said").read_text(errors="replace")[-2000:]
                assert time.monotonic() < until, (folder / "said").read_text(errors="replace")[-2000:]
                time.sleep(0.02)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return re.findall(r"CONSOLE[^\n]*", (folder / "said").read_text(errors="replace"))

    return chat


def test_it_chats_and_tints_what_was_drafted_and_kept(chat: Chat) -> None:
    seen = chat()
    assert seen.told["answers"] == ["".join(text for text, _ in ANSWER)]
    assert seen.told["kept"] == [text for text, kept in ANSWER if kept]
    assert re.match(r"accept length 1\.67 over 3 rounds, 4 tokens, [\d.]+ tokens/s", seen.told["facts"][0])
    assert seen.told["status"] == ""
    assert seen.page.console == []
    (body,) = seen.bodies
    assert body["messages"] == [{"role": "user", "content": "Which <b>colours</b>?"}]


def test_text_is_obeyed_nowhere(chat: Chat) -> None:
    """Neither the model's nor the user's: the answer holds an image with a handler, and a script."""
    seen = chat()
    assert HOSTILE in seen.told["answers"][0]
    assert seen.told["title"] == "tiny - eyas"
    tags = [tag for tag, _ in seen.page.tags]
    assert "img" not in tags
    assert "b" not in tags
    assert tags.count("script") == 2, "the page's and the test's"
    assert html.escape("<img src=x", quote=False) in seen.page.dom


def test_the_policy_bars_what_has_no_nonce(chat: Chat) -> None:
    """Were text obeyed after all, nothing in it would run."""
    loose = "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title=1\">');"
    seen = chat(script=loose + DRIVE)
    assert any("Content Security Policy" in line for line in seen.page.console)
    assert seen.told["title"] == "tiny - eyas"
    assert "img" in [tag for tag, _ in seen.page.tags]


def test_a_second_question_brings_the_first_along(chat: Chat) -> None:
    seen = chat(turns=2)
    assert len(seen.told["answers"]) == 2
    first, second = (body["messages"] for body in seen.bodies)
    assert [m["role"] for m in second] == ["user", "assistant", "user"]
    assert second[:1] == first
    assert second[1]["content"] == seen.told["answers"][0]


def test_a_key_is_asked_for_and_what_is_refused_is_shown(chat: Chat) -> None:
    key = "correct-horse-battery"
    told = chat(api_key=key).told
    assert "A key is needed" in told["status"]
    assert told["kept"] == []
    seen = chat(api_key=key, key=key)
    assert seen.told["status"] == ""
    assert seen.told["kept"]
    assert key not in seen.page.dom.replace(f'var KEY = "{key}"', "")


def test_it_fits_a_phone(chat: Chat) -> None:
    told = chat(answer=[("word" * 200 + " ", True), ("more " * 100, False)], framed=True).told
    assert told["width"] == 360
    assert told["scroll"] <= 360
    assert told["kept"]


def test_dark_is_dark_and_light_is_light(chat: Chat) -> None:
    dark, light = (chat(f"--blink-settings=preferredColorScheme={n}").told for n in (0, 1))
    assert dark["paper"] == "rgb(18, 22, 26)"
    assert light["paper"] == "rgb(255, 255, 255)"
    assert len({dark["tint"], light["tint"], dark["paper"], light["paper"]}) == 4


def test_no_file_of_the_page_names_another_place() -> None:
    folder = Path(__file__).parents[1] / "src" / "eyas" / "serve"
    for name in ("page.html.jinja", "page.css", "page.js"):
        text = (folder / name).read_text(encoding="utf-8")
        assert not re.search(r"https?://|//cdn|@import|url\(", text), name
        assert "innerHTML" not in text
        assert "insertAdjacentHTML" not in text
