"""Tiny random models of the decoder-only architectures in transformers. Knows neither which of them the package can
drive nor what any of them computes: only how to make one small, with every special trait of it switched on."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

WINDOW = 24  # the sliding window, attention chunk or index budget of every architecture that has one

# What every architecture gets, as far as its config knows the name.
_BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "init_std": 0.3,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "sliding_window": WINDOW,
    "ffn_hidden_size": 96,
    "ffn_dim": 96,
    # Experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_experts_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "dense_intermediate_size": 96,
    "expert_ffn_hidden_size": 32,
    # Latent and indexed attention
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "index_topk": WINDOW,
    "index_head_dim": 16,
    "index_n_heads": 16,  # with few, many index scores are exactly zero and the choice among them is arbitrary
    # Recurrent layers of hybrids
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_chunk_size": 32,
    "mamba_dt_rank": 4,
    "chunk_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
}

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_THREE_TO_ONE = [_SLIDING, _SLIDING, _SLIDING, _FULL]
_COMPRESSED = "heavily_compressed_attention", "compressed_sparse_attention"
_LATENT: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 8}  # MLA: every head has keys of its own
_SCALED: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
}

_INKLING: dict[str, Any] = {
    "layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid_sliding", "hybrid"],
    "unpadded_vocab_size": 128,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": WINDOW,
    "d_rel": 8,
    "rel_extent": 64,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def _rope(theta: float, part: float = 1.0) -> dict[str, Any]:
    """Plain rotary parameters for one type of layer."""
    return {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": part}


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "afmoe": {"mup_enabled": True, "route_scale": 1.5},
    "apertus": {},
    "apertus1p5_text": {},
    "arcee": {},
    "aria_text": {},
    "axk1": _LATENT,
    "axk2": {**_LATENT, "gated_norm_rank": 8},
    "bailing_hybrid": {**_LATENT, "layer_group_size": 4},
    "bamba": {"attn_layer_indices": [2]},
    "beam": {"layer_types": _THREE_TO_ONE, "final_logit_softcapping": 5.0},
    "biogpt": {},
    "bitnet": {},
    "bloom": {},
    "codegen": {"rotary_dim": 8},
    "cohere": {"use_qk_norm": True, "logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25},
    "cohere2_moe": {"logit_scale": 0.25},
    "cohere_compass_text": {
        "layer_types": _THREE_TO_ONE,
        "logit_scale": 0.25,
        "rope_parameters": {
            kind: {**_rope(theta), "mrope_section": [3, 3, 2]} for kind, theta in ((_FULL, 1e4), (_SLIDING, 1e3))
        },
    },
    "ctrl": {"n_positions": 512, "dff": 96},
    "cwm": {},
    "dbrx": {
        "d_model": 64,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "layer_types": [_COMPRESSED[0], _COMPRESSED[1], _COMPRESSED[1], _COMPRESSED[0]],
        "compress_rates": {_COMPRESSED[0]: 16, _COMPRESSED[1]: 4},
        "o_groups": 2,
        "o_lora_rank": 8,
        "index_topk": 4,
    },
    "diffllama": {},
    "doge": {"sliding_window": None, "keep_window_size": WINDOW},
    "dory": {
        "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL],
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
    },
    "dots1": {"layer_types": [_FULL, _SLIDING, _SLIDING, _FULL]},
    "dots3_note_text": {
        **_LATENT,
        "layer_types": ["indexed_attention", _SLIDING, _SLIDING, "indexed_attention"],
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 20,
        "swa_qk_nope_head_dim": 8,
        "swa_qk_rope_head_dim": 8,
        "swa_v_head_dim": 12,
        "swa_head_dim": 16,
    },
    "ernie4_5": {"use_bias": True},
    "ernie4_5_moe": {"use_bias": True},
    "exaone": {},
    "exaone4": {},
    "exaone_moe": {},
    "falcon": {},
    "falcon_h1": {"mamba_d_ssm": 128, "key_multiplier": 0.5, "lm_head_multiplier": 0.5},
    "flex_olmo": {},
    "flint": {},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0},
    "gemma3_text": {"layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING], "query_pre_attn_scalar": 20},
    "gemma3n_text": {
        "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL],
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "final_logit_softcapping": 5.0,
    },
    "gemma4_text": {
        "layer_types": _THREE_TO_ONE,
        "global_head_dim": 32,
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 8,
    },
    "gemma4_unified_text": {"layer_types": _THREE_TO_ONE, "global_head_dim": 32},
    "glm": {},
    "glm4": {},
    "glm4_moe": {"use_qk_norm": True},
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _LATENT,
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
    "gpt_bigcode": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "gpt_neox": {},
    "gpt_neox_japanese": {},
    "gpt_oss": {"rope_parameters": {**_YARN, "truncate": False}},
    "gptj": {"rotary_dim": 8},
    "granite": _SCALED,
    "granite_swa": {**_SCALED, "layer_rope_theta": [0, 1e4, 1e3, 1e4]},
    "granitemoe": _SCALED,
    "granitemoe_swa": {**_SCALED, "layer_rope_theta": [0, 1e4, 1e3, 1e4]},
    "granitemoehybrid": {**_SCALED, "layer_types": [_LINEAR, _LINEAR, _FULL, _LINEAR]},
    "granitemoeshared": _SCALED,
    "helium": {},
    "hrm_text": {"prefix_lm": False, "initializer_range": 0.1},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "hy_v4": _LATENT,
    "hyperclovax": _SCALED,
    "inkling2_loop_text": {
        **_INKLING,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "loop_gate_rank": 8,
    },
    "inkling2_text": {**_INKLING, "n_layers_per_attn_res_block": 2},
    "inkling_text": _INKLING,
    "internlm3": {},
    "iquestcoder": {},
    "jais2": {},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 2},
    "jetmoe": {"kv_channels": 16},
    "kimi_linear": {**_LATENT, "layer_types": [_LINEAR, _LINEAR, _FULL, _LINEAR]},
    "kolibri1": {"layer_types": _THREE_TO_ONE},
    "laguna": {"layer_types": [_FULL, _SLIDING, _SLIDING, _FULL], "num_attention_heads_per_layer": [4, 8, 8, 4]},
    "lara_mini": {},
    "lfm2": {"layer_types": ["conv", _FULL, "conv", _FULL]},
    "lfm2_moe": {"layer_types": ["conv", _FULL, "conv", _FULL]},
    "lfm3": {"layer_types": ["conv", _FULL, _SLIDING, "conv"]},
    "llama": {},
    "llama4_text": {
        "attention_chunk_size": WINDOW,
        "floor_scale": 16,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 96,
    },
    "longcat_flash": {**_LATENT, "num_layers": 2, "zero_expert_num": 2},
    "mellum": {"layer_types": _THREE_TO_ONE},
    "mimo_v2_flash": {
        "layer_types": [_FULL, _SLIDING, _SLIDING, _FULL],
        "rope_parameters": {_FULL: _rope(1e4, 0.5), _SLIDING: _rope(1e3, 0.5)},
    },
    "minicpm3": _LATENT,
    "minimax": {"sliding_window": None, "block_size": 32},
    "minimax_m2": {},
    "minimax_m3_vl_text": {
        "layer_types": [_FULL, "minimax_m3_sparse", "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "rotary_dim": 8,
        "index_n_heads": 2,  # one for each key-value head
        "index_block_size": 8,
        "index_topk_blocks": 3,
    },
    "ministral": {"layer_types": [_FULL, _SLIDING, _SLIDING, _SLIDING]},
    "ministral3": {"sliding_window": None, "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1}},
    "mistral": {},
    "mixtral": {"sliding_window": None},
    "modernbert-decoder": {},
    "moshi": {"sliding_window": 512},
    "mpt": {},
    "nanochat": {"final_logit_softcapping": 5.0},
    "nemotron": {},
    "nemotron_h": {
        "sliding_window": None,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 32,
    },
    "olmo": {"clip_qkv": 2.0},
    "olmo2": {},
    "olmo3": {},
    "olmo_hybrid": {},
    "olmoe": {"clip_qkv": 2.0},
    "openai-gpt": {},
    "opt": {},
    "persimmon": {},
    "phi": {"qk_layernorm": True},
    "phi3": {},
    "phimoe": {
        "sliding_window": None,
        "lm_head_bias": True,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 8,
            "long_factor": [1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0],
            "short_mscale": 1.1,
            "long_mscale": 1.3,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen2_moe": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen3_5_moe_text": {},
    "qwen3_5_text": {},
    "qwen3_moe": {"sliding_window": None},
    "qwen3_next": {},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": WINDOW,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 8,
    },
    "recurrent_gemma": {},
    "sarvam_mla": _LATENT,
    "sarvam_moe": {},
    "seed_oss": {},
    "smollm3": {"sliding_window": None},
    "solar_open": {},
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True},
    "starcoder2": {},
    "vaultgemma": {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0},
    "xglm": {},
    "youtu": _LATENT,
    "zamba": {},
    "zamba2": {"layers_block_type": [_LINEAR, "hybrid", "hybrid", _LINEAR]},
    "zaya": {
        "layer_types": ["hybrid", "hybrid_sliding", "hybrid_sliding", "hybrid"],
        "num_experts_per_tok": 1,
        "router_hidden_size": 16,
    },
}


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """The tiny config of an architecture; `changes` win over what is set here."""
    kind = CONFIG_MAPPING[model_type]
    default = kind()
    known = {*default.to_dict(), *default.attribute_map}
    shared = {name: value for name, value in _BASE.items() if name in known}
    return kind(**{**shared, **deepcopy(ARCHITECTURES[model_type]), **changes})  # configs rewrite what they are given


def tiny_architecture(model_type: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A seeded random float32 model of `tiny_config`. Token 0 is padding: leave it out of prompts."""
    torch.manual_seed(seed)
    config = tiny_config(model_type, **changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for weight in model.parameters():  # norms of one and biases of zero would hide a mix-up
        if weight.ndim == 1 or weight.min() == weight.max():
            weight.add_(torch.rand_like(weight) - 0.5)
    return model
