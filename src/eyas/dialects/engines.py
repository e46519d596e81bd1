"""The engines whose wiring is known, by name, and one of them as it is asked about."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from eyas.contract import Contract
from eyas.dialects import host, llama_cpp, sglang, tensorrt_llm, vllm
from eyas.dialects.wiring import Files, Launch, Runner, TargetFacts, Wiring, parse_engine


class EngineDialect(Protocol):
    """What every engine's module offers. ``VERSIONS`` ascend; ``write`` raises CannotExpress."""

    @property
    def VERSIONS(self) -> tuple[str, ...]: ...  # noqa: N802

    def wire(self, files: Files, target: TargetFacts | None, launch: Launch) -> Wiring: ...

    def write(
        self, contract: Contract, config: Mapping[str, Any], target: TargetFacts, launch: Launch
    ) -> dict[str, Any]: ...


ENGINES: dict[str, EngineDialect] = {
    "llama.cpp": llama_cpp,
    "sglang": sglang,
    "tensorrt-llm": tensorrt_llm,
    "vllm": vllm,
}
VERSIONS: dict[str, tuple[str, ...]] = {name: dialect.VERSIONS for name, dialect in ENGINES.items()}
RUNNERS: dict[str, tuple[Runner, ...]] = {"vllm": ("v1", "v2")}
"""Engines that read a drafter in more than one way within one version."""


@dataclass(frozen=True)
class Asked:
    name: str
    dialect: EngineDialect
    launch: Launch


def asked(text: str, runner: Runner | None = None, flags: tuple[str, ...] = ()) -> Asked:
    """``NAME[==VERSION]`` as the user wrote it."""
    name, version = parse_engine(text, VERSIONS)
    return Asked(name, ENGINES[name], Launch(version, runner if name in RUNNERS else None, flags))


def each_runner(several: Iterable[Asked]) -> Iterator[Asked]:
    """Where an engine has several runners and none was chosen, each of them."""
    for one in several:
        if one.name in RUNNERS and one.launch.runner is None:
            for runner in RUNNERS[one.name]:
                yield replace(one, launch=replace(one.launch, runner=runner))
        else:
            yield one


def host_of(contract: Contract) -> TargetFacts | None:
    """The target a contract names, where it does."""
    return host.from_identity(contract["target"]) if "target" in contract else None
