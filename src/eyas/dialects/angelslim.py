"""AngelSlim (Tencent), revision 67394ce: the folder of its EAGLE-3 trainer.

Taps are Hugging Face's states after layers 1, n//2-1 and n-4, so 2, n//2 and n-3; a list given to a run is not written
down, and is concatenated in the order given (train/models/target/target_model_wrapper.py:578-629). One layer, no bias,
no switch; the embedding is the target's, frozen. ``tie_word_embeddings`` is the target's own and left standing: the
head is separate (train/models/draft/llama_eagle3.py:543). Its rope takes ``rope_theta`` for mrope only (the same file,
``_init_rope``; executed: base 10000 with a config of 1e6).
"""

from __future__ import annotations

from eyas.contract import Contract
from eyas.dialects import ids, reading, rope
from eyas.dialects.eagle import unread_base
from eyas.dialects.keys import Keys
from eyas.dialects.reading import Draft, Reading
from eyas.dialects.wiring import Files, TargetFacts

ARCHITECTURES = ("Eagle3LlamaForCausalLM", "Eagle3LLamaforCausalLM", "CosyVoice3Eagle3LlamaForCausalLM")
_FOREIGN = (ids.KEY, "eagle_config", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def recognise(files: Files) -> str | None:
    keys = Keys(files.config)
    names = keys.texts("architectures")
    if len(names) != 1 or names[0] not in ARCHITECTURES or any(key in keys for key in _FOREIGN):
        return None
    return f"{names[0]} and none of the engines' switches, as AngelSlim writes its drafters"


def read(files: Files, target: TargetFacts | None) -> Contract:
    return read_all(files, target).contract


def read_all(files: Files, target: TargetFacts | None) -> Reading:
    keys = Keys(files.config)
    draft = Draft()
    draft.set("taps", reading.default_taps(target))
    if "mrope_section" in rope.read(keys).value:
        draft.set("rope", rope.read(keys))
    else:
        unread_base(draft, keys, "AngelSlim")
    reading.vocabulary(draft, keys, keys, files)
    reading.max_positions(draft, keys, 2048)
    if keys.flag("tie_word_embeddings").value:
        draft.notes.append("tie_word_embeddings is true and was not acted on in training: the head is its own.")
    return draft.done()
