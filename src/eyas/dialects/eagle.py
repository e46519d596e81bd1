"""EAGLE (SafeAILab), revision cb7e084: the authors' own trainer and its published drafters.

Everything is hard-coded: taps 2, n//2 and n-3 (traineagle3/modeling_llama_kv.py:1137), one layer whatever the config
counts, no bias, no switch. The trainer builds its rope from ``rope_scaling`` alone and never reads ``rope_theta``
(traineagle3/cnets.py:207, executed), while its decoder does (model/cnets.py:215). Frozen weights are not saved
(traineagle3/main.py:349), so the embedding is the target's, unless the drafter is of another width.
"""

from __future__ import annotations

from eyas.contract import Contract, Fact
from eyas.dialects import ids, reading, rope
from eyas.dialects.keys import Keys
from eyas.dialects.reading import Draft, Reading
from eyas.dialects.wiring import Files, TargetFacts

ARCHITECTURES = ("LlamaForCausalLM", "LlamaForCausalLMEagle3")
OLD_CONFIG = "4.28.1"  # the transformers of its template, which nothing that saves anew would keep
_FOREIGN: tuple[str, ...] = (
    ids.KEY,
    "eagle_config",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
)
_FOREIGN += ("num_aux_hidden_states", "truncated_vocab_size", "target_model_type", "max_window_layers")


def recognise(files: Files) -> str | None:
    keys = Keys(files.config)
    if "draft_vocab_size" not in keys or any(key in keys for key in _FOREIGN):
        return None
    names = keys.texts("architectures")
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        return None
    if names[0] == ARCHITECTURES[0]:
        return "LlamaForCausalLM with a draft vocabulary, as EAGLE's own trainer has it"
    if keys.text("transformers_version") == OLD_CONFIG:
        return f"transformers {OLD_CONFIG}, as in the configs of EAGLE's authors"
    width = keys.count("target_hidden_size")
    if width is not None and width != keys.count("hidden_size"):
        return "target_hidden_size beside another width and no other switch, as in EAGLE's own drafters"
    return None


def read(files: Files, target: TargetFacts | None) -> Contract:
    return read_all(files, target).contract


def read_all(files: Files, target: TargetFacts | None) -> Reading:
    keys = Keys(files.config)
    draft = Draft()
    draft.set("taps", reading.default_taps(target))
    unread_base(draft, keys, "EAGLE's trainer")
    reading.vocabulary(draft, keys, keys, files)
    reading.max_positions(draft, keys, 2048)
    width = keys.count("target_hidden_size")
    names = reading.tensors(files)
    if names is not None and "embed_tokens.weight" in names:
        draft.set("embedding", Fact("own", "inferred"))
    elif width is not None and width != keys.count("hidden_size"):
        draft.set("embedding", Fact("own", "defaulted"))
    return draft.done()


def unread_base(draft: Draft, keys: Keys, who: str) -> None:
    """``rope`` of a trainer that never reads ``rope_theta``: open where the config names another base than 10000."""
    said = rope.read(keys)
    trained = rope.normal({**said.value, "rope_theta": rope.THETA})
    if said.value == trained:
        draft.set("rope", said)
    else:
        draft.leave_open(
            "rope",
            (trained, said.value),
            f"{who} does not read rope_theta: its own attention, run on such a config, turns with base {rope.THETA:g}; "
            "accuracy at depth 0 under either base tells",
        )
