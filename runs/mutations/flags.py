"""C, and what of Q lies in flags: options and declarations that are overridden, ignored or contradict one another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from runs.mutations.subject import IDS, Bed, Change, Mutation, Subject, fields, keys

CHAIN = "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"


def sglang(flags: str) -> Change:
    return fields(engine="sglang", flags=flags)


def vllm(config: str) -> Change:
    return fields(engine="vllm", flags=f"--speculative-config '{config}'")


def contract(**facts: Any) -> Change:
    """Facts of the contract edited, the engines' keys left."""

    def run(bed: Bed, subject: Subject) -> Subject:
        block = subject.config["eyas"]
        edited = {name: {"value": value, "origin": "declared"} for name, value in facts.items()}
        return replace(subject, config=subject.config | {"eyas": block | {"contract": block["contract"] | edited}})

    return run


def bases_differ(bed: Bed, subject: Subject) -> Subject:
    """The base at top level, which older readers take, is another than the one in ``rope_parameters``."""
    return keys(rope_theta=subject.config["rope_theta"] / 10)(bed, subject)


def ids_differ(bed: Bed, subject: Subject) -> Subject:
    """Inside ``eagle_config`` stand other layers than at top level."""
    inner = {**subject.config["eagle_config"], IDS: [t + 3 for t in bed.taps]}
    return replace(subject, config=subject.config | {"eagle_config": inner})


def llama(bed: Bed) -> bool:
    """Targets whose stream SGLang captures: of Gemma 3 it hands over a branch, whatever the flags."""
    return bed.target.architecture == "LlamaForCausalLM"


def flagged(name: str, expected: str | None, change: Change, *also: str, kind: str = "C") -> Mutation:
    return Mutation(
        name, kind, expected, change, also=also, inventory=expected != "healthy", keeps_contract=True, applies=llama
    )


MUTATIONS: list[Mutation] = [
    flagged("SGLang runs EAGLE", "algorithm-eagle", sglang(f"--speculative-algorithm EAGLE {CHAIN}")),
    flagged("vLLM runs eagle", "algorithm-eagle",
            vllm('{"method": "eagle", "model": "here", "num_speculative_tokens": 3}')),
    flagged("24 draft tokens for a chain of 4 steps", "draft-tokens-lowered",
            sglang("--speculative-num-steps 4 --speculative-eagle-topk 1 --speculative-num-draft-tokens 24")),
    flagged("2 draft tokens for 2 steps", "draft-tokens-below-steps",
            sglang("--speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 2")),
    flagged("a flag that contradicts itself", "flag-refused",
            sglang("--speculative-num-draft-tokens 4 --speculative-eagle-topk 1")),
    flagged("a field vLLM does not know", "flag-refused",
            vllm('{"method": "eagle3", "model": "here", "num_spec_tokens": 3}')),
    flagged("acceptance made up", "acceptance-faked", sglang(f"SGLANG_SIMULATE_ACC_LEN=3 {CHAIN}")),
    flagged("drafter in fp16", "drafter-dtype-forced", sglang(f"--dtype float16 {CHAIN}")),
    flagged("two batches overlapped", "taps-too-few", sglang(f"--enable-two-batch-overlap {CHAIN}")),
    flagged("verified on a CPU", "verify-greedy", sglang(f"--device cpu {CHAIN}")),
    flagged("the target's quantisation inherited", "drafter-target-quantisation", sglang(f"--quantization fp8 {CHAIN}"),
            kind="Q"),
    flagged("flags as they should be, SGLang", "healthy", sglang(CHAIN), kind="H"),
    flagged("flags as they should be, vLLM", "healthy",
            vllm('{"method": "eagle3", "model": "here", "num_speculative_tokens": 3}'), kind="H"),
    Mutation("quantisation of the target in config.json", "Q", "drafter-target-quantisation",
             keys(quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"}), inventory=True,
             also=("weights-missing",)),
    Mutation("contract of other taps", "C", "contract-edited",
             lambda bed, s: contract(taps=[t + 1 for t in bed.taps])(bed, s), also=("taps-off-by-one", "taps-differ"),
             inventory=True, keeps_contract=True),
    Mutation("contract of a normed feedback", "C", "contract-edited", contract(feedback="after the last norm"),
             also=("feedback-post-norm",), inventory=True, keeps_contract=True,
             applies=lambda bed: not bed.config.get("norm_output")),
    Mutation("two bases", "C", "keys-contradict", bases_differ, also=("rope-base-wrong",), inventory=True),
    Mutation("two lists of ids", "C", "keys-contradict", ids_differ, also=("taps-ambiguous", "taps-differ"),
             inventory=True),
    Mutation("training flag not saved", "C", "recipe-flag-not-saved", keys(remove=["fc_norm", "norm_output"]),
             also=("fc-norm-skipped", "feedback-pre-norm", "weights-unexpected"), inventory=True,
             applies=lambda bed: bool(bed.config.get("fc_norm"))),
]  # fmt: skip
