"""A metrics page, or any other answer of an engine, fetched with a time limit and a bound on its size."""

from __future__ import annotations

import time

import httpx

from eyas.errors import EnvironmentFault, InputError, UsageError

SECONDS = 20.0
MOST = 32 << 20  # bytes


def is_url(text: str) -> bool:
    return "://" in text


def address(text: str) -> str:
    """The URL to ask; ``/metrics`` of a bare host. UsageError for what is no http(s) URL or carries a password."""
    try:
        url = httpx.URL(text)
    except (httpx.InvalidURL, TypeError) as error:
        raise UsageError(f"{text!r} is not a URL ({error}).", way_out="Write it like http://localhost:8000.") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise UsageError(f"{text!r} is not an http URL.", way_out="Write it like http://localhost:8000.")
    if url.userinfo:
        raise UsageError(
            "The URL carries a password, which would be written into the result.",
            way_out="Fetch the page yourself (curl) and give it as '-'.",
        )
    return str(url.copy_with(path="/metrics") if url.path in ("", "/") else url)


def fetch(url: str, *, seconds: float = SECONDS, most: int = MOST) -> bytes:
    """The body. EnvironmentFault where nobody answers in time, InputError for an answer that is none."""
    until = time.monotonic() + seconds
    body = bytearray()
    try:
        with (
            httpx.Client(
                timeout=seconds, follow_redirects=True, max_redirects=3, verify=url.startswith("https")
            ) as client,
            client.stream("GET", url) as response,
        ):
            if response.status_code != 200:
                raise InputError(f"{url} says HTTP {response.status_code}.", way_out=_about(response.status_code))
            for block in response.iter_bytes():
                body += block
                if len(body) > most:
                    raise InputError(
                        f"{url} answers with more than {most >> 20} MB.",
                        way_out="A metrics page is far smaller: check it.",
                    )
                if time.monotonic() > until:
                    raise EnvironmentFault(
                        f"{url} has not finished its answer in {seconds:.0f} s.",
                        way_out="Check the engine, and try again.",
                    )
            if "html" in response.headers.get("content-type", "").lower():
                raise InputError(f"{url} is an HTML page.", way_out="Give the metrics page, mostly …/metrics.")
    except httpx.TimeoutException as error:
        raise EnvironmentFault(
            f"{url} does not answer in {seconds:.0f} s.", way_out="Check that the engine is up, and the port."
        ) from error
    except httpx.HTTPError as error:
        raise EnvironmentFault(
            f"{url} cannot be reached: {str(error) or type(error).__name__}.",
            way_out="Check that the engine is up, and the port.",
        ) from error
    return bytes(body)


def _about(status: int) -> str:
    if status == 404:
        return "SGLang and llama.cpp have a metrics page only with --enable-metrics or --metrics; check the path too."
    if status in (401, 403):
        return "Fetch the page yourself with the key (curl -H) and give it as '-'."
    return "Look at the engine's own log."
