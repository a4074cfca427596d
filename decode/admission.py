"""Who is answered next: requests begin while there is room, and their prompts are read a part at a time."""

from __future__ import annotations

from specds.decode.contracts import Target
from specds.decode.draft import common_prefix
from specds.decode.pricing.budget import Budget
from specds.decode.request import Part, Request, Source
from specds.errors import PromptError


class Running:
    """The requests that are being answered, in the order in which they began.

    Prompts are read in this order, a chunk of the target's a pass, beside the steps of the others. One that begins like
    a prompt that is being read waits until that much of it is there.
    """

    def __init__(self, target: Target, requests: Source, budget: Budget, parallel: int) -> None:
        self._target, self._requests, self._budget, self._parallel = target, requests, budget, parallel
        self._running: list[Request] = []
        self._failed: list[Request] = []
        self._next: Request | None = None

    def admit(self) -> bool:
        """Begin what there is room for; waits for a request if there are none. Whether any runs, or has failed.

        Those that have failed stand in the place of one that runs, so that they are soon told.
        """
        running = self._running
        reading = [request for request in running if request.unread]
        unread = sum(request.unread for request in reading)
        while len(running) + len(self._failed) < self._parallel and unread < self._target.chunk:
            request = self._next or self._requests.take(wait=not running and not self._failed)
            self._next = None
            if request is None:
                break
            if request.error is not None:
                self._failed.append(request)
                continue
            try:
                if not self._begin(request, reading):
                    if not running:
                        raise PromptError(
                            f"the key-value cache has no room for {self._length(request):,} tokens beside what others "
                            "hold of it",
                            "finish what was begun before, or use a larger --kv-memory",
                        )
                    self._next = request
                    break
            except PromptError as error:
                request.error = error
                self._failed.append(request)
                continue
            running.append(request)
            reading.append(request)
            unread += request.unread
        return bool(running or self._failed)

    def take_failed(self) -> list[Request]:
        """Those that could not begin, once."""
        failed, self._failed = self._failed, []
        return failed

    def read(self) -> list[Part]:
        """The next part of prompts, a chunk in all."""
        parts: list[Part] = []
        left = self._target.chunk
        for request in self._running:
            if left and request.unread:
                parts.append(request.read(left))
                left -= len(parts[-1].item.tokens)
        return parts

    def writing(self) -> list[Request]:
        """Those whose prompts are read."""
        return [request for request in self._running if request.step is not None]

    def give_up(self, request: Request) -> None:
        """One has failed outside of a pass."""
        self.retire(request)
        self._failed.append(request)

    def retire(self, request: Request) -> None:
        """Make room if a request is done."""
        if request.done:
            self._running.remove(request)
            self._release(request)

    def close(self) -> None:
        """Give up whatever runs still."""
        while self._running:
            self._release(self._running.pop())

    def _begin(self, request: Request, reading: list[Request]) -> bool:
        """Open a slot for a request; False where it must wait."""
        for other in reading:
            assert other.slot is not None
            if common_prefix(request.prompt[:-1], other.prompt) > len(other.slot.tokens):
                return False
        request.slot = self._target.open(request.prompt, self._length(request))
        if request.slot is None:
            return False
        try:
            request.drafting = request.drafter(request.slot)
        except BaseException:
            self._release(request)
            raise
        request.allowance = self._budget.open()
        return True

    def _length(self, request: Request) -> int:
        """Tokens that a request may have in the cache, a draft behind its answer included."""
        return len(request.prompt) + request.max_new_tokens + self._budget.most

    def _release(self, request: Request) -> None:
        assert request.slot is not None
        self._target.close(request.slot, keep=request.error is None)
        request.slot = None
        request.end()
