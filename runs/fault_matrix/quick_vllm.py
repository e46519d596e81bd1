"""vLLM's server whose own children are forked instead of started anew: three imports of vLLM become one.

    python quick_vllm.py --model … (as ``python -m vllm.entrypoints.openai.api_server``)

Only how the processes come about differs; a CPU build asks for "spawn" (platforms/cpu.py, 0.32). With forty engines to
start that is the greater part of an hour.
"""

from __future__ import annotations

import multiprocessing
import runpy
import sys
from typing import Any


def main() -> None:
    import vllm.utils.system_utils as system  # type: ignore[import-not-found]
    import vllm.v1.executor.multiproc_executor  # type: ignore[import-not-found]
    import vllm.v1.worker.cpu_worker  # type: ignore[import-not-found]  # noqa: F401  (what the children would import)

    def forked(*_: Any, **__: Any) -> Any:
        return multiprocessing.get_context("fork")

    for module in list(sys.modules.values()):
        if vars(module).get("get_mp_context") is system.get_mp_context:  # getattr would wake lazy modules
            module.get_mp_context = forked  # type: ignore[attr-defined]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
