from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eyas.cli import common

if TYPE_CHECKING:
    from eyas.bench import Bench, SideResult
    from eyas.decode.cost import PassCost
    from eyas.drafter import Drafter
    from eyas.prompts import Prompt
    from eyas.target import Target


TIES_MEASURED_ON = 4  # prompts


def bench(
    prompts: Annotated[
        str, typer.Option("--prompts", "-p", help="mt-bench, humaneval, gsm8k, or a .jsonl / .txt file.")
    ] = "mt-bench",
    target: common.TargetOption = "smollm2",
    dtype: common.DtypeOption = "fp32",
    device: common.DeviceOption = "cpu",
    device_map: common.DeviceMapOption = None,
    trust_remote_code: common.TrustOption = False,
    drafter: common.DrafterOption = "smollm2-eagle3",
    limit: Annotated[int | None, typer.Option(help="Only the first N prompts.")] = None,
    draft_tokens: Annotated[
        str, typer.Option("--draft-tokens", "-k", help="Drafted tokens a round; several to compare: 1,2,4.")
    ] = "4",
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1)] = 128,
    library: Annotated[
        bool, typer.Option("--library", help="Time transformers' own generate too, as a third side.")
    ] = False,
    packed: Annotated[bool, typer.Option("--packed/--no-packed", help="Prepacked linear layers on the CPU.")] = True,
    json: common.JsonOption = None,
) -> None:
    """Decode a prompt set with and without the drafter, in turns: speed, ratio, accept length, equal texts."""
    common.quiet_threads()
    from contextlib import nullcontext

    from eyas import bench as benching
    from eyas import checkpoint, resolve
    from eyas import prompts as sets
    from eyas.decode.cost import measure_cost
    from eyas.decode.pack import packed as pack

    chosen = sets.load(prompts, limit)
    ks = parse_counts(draft_tokens)
    loaded = common.load_target(target, dtype, device, device_map, trust_remote_code)
    side = checkpoint.load(checkpoint.read(resolve.drafter(drafter)), loaded)
    encode = encoder(loaded)
    if loaded.tokenizer is not None and not loaded.tokenizer.chat_template:
        common.note(f"{target} has no chat template: prompts are taken as they are, as text to go on with.")
    console = common.console_for(json)
    with pack(loaded, side) if packed else nullcontext():
        cost = measure_cost(loaded, side, encode(chosen[0]), ks)
        gaps: dict[str, list[float]] | None = None if dtype == "fp32" else {}
        sides = make_sides(loaded, side, encode, ks, max_new_tokens, gaps)
        with common.counting(f"{len(chosen)} prompts × {len(sides) + library} sides", len(chosen)) as progress:
            done = 0

            def counted(prompt: Prompt) -> SideResult:
                nonlocal done
                done += 1
                progress(done)
                return plain(prompt)

            plain = sides["plain"]
            costs = {f"chain {k}": benching.Cost(*cost.relative(k)) for k in ks}
            if library:
                # Loaded again: the layers of the first are packed.
                bare = common.load_target(target, dtype, device, device_map, trust_remote_code)
                sides["transformers"] = transformers_side(bare, encode, max_new_tokens)
            result = benching.run({**sides, "plain": counted}, chosen, costs=costs)
        ties = excused(loaded, result, {p.id: encode(p) for p in chosen}, gaps) if gaps is not None else None
    told = {
        **result.to_json(),
        "prompts_name": prompts,
        "max_new_tokens": max_new_tokens,
        "pass_cost": cost_json(cost),
        "ties": ties,
    }
    common.write_result(told, json)
    print_bench(result, cost, console)
    if ties is not None:
        parts = ", ".join(f"{name} {n['excused']} of {n['differ']}" for name, n in ties["sides"].items())
        line = f"texts that differ only from where the two best logits are closer than {ties['tie']:.3g}: {parts}"
        console.print(Text(line, style="dim"))


def parse_counts(text: str) -> list[int]:
    from eyas.errors import UsageError

    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or not all(1 <= k <= 16 for k in counts):
        raise UsageError(
            f"--draft-tokens {text!r} is not a list of numbers from 1 to 16.",
            way_out="Pass for example -k 1,2,4.",
        )
    return counts


def encoder(target: Target) -> Callable[[Prompt], list[int]]:
    """First turns through the chat template; as plain text where there is none."""
    from eyas.records import Renderer
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
    max_new_tokens: int,
    gaps: dict[str, list[float]] | None,
) -> dict[str, Callable[[Prompt], SideResult]]:
    """The sides by name. Into ``gaps``, where it is wanted, goes how near to a tie each plain step was, by prompt."""
    from eyas.bench import SideResult
    from eyas.decode.loop import generate
    from eyas.decode.plain import plain

    def without(prompt: Prompt) -> SideResult:
        ids = encode(prompt)
        steps: list[float] | None = gaps.setdefault(prompt.id, []) if gaps is not None else None
        began = time.perf_counter()
        tokens = list(plain(target, ids, max_new_tokens=max_new_tokens, gaps=steps))
        return SideResult(tokens, time.perf_counter() - began)

    def drafted(k: int) -> Callable[[Prompt], SideResult]:
        def one(prompt: Prompt) -> SideResult:
            run = generate(target, drafter, encode(prompt), max_new_tokens=max_new_tokens, draft_tokens=k).finish()
            return SideResult(run.token_ids, run.seconds, run.rounds, run.drafted, run.accepted)

        return one

    return {"plain": without, **{f"chain {k}": drafted(k) for k in ks}}


def excused(
    target: Target, result: Bench, prompt_ids: dict[str, list[int]], gaps: dict[str, list[float]]
) -> dict[str, Any]:
    """Texts that differ from the plain ones, and those of them that do so from a tie as this precision makes them."""
    from eyas.decode.ties import first_difference, measured_tie

    plain = {turn.prompt_id: list(turn.results[result.baseline].token_ids) for turn in result.turns}
    tie = max(measured_tie(target, prompt_ids[name] + ids) for name, ids in list(plain.items())[:TIES_MEASURED_ON])
    sides = {}
    for side in result.sides[1:]:
        found = [
            first_difference(plain[turn.prompt_id], turn.results[side].token_ids, gaps[turn.prompt_id], tie)
            for turn in result.turns
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


def cost_json(cost: PassCost) -> dict[str, Any]:
    return {"plain_seconds": cost.plain, "verify_seconds": cost.verify, "draft_depth_seconds": cost.draft}


def print_bench(result: Bench, cost: PassCost, console: Console) -> None:
    for title, without_loops in (("all prompts", False), ("without looping answers", True)):
        summary = result.summary(without_loops=without_loops)
        prompts = sum(not (without_loops and turn.loops) for turn in result.turns)
        if not summary:
            console.print(Text(f"{title}: none left", style="dim"))
            continue
        table = Table(title=f"{title} ({prompts})", title_justify="left", title_style="bold")
        for heading in (
            "side",
            "tokens/s",
            "median",
            "ratio",
            "bound",
            "accept length",
            "joint by depth",
            "equal texts",
            "repeated 8-grams",
        ):
            table.add_column(heading)
        for name, side in summary.items():
            low, high = side.ratio_interval
            interval = (
                f" ({low:.2f}–{high:.2f})" if low is not None and high is not None and name != result.baseline else ""
            )
            lengths = side.lengths
            table.add_row(
                name,
                f"{side.tokens_per_second:.1f}",
                f"{side.median_tokens_per_second:.1f}",
                f"{side.ratio:.2f}{interval}",
                f"{side.bound:.2f}" if side.bound is not None else "–",
                f"{lengths.value:.3f} ({lengths.total_rounds:,} rounds)" if lengths and lengths.value else "–",
                " ".join(f"{rate.rate:.2f}" for rate in side.depths if rate.rate is not None) or "–",
                f"{side.equal.hits}/{side.equal.n}",
                f"{side.repeats.share or 0:.1%}",
            )
        console.print(table)
    verify = ", ".join(f"K={k} {seconds * 1e3:.1f} ms" for k, seconds in cost.verify.items())
    told = f"one plain step {cost.plain * 1e3:.1f} ms; verify {verify}; one draft depth {cost.draft * 1e3:.1f} ms"
    console.print(Text(told, style="dim"))
