"""From a request to pictures to draw: defaults filled in, limits kept, everything said that is wrong."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from ..errors import did_you_mean
from .choice import Choice, requested
from .errors import ApiError, invalid, too_large
from .model import Facts
from .schemas import ImageRequest
from .settings import Settings
from .work import Event, Job, Order, Ticket, steps_to_show

Size = tuple[int, int]


class Asked:
    """One request, understood for one model under one server's limits."""

    def __init__(self, request: ImageRequest, facts: Facts, settings: Settings, standing: Choice) -> None:
        self._request, self._facts, self._settings = request, facts, settings
        self._check_model()
        self._check_lengths()
        self.count = self._count()
        self.size = self._size()
        self.seed = secrets.randbits(32) if request.seed is None else request.seed
        self.job = Job(
            size=facts.size if facts.fixed else self.size,
            steps=self._steps(),
            guidance=self._guidance(),
            negative=self._negative(),
            choice=requested(request.cache, standing),
        )
        self.shown_after = self._shown_after()

    def ticket(self, index: int, deliver: Callable[[Event], None], request_id: str) -> Ticket:
        """The picture of that index."""
        request, seed = self._request, self.seed + index
        order = Order(self.job, request.prompt, request.negative_prompt, seed, self.shown_after, request_id)
        return Ticket(order, deliver)

    @property
    def size_name(self) -> str:
        return size_name(self.size)

    def _check_model(self) -> None:
        name, known = self._request.model, self._facts.name
        if name not in (None, known):
            hint = did_you_mean(name or "", [known]) or f" This server has {known!r}."
            raise ApiError(404, f"There is no model {name!r}.{hint}", "model_not_found", "model")

    def _check_lengths(self) -> None:
        longest = self._settings.max_prompt
        texts = {"prompt": self._request.prompt, "negative_prompt": self._request.negative_prompt}
        for name, text in texts.items():
            if text is not None and len(text) > longest:
                raise too_large(f"{name} has {len(text)} characters; at most {longest} are read.", name)

    def _count(self) -> int:
        count, most = self._request.n or 1, self._settings.max_images
        if count > most:
            raise too_large(f"n is {count}; one request draws at most {most} pictures.", "n")
        if self._request.stream and count > 1:
            raise invalid(f"A stream draws one picture: n must be 1, not {count}.", "n")
        return count

    def _size(self) -> Size:
        asked, facts, most = self._request.size, self._facts, self._settings.max_size
        if asked in (None, "auto"):
            return facts.size
        assert asked is not None
        width, height = (int(side) for side in asked.split("x"))
        if max(width, height) > most:
            raise too_large(f"size is {asked}; the longest side may have {most} pixels.", "size")
        if facts.fixed and width != height:
            raise invalid(f"size is {asked}; {facts.name} draws squares, such as {size_name(facts.size)}.", "size")
        if not facts.fixed and (width % facts.multiple or height % facts.multiple):
            raise invalid(f"size is {asked}; width and height must be multiples of {facts.multiple}.", "size")
        return width, height

    def _steps(self) -> int:
        request, most = self._request, self._settings.max_steps
        steps = _one("steps", request.steps, "num_inference_steps", request.num_inference_steps)
        if steps is not None and steps > most:
            raise too_large(f"steps is {steps}; this server draws with at most {most}.", "steps")
        return min(self._facts.steps, most) if steps is None else int(steps)

    def _guidance(self) -> tuple[tuple[str, float], ...]:
        request, parameters = self._request, self._facts.parameters
        guidance = _one("guidance", request.guidance, "guidance_scale", request.guidance_scale)
        if "true_cfg_scale" in parameters:
            scales = {"guidance_scale": guidance, "true_cfg_scale": request.cfg_scale}
        else:
            scales = {"guidance_scale": _one("guidance", guidance, "cfg_scale", request.cfg_scale)}
        for name, scale in scales.items():
            if scale is not None and name not in parameters:
                raise invalid(f"{self._facts.name} has no guidance to set.", "guidance")
        return tuple((name, float(scale)) for name, scale in scales.items() if scale is not None)

    def _negative(self) -> bool:
        given = bool(self._request.negative_prompt)
        if given and "negative_prompt" not in self._facts.parameters:
            raise invalid(f"{self._facts.name} takes no negative prompt.", "negative_prompt")
        return given

    def _shown_after(self) -> frozenset[int]:
        count = self._request.partial_images or 0
        if count and not self._request.stream:
            raise invalid("partial_images is for streams: say stream as well.", "partial_images")
        if count and not self._facts.partial_images:
            raise invalid(f"{self._facts.name} cannot be shown unfinished.", "partial_images")
        return steps_to_show(count, self.job.steps)


def size_name(size: Size) -> str:
    return f"{size[0]}x{size[1]}"


def _one(name: str, value: float | None, other: str, same: float | None) -> float | None:
    """The value of a field that has two names."""
    if value is not None and same is not None and value != same:
        raise invalid(f"{name} is {value:g} and {other} is {same:g}: they are one thing here, give one.", other)
    return value if value is not None else same
