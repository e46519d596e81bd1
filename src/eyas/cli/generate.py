from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from eyas.cli import common

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from eyas.answers import Sampling
    from eyas.drafter import Drafter
    from eyas.target import Target


def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask; '-' reads standard input.")],
    target: common.TargetOption = "smollm2",
    dtype: common.DtypeOption = "fp32",
    device: common.DeviceOption = "cpu",
    device_map: common.DeviceMapOption = None,
    trust_remote_code: common.TrustOption = False,
    int8: common.Int8Option = False,
    drafter: common.DrafterOption = "smollm2-eagle3",
    plain: common.PlainOption = False,
    draft_tokens: common.DraftTokensOption = 2,
    adaptive: Annotated[
        bool,
        typer.Option(
            "--adaptive",
            help="Draft as many tokens a round as pay here, --draft-tokens at most. That hangs on the clock: a sampled "
            "answer is not the same again by its seed.",
        ),
    ] = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy, 1 the target's own; between them surer.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Share of the probability that sampling keeps.")] = 1.0,
    top_k: Annotated[int | None, typer.Option("--top-k", help="Tokens that sampling keeps.")] = None,
    min_p: Annotated[
        float, typer.Option("--min-p", help="Sampling keeps tokens with at least this part of the best one's share.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Another seed, another sampled answer.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Take the prompt as it is, without the chat template.")] = False,
    json: common.JsonOption = None,
) -> None:
    """Answer a prompt, greedily or sampled; with a drafter, tokens it drafted and the target kept are green."""
    common.quiet_threads()
    from eyas import checkpoint, resolve
    from eyas.answers import Sampling
    from eyas.errors import UsageError
    from eyas.render import Renderer
    from eyas.target import no_tokenizer

    sampling = Sampling(temperature, top_p, top_k, seed, min_p)
    if plain and adaptive:
        raise UsageError(
            "--plain drafts nothing, so --adaptive has nothing to choose.", way_out="Leave one of them out."
        )
    question = sys.stdin.read() if prompt == "-" else prompt
    loaded = common.load_target(target, dtype, device, device_map, trust_remote_code, int8)
    if loaded.tokenizer is None:
        raise no_tokenizer(target)
    if not raw and not loaded.tokenizer.chat_template:
        common.note(f"{target} has no chat template: the prompt is taken as it is, as text to go on with (--raw).")
        raw = True
    if raw:
        prompt_ids = list(loaded.tokenizer(question)["input_ids"])
    else:
        prompt_ids = Renderer(loaded.tokenizer, loaded.eos_ids()).ids(
            [{"role": "user", "content": question}], prompt=True
        )
    side = None if plain else checkpoint.load(checkpoint.read(resolve.drafter(drafter)), loaded)
    if int8 and side is not None:
        common.round_weights(side)
    printer = Printer(loaded.tokenizer, common.console_for(json))
    found = answer(loaded, side, prompt_ids, max_new_tokens, draft_tokens, sampling, printer, adaptive=adaptive)
    text = loaded.tokenizer.decode(found.token_ids, skip_special_tokens=True)
    common.write_result({"schema": 1, **asdict(found), "text": text}, json)
    printer.close(found)


@dataclass(frozen=True)
class Answer:
    """What a generation gives; ``drafted`` and ``accepted`` count rounds by depth."""

    prompt_ids: list[int]
    token_ids: list[int]
    rounds: int
    drafted: list[int]
    accepted: list[int]
    seconds: float


def answer(
    target: Target,
    drafter: Drafter | None,
    prompt_ids: list[int],
    max_new_tokens: int,
    k: int,
    sampling: Sampling,
    printer: Printer,
    *,
    adaptive: bool = False,
) -> Answer:
    """Decode, and print tokens as they come; ``adaptive`` drafts as many as pay, ``k`` deep at most."""
    from eyas.decode.loop import Chooser, DraftSide, Generation, chooser
    from eyas.decode.pack import packed
    from eyas.decode.siblings import Siblings, by_worth
    from eyas.decode.swift import chain_of

    with packed(target, drafter):
        side: DraftSide | None = None
        chooses: Chooser | None = None
        if drafter is not None and adaptive and sampling.greedy:
            side, chooses = Siblings(drafter), by_worth(target, drafter, prompt_ids, k)
        elif drafter is not None:  # a chain that is drawn is kept more often than words that were chosen
            side, chooses = chain_of(drafter), chooser(target, drafter, prompt_ids, k) if adaptive else None
        run = Generation(
            target,
            side,
            prompt_ids,
            max_new_tokens=max_new_tokens,
            draft_tokens=0 if drafter is None else k,
            chooser=chooses,
            sampling=sampling,
        )
        printer.add(run.token_ids, run.was_drafted)
        for _ in run:
            printer.add(run.token_ids, run.was_drafted)
        rounds = run.rounds if drafter is not None else 0
        return Answer(prompt_ids, run.token_ids, rounds, run.drafted, run.accepted, run.seconds)


class Printer:
    """Streams text; a character spread over several tokens is held back until it is whole."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, console: Console) -> None:
        self._tokenizer, self._console = tokenizer, console
        self._shown = 0

    def add(self, token_ids: list[int], was_drafted: list[bool]) -> None:
        while (upto := self._whole(token_ids)) is not None:
            piece = Text(self._decode(token_ids[self._shown : upto]), "bold green" if was_drafted[self._shown] else "")
            self._console.print(piece, end="", soft_wrap=True)
            self._shown = upto

    def _whole(self, token_ids: list[int]) -> int | None:
        """The end of the next stretch of whole characters, if there is one."""
        for end in range(self._shown + 1, len(token_ids) + 1):
            if "\ufffd" not in self._decode(token_ids[self._shown : end]):
                return end
        return None

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def close(self, found: Answer) -> None:
        count, seconds = len(found.token_ids), max(found.seconds, 1e-9)
        line = f"\n{count} tokens in {seconds:.1f} s, {count / seconds:.1f} tokens/s"
        if found.rounds:
            line += f"; {found.rounds} rounds, accept length {1 + sum(found.accepted) / found.rounds:.2f}"
        self._console.print(Text(line, style="dim"))
