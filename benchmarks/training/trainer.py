"""The run itself: a supervised warm start, then GRPO steps of sample, score, normalise, clip and update."""

from __future__ import annotations

import copy
import hashlib
import time
from typing import TYPE_CHECKING

import torch

from benchmarks.training.history import StepRecord
from benchmarks.training.model import Transformer
from benchmarks.training.task import SumTask, mislead, score

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.training.operators import Operators
    from benchmarks.training.presets import RunSettings

RAMP_SHARE = 0.1  # of the warm start, over which its learning rate rises: at its full rate a deep model can diverge


class Trainer:
    """A policy on its way: `warm_start` first, then `grpo_step` as often as wished.

    Attributes:
        random: the CPU generator of weights, prompts and sampling noise, the same on every device.
        reference: the warm-started policy, frozen; None before `begin_grpo`.
        steps_done: GRPO steps so far.
    """

    def __init__(self, settings: RunSettings, operators: Operators) -> None:
        self.settings = settings
        self.operators = operators
        self.task = SumTask(settings.largest_number)
        self.random = torch.Generator().manual_seed(settings.seed)
        self.policy = Transformer(
            settings.shape,
            operators=operators,
            compute_dtype=getattr(torch, settings.compute_dtype),
            random=self.random,
        ).to(settings.device)
        self.reference: Transformer | None = None
        self.optimizer = self._optimizer(settings.warm_learning_rate)
        self.steps_done = 0

    def warm_start(self) -> Iterator[StepRecord]:
        """Teach the policy a partly wrong teacher's answers, one record a step."""
        settings = self.settings
        ramp_steps = max(1.0, RAMP_SHARE * settings.warm_steps)
        for step in range(settings.warm_steps):
            start_s = time.perf_counter()
            problems = self.task.sample(settings.warm_batch, self.random)
            answers = mislead(problems.answers, settings.teacher_error_rate, self.random)
            tokens = torch.cat([problems.prompts, answers], 1).to(settings.device)
            for group in self.optimizer.param_groups:
                group["lr"] = settings.warm_learning_rate * min(1.0, (step + 1) / ramp_steps)
            loss = -self.policy.answer_logps(tokens, self.task.prompt_length).mean()
            self._update(loss)
            value = float(loss.item())
            yield StepRecord("warm", step, value, (value.hex(),), time.perf_counter() - start_s)

    def begin_grpo(self) -> Transformer:
        """Freeze a copy of the policy as the reference, return it, and start the policy's optimizer afresh."""
        self.reference = copy.deepcopy(self.policy).requires_grad_(requires_grad=False)
        self.optimizer = self._optimizer(self.settings.learning_rate)
        return self.reference

    def grpo_step(self) -> StepRecord:
        """Sample a group of answers a prompt, score them and update the policy on them."""
        if self.reference is None:
            raise RuntimeError("grpo_step: no reference policy yet; call begin_grpo first")
        settings, task = self.settings, self.task
        start_s = time.perf_counter()
        problems = task.sample(settings.prompts_per_step, self.random)
        prompts = problems.prompts.repeat_interleave(settings.group_size, 0).to(settings.device)
        expected = problems.answers.repeat_interleave(settings.group_size, 0).to(settings.device)
        tokens = self.sample_answers(prompts)
        rewards = score(tokens[:, task.prompt_length :], expected)
        advantages = self.operators.group_advantages(rewards, samples_per_prompt=settings.group_size)
        with torch.no_grad():
            old_logps = self.policy.answer_logps(tokens, task.prompt_length)
            ref_logps = self.reference.answer_logps(tokens, task.prompt_length)
        losses, kls = [], []
        for _ in range(settings.updates_per_step):
            result = self.operators.grpo_loss(
                self.policy.answer_logps(tokens, task.prompt_length),
                old_logps,
                advantages,
                torch.ones_like(old_logps, dtype=torch.bool),  # answers have one length: nothing is padding
                ref_logps=ref_logps,
                clip_eps=settings.clip_eps,
                beta=settings.kl_weight,
            )
            self._update(result.loss)
            losses.append(result.loss.detach())
            kls.append(result.kl)
        values = torch.stack([*losses, kls[-1], rewards.mean()]).tolist()  # one wait for the device a step
        record = StepRecord(
            phase="grpo",
            step=self.steps_done,
            loss=values[len(losses) - 1],
            losses=tuple(value.hex() for value in values[: len(losses)]),
            step_s=time.perf_counter() - start_s,
            reward=values[-1],
            kl=values[-2],
        )
        self.steps_done += 1
        return record

    @torch.no_grad()
    def sample_answers(self, prompts: torch.Tensor) -> torch.Tensor:
        """Sample at temperature 1: prompts [samples, prompt length] to [samples, prompt + answer length], int64."""
        tokens = prompts
        for _ in range(self.task.answer_length):
            logits = self.policy(tokens, first=tokens.shape[1] - 1)[:, 0]
            # Gumbel-max: the noise comes from the CPU, and argmax, unlike multinomial's cumsum, has one answer
            uniform = torch.rand(logits.shape, generator=self.random, dtype=torch.float64)
            gumbel = -torch.log(-torch.log(uniform))
            chosen = (logits + gumbel.to(logits)).argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, chosen], 1)
        return tokens

    def digest(self) -> str:
        """Return the SHA-256 of the policy's weights, in the order of their names."""
        digest = hashlib.sha256()
        for name, weight in sorted(self.policy.state_dict().items()):
            digest.update(name.encode())
            digest.update(weight.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def parameters(self) -> int:
        """Return the number of weights."""
        return sum(weight.numel() for weight in self.policy.parameters())

    def _optimizer(self, learning_rate: float) -> torch.optim.AdamW:
        return torch.optim.AdamW(self.policy.parameters(), learning_rate, betas=(0.9, 0.95), weight_decay=0.01)

    def _update(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.settings.max_gradient_norm)
        self.optimizer.step()
