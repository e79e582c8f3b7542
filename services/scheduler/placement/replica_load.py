"""The cost of a request on a replica: the total seconds by which it delays all requests, itself included.

    until its first token    what it waits for a row and blocks, what was begun before it, loads, and its own prompt
    until its end            a step for each token of its output, each as long as a step with that many decodes
    others                   its prompt delays all requests that run there, and so does its part of each of these steps

A step that fills a slot with the adapter of the request counts as one more step, for all.

There are no weights: the cost model has learned the durations of steps, and past requests the lengths of outputs. So a
cached prefix is worth the time to compute it, for the request and for each other request that would wait for that; it
is worth nothing where the running requests already cost more. Pure.
"""

from dataclasses import dataclass

from pagewire.services.scheduler.costs.cost_model import StepCosts


class UnknownCosts(StepCosts):
    """Costs while nothing was measured: each token, of a prompt or a decode, counts as a second."""

    def decode_seconds(self, num_decodes: float) -> float:
        return num_decodes

    def prompt_seconds(self, start: int, num_tokens: float) -> float:
        return num_tokens


@dataclass(slots=True)
class Fit:
    """The needs of a waiting request on one replica."""

    num_tokens: int
    num_cached: int  # found there, now or once running requests are computed
    num_blocks: int  # blocks that the request lacks there
    output_tokens: float  # expected
    has_adapter: bool = True  # in a slot, or none is needed
    num_loadable: int = 0  # tokens after the cached ones that can be loaded
    load_seconds: float = 0.0  # expected


@dataclass(slots=True)
class Deferred:
    """The sums over the requests that were left to a replica and not taken yet."""

    num: int = 0
    num_tokens: float = 0.0  # the uncomputed tokens of their prompts
    num_blocks: int = 0

    def add(self, fit: Fit) -> None:
        self.num += 1
        self.num_tokens += fit.num_tokens - fit.num_cached
        self.num_blocks += fit.num_blocks


NOTHING_DEFERRED = Deferred()


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a replica, valid until its next step."""

    num_running: int
    num_open_rows: int
    num_free_blocks: int
    blocks_per_request: float  # the average of running requests
    backlog_tokens: int  # the uncomputed prompt tokens of running requests
    backlog_pairs: float  # the pairs of these tokens and those that they attend to
    room: float  # the prompt tokens of a step

    def places_missing(self, fit: Fit, before: Deferred) -> float:
        """Returns how many running requests have to end before the request can begin."""
        rows = before.num + 1 - self.num_open_rows
        blocks = before.num_blocks + fit.num_blocks - self.num_free_blocks
        return max(0.0, rows, blocks / max(1.0, self.blocks_per_request))

    def seconds(self, fit: Fit, before: Deferred, costs: StepCosts) -> float:
        """Returns the total seconds by which the request delays all requests, itself included."""
        output_tokens = fit.output_tokens
        num_beside = min(self.num_running + before.num, self.num_running + self.num_open_rows)
        start, loading = fit.num_cached, 0.0
        if fit.load_seconds < (1 + num_beside) * costs.prompt_seconds(start, fit.num_loadable):
            start, loading = start + fit.num_loadable, fit.load_seconds
        missing = fit.num_tokens - start
        stages = costs.num_stages  # a step has one of this many parts of the decoding requests
        step = costs.decode_seconds(num_beside / stages)
        wait = 0.0
        if self.num_running and (places := self.places_missing(fit, before)):
            # On average, a request ends every output_tokens / (num_running / stages) steps.
            num_decodes = self.num_running / stages
            wait = places * output_tokens / num_decodes * costs.decode_seconds(num_decodes)
        prompt = costs.prompt_seconds(start, missing)
        earlier = self._backlog_seconds(costs) + costs.prompt_seconds(0, before.num_tokens)
        # The running step has to end before the first step of the request can begin.
        num_steps = (self.backlog_tokens + before.num_tokens) / self.room + max(1.0, missing / self.room)
        num_steps += (1.0 if self.num_running else 0.0) + stages - 1
        first_token = wait + earlier + loading + prompt + num_steps * (step + costs.first_prompt_seconds)
        with_it = costs.decode_seconds((num_beside + 1) / stages)
        filling = 0.0 if fit.has_adapter else with_it
        others = num_beside * (prompt + filling + output_tokens * stages * (with_it - step))
        return first_token + filling + output_tokens * stages * with_it + others

    def _backlog_seconds(self, costs: StepCosts) -> float:
        """Returns the seconds that running prompts add to steps, computed as for one prompt with as many tokens and
        pairs."""
        num = self.backlog_tokens
        return costs.prompt_seconds(int(self.backlog_pairs / num - num / 2), num) if num else 0.0
