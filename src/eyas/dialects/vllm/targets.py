"""Which classes of targets vLLM knows, and how each hands over its layers to a drafter.

Read from vLLM 0.32.0: model_executor/models/registry.py and every class there, for the interface ``SupportsEagle3``;
those that a CPU build can import were asked (tests/fixtures/engines/vllm-ask.json, ``classes``).
"""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Classes with the interface.
SUPPORTING = _names("""
    AfmoeForCausalLM ApertusForCausalLM Cohere2MoeForCausalLM CohereCompassForConditionalGeneration
    Cosmos3ForConditionalGeneration DeepseekForCausalLM DeepseekV2ForCausalLM DeepseekV32ForCausalLM
    DeepseekV3ForCausalLM DeepseekV41ForCausalLM DeepseekV4ForCausalLM DeepseekV4ForConditionalGeneration
    Ernie4_5ForCausalLM Exaone4_5_ForConditionalGeneration Gemma4ForCausalLM Gemma4ForConditionalGeneration
    Gemma4UnifiedForConditionalGeneration Glm5NextForCausalLM Glm5NextForConditionalGeneration GlmMoeDsaForCausalLM
    GptOssForCausalLM GraniteForCausalLM GraniteSWAForCausalLM IQuestCoderForCausalLM InternLM3ForCausalLM
    InternS1ProForConditionalGeneration InternS2MobiusForConditionalGeneration InternS2PreviewForConditionalGeneration
    K2HorizonForCausalLM KimiK25ForConditionalGeneration KimiK3ForConditionalGeneration KimiLinearForCausalLM
    LLaMAForCausalLM LagunaForCausalLM LightOnOCRForConditionalGeneration Llama4ForCausalLM
    Llama4ForConditionalGeneration LlamaForCausalLM LlavaForConditionalGeneration MiMoForCausalLM
    MiMoV2FlashForCausalLM MiMoV2ForCausalLM MiMoV2OmniForCausalLM MiniCPM3ForCausalLM MiniCPMForCausalLM
    MiniCPMV4_6ForConditionalGeneration MiniCPMV4_7ForConditionalGeneration MiniMaxM2ForCausalLM
    MiniMaxM3SparseForCausalLM MiniMaxM3SparseForConditionalGeneration Ministral3ForCausalLM
    Mistral3ForConditionalGeneration MistralForCausalLM MistralLarge3ForCausalLM MuseGlimmerForCausalLM
    MuseGlimmerForConditionalGeneration NemotronHForCausalLM NemotronHPuzzleForCausalLM
    NemotronH_Nano_Omni_Reasoning_V3 NemotronH_Nano_VL_V2 NemotronH_Omni_Reasoning_V3
    NemotronH_Super_Omni_Reasoning_V3 OpenCUAForConditionalGeneration Phi3ForCausalLM PixtralForConditionalGeneration
    Plamo3ForCausalLM Qwen2ForCausalLM Qwen2_5_VLForConditionalGeneration Qwen3ASRForConditionalGeneration
    Qwen3ASRRealtimeGeneration Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM
    Qwen3OmniMoeForConditionalGeneration Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration
    Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration
    Qwen4ExpForConditionalGeneration SarvamMLAForCausalLM Step1ForCausalLM TeleChat2ForCausalLM TeleChat3ForCausalLM
    TeleFLMForCausalLM
""")

# Classes without it: vLLM stops. An architecture in neither list is run by the Transformers backend, which has it.
OTHERS = _names("""
    AXK1ForCausalLM AriaForConditionalGeneration AudioFlamingo3ForConditionalGeneration BagelForConditionalGeneration
    BailingMoeForCausalLM BailingMoeV2ForCausalLM BailingMoeV2_5ForCausalLM BailingMoeV3ForCausalLM
    BailingMoeV3VLForConditionalGeneration BeeForConditionalGeneration Blip2ForConditionalGeneration BloomForCausalLM
    ChatGLMForConditionalGeneration ChatGLMModel Cohere2ForCausalLM Cohere2VisionForConditionalGeneration
    CohereAsrForConditionalGeneration CohereForCausalLM Cosmos3EdgeForConditionalGeneration DbrxForCausalLM
    DeciLMForCausalLM DeepseekOCR2ForCausalLM DeepseekOCRForCausalLM DeepseekVLV2ForCausalLM
    DiffusionGemmaForBlockDiffusion Dots3NoteForCausalLM DotsOCRForCausalLM Eagle2_5_VLForConditionalGeneration
    Ernie4_5_MoeForCausalLM Ernie4_5_VLMoeForConditionalGeneration Exaone4ForCausalLM ExaoneForCausalLM
    ExaoneMoEForCausalLM ExaoneMoeForCausalLM FalconForCausalLM FalconH1ForCausalLM FalconMambaForCausalLM
    FireRedASR2ForConditionalGeneration FunASRForConditionalGeneration FunAudioChatForConditionalGeneration
    GLM4VForCausalLM GPT2LMHeadModel GPTJForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM
    Gemma3ForConditionalGeneration Gemma3nForCausalLM Gemma3nForConditionalGeneration GemmaForCausalLM Glm4ForCausalLM
    Glm4MoeForCausalLM Glm4MoeLiteForCausalLM Glm4vForConditionalGeneration Glm4vMoeForConditionalGeneration
    GlmAsrForConditionalGeneration GlmOcrForConditionalGeneration Granite4VisionForConditionalGeneration
    GraniteMoeForCausalLM GraniteMoeHybridForCausalLM GraniteMoeSWAForCausalLM GraniteMoeSharedForCausalLM
    GraniteSpeechForConditionalGeneration GraniteSpeechPlusForConditionalGeneration H2OVLChatModel
    HCXVisionV2ForCausalLM HYV3ForCausalLM HYV4ForCausalLM HfMoondream HrmTextForCausalLM HyperCLOVAXForCausalLM
    IQuestLoopCoderForCausalLM Idefics3ForConditionalGeneration InklingForCausalLM InklingForConditionalGeneration
    InternLM2ForCausalLM InternS1ForConditionalGeneration InternVLChatModel InternVLForConditionalGeneration
    IsaacForConditionalGeneration JambaForCausalLM KananaVForConditionalGeneration KeyeForConditionalGeneration
    KeyeVL1_5ForConditionalGeneration KimiVLForConditionalGeneration Lfm2ForCausalLM Lfm2MoeForCausalLM
    Lfm2VlForConditionalGeneration Llama_Nemotron_Nano_VL LlavaNextForConditionalGeneration
    LlavaNextVideoForConditionalGeneration LlavaOnevision2ForConditionalGeneration
    LlavaOnevisionForConditionalGeneration LongcatFlashForCausalLM LongcatFlashNgramForCausalLM Mamba2ForCausalLM
    MambaForCausalLM MiDashengLMModel MiniCPMO MiniCPMV MixtralForCausalLM Molmo2ForConditionalGeneration
    MolmoForCausalLM Moondream3ForCausalLM MoonshotKimiaForCausalLM MossAudioModel
    MossTranscribeDiarizeForConditionalGeneration NVLM_D NemotronForCausalLM NemotronParseForConditionalGeneration
    OPTForCausalLM OlmoHybridForCausalLM OlmoeForCausalLM OpenPanguVLForConditionalGeneration
    OpenVLAForActionPrediction OrionForCausalLM Ovis Ovis2_5 Ovis2_6ForCausalLM Ovis2_6_MoeForCausalLM
    PaddleOCRVLForConditionalGeneration PaliGemmaForConditionalGeneration PanguEmbeddedForCausalLM
    PanguProMoEV2ForCausalLM PanguUltraMoEForCausalLM Param2MoEForCausalLM Phi3VForCausalLM Phi4ForCausalLMV
    Phi4MMForCausalLM PhiMoEForCausalLM QianfanOCRForConditionalGeneration Qwen2AudioForConditionalGeneration
    Qwen2MoeForCausalLM Qwen2VLForConditionalGeneration Qwen2_5OmniForConditionalGeneration Qwen2_5OmniModel
    Qwen4ExpForCausalLM RForConditionalGeneration Rnj1ForCausalLM SarvamMoEForCausalLM SkyworkR1VChatModel
    SmolVLMForConditionalGeneration SolarForCausalLM StableLmForCausalLM Step3TextForCausalLM
    Step3VLForConditionalGeneration Step3p5ForCausalLM Step3p7ForConditionalGeneration StepVLForConditionalGeneration
    UltravoxModel UnlimitedOCRForCausalLM VoxtralForConditionalGeneration VoxtralRealtimeGeneration
    WhisperForConditionalGeneration Zamba2ForCausalLM
""")

# They add a residual that is not there yet at the entrance of layer 0 (models/deepseek_v2.py:1562).
NO_TAP_0 = _names("""
    DeepseekForCausalLM DeepseekV2ForCausalLM DeepseekV3ForCausalLM MistralLarge3ForCausalLM
    KimiK25ForConditionalGeneration
""")
# On CUDA they look at the entrance of layers, never behind the last (vllm/models/deepseek_v32/nvidia/model.py:289).
NO_LAST_TAP = _names("DeepseekV32ForCausalLM GlmMoeDsaForCausalLM")
# Several residual streams, of which a tap is the mean (vllm/models/deepseek_v4/cpu/model.py:614): no tap of ours.
MEAN_OF_STREAMS = _names("DeepseekV4ForCausalLM DeepseekV4ForConditionalGeneration DeepseekV41ForCausalLM")
