"""A model that answers with the words of its own prompt, so that a foreign word in an answer is a leak.

One layer. The values that attention carries are the words themselves (one dimension a word), its weights are random, so
an answer walks over the words in reach; fillers weigh little. Nothing but attention brings a word into an answer.
"""

from __future__ import annotations

from pathlib import Path

import torch

NUM_SEATS = 64
WORDS_PER_SEAT = 3
NUM_FILLERS = 64
VOCAB = NUM_SEATS * WORDS_PER_SEAT + NUM_FILLERS
FILLERS = range(NUM_SEATS * WORDS_PER_SEAT, VOCAB)
NUM_HEADS = 4


def words_of(seat: int) -> range:
    """Nobody else's prompt has these ids."""
    return range(seat * WORDS_PER_SEAT, (seat + 1) * WORDS_PER_SEAT)


def build(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    generator = torch.Generator().manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=VOCAB,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_HEADS,
        max_position_embeddings=256,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    identity = torch.eye(VOCAB)
    values = identity.clone()
    values[:, FILLERS.start :] *= 0.1

    def random(scale: float) -> torch.Tensor:
        return torch.randn(VOCAB, VOCAB, generator=generator) * scale

    layer = model.model.layers[0]
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(identity * 0.1)
        layer.self_attn.q_proj.weight.copy_(random(0.2))
        layer.self_attn.k_proj.weight.copy_(random(0.2))
        layer.self_attn.v_proj.weight.copy_(values)
        layer.self_attn.o_proj.weight.copy_(identity)
        layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.copy_(identity)
    model.save_pretrained(folder)
    return folder
