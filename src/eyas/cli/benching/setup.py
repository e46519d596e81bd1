"""The sides of a run, made ready, and what is known of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

from eyas.cli import common
from eyas.cli.benching import results
from eyas.cli.benching.sides import encoder, excused, make_sides, server_json, transformers_side, url_sides

if TYPE_CHECKING:
    from eyas.bench import Bench, Cost, SideResult
    from eyas.bench.url import UrlSide
    from eyas.decode.cost import PassCost
    from eyas.prompts import Prompt
    from eyas.target import Target

Sides = dict[str, "Callable[[Prompt], SideResult]"]


class Setup:
    """Add sides, then take ``sides`` and ``costs`` to the run and its result back to ``result_json``."""

    def __init__(self, max_new_tokens: int) -> None:
        self.max_new_tokens = max_new_tokens
        self.sides: Sides = {}
        self.costs: dict[str, Cost] = {}
        self.cost: PassCost | None = None
        self.servers: dict[str, UrlSide] = {}
        self._target: Target | None = None
        self._gaps: dict[str, list[float]] | None = None
        self._about: Mapping[str, object] = {}

    def add_local(
        self,
        place: tuple[str, str, str, str | None, bool, bool],
        drafter: str,
        ks: Sequence[int],
        chosen: Sequence[Prompt],
        *,
        trees: Sequence[tuple[int, int, int]],
        adaptive: bool,
        library: bool,
        packed: bool,
        stack: ExitStack,
    ) -> None:
        common.quiet_threads()
        from eyas import bench as benching
        from eyas import checkpoint, resolve
        from eyas.decode.adaptive import Costs
        from eyas.decode.cost import measure_cost
        from eyas.decode.pack import packed as pack
        from eyas.decode.siblings import MEASURED
        from eyas.decode.tree import TreeSize

        folder = resolve.drafter(drafter)
        target = common.load_target(*place)
        side = checkpoint.load(checkpoint.read(folder), target)
        if place[5]:
            common.round_weights(side)
        encode = encoder(target)
        if target.tokenizer is not None and not target.tokenizer.chat_template:
            common.note(f"{target.spec} has no chat template: prompts are taken as they are, as text to go on with.")
        stack.enter_context(pack(target, side) if packed else nullcontext())
        self._target = target
        self._gaps = None if place[1] == "fp32" else {}
        sizes = [TreeSize(*size) for size in trees]
        self.cost = measure_cost(target, side, encode(chosen[0]), sorted({*ks, *MEASURED}) if adaptive else ks)
        costs = Costs.measured(self.cost) if adaptive else None
        self.sides |= make_sides(target, side, encode, ks, sizes, self.max_new_tokens, self._gaps, costs)
        self.costs = {f"chain {k}": benching.Cost(*self.cost.relative(k)) for k in ks}
        if library:
            bare = common.load_target(*place)  # loaded again: the layers of the first are packed
            self.sides["transformers"] = transformers_side(bare, encode, self.max_new_tokens)
        self._about = {
            "target": place[0],
            "dtype": place[1],
            "device": place[2],
            "int8": place[5],
            "packed": packed,
            "drafter_sha256": results.weights_sha256(folder),
        }

    def add_urls(
        self, urls: Sequence[str], models: Sequence[str], keys: Sequence[str], *, stream: bool, stack: ExitStack
    ) -> None:
        from eyas.errors import UsageError

        found = url_sides(urls, models, keys, max_new_tokens=self.max_new_tokens, stream=stream, stack=stack)
        for name, side in found.items():
            if name in self.sides:
                raise UsageError(
                    f"--url names {name!r}, which is a side of this process.", way_out="Name it otherwise."
                )
            self.sides[name] = side
        self.servers = found

    def require_sides(self) -> None:
        from eyas.errors import UsageError

        if not self.sides:
            raise UsageError("There is nothing to time.", way_out="Leave --no-local out, or name a server with --url.")

    def told(self) -> dict[str, Mapping[str, object]]:
        """What the turns of a journal were made by."""
        return {name: self._about for name in self.sides if name not in self.servers} | {
            name: {"url": side.url, "model": side.model, "streamed": side.stream} for name, side in self.servers.items()
        }

    def result_json(
        self, result: Bench, chosen: Sequence[Prompt], about: dict[str, object], drafter: str
    ) -> dict[str, Any]:
        from eyas import bench as benching
        from eyas import provenance
        from eyas.bench.settings import named

        settings = {name: setting for name in self.sides if (setting := named(name)) is not None}
        recommended = benching.recommend(result, settings, drafter)
        return {
            **result.to_json(),
            **about,
            "pass_cost": results.cost_json(self.cost) if self.cost is not None else None,
            "ties": self._ties(result, chosen),
            "settings": {name: setting.to_json() for name, setting in settings.items()},
            "recommendation": recommended.to_json() if recommended is not None else None,
            "servers": {name: server_json(side) for name, side in self.servers.items()},
            "provenance": provenance.collect({"sides": self.told(), **about}),
        }

    def _ties(self, result: Bench, chosen: Sequence[Prompt]) -> dict[str, Any] | None:
        if self._gaps is None or self._target is None:
            return None
        encode = encoder(self._target)
        asked = {prompt.id: prompt for prompt in chosen}
        prompt_ids = {name: encode(asked[name]) for name in self._gaps if name in asked}
        self._gaps = {name: gaps for name, gaps in self._gaps.items() if name in asked}  # not of the warm-up
        return excused(self._target, result, prompt_ids, self._gaps)
