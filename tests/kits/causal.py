"""A causal class for text models that transformers has only inside a multimodal one: its text model and a head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Glm5NextTextConfig
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextPreTrainedModel, Glm5NextTextModel


class Glm5NextTextForCausalLM(Glm5NextPreTrainedModel):  # type: ignore[misc]
    config_class = Glm5NextTextConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = Glm5NextTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, logits_to_keep: int = 0, **options: Any) -> CausalLMOutputWithPast:
        """As of any causal class there."""
        options.pop("return_dict", None)
        found = self.model(input_ids=input_ids, **options)
        hidden: Tensor = found.last_hidden_state[:, -logits_to_keep:]
        return CausalLMOutputWithPast(logits=self.lm_head(hidden))  # type: ignore[arg-type]

    @torch.no_grad()
    def generate(self, prompt: Tensor, *, max_new_tokens: int, **options: Any) -> Tensor:
        """Greedily, everything computed anew for each token. [1, tokens] -> [1, tokens + max_new_tokens]"""
        for _ in range(max_new_tokens):
            token = self(prompt, use_cache=False).logits[:, -1:].argmax(-1)
            prompt = torch.cat((prompt, token), 1)
        return prompt


def register() -> None:
    """So that the auto classes find it."""
    AutoModelForCausalLM.register(Glm5NextTextConfig, Glm5NextTextForCausalLM, exist_ok=True)
