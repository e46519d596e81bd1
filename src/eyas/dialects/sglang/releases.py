"""Releases of SGLang: what the tables were read from, what changed between, and where each rule stands.

Read wholly: 0.5.12.post1, the last release in which DeepSeek-family targets add one to every id (pull request 25454
changed that in 0.5.13), and 0.5.23. The setters were also run from 0.5.13 and 0.5.20. A version between takes the
table of the later one, less what is known to have come after it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from packaging.version import Version

from eyas.dialects.sglang import taps
from eyas.dialects.wiring import Basis, Source

OLD, NEW = "0.5.12.post1", "0.5.23"
VERSIONS = (OLD, NEW)
MINUS_ONE = "minus-one"
"""Rule of a patched build, ``0.5.12.post1+minus-one``: id -1 captures the embedding of DeepSeek-family targets."""

MLA_SWITCHES_SINCE = Version("0.5.13")  # fc_norm and norm_output of models/kimi_k25_eagle3.py
NORM_BEFORE_FC_SINCE = Version("0.5.17")  # models/llama_eagle3.py; 0.5.16 has it not
RATE_SINCE = Version(
    "0.5.11"
)  # accept rate without the bonus token; 0.5.10.post1 divides accept length by draft tokens

_LINES: dict[str, tuple[str, str]] = {
    "capture ids": (
        "model_executor/model_runner.py:436",
        "model_executor/model_runner_components/spec_aux_hidden_state.py:185",
    ),
    "setter missing": (
        "model_executor/model_runner.py:905",
        "model_executor/model_runner_components/attention_backend_setup.py:55",
    ),
    "target_hidden_size": ("models/llama_eagle3.py:148", "models/llama_eagle3.py:151"),
    "num_aux": ("models/llama_eagle3.py:154", "models/llama_eagle3.py:157"),
    "norm_before_fc": ("models/llama_eagle3.py", "models/llama_eagle3.py:173"),
    "fc_norm": ("models/llama_eagle3.py:167", "models/llama_eagle3.py:185"),
    "norm_output": ("models/llama_eagle3.py:188", "models/llama_eagle3.py:207"),
    "qkv bias": ("models/llama_eagle3.py:59", "models/llama_eagle3.py:65"),
    "fc width": ("models/llama_eagle3.py:218", "models/llama_eagle3.py:238"),
    "residual": ("models/llama_eagle3.py:95", "models/llama_eagle3.py:99"),
    "later norm": ("models/llama_eagle3.py:101", "models/llama_eagle3.py:105"),
    "head": ("models/llama_eagle3.py:271", "models/llama_eagle3.py:303"),
    "names": ("models/llama_eagle3.py:306", "models/llama_eagle3.py:338"),
    "d2t": ("models/llama_eagle3.py:318", "models/llama_eagle3.py:350"),
    "window": ("models/llama_eagle3.py:351", "models/llama_eagle3.py:287"),
    "embedding": ("models/llama.py:779", "models/llama.py:910"),
    "rope": ("models/llama.py:264", "models/llama.py:323"),
    "head from target": ("speculative/eagle_worker_v2.py:218", "speculative/eagle_worker_v2.py:353"),
    "mla": ("models/kimi_k25_eagle3.py:60", "models/kimi_k25_eagle3.py:68"),
    "mla num_aux": ("models/kimi_k25_eagle3.py:37", "models/kimi_k25_eagle3.py:48"),
    "mla layers": ("models/kimi_k25_eagle3.py:206", "models/kimi_k25_eagle3.py:243"),
    "mla head": ("models/kimi_k25_eagle3.py:300", "models/kimi_k25_eagle3.py:351"),
    "mla names": ("models/kimi_k25_eagle3.py:397", "models/kimi_k25_eagle3.py:448"),
    "mla embedding": ("models/kimi_k25_eagle3.py:353", "models/kimi_k25_eagle3.py:404"),
    "context length": ("configs/model_config.py:541", "configs/model_config.py:1291"),
    "override args": ("configs/model_config.py", "configs/model_config.py:961"),
    "draft dtype": ("configs/model_config.py:398", "configs/model_config.py:965"),
    "capture elsewhere": ("models/deepseek_v2.py:2296", "models/deepseek_v2.py:3203"),
    "quantisation": ("server_args.py:1192", "arg_groups/serving_hook.py:677"),
    "eagle family": ("server_args.py:3735", "arg_groups/speculative_hook.py:1072"),
    "speculation": ("server_args.py:3551", "arg_groups/speculative_hook.py:121"),
    "auto": ("server_args.py:7929", "arg_groups/speculative_hook.py:1430"),
    "draft path": ("server_args.py:3780", "arg_groups/speculative_hook.py:1117"),
    "topk one": ("server_args.py:3828", "arg_groups/speculative_hook.py:1255"),
    "pages": ("server_args.py:3837", "arg_groups/speculative_hook.py:1269"),
    "rejection": ("server_args.py", "arg_groups/speculative_hook.py:1207"),
    "token map": ("speculative/eagle_worker_v2.py:201", "speculative/eagle_worker_v2.py:326"),
    "simulated": ("environ.py:206", "environ.py:527"),
    "rate": ("observability/scheduler_metrics_mixin.py:683", "managers/scheduler_components/metrics_reporter.py:974"),
    "greedy": ("speculative/eagle_info.py", "speculative/eagle_utils.py:485"),
}


@dataclass(frozen=True)
class Release:
    """The tables for one asked version. ``read`` is the release they were read from."""

    version: Version
    read: str
    patched: bool
    assumed: str | None

    def at(self, rule: str, basis: Basis = "read") -> Source:
        """Where a rule stands in the release that was read."""
        return Source(f"sglang {self.read} {_LINES[rule][self.read == NEW]}", basis)

    @property
    def public(self) -> Version:
        return Version(self.version.public)

    def capture(self, architecture: str) -> taps.Capture | None:
        how = taps.targets(self.public).get(architecture)
        if how is not None and self.patched and architecture in FIRST_ID_RULE:
            return replace(how, embedding=True)
        return how

    def setter(self, architecture: str, basis: Basis = "executed") -> Source:
        how = taps.TARGETS[architecture]
        return Source(f"sglang {self.read} {how.where if self.read == NEW else how.where.split(':')[0]}", basis)

    @property
    def norm_before_fc(self) -> bool:
        return self.public >= NORM_BEFORE_FC_SINCE

    @property
    def mla_switches(self) -> bool:
        return self.public >= MLA_SWITCHES_SINCE

    @property
    def name(self) -> str:
        return f"SGLang {self.version}"


FIRST_ID_RULE = tuple(name for name, how in taps.TARGETS.items() if how.rule == "first-id")


def release(version: Version) -> Release:
    """The tables that answer for ``version``."""
    public = Version(version.public)
    old = public < taps.FIRST_ID_SINCE
    patched = old and version.local == MINUS_ONE.replace("-", ".")
    said = []
    read = OLD if old else NEW
    if public != Version(read):
        said.append(
            f"the tables of {read} stand in for {public}; of what lies between, only the capture of taps and the "
            "switches of fc and feedback are dated"
        )
    if version.local is not None and not patched:
        said.append(
            f"{version.local!r} after the + is taken for the name of a build that changes nothing; the one rule known "
            f"there is {MINUS_ONE!r}, of a patched build before {taps.FIRST_ID_SINCE}"
        )
    if patched:
        said.append("a build patched so that id -1 captures the embedding of DeepSeek-family targets")
    return Release(version, read, patched, "; ".join(said) or None)
