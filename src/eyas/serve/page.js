"use strict";
// What the model says is put into the page as text only (textContent), never as HTML.
(function () {
  var at = function (id) { return document.getElementById(id); };
  var model = document.body.dataset.model, messages = [], stopper = null;

  function turn(role, text) {
    var entry = document.createElement("li");
    entry.className = "turn " + role;
    entry.textContent = text;
    at("turns").append(entry);
    return entry;
  }

  function busy(running) {
    at("send").disabled = running;
    at("stop").hidden = !running;
  }

  function headers() {
    var made = {"Content-Type": "application/json"}, key = at("key");
    if (key && key.value) { made.Authorization = "Bearer " + key.value; }
    return made;
  }

  function request() {
    return JSON.stringify({
      model: model, messages: messages, stream: true, stream_options: {include_usage: true},
      temperature: Number(at("temperature").value), max_completion_tokens: Number(at("most").value)
    });
  }

  // One piece of the answer: its stretches, drafted ones tinted. Returns its text.
  function show(entry, spans) {
    return spans.map(function (span) {
      var piece = document.createElement("span");
      piece.textContent = span[0];
      if (span[1]) { piece.className = "kept"; }
      entry.append(piece);
      return span[0];
    }).join("");
  }

  function measure(facts, eyas, usage, began) {
    var told = [];
    if (eyas.accept_length) { told.push("accept length " + eyas.accept_length.toFixed(2) + " over " + eyas.rounds + " rounds"); }
    if (usage) {
      told.push(usage.completion_tokens + " tokens");
      told.push((usage.completion_tokens / ((performance.now() - began) / 1000)).toFixed(1) + " tokens/s");
    }
    facts.textContent = told.join(", ");
  }

  // Calls heard with each event of a stream of server-sent events.
  async function listen(body, heard) {
    var reader = body.getReader(), decoder = new TextDecoder(), left = "";
    for (;;) {
      var read = await reader.read();
      if (read.done) { return; }
      left += decoder.decode(read.value, {stream: true});
      var events = left.split("\n\n");
      left = events.pop();
      events.forEach(function (event) {
        if (event !== "data: [DONE]" && event.startsWith("data: ")) { heard(JSON.parse(event.slice(6))); }
      });
    }
  }

  async function answer(entry, facts) {
    var began = performance.now(), text = "";
    var response = await fetch("/v1/chat/completions", {
      method: "POST", headers: headers(), body: request(), signal: stopper.signal
    });
    if (!response.ok) { throw new Error((await response.json()).error.message); }
    await listen(response.body, function (chunk) {
      if (chunk.error) { throw new Error(chunk.error.message); }
      if (chunk.eyas) { text += show(entry, chunk.eyas.spans); measure(facts, chunk.eyas, null, began); }
      if (chunk.usage) { measure(facts, chunk.usage.eyas, chunk.usage, began); }
      var main = document.querySelector("main");
      main.scrollTop = main.scrollHeight;
    });
    return text;
  }

  async function ask(words) {
    var mine = messages;  // "New chat" begins another list while this answer may still be coming
    mine.push({role: "user", content: words});
    turn("user", words);
    var entry = turn("assistant", ""), facts = document.createElement("p");
    facts.className = "facts";
    at("turns").lastElementChild.after(facts);
    busy(true);
    at("status").textContent = "";
    stopper = new AbortController();
    try {
      await answer(entry, facts);
    } catch (error) {
      if (error.name !== "AbortError") {
        at("status").textContent = error.message;
        at("status").className = "wrong";
      }
    }
    if (entry.textContent) {
      mine.push({role: "assistant", content: entry.textContent});
    } else {
      mine.pop();  // a question without an answer is not asked along with the next one
    }
    busy(false);
    at("words").focus();
  }

  at("ask").addEventListener("submit", function (event) {
    event.preventDefault();
    var words = at("words").value.trim();
    if (!words || at("send").disabled) { return; }
    at("words").value = "";
    ask(words);
  });
  at("words").addEventListener("keydown", function (event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      at("ask").requestSubmit();
    }
  });
  at("stop").addEventListener("click", function () { stopper.abort(); });
  at("fresh").addEventListener("click", function () {
    if (stopper) { stopper.abort(); }
    messages = [];
    at("turns").replaceChildren();
    at("status").textContent = "";
  });
})();
