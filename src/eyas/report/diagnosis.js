// Copies, and opens what is folded before it is printed. The page is whole without it.
(function () {
  "use strict";
  function select(node) {
    var range = document.createRange();
    range.selectNodeContents(node);
    var chosen = window.getSelection();
    chosen.removeAllRanges();
    chosen.addRange(range);
  }
  function say(button, word) {
    button.textContent = word;
    window.setTimeout(function () { button.textContent = button.dataset.word; }, 2500);
  }
  function byHand(button, node) {
    select(node);
    var done = false;
    try { done = document.execCommand("copy"); } catch (error) { done = false; }
    say(button, done ? "Copied" : "Selected: press Ctrl+C");
  }
  document.querySelectorAll("button[data-copies]").forEach(function (button) {
    var node = document.getElementById(button.dataset.copies);
    button.hidden = false;
    button.addEventListener("click", function () {
      if (!navigator.clipboard || !navigator.clipboard.writeText) { byHand(button, node); return; }
      navigator.clipboard.writeText(node.textContent).then(
        function () { say(button, "Copied"); },
        function () { byHand(button, node); }
      );
    });
  });
  var opened = [];
  window.addEventListener("beforeprint", function () {
    opened = Array.prototype.slice.call(document.querySelectorAll("details.printed:not([open])"));
    opened.forEach(function (details) { details.open = true; });
  });
  window.addEventListener("afterprint", function () {
    opened.forEach(function (details) { details.open = false; });
  });
})();
