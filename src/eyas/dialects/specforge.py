"""SpecForge (sgl-project), revision a6b6b02: the folder its exporters write.

Its states come from SGLang: ids go to the target class's own setter (algorithms/model_providers.py:188,
offline_capture/sglang_backend/capture.py:86), whose rule for a few families changed between releases. Always three
taps, one layer, no bias. ``norm_output`` is not what engines take it for: true, its default, is a norm before the head
and never touches what the next depth is fed; false is no norm before the head (modeling/draft/llama3_eagle.py:1690,
1772). The embedding is the target's, frozen, whether the folder holds it or not. A run's own choice of layers
(``model.aux_hidden_state_layer_ids``) is not written into the folder.
"""

from __future__ import annotations

from eyas.contract import Contract, Fact
from eyas.dialects import ids, reading, rope
from eyas.dialects.keys import Keys
from eyas.dialects.reading import Draft, Reading
from eyas.dialects.wiring import Files, TargetFacts

ARCHITECTURE = "LlamaForCausalLMEagle3"
# SGLang hands a drafter what the MLP of a layer adds, not the stream (models/gemma3_causal.py:369 and :635).
GEMMA_3 = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
# Keys that other trainers write beside this architecture, and this one never.
_FOREIGN = (ids.KEY, "norm_before_residual", "norm_before_fc", "num_aux_hidden_states", "truncated_vocab_size")
_INNER = {ids.KEY, "use_aux_hidden_state"}  # what its configs put into eagle_config
# Left in its configs by the target's config that they were made from, and meaningless to a LlamaConfig.
_MARKS = ("target_model_type", "max_window_layers")


def recognise(files: Files) -> str | None:
    keys = Keys(files.config)
    foreign = [key for key in _FOREIGN if key in keys] + sorted(set(keys.inside("eagle_config").config) - _INNER)
    if keys.texts("architectures") != (ARCHITECTURE,) or foreign:
        return None
    if marks := [key for key in _MARKS if key in keys]:
        return f"{ARCHITECTURE} beside {marks[0]}, which SpecForge's draft configs carry"
    names = set(files.tensors or ())
    layer = any(name.startswith("midlayer.") for name in names)
    if layer and {"t2d", "d2t"} <= names and not any("embed" in name for name in names):
        return "midlayer.*, d2t and t2d and no embedding: what SpecForge's exporter to SGLang writes"
    return None


def read(files: Files, target: TargetFacts | None) -> Contract:
    return read_all(files, target).contract


def read_all(files: Files, target: TargetFacts | None) -> Reading:
    keys = Keys(files.config)
    draft = Draft()
    if target is not None and target.architecture in GEMMA_3:
        draft.set("tap_state", Fact("branch", "inferred"))
    draft.set("fc_norm", reading.norms_before_fc(Fact(False, "defaulted"), keys.flag("fc_norm")))
    draft.set("head_norm", keys.flag("norm_output", default=True))
    draft.set("rope", rope.read(keys))
    _taps(draft, keys, target)
    reading.vocabulary(draft, keys, keys, files)
    reading.max_positions(draft, keys, 2048)
    return draft.done()


def _taps(draft: Draft, keys: Keys, target: TargetFacts | None) -> None:
    said = keys.inside("eagle_config").ids(ids.KEY)
    if said is None:
        draft.set("taps", reading.default_taps(target))
        return
    one_more = ids.taps(said, "layer output")
    rules = {one_more, ids.captured(said, target)}
    if target is None and said[0] != 1:
        rules.add(ids.taps(said, "tap"))  # of a family that adds one only where the first id is 1
    if len(rules) == 1:
        draft.set("taps", Fact(one_more, "declared"))
    else:
        draft.leave_open(
            "taps",
            (*sorted(rules - {one_more}), one_more),
            "which SGLang captured the states, and for which target: for some families its rule of adding one came "
            "to depend on the first or last id (pull requests 25454 and 32334)",
        )
