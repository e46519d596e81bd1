"""``python -m runs.fault_matrix``: every row that is not there yet. Hours on two cores; it says how many.

--engine-python PY   an environment with vLLM (default .engines/vllm/bin/python)
--out FILE           rows (default out/fault-matrix/rows.jsonl), appended one by one, so a run resumes
--rows REGEX         only these
--report             write docs/fault-matrix.jsonl and docs/fault-matrix.md from what is there
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from runs.fault_matrix import report
from runs.fault_matrix.rows import OTHER, ROWS, SHIPPED, Row
from runs.mutations.subject import Bed, bed, healthy

from eyas import diagnose, prompts, resolve
from eyas import target as targets
from eyas.diagnose import asked
from eyas.diagnose.dead import died
from eyas.engines.vllm_live import Vllm
from eyas.errors import EnvironmentFault, EyasError
from eyas.render import Renderer
from eyas.target import Target

HERE = Path(__file__).parent
FIXTURES = {SHIPPED: None, OTHER: HERE.parents[1] / "tests" / "fixtures" / "drafters" / OTHER}
EXTENSION = ("vllm_faults.FaultyProbe", HERE)


class Matrix:
    def __init__(self, python: Path, out: Path) -> None:
        self.python, self.out = python, out
        self.target: Target = targets.load("smollm2")
        self._beds: dict[str, Bed] = {}
        self._renderer = Renderer(self.target.tokenizer, self.target.eos_ids())

    def bed(self, name: str) -> Bed:
        if name not in self._beds:
            folder = FIXTURES[name] or resolve.drafter(name)
            self._beds[name] = bed(name, folder, self.target, [])
        return self._beds[name]

    def write(self, row: Row, folder: Path) -> Path:
        """The drafter that is served."""
        subject = row.files(self.bed(row.bed), healthy(self.bed(row.bed), row.keeps_contract))
        return subject.write(folder / "eagle3-drafter")

    def collect(self, row: Row) -> dict[str, Any]:
        """What the engine did: in a thread, while the row before is judged."""
        began = time.monotonic()
        work = Path(tempfile.mkdtemp(prefix="eyas-matrix-"))
        served = self.write(row, work)
        flags = ["--dtype", "float32", "--max-model-len", "1024"]
        if row.template is not None:
            (work / "template.jinja").write_text(row.template, encoding="utf-8")
            flags += ["--chat-template", str(work / "template.jinja")]
        if row.speculative:
            flags += ["--speculative-config", json.dumps(row.speculative)]
        flags += list(row.flags)
        chats = [p.messages() for p in prompts.load(row.prompts, row.first + row.count)[row.first :]]
        ours = [self._renderer.ids(chat, prompt=True) for chat in chats]
        quick = work / "python"
        quick.write_text(
            f'#!/bin/sh\nshift 2\nexec {self.python.absolute()} {HERE / "quick_vllm.py"} "$@"\n', encoding="utf-8"
        )
        quick.chmod(0o700)
        engine = Vllm.launch(
            quick, self.target.folder, served, draft_tokens=row.draft_tokens, flags=flags, extension=EXTENSION
        )
        found: dict[str, Any] = {"work": work, "served": served, "flags": flags, "engine": engine.about}
        try:
            engine.ready()
            if row.engine:
                told = engine.call("eyas_break", json.dumps(list(row.engine)))
                assert "error" not in told, told
            asks, prompt = asked.rendered(engine, chats, ours)
            found["collected"] = diagnose.collect(engine, asks, row.tokens, temperature=row.temperature, prompt=prompt)
        except EnvironmentFault as error:
            found["died"] = error
        finally:
            found["log"] = engine.log()
            engine.stop()
        found["seconds"] = round(time.monotonic() - began, 1)
        return found

    def judge(self, row: Row, found: dict[str, Any]) -> dict[str, Any]:
        began = time.monotonic()
        try:
            if "died" in found:
                result = died(
                    found["served"], self.target, found["engine"], found["died"], found["flags"], name=row.bed
                ).to_json()
            else:
                result = diagnose.diagnose(
                    found["served"], self.target, found["collected"], name=row.bed, draft_tokens=row.draft_tokens,
                    flags=found["flags"],
                ).to_json()  # fmt: skip
        finally:
            shutil.rmtree(found["work"], ignore_errors=True)
        return {**report.row(row, result, found), "judge_seconds": round(time.monotonic() - began, 1), "told": result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine-python", type=Path, default=Path(".engines/vllm/bin/python"))
    parser.add_argument("--out", type=Path, default=Path("out/fault-matrix/rows.jsonl"))
    parser.add_argument("--rows", default="")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    done = report.read(options.out)
    if options.report:
        report.write(list(done.values()))
        return
    left = [row for row in ROWS if row.name not in done and re.search(options.rows, row.name)]
    print(f"{len(left)} of {len(ROWS)} rows are left: about {len(left) * 2} minutes on two cores.", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    matrix = Matrix(options.engine_python, options.out)
    with ThreadPoolExecutor(1) as ahead:
        coming = {row.name: ahead.submit(matrix.collect, row) for row in left}
        for row in left:
            began = time.monotonic()
            try:
                told = matrix.judge(row, coming.pop(row.name).result())
            except (EyasError, AssertionError, Exception) as error:  # a row that fails is told, and run again next time
                traceback.print_exc()
                print(f"{row.name}: FAILED {type(error).__name__}: {error}", flush=True)
                continue
            with open(options.out, "a", encoding="utf-8") as handle:
                handle.write(json.dumps(told, default=str) + "\n")
            print(f"{row.name}: {told['first']} | {told['second']} ({told['verdict']}, right {told['right']}, "
                  f"{told['accept_length']}, {time.monotonic() - began:.0f} s)", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
