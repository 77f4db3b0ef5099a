"""Which architectures are driven, by `model_type`: each is proven against the plain model by a test.

Knows nothing of how.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tidekv_cli.errors import ModelError

# The class that a config names under `architectures`.
SUPPORTED: dict[str, str] = {
    "afmoe": "AfmoeForCausalLM",
    "apertus": "ApertusForCausalLM",
    "apertus1p5_text": "Apertus1p5TextForCausalLM",
    "arcee": "ArceeForCausalLM",
    "aria_text": "AriaTextForCausalLM",
    "beam": "BeamForCausalLM",
    "bitnet": "BitNetForCausalLM",
    "codegen": "CodeGenForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "cohere2_moe": "Cohere2MoeForCausalLM",
    "cohere_compass_text": "CohereCompassForCausalLM",
    "cwm": "CwmForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "exaone": "LlamaForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "exaone_moe": "ExaoneMoeForCausalLM",
    "flex_olmo": "FlexOlmoForCausalLM",
    "flint": "FlintForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_bigcode": "GPTBigCodeForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "gptj": "GPTJForCausalLM",
    "granite": "GraniteForCausalLM",
    "granite_swa": "GraniteSWAForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoe_swa": "GraniteMoeSWAForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "helium": "HeliumForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM",
    "hy_v3": "HYV3ForCausalLM",
    "hyperclovax": "HyperCLOVAXForCausalLM",
    "internlm3": "LlamaForCausalLM",
    "iquestcoder": "LlamaForCausalLM",
    "jais2": "Jais2ForCausalLM",
    "kolibri1": "Kolibri1ForCausalLM",
    "laguna": "LagunaForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "mellum": "MellumForCausalLM",
    "mimo_v2_flash": "MiMoV2FlashForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "ministral": "MinistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "nanochat": "NanoChatForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "olmo": "OlmoForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "opt": "OPTForCausalLM",
    "persimmon": "PersimmonForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "sarvam_moe": "Glm4MoeForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "solar_open": "SolarOpenForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "vaultgemma": "VaultGemmaForCausalLM",
}
OLDEST = (5, 5)  # release of transformers that is taken
# From which release on these are proven: before it they are not there, or compute or allocate otherwise.
SINCE: dict[str, tuple[int, int]] = {
    "hy_v3": (5, 6),
    "laguna": (5, 7),
    "cohere2_moe": (5, 9),
    "hyperclovax": (5, 9),
    "mellum": (5, 10),
    "granitemoe": (5, 13),
    "granitemoeshared": (5, 13),
    "mimo_v2_flash": (5, 13),
    "nemotron": (5, 13),
    "gemma4_text": (5, 14),
    "gemma4_unified_text": (5, 14),
    "granite_swa": (5, 15),
    "granitemoe_swa": (5, 15),
    "cohere_compass_text": (5, 16),
    "aria_text": (5, 18),
    "opt": (5, 18),
    "beam": (5, 20),
    "kolibri1": (5, 20),
    "flint": (5, 21),
    "internlm3": (5, 23),
    "iquestcoder": (5, 23),
    "apertus1p5_text": (5, 24),
    "codegen": (5, 24),
    "exaone": (5, 24),
    "gptj": (5, 24),
    "sarvam_moe": (5, 24),
}
_RECURRENT = "layers keep a recurrent state beside or in place of keys and values"
_LATENT = "its cache holds latents or an index, not the keys that queries see"
_OWN = "its attention does not go through the interface that lets it be replaced"
_UNLIKE = "its layers are not one list that is run once from first to last"
_UNPLANNED = "what it takes cannot be simulated, because it depends on values"
_WINDOW = "its layers do not apply the window that its cache has"
# Why others are not.
REFUSED: dict[str, str] = {
    "dbrx": _UNPLANNED,
    "modernbert-decoder": _UNPLANNED,
    "moshi": _WINDOW,
    "bailing_hybrid": _RECURRENT,
    "bamba": _RECURRENT,
    "falcon_h1": _RECURRENT,
    "falcon_mamba": _RECURRENT,
    "granitemoehybrid": _RECURRENT,
    "inkling2_loop_text": _RECURRENT,
    "inkling2_text": _RECURRENT,
    "inkling_text": _RECURRENT,
    "jamba": _RECURRENT,
    "kimi_linear": _RECURRENT,
    "lara_mini": _RECURRENT,
    "lfm2": _RECURRENT,
    "lfm2_moe": _RECURRENT,
    "lfm3": _RECURRENT,
    "mamba": _RECURRENT,
    "mamba2": _RECURRENT,
    "minimax": _RECURRENT,
    "nemotron_h": _RECURRENT,
    "olmo_hybrid": _RECURRENT,
    "qwen3_5_moe_text": _RECURRENT,
    "qwen3_5_text": _RECURRENT,
    "qwen3_next": _RECURRENT,
    "qwen4_exp_text": _RECURRENT,
    "recurrent_gemma": _RECURRENT,
    "rwkv": _RECURRENT,
    "xlstm": _RECURRENT,
    "zamba": _RECURRENT,
    "zamba2": _RECURRENT,
    "zaya": _RECURRENT,
    "axk1": _LATENT,
    "axk2": _LATENT,
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "deepseek_v4": _LATENT,
    "dots3_note_text": _LATENT,
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _LATENT,
    "hy_v4": _LATENT,
    "longcat_flash": _LATENT,
    "minicpm3": _LATENT,
    "minimax_m3_vl_text": _LATENT,
    "sarvam_mla": _LATENT,
    "youtu": _LATENT,
    "bloom": _OWN,
    "diffllama": _OWN,
    "doge": _OWN,
    "falcon": _OWN,
    "gpt_neo": _OWN,
    "gpt_neox_japanese": _OWN,
    "jetmoe": _OWN,
    "mpt": _OWN,
    "openai-gpt": _OWN,
    "xglm": _OWN,
    "biogpt": _UNLIKE,
    "ctrl": _UNLIKE,
    "dory": _UNLIKE,
    "gemma3n_text": _UNLIKE,
    "hrm_text": _UNLIKE,
}


MOVING_ROTATIONS = ("dynamic", "longrope", "su")  # types that depend on the longest position
# Their keys are rotated otherwise than in halves, so places in the cache cannot count as positions.
OTHER_ROTATIONS = frozenset(
    (
        "cohere",
        "cohere2",
        "cohere2_moe",
        "ernie4_5",
        "ernie4_5_moe",
        "glm",
        "glm4",
        "gpt_oss",
        "helium",
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "nanochat",
    )
)


def check_slots(config: Mapping[str, Any]) -> None:
    """Raises `ModelError` for a config whose rotations cannot be turned back to places in the cache.

    Of others the built model may tell: see `engine/turning.py`.
    """
    kind = str(config.get("model_type"))
    moving = [name for key in ("rope_parameters", "rope_scaling") for name in _rotations(config.get(key))]
    if kind in OTHER_ROTATIONS or any(name in MOVING_ROTATIONS for name in moving):
        raise ModelError(
            f"this model of type {kind} does not rotate its keys in the one way that positions=slot can turn",
            "use positions=absolute",
        )


def _rotations(found: Any) -> Iterator[str]:
    """Types of rotation that are named there, of which there may be one a type of layer."""
    if isinstance(found, Mapping):
        yield str(found.get("rope_type", found.get("type")))
        for inner in found.values():
            yield from _rotations(inner)


def release_needed(kind: str, installed: str) -> str | None:
    """The transformers release that a supported `model_type` needs, None where `installed` is as new as that."""
    needed = SINCE.get(kind, OLDEST)
    major, minor = installed.split(".")[:2]
    return None if (int(major), int(minor)) >= needed else ".".join(map(str, needed))
