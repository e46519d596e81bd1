"""Runs in vLLM's environment, not in ours: what vLLM's own resolution makes of a drafter's config. No weights.

Started by ``eyas.engines.ask`` with one JSON object on standard input: ``config`` (the drafter's config.json),
``target_config`` (the target's), ``tensors`` (names, not used here), ``flags`` (as on vLLM's command line). The
answer is one line of JSON, the last one written. vLLM's own classes do the work: ``EngineArgs`` makes the config
objects, the V1 runner's and the V2 runner's functions choose the layers, the target's class names its defaults.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
WHOLE = (["--speculative-config"], ["--speculative_config"], ["-sc"])
# What a drafter's class reads of its config, as vLLM's config classes hand it over.
READ = (
    "architectures",
    "attention_bias",
    "draft_vocab_size",
    "fc_norm",
    "head_dim",
    "hidden_size",
    "layer_types",
    "max_position_embeddings",
    "norm_before_fc",
    "norm_before_residual",
    "norm_output",
    "num_aux_hidden_states",
    "num_hidden_layers",
    "rope_parameters",
    "sliding_window",
    "target_hidden_size",
    "vocab_size",
)


def main() -> None:
    request = json.loads(sys.stdin.read())
    print(json.dumps(answer(request)))


def answer(request: dict[str, Any]) -> dict[str, Any]:
    import vllm  # type: ignore[import-not-found]  # here, in its environment
    import vllm.logger  # type: ignore[import-not-found]  # sets the handlers up, ours come after

    found: dict[str, Any] = {"engine": "vllm", "version": vllm.__version__}
    heard = Heard()
    logging.getLogger("vllm").addHandler(heard)
    with tempfile.TemporaryDirectory(prefix="eyas-ask-") as folder:
        try:
            found |= resolved(request, Path(folder))
        except (Exception, SystemExit) as error:  # whatever stops vLLM is the answer
            found["error"] = {"type": type(error).__name__, "message": plain(str(error), folder)}
        found["said"] = [{"level": level, "text": plain(text, folder)} for level, text in heard.lines]
    logging.getLogger("vllm").removeHandler(heard)
    return found


class Heard(logging.Handler):
    """Everything vLLM's logger says about the drafter or the runner."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if any(word in text.lower() for word in ("draft", "eagle", "speculat", "runner")):
            self.lines.append((record.levelname.lower(), text))


def plain(text: str, folder: str) -> str:
    return " ".join(text.replace(folder, "…").split())[:600]


def resolved(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    from vllm.engine.arg_utils import EngineArgs  # type: ignore[import-not-found]
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # type: ignore[import-not-found]

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(exit_on_error=False))
    parser.error = refuse  # bad flags as an error with its message, not as a usage text and an exit
    target = written(folder / "target", request["target_config"])
    args = EngineArgs.from_cli_args(parser.parse_args(["--model", str(target), *flags_of(request)]))
    given = dict(args.speculative_config or {})
    for key, value in (("method", args.spec_method), ("num_speculative_tokens", args.spec_tokens)):
        given |= {key: value} if value is not None and key not in given else {}
    named = str(given.get("model") or args.spec_model or "draft")
    # Its path can decide the method, so it has the name that was given.
    draft = written(folder / re.sub("[^A-Za-z0-9._-]", "_", named)[-100:], request["config"])
    args.skip_tokenizer_init, args.load_format = True, "dummy"
    args.speculative_config, args.spec_model = {**(args.speculative_config or {}), "model": str(draft)}, None
    config = args.create_engine_config()
    spec = config.speculative_config
    hf_config = spec.draft_model_config.hf_config
    return {
        **runner(config, request["flags"]),
        **taps(config),
        "drafter": {
            "class": spec.draft_model_config._architecture,
            "config": {key: getattr(hf_config, key) for key in READ if hasattr(hf_config, key)},
            "max_model_len": spec.draft_model_config.max_model_len,
        },
        "flags": [
            {"flag": key, "requested": given.get(key), "resolved": value}
            for key, value in sorted(vars(spec).items())
            if isinstance(value, str | int | float | bool | list) and key != "model"
        ],
    }


def written(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def flags_of(request: dict[str, Any]) -> list[str]:
    """The flags as on vLLM's command line, without those that name a model to look for; what stood before the line
    goes where vLLM looks for it."""
    kept: list[str] = []
    flags = iter(request["flags"])
    for flag in flags:
        name, equals, value = flag.partition("=")
        if name in ("--model", "--tokenizer", "--hf-config-path"):
            if not equals:
                next(flags, None)
        elif equals and name.startswith("VLLM_") and name.isupper():
            os.environ |= {name: value} if name != RUNNER else {}  # without Triton a V2 runner stops all questions
        else:
            kept += ["--speculative-config", flag] if flag.startswith("{") and kept[-1:] not in WHOLE else [flag]
    return kept


def runner(config: Any, flags: list[str]) -> dict[str, Any]:
    """Which runner it is here, and which it would be where Triton is."""
    from vllm.triton_utils import HAS_TRITON  # type: ignore[import-not-found]

    if asked := [flag.partition("=")[2] for flag in flags if flag.startswith(f"{RUNNER}=")]:
        here = "v1" if asked[-1] in ("0", "false") else "v2"
        missing = "" if HAS_TRITON or here == "v1" else ", but it needs Triton, which is not here: vLLM would stop"
        return {"runner": here, "runner_with_triton": here, "why": f"{RUNNER} is set{missing}"}
    here = "v2" if config.use_v2_model_runner else "v1"
    cannot = config._get_v2_model_runner_unsupported_features()
    there = "v1" if cannot else "v2"
    lacks = f"the V2 runner cannot do {', '.join(cannot)}" if cannot else None
    why = lacks or ("Triton is there" if HAS_TRITON else "the V2 runner needs Triton, which is not here")
    return {"runner": here, "runner_with_triton": there, "why": why}


def taps(config: Any) -> dict[str, Any]:
    """The layers each runner's own function chooses; the target's own defaults where it chooses none."""
    from vllm.model_executor.models.interfaces import supports_eagle3  # type: ignore[import-not-found]
    from vllm.v1.worker.gpu.spec_decode.eagle import eagle3_utils  # type: ignore[import-not-found]
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # type: ignore[import-not-found]

    target = config.model_config
    made, _ = target.registry.resolve_model_cls(target.architectures, target)
    v1 = GPUModelRunner._get_eagle3_aux_layers_from_config(
        types.SimpleNamespace(speculative_config=config.speculative_config)
    )
    v2 = eagle3_utils.get_eagle3_aux_layers_from_config(config.speculative_config)
    usual = list(defaults(made, target.get_total_num_hidden_layers())) if supports_eagle3(made) else None
    return {
        "taps": {"v1": list(v1) if v1 else usual, "v2": list(v2) if v2 else usual},
        "from_config": {"v1": bool(v1), "v2": bool(v2)},
        "default_taps": usual,
        "target": {"class": made.__name__, "module": made.__module__, "supports_eagle3": bool(supports_eagle3(made))},
    }


def defaults(made: Any, layers: int) -> tuple[int, ...]:
    """The class's own method, on a stand-in that has nothing but layers."""
    language = Layers(layers)
    stand_in = types.SimpleNamespace(model=language.model, text_config=language.text_config)
    if "get_eagle3_default_aux_hidden_state_layers" in vars(made):  # it hands the question on to its language model
        stand_in.language_model = language
    chosen: tuple[int, ...] = made.get_eagle3_default_aux_hidden_state_layers(stand_in)
    return chosen


class Layers:
    def __init__(self, layers: int) -> None:
        self.model = types.SimpleNamespace(layers=range(layers))
        self.text_config = types.SimpleNamespace(num_hidden_layers=layers)

    def get_eagle3_default_aux_hidden_state_layers(self) -> tuple[int, ...]:
        from vllm.model_executor.models.interfaces import SupportsEagle3

        chosen: tuple[int, ...] = SupportsEagle3.get_eagle3_default_aux_hidden_state_layers(self)
        return chosen


def refuse(message: str) -> None:
    raise ValueError(message)


if __name__ == "__main__":
    main()
