"""make_model.py OUT: a tiny Llama with random weights that a real engine loads in a second, for demos and tests.

It babbles, but its greedy text is varied and hangs on every prompt token, so a wrong or missing KV block shows at once.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel

SEED = 20
LAYERS = 2
HIDDEN = 128
HEAD_DIM = 32
HEADS = 4
KV_HEADS = 2
CONTEXT_TOKENS = 16384
BOS, EOS, UNKNOWN = SPECIAL = ("<s>", "</s>", "<unk>")
VOCABULARY = [*SPECIAL, *sorted(ByteLevel.alphabet())]  # one token per byte

# Renders what real templates render: tools and template kwargs up front, content as text or as a list of parts, tool
# calls and their results. The loop over message.content tells vLLM to hand parts over as parts. Line breaks are written
# out: whether the one after a block counts is an option of the renderer.
CHAT_TEMPLATE = r"""
{%- if tools or enable_thinking is defined -%}
  {{- 'settings:' -}}
  {%- if enable_thinking is defined -%} {{- ' thinking ' ~ ('on' if enable_thinking else 'off') ~ ';' -}} {%- endif -%}
  {%- for tool in tools or [] -%} {{- ' tool ' ~ (tool | tojson) ~ ';' -}} {%- endfor -%}
  {{- '\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {{- message.role ~ (' ' ~ message.tool_call_id if message.tool_call_id else '') ~ ': ' -}}
  {%- if message.content is string -%}
    {{- message.content -}}
  {%- elif message.content -%}
    {%- for part in message.content -%}
      {{- part.text if part.type == 'text' else '<' ~ (part.type | replace('_url', '')) ~ '>' -}}
    {%- endfor -%}
  {%- endif -%}
  {%- for call in message.tool_calls or [] -%}
    {{- '[call ' ~ call.id ~ ' ' ~ call.function.name ~ ' ' ~ (call.function.arguments | tojson) ~ ']' -}}
  {%- endfor -%}
  {{- '\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- 'assistant: ' ~ ('<think></think> ' if enable_thinking is defined and not enable_thinking else '') -}}
{%- endif -%}
"""


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(VOCABULARY)}, merges=[]))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return made


def weights() -> dict[str, torch.Tensor]:
    """Hugging Face's names for Llama's tensors -> bfloat16.

    Random integers times one factor give the same bits on every machine; a normal distribution takes logarithms, whose
    last bits differ between processors.
    """
    generator = torch.Generator().manual_seed(SEED)

    def random(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        """Uniform, mean 0, standard deviation gain / sqrt(columns)."""
        steps = torch.randint(-(2**15), 2**15, (rows, columns), generator=generator, dtype=torch.int32)
        return (steps.float() * (gain * math.sqrt(3 / columns) / 2**15)).bfloat16()

    def ones() -> torch.Tensor:
        return torch.ones(HIDDEN, dtype=torch.bfloat16)

    made = {"model.embed_tokens.weight": random(len(VOCABULARY), HIDDEN, gain=math.sqrt(HIDDEN))}
    for layer in (f"model.layers.{i}" for i in range(LAYERS)):
        # Sharp attention (gain 2 on both sides) is what makes far tokens matter.
        made[f"{layer}.self_attn.q_proj.weight"] = random(HEADS * HEAD_DIM, HIDDEN, gain=2)
        made[f"{layer}.self_attn.k_proj.weight"] = random(KV_HEADS * HEAD_DIM, HIDDEN, gain=2)
        made[f"{layer}.self_attn.v_proj.weight"] = random(KV_HEADS * HEAD_DIM, HIDDEN, gain=2)
        made[f"{layer}.self_attn.o_proj.weight"] = random(HIDDEN, HEADS * HEAD_DIM, gain=2)
        made[f"{layer}.mlp.gate_proj.weight"] = random(2 * HIDDEN, HIDDEN)
        made[f"{layer}.mlp.up_proj.weight"] = random(2 * HIDDEN, HIDDEN)
        made[f"{layer}.mlp.down_proj.weight"] = random(HIDDEN, 2 * HIDDEN)
        made[f"{layer}.input_layernorm.weight"] = ones()
        made[f"{layer}.post_attention_layernorm.weight"] = ones()
    made["model.norm.weight"] = ones()
    made["lm_head.weight"] = random(len(VOCABULARY), HIDDEN)
    # Logit 0 is never the greatest: greedy text is printable ASCII, one streamed event per token, and never ends early.
    made["lm_head.weight"][[not (len(token) == 1 and " " < token <= "~") for token in VOCABULARY]] = 0
    return made


def settings() -> Mapping[str, Mapping[str, object]]:
    """File name -> content. The generation config names no sampling parameters: vLLM would make them its defaults."""
    ids = {"bos_token_id": VOCABULARY.index(BOS), "eos_token_id": VOCABULARY.index(EOS)}
    return {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "vocab_size": len(VOCABULARY),
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "max_position_embeddings": CONTEXT_TOKENS,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": False,
            **ids,
        },
        "generation_config.json": ids,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "unk_token": UNKNOWN,
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT_TOKENS,
        },
    }


def make(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name, content in settings().items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    tokenizer().save(str(out / "tokenizer.json"))
    save_file(weights(), out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: make_model.py OUT")
    make(Path(sys.argv[1]))
