"""Trains the model of the two-hop task: Llama, 4 layers, 0.6 million parameters, in the time it is given."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
import twohop_task as task
from twohop_task import Prompt, Shape

# From repeating a run of tokens to the whole task: without the first steps it takes far longer to learn.
CURRICULUM: tuple[tuple[Callable[[Random], Prompt], int], ...] = (
    (lambda random: task.copying(random, 24), 96),
    (lambda random: task.prompt(random, Shape(2, 2, 3)), 128),
    (lambda random: task.prompt(random, Shape(2, 4, 5)), 96),
    (task.prompt, 64),
)
RATE = 2e-3  # learning rate, reached over 100 steps
READY = 0.93  # accuracy over the last 20 batches that ends a stage
GOOD = 0.998  # of the held-out questions: what is left of the time goes into a lower learning rate
STEADY = 0.6  # share of the time after which the learning rate falls
IGNORED = -100


def config() -> Any:
    """The model's ``LlamaConfig``."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=task.VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        bos_token_id=task.START,
        eos_token_id=task.END,
        pad_token_id=task.PAD,
        tie_word_embeddings=False,
        initializer_range=0.05,
    )


def tensors(prompts: list[Prompt]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, each ``(prompts, tokens)`` int64; :data:`IGNORED` where nothing is asked."""
    ids = torch.tensor([prompt.ids for prompt in prompts])
    labels = torch.full_like(ids, IGNORED)
    for row, prompt in zip(labels, prompts, strict=True):
        for position, label in prompt.labels.items():
            row[position] = label
    return ids, labels


def accuracy(model: Any, prompts: list[Prompt]) -> dict[str, float]:
    """Share of the questions answered by full prefill: ``all``, and for each kind."""
    right: dict[str, list[bool]] = {kind: [] for kind in task.KINDS}
    for at in range(0, len(prompts), 128):
        some = prompts[at : at + 128]
        with torch.inference_mode():
            said = model(input_ids=tensors(some)[0], use_cache=False).logits.argmax(-1).tolist()
        for row, prompt in zip(said, some, strict=True):
            for position, kind in prompt.questions:
                right[kind].append(row[position] == prompt.labels[position])
    return summary(right)


def summary(right: dict[str, list[bool]]) -> dict[str, float]:
    """Shares of ``True``: ``all``, and each kind that was asked for."""
    every = [answer for answers in right.values() for answer in answers]
    return {"all": sum(every) / len(every)} | {
        kind: sum(answers) / len(answers) for kind, answers in right.items() if answers
    }


class Learner:
    """A model and its optimizer."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)

    def step(self, prompts: list[Prompt], rate: float) -> tuple[float, float]:
        """One batch of prompts of the same length; its loss, and the share of labels that were met."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        ids, labels = tensors(prompts)
        asked = labels != IGNORED
        states = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = self.model.lm_head(states[asked])
        loss = torch.nn.functional.cross_entropy(logits, labels[asked])
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        return loss.item(), (logits.argmax(-1) == labels[asked]).float().mean().item()


def train(out: Path, minutes: float, seed: int, say: Callable[[str], object] = print) -> dict[str, float]:
    """Train for at most ``minutes`` of CPU time, save to ``out``; returns the held-out :func:`accuracy`."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    random = Random(seed)
    held_out = [task.prompt(random) for _ in range(512)]
    learner = Learner(LlamaForCausalLM(config()))
    began, budget = time.process_time(), minutes * 60
    stage, step, recent = 0, 0, deque[float](maxlen=20)
    while (done := (time.process_time() - began) / budget) < 1:
        decay = 1 if done < STEADY else max(0.03, 1 - (done - STEADY) / (1 - STEADY))
        draw, size = CURRICULUM[stage]
        prompts = [draw(random) for _ in range(size)]
        loss, met = learner.step(prompts, RATE * min(1, (step + 1) / 100) * decay)
        step += 1
        recent.append(met)
        last = stage == len(CURRICULUM) - 1
        if not last and len(recent) == recent.maxlen and sum(recent) / len(recent) > READY:
            stage += 1
            recent.clear()
            say(f"stage {stage} from step {step} on, at {done:.0%} of the time")
        if step % 200 == 0:
            found = {"step": step, "stage": stage, "done": round(done, 3), "loss": round(loss, 4)}
            if last:
                reached = accuracy(learner.model, held_out)
                found |= {kind: round(share, 4) for kind, share in reached.items()}
                if reached["all"] > GOOD and done < STEADY:
                    budget = (time.process_time() - began) / STEADY
            say(json.dumps(found))
            learner.model.save_pretrained(out)
    learner.model.save_pretrained(out)
    return accuracy(learner.model.eval(), held_out)
