"""Plays schedules over a line and compares what clients receive with what they receive undisturbed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import httpx

from pagewire.gateway.core.tokenizer_client import MAX_ATTEMPTS
from tests.chaos.answers import difference
from tests.chaos.client import Answer, Client, Trouble
from tests.chaos.faults.catalogue import ALL, RARE
from tests.chaos.faults.chaos_line import ChaosLine
from tests.chaos.faults.faults import inflict
from tests.chaos.faults.schedule import GATEWAYS, Ask, Schedule, Setting
from tests.e2e.line import http_client

# gRPC's own, of a server that stops while a call arrives.
_NOISE = re.compile(r'Traceback [^\n]*\n( *File "src/python/grpcio/[^\n]*\n)+\S*CancelledError')
# A log that has one of these is of a defect.
_DEFECT = re.compile(r"Traceback \(most recent|never retrieved|was never awaited|AssertionError")
# Clients of gateways that hang go elsewhere after so many times the line's --hang-timeout.
PATIENCE = 1.25
SETTLE_TIMEOUT_S = 60.0


class Progress:
    """Returns how many events all clients together have read."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = asyncio.Condition()

    async def advance(self) -> None:
        async with self._changed:
            self._count += 1
            self._changed.notify_all()

    async def reach(self, count: float) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._count >= count)


@dataclass
class Outcome:
    schedule: Schedule
    seconds: float
    problems: list[str] = field(default_factory=list)
    num_comebacks: int = 0  # of patient clients
    longest_silence: float = 0.0  # that a stream has had, seconds


class Player:
    """Has the undisturbed answers, and plays schedules one after the other."""

    def __init__(self, line: ChaosLine, name: str, requests: Iterable[str], max_asks: int, timeout: float) -> None:
        """name: of this run; keys are new with each. timeout: seconds that a schedule may take."""
        self._line = line
        self._name = name
        self._timeout, self._max_asks = timeout, max_asks
        self._undisturbed: dict[str, Answer] = {}
        self._log_sizes: dict[str, int] = {}
        self._num_played = 0
        names = list(requests)
        self.setting = Setting(
            services=line.services,
            requests=[name for name in names if name not in RARE],
            rare_requests=[name for name in names if name in RARE],
            hang_timeout=line.hang_timeout,
            has_disk=line.has_disk,
            max_asks=max_asks,
        )

    async def learn(self) -> list[str]:
        """The undisturbed answers; returns what differs when the same is asked again, beside others."""
        names = [*self.setting.requests, *self.setting.rare_requests]
        room = asyncio.Semaphore(self._max_asks)

        async def ask(http: httpx.AsyncClient, name: str) -> Answer:
            async with room:
                return await Client(http, self._line.base_urls, ALL[name]).run()

        async with _http() as http:
            try:
                first, second = [await asyncio.gather(*(ask(http, name) for name in names)) for _ in range(2)]
            except Trouble as error:
                return [f"undisturbed: {error}"]
        self._undisturbed = dict(zip(names, first, strict=True))
        compared = (
            (name, difference(*(answer.value for answer in pair)))
            for name, *pair in zip(names, second, first, strict=True)
        )
        return [f"{name}, undisturbed: {said}" for name, said in compared if said]

    async def play(self, schedule: Schedule) -> Outcome:
        loop = asyncio.get_running_loop()
        start = loop.time()
        outcome = Outcome(schedule, 0.0)
        self._num_played += 1
        self._line.deaths.clear()
        tasks: list[asyncio.Task[None]] = []
        async with _http() as http:
            try:
                async with asyncio.timeout(self._timeout):
                    await self._play(schedule, http, outcome, tasks)
                await self._line.wait_settled(SETTLE_TIMEOUT_S)
            except TimeoutError as error:
                waiting = [task.get_name() for task in tasks if not task.done()]
                outcome.problems.append(str(error) or f"not done after {self._timeout:g} s: {waiting} do not end")
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                if outcome.problems:
                    await self._line.heal()
        has_full_disk = any(fault.kind == "disk" for fault in schedule.faults)
        # A gateway does not start without its data directory; its supervisor tries again.
        outcome.problems += [said for said in self._line.deaths if not (has_full_disk and said.startswith(GATEWAYS))]
        outcome.problems += self._defects()
        outcome.seconds = loop.time() - start
        return outcome

    async def _play(
        self, schedule: Schedule, http: httpx.AsyncClient, outcome: Outcome, tasks: list[asyncio.Task[None]]
    ) -> None:
        progress = Progress()
        for number, ask in enumerate(schedule.asks):
            leaves = ask.leaves_at is not None
            run = self._leave(ask, http) if leaves else self._ask(schedule, number, http, progress, outcome)
            tasks.append(asyncio.create_task(run, name=ask.name))
        total = sum(self._undisturbed[ask.name].num_events for ask in schedule.asks if ask.leaves_at is None)
        for fault in schedule.faults:
            reached = asyncio.create_task(progress.reach(fault.at * total))
            await asyncio.wait([reached], timeout=fault.patience)
            reached.cancel()
            tasks.append(asyncio.create_task(inflict(self._line, fault), name=fault.kind))
        await asyncio.wait(tasks)  # not gather(), which would cancel them if this is cancelled
        for task in tasks:
            task.result()

    async def _ask(
        self, schedule: Schedule, number: int, http: httpx.AsyncClient, progress: Progress, outcome: Outcome
    ) -> None:
        ask = schedule.asks[number]
        request = ALL[ask.name]
        # What a call was for is not computed for ever: it may be what the service dies of.
        is_given_up = request.begins_again and schedule.num_faults("tokenizer") >= MAX_ATTEMPTS
        is_kept = ask.is_kept or is_given_up
        may_notice = is_kept and (is_given_up or not schedule.spares_gateways)
        client = Client(
            http,
            self._line.base_urls if number % 2 else self._line.base_urls[::-1],
            request,
            key=f"{self._name} {self._num_played} {number}" if is_kept else None,
            patience=PATIENCE * self._line.hang_timeout if may_notice else None,
            on_event=progress.advance,
        )
        try:
            answer = await client.run()
        except Trouble as error:
            outcome.problems.append(f"{ask.name}: {error}")
            return
        if said := difference(answer.value, self._undisturbed[ask.name].value):
            outcome.problems.append(f"{ask.name}: {said}; on the way: {answer.troubles or 'nothing'}")
        if answer.troubles and not may_notice:
            outcome.problems.append(f"{ask.name}: its client noticed {answer.troubles}")
        outcome.num_comebacks += len(answer.troubles)
        if request.is_stream:
            outcome.longest_silence = max(outcome.longest_silence, answer.longest_silence)

    async def _leave(self, ask: Ask, http: httpx.AsyncClient) -> None:
        """Its client goes away in the middle."""
        gone = asyncio.Event()
        num_events = 0

        async def count() -> None:
            nonlocal num_events
            num_events += 1
            if num_events == ask.leaves_at:
                gone.set()

        reading = asyncio.create_task(Client(http, self._line.base_urls, ALL[ask.name], on_event=count).run())
        leaving = asyncio.create_task(gone.wait())
        try:
            await asyncio.wait([reading, leaving], timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reading, leaving):
                task.cancel()
            with suppress(asyncio.CancelledError, Trouble):
                await reading

    def _defects(self) -> list[str]:
        """Of what the logs have since the last time."""
        defects = []
        for service in self._line.services:
            log = self._line.log(service)
            with log.open("rb") as file:
                file.seek(self._log_sizes.get(service, 0))
                new = file.read()
                self._log_sizes[service] = file.tell()
            text = _NOISE.sub("", new.decode(errors="replace"))
            if found := _DEFECT.search(text):
                defects.append(f"{service} logs a defect:\n{text[max(0, found.start() - 400) : found.start() + 3000]}")
        return defects


def _http() -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return http_client(limits=limits, trust_env=False)
