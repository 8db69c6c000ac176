"""Make a tiny model of random weights, in the files that vLLM loads: weights, tokenizer, chat template.

    .venv-vllm/bin/python tests/vllm/tiny_model.py OUT_DIR SHAPE [--layers N]

Runs with the vLLM environment's own Python; neither torch nor transformers is imported, so it takes a second.
The same arguments give the same bytes. The text it writes means nothing; that it is exactly the same text
after an interruption is what the tests ask of it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

HEAD_DIM = 32
"""The least that vLLM's attention on CPUs takes."""
VOCABULARY = 512
CONTEXT = 4096
SHAPES = {
    "multi-head": {"heads": 2, "kv_heads": 2, "tied": False},
    "grouped-query": {"heads": 4, "kv_heads": 2, "tied": False},
    "tied-embeddings": {"heads": 2, "kv_heads": 2, "tied": True},
}
SPECIALS = ("<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SENTENCES = (
    "one queue holds what users wait for, another holds what may wait",
    "the gate opens when the engine has been idle for a whole window",
    "a request that was ended goes on from the tokens it had produced",
    "answers are written in the order of the lines that asked for them",
    "0 1 2 3 4 5 6 7 8 9 . , ; : ? ! ( ) [ ] { } + - * / = < > _ # %",
    "Grüße, naïve café, 東京 and 🙂 take several bytes for one character",
)


def make_tokenizer() -> Tokenizer:
    """Byte pairs over all 256 bytes, so that any text has tokens; a beginning is put before every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        SENTENCES * 10,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=list(SPECIALS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", begin)]
    )
    return tokenizer


def make_weights(*, heads: int, kv_heads: int, tied: bool, layers: int) -> dict[str, np.ndarray]:
    """Llama's tensors under their names, in 32-bit floats.

    Large random embeddings keep the best next token well ahead of the second: the last bits of a sum, which
    depend on what else is in the batch, never decide between two of them.
    """
    random = np.random.default_rng(20)
    hidden = heads * HEAD_DIM
    inner = 2 * hidden

    def matrix(rows: int, columns: int, scale: float) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * scale).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(VOCABULARY, hidden, 1.0)}
    if not tied:
        weights["lm_head.weight"] = matrix(VOCABULARY, hidden, 1.0)
    scale = hidden**-0.5
    for layer in range(layers):
        at = f"model.layers.{layer}."
        for name, rows, columns in (
            ("self_attn.q_proj", hidden, hidden),
            ("self_attn.k_proj", kv_heads * HEAD_DIM, hidden),
            ("self_attn.v_proj", kv_heads * HEAD_DIM, hidden),
            ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            weights[f"{at}{name}.weight"] = matrix(rows, columns, 2.0 * scale)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}{name}.weight"] = np.ones(hidden, np.float32)
    weights["model.norm.weight"] = np.ones(hidden, np.float32)
    return weights


def only_whole_characters(weights: dict[str, np.ndarray], tokenizer: Tokenizer) -> None:
    """Have the model write no piece of a character: what it writes is text, as a real model's is."""
    for token in range(VOCABULARY):
        text = tokenizer.decode([token])
        if not text or "\ufffd" in text:
            weights["lm_head.weight"][token] = 0.0  # never the best of hundreds


def make_model(out: Path, shape: str, layers: int, *, text: bool = False) -> None:
    """Write the model's files into `out`, which is there whole or not at all."""
    form = SHAPES[shape]
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(part / "tokenizer.json"))
    begin, end, pad = (tokenizer.token_to_id(name) for name in ("<s>", "</s>", "<pad>"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": form["heads"] * HEAD_DIM,
        "intermediate_size": 2 * form["heads"] * HEAD_DIM,
        "num_hidden_layers": layers,
        "num_attention_heads": form["heads"],
        "num_key_value_heads": form["kv_heads"],
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": form["tied"],
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": begin,
        "eos_token_id": end,
        "pad_token_id": pad,
        "torch_dtype": "float32",
    }
    for name, value in (
        ("config.json", config),
        ("generation_config.json", {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": pad}),
        (
            "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "pad_token": "<pad>",
                "model_max_length": CONTEXT,
                "clean_up_tokenization_spaces": False,
                "chat_template": CHAT_TEMPLATE,
            },
        ),
    ):
        (part / name).write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")
    weights = make_weights(**form, layers=layers)
    if text:
        only_whole_characters(weights, tokenizer)
    save_file(weights, str(part / "model.safetensors"), metadata={"format": "pt"})
    shutil.rmtree(out, ignore_errors=True)
    part.rename(out)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make a tiny model of random weights for the real vLLM.")
    parser.add_argument("out", type=Path, help="folder to make; one that is there is replaced")
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--text", action="store_true", help="it writes whole characters (no tied embeddings)")
    given = parser.parse_args()
    if given.layers < 1:
        parser.error(f"--layers must be at least 1, got {given.layers}")
    if given.text and SHAPES[given.shape]["tied"]:
        parser.error("--text needs a shape without tied embeddings")
    make_model(given.out, given.shape, given.layers, text=given.text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
