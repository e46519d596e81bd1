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


def bench(
    prompts: Annotated[
        str, typer.Option("--prompts", "-p", help="mt-bench, humaneval, gsm8k, or a .jsonl / .txt file.")
    ] = "mt-bench",
    target: common.TargetOption = "smollm2",
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
    loaded = common.load_target(target)
    side = checkpoint.load(checkpoint.read(resolve.drafter(drafter)), loaded)
    encode = encoder(loaded)
    console = common.console_for(json)
    with pack(loaded, side) if packed else nullcontext():
        cost = measure_cost(loaded, side, encode(chosen[0]), ks)
        sides = make_sides(loaded, side, encode, ks, max_new_tokens)
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
                sides["transformers"] = transformers_side(loaded, encode, max_new_tokens)
            result = benching.run({**sides, "plain": counted}, chosen, costs=costs)
    told = {
        **result.to_json(),
        "prompts_name": prompts,
        "max_new_tokens": max_new_tokens,
        "pass_cost": cost_json(cost),
    }
    common.write_result(told, json)
    print_bench(result, cost, console)


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
    from eyas.errors import TargetError
    from eyas.render import Renderer

    tokenizer = target.tokenizer
    if tokenizer is None:
        raise TargetError(
            f"Target {target.spec!r} has no tokenizer files.",
            way_out="Put tokenizer.json beside its weights.",
        )
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
) -> dict[str, Callable[[Prompt], SideResult]]:
    from eyas.bench import SideResult
    from eyas.decode.loop import generate
    from eyas.decode.plain import plain

    def without(prompt: Prompt) -> SideResult:
        ids = encode(prompt)
        began = time.perf_counter()
        tokens = list(plain(target, ids, max_new_tokens=max_new_tokens))
        return SideResult(tokens, time.perf_counter() - began)

    def drafted(k: int) -> Callable[[Prompt], SideResult]:
        def one(prompt: Prompt) -> SideResult:
            run = generate(target, drafter, encode(prompt), max_new_tokens=max_new_tokens, draft_tokens=k).finish()
            return SideResult(run.token_ids, run.seconds, run.rounds, run.drafted, run.accepted)

        return one

    return {"plain": without, **{f"chain {k}": drafted(k) for k in ks}}


def transformers_side(
    target: Target, encode: Callable[[Prompt], list[int]], max_new_tokens: int
) -> Callable[[Prompt], SideResult]:
    """The library's own greedy generate, on its own layers, as the speed a user would have without us."""
    import torch
    from transformers import AutoModelForCausalLM

    from eyas.bench import SideResult
    from eyas.target import quiet

    model = target.model
    if target.folder is not None:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(target.folder, dtype=torch.float32).eval()

    def one(prompt: Prompt) -> SideResult:
        ids = torch.tensor([encode(prompt)])
        began = time.perf_counter()
        with torch.inference_mode():
            found = model.generate(  # type: ignore[operator]
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
