"""Benches made by hand, as JSON, for the report's tests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from eyas import bench
from eyas.bench import Cost, Fault, Setting, SideResult
from eyas.bench.predict import StepTimes, from_rates, predict
from eyas.report.terminal import as_json

HOSTILE = "</script><img src=x onerror=alert(1)>|`*\u202e"


@dataclass(frozen=True)
class Asked:
    id: str
    category: str | None = None


def prompts(count: int = 6, categories: tuple[str, ...] = ("maths", "writing")) -> list[Asked]:
    return [Asked(f"p{i}", categories[i % len(categories)] if categories else None) for i in range(count)]


def plain(prompt: Asked) -> SideResult:
    return SideResult(tuple(range(20)), 2.0 + 0.1 * int(prompt.id[1:]), first_seconds=0.2)


def chain(k: int, seconds: float) -> Any:
    """Each depth kept half as often as the one before, out of 16 rounds."""
    kept = tuple(8 >> depth for depth in range(k))

    def one(prompt: Asked) -> SideResult:
        n = int(prompt.id[1:])
        return SideResult(tuple(range(20)), seconds + 0.05 * (n % 3), 16, (16,) * k, kept, first_seconds=0.25)

    return one


def measured(**sides: Any) -> bench.Bench:
    """By default plain 2.0 s and more, chain 2 the fastest, chain 4 with the longer accept length."""
    chosen = sides or {"plain": plain, "chain 2": chain(2, 1.4), "chain 4": chain(4, 1.8)}
    costs = {"chain 2": Cost(1.2, 0.09), "chain 4": Cost(1.35, 0.09)}
    asked = prompts()
    return bench.run(chosen, asked, costs=costs, category=lambda prompt: prompt.category)


def told(name: str = "mt-bench", faults: tuple[Fault, ...] = ()) -> dict[str, Any]:
    """The JSON of ``eyas bench`` as a reader of the file has it."""
    done = measured()
    done = bench.Bench(done.sides, done.turns, done.costs, done.seed, faults)
    settings = {"plain": Setting(0), "chain 2": Setting(2), "chain 4": Setting(4)}
    recommended = bench.recommend(done, settings, name)
    assert recommended is not None
    result = {
        **done.to_json(),
        "prompts_name": name,
        "max_new_tokens": 20,
        "pass_cost": {
            "plain_seconds": 0.1,
            "verify_seconds": {"2": 0.12, "4": 0.135},
            "draft_depth_seconds": 0.009,
        },
        "ties": None,
        "settings": {side: setting.to_json() for side, setting in settings.items()},
        "recommendation": recommended.to_json(),
        "servers": {
            "far": {"url": "http://h/v1", "model": name, "answered_as": ["other"], "streamed": True, "retries": 2}
        },
        "provenance": {"python": "3.11", "arguments": {"name": name}},
    }
    return json.loads(as_json(result))  # type: ignore[no-any-return]


def hostile() -> dict[str, Any]:
    return told(HOSTILE, (Fault("far", HOSTILE, HOSTILE, True),))


def predicted() -> dict[str, Any]:
    times = StepTimes({1: 0.045, 5: 0.060}, 0.004)
    result = predict(times, range(1, 5), from_rates([0.6, 0.4, 0.3]), "rates").to_json()
    return json.loads(as_json(result | {"provenance": {"python": "3.11"}}))  # type: ignore[no-any-return]
