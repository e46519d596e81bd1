"""The one table of causes: what can be wrong, in one plain sentence, and what to change.

``docs/causes.md`` is rendered from here. A finding names its cause by slug, so a slug is part of the
machine-readable results: add slugs, never rename one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast, get_args

Kind = Literal[
    "taps", "weights", "vocab", "norm", "feedback", "rope", "shift",
    "data", "prompt", "precision", "engine", "flags", "metric", "quality",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)

KIND_MEANINGS: dict[Kind, str] = {
    "taps": "which layers of the target are read, and in what order",
    "weights": "tensors that did not arrive, or are not the trained ones",
    "vocab": "the map between draft ids and target ids",
    "norm": "norms and residuals that are missing, extra or misplaced",
    "feedback": "what the drafter is fed from its second step on",
    "rope": "rotary embedding, positions, length limits and windows",
    "shift": "which token stands beside which state",
    "data": "training data, stored states and loss masks",
    "prompt": "the served prompt is not the trained prompt",
    "precision": "quantisation and rotation of target or drafter",
    "engine": "faults inside the serving engine",
    "flags": "options and declarations that were overridden, ignored or edited",
    "metric": "the number is wrong or misread, not the drafter",
    "quality": "the drafter is simply this good, or speculation does not pay here",
}


@dataclass(frozen=True)
class Cause:
    slug: str
    kind: Kind
    sentence: str
    fix: str


# "[kind]" opens a group; "slug: sentence" is one line; the indented lines under it are the fix.
_TABLE = """
[taps]
taps-off-by-one: Every tap is read one layer deeper than the drafter was trained on.
  Lower every id in eagle_config.eagle_aux_hidden_state_layer_ids by 1: vLLM reads id k as tap k, most SGLang
  models as tap k + 1. `eyas show CHECKPOINT --engine NAME` prints the taps each engine will read.
taps-off-by-minus-one: Every tap is read one layer shallower than the drafter was trained on.
  Raise every id in eagle_config.eagle_aux_hidden_state_layer_ids by 1, or export again for this engine.
taps-swapped: Two of the taps change places before the fc layer.
  Concatenate the taps in the order of contract.taps; engines concatenate in ascending layer order.
taps-reversed: The taps are concatenated from the deepest to the shallowest.
  Concatenate in ascending layer order, or permute the column blocks of fc.weight to match the engine.
taps-engine-default: The engine reads its default taps [2, n//2, n-3] instead of the ones trained on.
  Put the ids where this engine looks: eagle_config.eagle_aux_hidden_state_layer_ids for SGLang and vLLM's V1
  runner, top-level eagle_aux_hidden_state_layer_ids for vLLM's V2 runner, each in
  that engine's own numbering (`eyas show --engine NAME`).
taps-highest-final-state: The highest tap was replaced by the target's final, normalised state.
  Read the residual stream at the declared layer. Hugging Face's last hidden_states entry is normed.
taps-too-few: One tap id lies outside the target or is repeated, so fewer states arrive than fc expects.
  Use distinct ids the engine can read; under SGLang's +1 rule id n-1 is out of reach for most targets.
taps-key-missing: The config names no taps, so every engine falls back on its own default.
  Write eagle_config.eagle_aux_hidden_state_layer_ids and the same list at top level.
taps-differ: The engine reads other layers than the drafter was trained on.
  Write the ids in this engine's own numbering: `eyas export CHECKPOINT --to ENGINE`.
taps-ambiguous: Nothing in the files says how their layer ids are counted, and engines count in two ways.
  Ask the trainer, or measure: `eyas check CHECKPOINT --target T` tries both readings.
taps-branch: The engine hands over what the last block of a layer adds, not the residual stream after it.
  Serve with an engine that captures the stream (vLLM does), or train on states captured by this one.
[weights]
checkpoint-unreadable: The checkpoint cannot be read: files missing, cut short, or not in a known format.
  Fetch or export it again and compare file sizes and hashes with the source.
weights-missing: Tensors the drafter needs are not in the file; engines would leave them random or at one.
  Export again with all tensors; `eyas show CHECKPOINT` lists the names it looked for.
weights-unexpected: The file holds tensors the built drafter does not use.
  Set the config flag that switches them on (e.g. fc_norm, norm_before_fc), or drop them on purpose.
weights-nan: Some weights are NaN or infinite.
  Go back to the last healthy training checkpoint; lower the learning rate or train in bf16 or fp32, not fp16.
weights-shape: Tensor shapes contradict the config, or one another.
  Correct hidden_size, draft_vocab_size, head counts or num_aux_hidden_states in config.json.
weights-changed: The weights are not the ones the contract was written for (their hash differs).
  If the change was meant, write the contract anew with `eyas export`; else restore the original file.
hidden-size-mismatch: The drafter's fc was built for a target of another hidden size.
  Use the target it was trained for, or set target_hidden_size if only the config is wrong.
target-differs: This is not the target the drafter was trained for.
  Check against the target named in the contract; after fine-tuning a target, train its drafter on.
head-missing: The file has no lm_head although the drafter does not share the target's head.
  Export lm_head.weight; SGLang would leave it uninitialised, vLLM would cut the target's head down.
head-random: The draft head holds random numbers.
  Restore lm_head.weight from the training checkpoint, and check that the export copied it.
embedding-random: The draft embedding holds random numbers.
  Drop embed_tokens.weight so that the target's is shared, or restore the trained rows.
embedding-overwritten: The engine replaces the drafter's own trained embedding by the target's.
  Train with the target's embedding frozen, or use an engine that keeps it (vLLM does; SGLang does not).
head-overwritten: The engine replaces the drafter's own trained head by the target's.
  Write draft_vocab_size as a number (never null) and keep lm_head.weight in the file.
layer-renamed: The decoder layer has a name this engine drops without a word (midlayer / layers.0).
  Export with this engine's names: `eyas export CHECKPOINT --engine NAME`.
head-tied-wrongly: tie_word_embeddings is true although the file has its own head rows.
  Set tie_word_embeddings to false in the drafter's config.json.
norm-weight-missing: One norm weight is not in the file and runs as all ones.
  Export the missing norm weight again.
layers-dropped: The engine builds fewer decoder layers than the drafter has and drops the others.
  Set num_hidden_layers to the number of layers in the file, or use an engine that runs several.
fc-skipped: The engine skips fc, because what fc takes happens to be as wide as what it gives.
  Serve with an engine that calls fc always (vLLM), or train with another number of taps or another width.
attention-bias-dropped: The biases of queries, keys and values are in the file but the engine has no place for them.
  Serve with an engine that reads attention_bias (vLLM), or train without the biases.
[vocab]
vocab-map-inconsistent: d2t and t2d do not describe the same set of tokens, or the map leaves the vocabulary.
  Rebuild both from one list of target ids: d2t[i] = id[i] - i, t2d[id] = true.
target-vocab-mismatch: The map was made for a target vocabulary of another size.
  Use the tokenizer and target of training; if the target's embedding was only padded, correct vocab_size.
d2t-missing: The map from draft ids to target ids is not there, so draft ids are used as target ids.
  Put d2t back into the file; without it only tokens whose two ids are equal can be accepted.
d2t-read-as-ids: d2t holds offsets but is read as ids, or the other way round.
  Write offsets, d2t[i] = target_id - i: SGLang, vLLM and llama.cpp all add i.
d2t-ramp: d2t is 0, 1, 2, ..., a default that nobody filled.
  Write the real offsets; where draft and target ids are the same, d2t is all zeros.
d2t-shuffled: Entries of d2t stand at the wrong draft ids.
  Restore d2t from the training run: i + d2t[i] must rise strictly.
t2d-first-ids: The mask marks the first N ids instead of the chosen tokens.
  Rebuild t2d from d2t, and train again if training used this mask.
d2t-stale: The map comes from another run: consistent in itself, but not the one the head was trained with.
  Copy d2t and t2d from the run that trained these weights, and clear the trainer's vocabulary cache.
t2d-too-few: The mask marks fewer tokens than the head has rows.
  Choose exactly draft_vocab_size tokens and rebuild d2t and t2d together.
[norm]
tap-post-norm: A tap is fed after the target's final norm, the drafter was trained on it before (or reversed).
  Feed the residual stream before the final norm: tap n is not Hugging Face's hidden_states[n].
fc-norm-skipped: The norm of each tap before fc is in the file but not applied.
  Set fc_norm to true (old SGLang name: use_aux_norm); SGLang drops the weights silently otherwise.
input-norm-skipped: The norm over the joined taps before fc is in the file but not applied.
  Set norm_before_fc to true, in eagle_config and at top level; some engines cannot express it.
head-norm-skipped: The last norm before the draft head is skipped.
  Apply norm.weight before lm_head; norm_output: false means "no head norm" to SpecForge and to no engine.
norm-gain-plus-one: Every norm gain is one too large (a 1 + w norm given gains that already hold the 1).
  Subtract 1 from all norm weights on export, or build plain RMSNorm layers.
norm-gain-minus-one: Every norm gain is one too small (gains stored as w - 1 and used as they are).
  Add 1 to all norm weights on export, or build the 1 + w norm the target family uses.
norm-gain-one-layer: A single norm has its gain off by one.
  Convert every norm of the layer by the same rule; input_layernorm and hidden_norm are easily forgotten.
residual-dropped: The residual connection inside the drafter's layer is missing.
  Add the layer's input back after attention and after the MLP.
norm-before-residual-ignored: The residual is taken before the norm, training took it after (or reversed).
  Write norm_before_residual explicitly; SGLang never reads it, so serve such a drafter with vLLM.
fc-norm-joint: One norm over all taps joined stands where training had one norm a tap.
  Export as fc_norm.0, fc_norm.1, ... with fc_norm: true, not as input_norm with norm_before_fc.
fc-norm-added: A norm stands before fc that training did not have.
  Remove fc_norm, norm_before_fc and use_aux_norm from the config, or set them to false.
head-norm-added: The last norm stands before the draft head, training had none there.
  No engine leaves it out: fold nothing, train with the norm (SpecForge: norm_output true, its default).
qk-norm-dropped: The norms of queries and keys are in the file but the engine's drafter has none.
  Use the architecture that has them (vLLM: Eagle3Qwen3ForCausalLM), or train without them.
later-norm-differs: Layers after the first are normed by another weight than the one trained.
  Write that norm under both names, input_layernorm and hidden_norm; `eyas export` does.
[feedback]
feedback-post-norm: From the second step on the drafter is fed its normalised state, not its raw one.
  Set norm_output to false or remove it.
feedback-pre-norm: From the second step on the drafter is fed its raw state, not its normalised one.
  Set norm_output to true, and use an engine that reads it (llama.cpp does not).
feedback-target-state: Every step is fed the target's state instead of the drafter's own last state.
  Feed the drafter's own output from the second step on.
feedback-stale: A step is fed the state of the step before last (a reused buffer).
  Copy the state out of the buffer before it is reused; try eager mode to confirm.
second-layer-no-residual: The second drafter layer runs without its residual.
  Carry (hidden, residual) from layer to layer; write one layer if the engine supports no more.
feedback-teacher-tokens: Training fed the true tokens at every step, never the drafter's own.
  This is normal for EAGLE-3 training; judge the drafter by the walk, not by step accuracy.
[rope]
rope-base-wrong: The rotary base differs from the one trained with.
  Write rope_theta explicitly, at top level and in rope_parameters; engines fall back on 10000.
rope-base-unread: The rotary base stands in a block of the config this engine does not read.
  Write it at top level as rope_theta as well as in rope_parameters.
rope-interleaved: Rotary pairs are interleaved where training split the head in halves (or reversed).
  Use the half-split (NeoX) layout, or permute the rows of q_proj and k_proj on export.
rope-scaling-dropped: Rotary scaling used in training is not applied.
  Copy rope_scaling from the trained config into the served one.
rope-scaling-added: Rotary scaling is applied although training had none.
  Remove rope_scaling from the drafter's config; do not inherit it from the target.
rope-scaling-differs: Rotary scaling is applied with other numbers than in training.
  Copy rope_scaling from the trained config into the served one, number by number.
position-limit-short: Contexts are longer than the drafter's position limit (max_position_embeddings).
  Raise max_position_embeddings to the served length, and check acceptance past the old limit.
positions-off-by-one: All positions are shifted by one against training.
  Start at position 0 for the first state; a constant shift is harmless only with plain rotary embedding.
step-positions-frozen: Draft steps after the first do not advance the position.
  Add 1 to the position at every draft step.
window-from-target: The drafter runs with the target's attention window, or without its own.
  Write sliding_window and layer_types of the drafter itself; null means full attention.
rope-partial-ignored: Only part of each head is to be rotated, but all of it is.
  Set partial_rotary_factor where the engine reads it.
[shift]
token-shift-missing: State t is paired with token t; it belongs with token t + 1.
  Shift the input ids left by one against the states.
token-shift-two: State t is paired with token t + 2; it belongs with token t + 1.
  Shift the input ids once, not twice, in the engine or the export.
training-shift-twice: Training shifted the inputs twice, so the drafter is best at a wrong shift.
  Remove one shift from the data pipeline (collator or model, not both) and train again.
chunk-tail-predicted: The last slot of a prefill chunk gets a predicted token, not the next prompt token.
  Turn chunked prefill off, or use an engine version that passes the next prompt token on.
gather-first-request: Every request of a batch is read at the index of the first one.
  Add each request's start offset to its last index; confirm with batch 1 against batch 4.
ids-cast-wrong: Token ids are read with the wrong integer width.
  Cast ids to int64 before they are handed over, not by viewing the same memory.
[data]
off-policy-records: The records are not the target's own answers, so rounds cannot be played on them.
  Regenerate the answers with the target at temperature 0: `eyas generate`.
states-zero: Stored states contain rows of zeros.
  Capture the states again and check that the capture hook ran for every token.
states-not-finite: Stored states contain NaN or infinite values.
  Find the layer that overflows (fp16?), run the target in bf16 or fp32, and capture again.
states-repeated: Rows of the stored states repeat one another.
  Capture the states again and check that each token's own row is copied, not a reused buffer.
states-of-other-request: Stored states belong to another request than the stored ids.
  Capture with prefix caching off and match states to requests by id, not by order.
states-rows-shuffled: The rows of the stored states are out of order inside a record.
  Capture again without chunk reordering; recompute a few rows one by one to confirm.
states-off-by-one-layer: Stored states come from one layer beside the declared taps.
  Correct the declared taps, or capture again; the capture tool's ids may mean tap k or tap k + 1.
mask-empty: The loss mask supervises nothing.
  Correct the answer markers of the template, then decode the first and last supervised token to be sure.
mask-full: The loss mask supervises every token, prompts included.
  Supervise answers only; check the template's answer markers.
mask-shifted: The loss mask is off by one against the tokens.
  Shift mask and labels together, once.
mask-empty-think: Empty think blocks are supervised, so the drafter learns the template instead of the text.
  Mask out the think block the template inserts.
states-truncated: States were cut to the length limit but ids were not.
  Cut ids, mask and states at the same length, and refuse records where they differ.
[prompt]
template-differs: The served chat template is not the one the drafter was trained with.
  Serve with the template of training, or train on with records made by the served one.
tokenizer-differs: The tokenizer is not the one the drafter was trained with.
  Use the tokenizer of training, added tokens included; hashes are in the contract.
think-block-dropped: Training had an empty think block before each answer, the served prompt has none.
  Pass the same enable_thinking setting in serving as in training.
think-block-added: The served prompt has an empty think block that training never had.
  Pass the same enable_thinking setting in serving as in training.
template-other-family: The prompt is written with another model family's template.
  Use the chat template in the target's own tokenizer folder.
template-missing: The prompt is sent raw, without the chat template.
  Use the chat endpoint, or apply the template before the completion endpoint.
thinking-newline-extra: An extra newline stands after the thinking prefix.
  Make served and trained prompts equal token by token; diff the ids of one prompt.
system-prompt-unseen: The served system prompt never occurred in training.
  Add records with this system prompt to training, or drop it.
text-loops: Answers repeat themselves, and loops are easy to draft: a high accept length on them is no quality.
  Measure on answers that do not loop; raise the length of answers or change the prompts.
[precision]
states-rotated: The target's states are rotated (Hadamard or other) against the ones trained on.
  Undo the rotation before the taps, fold it into fc.weight, or train on the rotated target.
target-quantised: The target is quantised; its states differ a little from the ones trained on.
  Usually a small loss; if it is not, capture states from the quantised target and train on.
drafter-quantised: The drafter is quantised.
  Usually no loss; serve the drafter unquantised to be sure.
drafter-dtype-forced: The engine runs the drafter in another precision than it was saved in.
  Serve in bf16 unless fp16 is needed, and compare accept length in both; states past 65,504 overflow in fp16.
drafter-target-quantisation: The drafter was loaded with the target's quantisation and left unfilled.
  Pass --speculative-draft-model-quantization unquant (SGLang), or give the drafter its own config.
[engine]
draft-cache-empty: The draft cache is empty for the prompt.
  Run the drafter over the whole prompt at prefill; turn prefix caching off to confirm.
draft-cache-not-refreshed: The draft cache keeps the drafter's own states for accepted tokens.
  Rerun the drafter over accepted tokens with the target's states after each verify step.
block-table-wrong-group: The drafter reads the cache through another group's block table.
  Use the drafter's own cache group; upgrade the engine, or turn hybrid cache groups off.
gather-later-requests: Requests after the first in a batch read wrong states.
  Run with batch 1 to confirm, then upgrade the engine.
nan-logits: Some steps give NaN logits; rounds are then all or nothing and the text turns to "!!!!".
  Run in bf16 or fp32, in eager mode, and look for the first NaN layer.
handover-states-random: After a prefill/decode handover the first step is fed uninitialised states.
  Send the last taps along with the handover, or turn the prefill/decode split off.
engine-cannot-express: This engine has no way to run the drafter as it was trained.
  Serve it with an engine that can (vLLM reads every switch), or train without what the finding names.
engine-falls-short: The engine keeps fewer drafted tokens than these files can give with the same number drafted.
  Compare what it wires (`eyas show CHECKPOINT --engine NAME==VERSION`), then serve the records' own prompts greedily.
speculation-idle: Requests run, but no round is drafted.
  See whether the engine turns drafts off at this load or for these requests (vLLM warns in its log), and restart it.
cache-drift: Acceptance sinks with uptime and a restart cures it: cache blocks are overwritten.
  Turn prefix caching off; if that holds, upgrade the engine and report the two settings.
sampling-differs: What the engine says at this temperature is not drawn from the target's own law.
  Serve at temperature 0, or without a drafter, and report it (vLLM 0.32 on a CPU leaves that temperature unset).
setting-costs: A setting of the engine costs drafted tokens: turned, and nothing else, they are kept.
  Serve with the setting that keeps them, upgrade the engine, and report the two settings with their counts.
[flags]
contract-missing: The checkpoint carries no contract, so every fact here is inferred.
  Write one with `eyas export` once the check has passed.
contract-edited: The engine's keys in config.json and the eyas contract disagree.
  Keep what was measured: export again, and edit the contract rather than single keys.
algorithm-eagle: The engine runs EAGLE, which uses the last state only, on an EAGLE-3 drafter.
  Pass --speculative-algorithm EAGLE3 (SGLang) or "method": "eagle3" (vLLM).
draft-tokens-lowered: More drafted tokens were asked for than a chain of these steps can give; they were cut.
  With top-k 1 set --speculative-num-draft-tokens to --speculative-num-steps + 1, or raise the steps.
draft-tokens-below-steps: Fewer draft tokens than steps + 1 were asked for: overridden or capped.
  Set --speculative-num-draft-tokens to at least --speculative-num-steps + 1.
draft-sampling-unset: Sampling is on but the draft sampling method was left at greedy.
  Set "draft_sample_method": "probabilistic" in vLLM's speculative_config.
flag-overridden: The engine resolves a flag to another value than the one asked for.
  Ask for the resolved value, or change what makes the engine override it (the finding names the rule).
draft-quantisation-ignored: The drafter's quantisation option did nothing.
  Compare the start-up log with the request, and quantise the checkpoint itself.
keys-contradict: Two places of config.json say different things, and engines read different ones.
  Write the same in both, or use `eyas export CHECKPOINT --to ENGINE`, which spells both places.
ids-odd: The layer ids are negative, repeated, out of range or out of order, which engines treat differently.
  Write distinct ids in ascending order, within the layers of the target, in this engine's own numbering.
table-outdated: The installed engine answers otherwise than the table that eyas carries for it.
  Believe the engine, and report the two answers: the table was read from another version.
flag-refused: The engine stops at its command line: a flag is unknown, missing, contradicted or out of range.
  Correct the flag that is named; `vllm serve --help=speculative-config` and SGLang's `--help` list them.
draft-path-defaulted: No drafter was named, so the engine loads the target's own checkpoint as one.
  Pass --speculative-draft-model-path with the drafter's folder.
recipe-flag-not-saved: A training flag that changes the maths was not saved in the config.
  Add the flag to config.json (norm_output, fc_norm, norm_before_fc, ...), and save it in the trainer.
[metric]
records-too-few: Too few records or rounds to say anything about accept length.
  Give more records: 200 rounds at least, 1,000 or more for a narrow interval.
tokens-after-end-counted: Tokens after the end of the text are counted as accepted.
  Cut each answer at its first end-of-text token before counting.
rate-definition-old: The accept rate follows another definition than the one it is compared with.
  Compare accept lengths; SGLang's old rate is length / draft tokens, the new one leaves the bonus token out.
bonus-dropped: The length was counted without the bonus token.
  Add 1: accept length = accepted + 1.
acceptance-faked: Acceptance is simulated: the engine keeps as many drafted tokens as a setting says.
  Unset SGLANG_SIMULATE_ACC_LEN (SGLang) or rejection_sample_method: synthetic (vLLM), and measure again.
verify-greedy: On this device drafts are verified greedily, whatever the temperature.
  Compare with greedy numbers only, or measure on a GPU.
rates-padded: The list of rates is longer than the drafted tokens; the rest is padding.
  Read the first K entries only.
counts-inconsistent: The engine's numbers contradict one another beyond rounding.
  Read one run at a time; if it stays, the text is edited, or the engine counts wrongly: report the line named.
tree-denominator: The accept rate is over the nodes of a draft tree, not over the tokens of a chain.
  Compare accept lengths, or serve a chain: --speculative-eagle-topk 1.
runs-mixed: One text holds several runs of the engine.
  Read the runs one by one; their numbers must not be averaged.
log-damaged: Lines about speculation are cut or garbled and were left out.
  Take the engine's own log file instead of a terminal's copy.
rates-at-different-k: Rates measured with different numbers of drafted tokens are compared.
  Measure both with the same number of drafted tokens.
observed-agrees: The engine's log agrees with what these files give.
  Change nothing in the engine; whatever is low is low in the drafter.
others-served: Others used the engine while it was measured, so its counters hold their requests too.
  Measure when nobody else uses it, or read per-request counts.
observed-exceeds: The engine's log shows more than these files give on these records.
  Look at the served text (loops are easy to draft), and check on records of that text.
[quality]
quality-low: Nothing is miswired; the drafter simply guesses seldom right.
  Train longer or on more of the target's own answers, then check again.
coverage-low: The map is right but too many tokens of this text lie outside the draft vocabulary.
  Choose the draft vocabulary from text like this, or enlarge it, and train on.
training-too-little: The drafter was trained on too little data.
  Train on more records, answered by the target itself.
language-unseen: The text is in a language or field the drafter never saw.
  Add records of that kind to training, answered by the target.
temperature-greedy-drafts: At this temperature greedy drafts cannot be kept more often.
  Lower the temperature, or sample the drafts ("draft_sample_method": "probabilistic" in vLLM).
sparse-target-batch-one: Accept length is fine but a sparse target gains nothing at batch 1.
  Measure at the batch size you serve; draft fewer tokens.
overfit: The drafter has learnt its training text by heart and fails on other text.
  Take an earlier checkpoint or fewer epochs; watch accept length on held-out records.
"""


def _parse(table: str) -> dict[str, Cause]:
    """Read ``_TABLE``; every slip in it is caught here, at import."""
    kind: Kind | None = None
    parts: dict[str, tuple[Kind, str, list[str]]] = {}
    slug = ""
    for line in table.strip().splitlines():
        if line.startswith("["):
            assert line[1:-1] in KINDS, line
            kind = cast(Kind, line[1:-1])
        elif line.startswith("  "):
            parts[slug][2].append(line.strip())
        else:
            slug, _, sentence = line.partition(": ")
            assert kind is not None, line
            assert sentence, line
            assert slug not in parts, line
            parts[slug] = (kind, sentence, [])
    return {slug: Cause(slug, k, sentence, " ".join(fix)) for slug, (k, sentence, fix) in parts.items()}


CAUSES: dict[str, Cause] = _parse(_TABLE)


class UnknownCauseError(AssertionError, KeyError):
    """A slug that is not in the table: a bug of ours, never of the user's."""


def cause(slug: str) -> Cause:
    if slug not in CAUSES:
        raise UnknownCauseError(f"{slug!r} is not in eyas.causes; add it to the table")
    return CAUSES[slug]


def as_markdown() -> str:
    """``docs/causes.md``: one section a kind, one row a cause."""
    lines = [
        "# Causes",
        "",
        "Every fault eyas can name. Made from `src/eyas/causes.py`: edit that file, not this one.",
    ]
    for kind in KINDS:
        lines += ["", f"## {kind}", "", f"{KIND_MEANINGS[kind].capitalize()}.", ""]
        lines += ["| cause | what is wrong | what to change |", "|---|---|---|"]
        rows = [c for c in CAUSES.values() if c.kind == kind]
        lines += [f"| `{c.slug}` | {_cell(c.sentence)} | {_cell(c.fix)} |" for c in rows]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
