"""Plain LLaDA generation: the whole canvas in every forward, the top k of the current block commit.

Source: Nie et al., "Large Language Diffusion Models" (arXiv 2502.09992), low-confidence remasking
and classifier-free guidance.
"""

from __future__ import annotations

import attrs
import numpy as np

from dllm_sched_hf.canvas import CanvasDecoder, CanvasPlan, CanvasRequest
from dllm_sched_hf.decoder import Floats, Ints, check_field

__all__ = ["LLaDA", "LLaDARequest"]


@attrs.frozen(kw_only=True, eq=False)
class LLaDARequest(CanvasRequest):
    """A request with its prompt and its settings for plain LLaDA generation.

    Attributes:
        cfg_scale: Weight of classifier-free guidance, in [0, 1e6]; 0 = none. Above 0 the row sends
            a second sequence through each forward, with masks in place of its prompt.

    Raises:
        ConfigError: If a field is out of its range or does not divide; names the field.

    Source: arXiv 2502.09992 and its public generation script.
    """

    cfg_scale: float = attrs.field(default=0.0, validator=check_field)


class LLaDA(CanvasDecoder):
    """The canvas of every slot. No forward reads what an earlier one has computed."""

    request_type = LLaDARequest
    knobs = ("cfg_scale", "temperature")
    caches = False

    def __init__(self, num_slots: int, max_len: int, mask_id: int) -> None:
        super().__init__(num_slots, max_len, mask_id)
        self.cfg_scale: Floats = np.zeros(num_slots)

    def plan(self, slots: Ints) -> CanvasPlan:
        """Lay out the coming forward, second sequences of guided rows last; writes nothing."""
        plan = super().plan(slots)
        scale = self.cfg_scale[slots]
        guided = np.flatnonzero(scale > 0)
        if len(guided) == 0:
            return plan
        again = np.flatnonzero((scale > 0)[plan.row])
        second = np.full(len(plan.row), -1)
        second[again] = np.arange(len(again)) + len(second)
        row, position = plan.row[again], plan.position[again]
        in_prompt = position < self.prompt_len[slots[row]]
        return attrs.evolve(
            plan,
            start=np.append(plan.start, plan.start[guided]),
            end=np.append(plan.end, plan.end[guided]),
            length=np.append(plan.length, plan.length[guided]),
            row=np.append(plan.row, len(slots) + np.searchsorted(guided, row)),
            position=np.append(plan.position, position),
            place=np.append(plan.place, plan.place[again]),
            token=np.append(plan.token, np.where(in_prompt, self.mask_id, plan.token[again])),
            visible=np.append(plan.visible, plan.visible[again]),
            guide=second[plan.masked],
            guide_scale=scale[plan.row[plan.masked]],
        )
