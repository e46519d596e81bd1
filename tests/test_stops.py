"""Text by tokens: told early, never taken back, cut before the first stop string; the whole text is the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eyas.decode.stops import MOST_PENDING, Text
from eyas.errors import UsageError

Decode = Callable[[Sequence[int]], str]


def decoder(tokens: Sequence[bytes]) -> Decode:
    """A byte-level tokenizer whose token i is these bytes."""
    return lambda ids: b"".join(tokens[i] for i in ids).decode("utf-8", errors="replace")


def told(tokens: Sequence[bytes], stops: Sequence[str] = ()) -> tuple[list[str], Text]:
    """What each token made certain, what the end did, and the text that told it."""
    text = Text(decoder(tokens), stops)
    return [*(text.feed([i]) for i in range(len(tokens))), text.close()], text


def cut(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Of all stop strings in ``text`` the one that is complete first, the longest of those, decides."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def split(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    """Tokens of given lengths, then bytes; empty ones are special tokens."""
    tokens, at = [], 0
    for length in cuts:
        tokens.append(data[at : at + length])
        at += length
    return [*tokens, *(bytes([byte]) for byte in data[at:])]


pieces = st.one_of(
    st.text("ab.é€😀", max_size=4).map(str.encode), st.binary(max_size=4), st.sampled_from([b"\xe2", b"\x82"])
)
bytes_ = st.lists(pieces, max_size=12).map(b"".join)
stop_lists = st.lists(st.text("ab.é😀", min_size=1, max_size=3), max_size=3)


@settings(max_examples=400, deadline=None)
@given(data=bytes_, cuts=st.lists(st.integers(0, 7), max_size=15), stops=stop_lists)
@example(data="a€b".encode(), cuts=[2, 1, 1], stops=[])
@example(data=b"\xff\xfe\xe2\x82\xac.", cuts=[], stops=["€."])
@example(data=b"\xe2\x82" * 30 + b"\xac.ab", cuts=[], stops=["ab"])
@example(data=b"\xe2" * 60 + "😀.".encode(), cuts=[], stops=["."])
@example(data=b"aab", cuts=[], stops=["ab", "aab"])
def test_the_text_is_the_whole_one_cut_before_the_first_stop(data: bytes, cuts: list[int], stops: list[str]) -> None:
    tokens = split(data, cuts)
    whole = b"".join(tokens).decode("utf-8", errors="replace")
    expected, stop = cut(whole, stops)
    parts, text = told(tokens, stops)
    assert "".join(parts) == expected
    assert text.stopped == stop
    # However many tokens come at once.
    at_once = Text(decoder(tokens), stops)
    assert at_once.feed(range(len(tokens))) + at_once.close() == expected
    assert (at_once.stopped, at_once.taken) == (stop, text.taken)
    if stop is None:
        assert text.taken == len(tokens)
    else:  # the last token used is the first that completes it
        assert cut(b"".join(tokens[: text.taken]).decode("utf-8", errors="replace"), stops)[1] == stop


@settings(max_examples=200, deadline=None)
@given(text=st.text("ab.é€😀", max_size=30), cuts=st.lists(st.integers(0, 5), max_size=20), stops=stop_lists)
def test_what_cannot_change_is_told_at_once(text: str, cuts: list[int], stops: list[str]) -> None:
    tokens = split(text.encode(), cuts)
    parts, _ = told(tokens, stops)
    longest = max((len(stop) for stop in stops), default=1)
    for n in range(len(tokens)):
        seen = b"".join(tokens[: n + 1])
        certain = cut(seen.decode("utf-8", errors="ignore"), stops)[0]
        said = "".join(parts[: n + 1])
        assert certain.startswith(said)
        assert len(certain) - len(said) < longest, "held back for no reason"


def test_characters_wait_for_their_bytes() -> None:
    assert told([b"a\xf0", b"\x9f", b"\x98", b"\x80b"])[0] == ["a", "", "", "😀b", ""]
    assert told([b"\xe2\x82", b"\xac\xe2", b"\x82"])[0] == ["", "€", "", "\ufffd"]


def test_a_stop_string_may_lie_in_several_tokens_or_inside_one() -> None:
    assert told([b"so\n", b"\nUs", b"er: x"], ["\nUser:"])[0] == ["so", "\n", "", ""]
    parts, text = told([b"one END two"], ["END"])
    assert (parts, text.stopped, text.taken) == (["one ", ""], "END", 1)
    parts, text = told([b"E", b"N", b"E", b"N", b"D", b"D"], ["END"])
    assert (parts, text.taken) == (["", "", "EN", "", "", "", ""], 5)


def test_nothing_comes_after_a_stop() -> None:
    text = Text(decoder([b"a", b"b", b"c"]), ["b"])
    assert text.feed([0, 1, 2]) == "a"
    assert text.taken == 2
    assert text.feed([2, 2]) == text.close() == ""
    assert text.taken == 2


def test_a_start_of_a_stop_string_is_told_at_the_end() -> None:
    assert told([b"a", b"EN"], ["END"])[0] == ["a", "", "EN"]


def test_a_character_replaced_byte_by_byte_waits_too() -> None:
    """SentencePiece's byte tokens: each byte of what is no character becomes a replacement character of its own."""
    parts = {0: b"\xe2", 1: b"\x82", 2: b"\xac", 3: b"x"}

    def decode(ids: Sequence[int]) -> str:
        data = b"".join(parts[i] for i in ids)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "".join(chr(byte) if byte < 128 else "\ufffd" for byte in data)

    text = Text(decode)
    assert [text.feed([i]) for i in (3, 0, 1, 2, 0, 3)] == ["x", "", "", "€", "", "\ufffdx"]


def test_a_first_space_that_a_decoder_drops_is_there_between_tokens() -> None:
    words = ["▁Hello", "▁there", "", "▁you"]
    text = Text(lambda ids: "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" "))
    assert [text.feed([i]) for i in (0, 1, 2, 3)] == ["Hello", " there", "", " you"]


def test_endless_nonsense_costs_no_endless_work() -> None:
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return "".join("" if i == 0 else "\ufffd" for i in ids)

    text = Text(decode, ["x"])
    said = "".join(text.feed([i]) for i in [1] * 500) + text.close()
    assert said == "\ufffd" * 500
    text = Text(decode)
    assert text.feed([0] * 500) == ""
    assert longest <= 2 * MOST_PENDING + 2


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        Text(decoder([]), ["a", ""])
