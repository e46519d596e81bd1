"""The sides of a bench that decode in this process, and those behind a URL."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eyas.bench import Bench, SideResult
    from eyas.bench.url import UrlSide
    from eyas.decode.adaptive import Costs
    from eyas.decode.tree import TreeSize
    from eyas.drafter import Drafter
    from eyas.prompts import Prompt
    from eyas.target import Target

TIES_MEASURED_ON = 4  # prompts
ADAPTIVE_DEPTHS = 4  # at most


def encoder(target: Target) -> Callable[[Prompt], list[int]]:
    """First turns through the chat template; as plain text where there is none."""
    from eyas.render import Renderer
    from eyas.target import no_tokenizer

    tokenizer = target.tokenizer
    if tokenizer is None:
        raise no_tokenizer(target.spec)
    if not tokenizer.chat_template:
        return lambda prompt: list(tokenizer(prompt.turns[0])["input_ids"])
    renderer = Renderer(tokenizer, target.eos_ids())
    return lambda prompt: renderer.ids(prompt.messages(), prompt=True)


def make_sides(
    target: Target,
    drafter: Drafter,
    encode: Callable[[Prompt], list[int]],
    ks: Sequence[int],
    trees: Sequence[TreeSize],
    max_new_tokens: int,
    gaps: dict[str, list[float]] | None,
    costs: Costs | None = None,
) -> dict[str, Callable[[Prompt], SideResult]]:
    """The sides by name. Into ``gaps``, where it is wanted, goes how near to a tie each plain step was, by prompt.

    ``costs`` adds a side that chooses its drafts by their worth, up to ``ADAPTIVE_DEPTHS`` deep.
    """
    from eyas.bench import SideResult
    from eyas.decode.loop import Generation, generate
    from eyas.decode.plain import plain
    from eyas.decode.siblings import Siblings
    from eyas.decode.worth import ByWorth

    def text(token_ids: Sequence[int]) -> str | None:
        if target.tokenizer is None:
            return None
        return str(target.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def without(prompt: Prompt) -> SideResult:
        ids = encode(prompt)
        if gaps is None:
            return told(Generation(target, None, ids, max_new_tokens=max_new_tokens, draft_tokens=0))
        gaps[prompt.id] = steps = list[float]()
        began = time.perf_counter()
        steps_of_plain = plain(target, ids, max_new_tokens=max_new_tokens, gaps=steps)
        tokens = [next(steps_of_plain)]
        first = time.perf_counter() - began
        tokens += steps_of_plain
        return SideResult(tokens, time.perf_counter() - began, first_seconds=first, text=text(tokens))

    def told(run: Generation) -> SideResult:
        first = run.seconds
        run.finish()
        rounds = run.rounds if run.drafted else 0
        said = text(run.token_ids)
        return SideResult(run.token_ids, run.seconds, rounds, run.drafted, run.accepted, first_seconds=first, text=said)

    def drafted(size: int | TreeSize) -> Callable[[Prompt], SideResult]:
        def one(prompt: Prompt) -> SideResult:
            return told(generate(target, drafter, encode(prompt), max_new_tokens=max_new_tokens, draft_tokens=size))

        return one

    def chosen(chooser: ByWorth) -> Callable[[Prompt], SideResult]:
        def one(prompt: Prompt) -> SideResult:
            return told(
                Generation(
                    target,
                    Siblings(drafter),
                    encode(prompt),
                    max_new_tokens=max_new_tokens,
                    draft_tokens=chooser.draft_tokens,
                    chooser=chooser,
                )
            )

        return one

    sides = {"plain": without, **{f"chain {k}": drafted(k) for k in ks}}
    sides |= {f"tree {size.depth}/{size.top_k}/{size.nodes}": drafted(size) for size in trees}
    if costs is not None:
        sides["adaptive"] = chosen(ByWorth(costs, ADAPTIVE_DEPTHS))
    return sides


def excused(
    target: Target, result: Bench, prompt_ids: dict[str, list[int]], gaps: dict[str, list[float]]
) -> dict[str, Any]:
    """Texts that differ from the plain ones, and those of them that do so from a tie as this precision makes them."""
    from eyas.decode.ties import first_difference, measured_tie

    turns = [turn for turn in result.turns if turn.prompt_id in gaps and result.baseline in turn.results]
    plain = {turn.prompt_id: list(turn.results[result.baseline].token_ids) for turn in turns}
    some = list(plain.items())[:TIES_MEASURED_ON]
    tie = max((measured_tie(target, prompt_ids[name] + ids) for name, ids in some), default=0.0)
    sides = {}
    for side in result.sides[1:]:
        mine = [turn for turn in turns if side in turn.results and turn.results[side].token_ids]
        found = [
            first_difference(plain[turn.prompt_id], turn.results[side].token_ids, gaps[turn.prompt_id], tie)
            for turn in mine
        ]
        parted = [difference for difference in found if difference is not None]
        sides[side] = {"differ": len(parted), "excused": sum(difference.excused for difference in parted)}
    return {"tie": tie, "sides": sides}


def transformers_side(
    target: Target, encode: Callable[[Prompt], list[int]], max_new_tokens: int
) -> Callable[[Prompt], SideResult]:
    """The library's own greedy generate, on its own layers, as the speed a user would have without us."""
    import torch

    from eyas.bench import SideResult

    def one(prompt: Prompt) -> SideResult:
        ids = torch.tensor([encode(prompt)], device=target.device)
        began = time.perf_counter()
        with torch.inference_mode():
            found = target.model.generate(  # type: ignore[operator]
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens
            )
        return SideResult(found[0, ids.shape[1] :].tolist(), time.perf_counter() - began)

    return one


def url_sides(
    urls: Sequence[str],
    models: Sequence[str],
    keys: Sequence[str],
    *,
    max_new_tokens: int,
    stream: bool,
    stack: ExitStack,
) -> dict[str, UrlSide]:
    """Servers by the names they were given, open while ``stack`` is. Raises for one that cannot be asked at all."""
    from eyas.bench.url import UrlSide

    named = pairs(urls, "--url", "http://localhost:8000/v1")
    of_model, of_key = pairs(models, "--url-model", "MODEL"), pairs(keys, "--url-key", "VARIABLE")
    require_known([*of_model, *of_key], list(named))
    sides = {}
    for name, url in named.items():
        side = UrlSide(
            url,
            model=of_model.get(name),
            max_new_tokens=max_new_tokens,
            stream=stream,
            key_variable=of_key.get(name),
        )
        stack.enter_context(side)
        sides[name] = side
    return sides


def pairs(texts: Sequence[str], option: str, example: str) -> dict[str, str]:
    """NAME=VALUE, each name once."""
    from eyas.errors import UsageError

    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip() or not value.strip() or "://" in name:
            raise UsageError(f"{option} {text!r} is not NAME=VALUE.", way_out=f"Write it as {option} fast={example}.")
        if name.strip() in found:
            raise UsageError(f"{option} names {name.strip()!r} twice.", way_out="Give each side a name of its own.")
        found[name.strip()] = value.strip()
    return found


def require_known(names: Sequence[str], sides: Sequence[str]) -> None:
    from eyas.errors import UsageError, did_you_mean

    for name in names:
        if name not in sides:
            raise UsageError(f"No --url is named {name!r}.", way_out=did_you_mean(name, sides))


def server_json(side: UrlSide) -> dict[str, Any]:
    return {
        "url": side.url,
        "model": side.model,
        "answered_as": sorted(side.models),
        "streamed": side.stream,
        "retries": side.retries,
    }
