"""The rows of the engine benchmark, each beside its roofline and judged by its target."""

from __future__ import annotations

from collections import Counter

from benchmarks.gpu.engine.models import BenchModel
from benchmarks.gpu.engine.steps import Decoded
from benchmarks.gpu.engine.whole_line import Arrivals
from benchmarks.gpu.measure import Ceilings
from benchmarks.gpu.report import Report, verdict

LINE_TARGET = 0.95  # of the executor alone
MAX_IDLE_SECONDS, MAX_IDLE_SHARE = 50e-6, 0.02  # whichever is longer

HEADER = (
    f"{'model':18}{'batch':>6} {'mode':22}{'ms/step':>9}{'roofline':>9}{'share':>7}{'tok/s':>9}{'ITL p50':>9}"
    f"{'p99 ms':>8}  targets"
)


class EngineTable:
    """Prints what was measured. judge: whether targets apply."""

    def __init__(self, report: Report, ceilings: Ceilings, itemsize: int, judge: bool) -> None:
        """itemsize: bytes of a weight, and of a cached value unless said otherwise."""
        self._report = report
        self._ceilings = ceilings
        self._itemsize = itemsize
        self._judge = judge
        self._verdicts: Counter[str] = Counter()
        self._steps: dict[tuple[str, int], tuple[BenchModel, float]] = {}  # (model, batch) -> of graphs at depth 2
        print(HEADER, flush=True)

    def prefill(self, model: BenchModel, tokens_per_second: float) -> None:
        share = 2 * model.num_weights * tokens_per_second / self._ceilings.matmul
        self._report.row(
            f"{model.name:18}{'':>6} prefill: {tokens_per_second:.0f} tokens/s, {share:.2f} of the matrix product's "
            "rate for the weights alone",
            model=model.name,
            mode="prefill",
            tokens_per_second=tokens_per_second,
            of_matmul=share,
        )

    def decoded(
        self, model: BenchModel, result: Decoded, mode: str, judged: str = "", kv_itemsize: int | None = None
    ) -> None:
        roofline = self._roofline(model, result, kv_itemsize)
        self._report.row(
            f"{model.name:18}{result.num_reqs:>6} {mode:22}{result.step_seconds * 1e3:>9.3f}{roofline * 1e3:>9.3f}"
            f"{roofline / result.step_seconds:>7.2f}{result.tokens_per_second:>9.0f}{result.gap(50) * 1e3:>9.2f}"
            f"{result.gap(99) * 1e3:>8.2f}{judged}",
            model=model.name,
            mode=mode,
            batch=result.num_reqs,
            context_len=result.context_len,
            step_seconds=result.step_seconds,
            roofline_seconds=roofline,
            tokens_per_second=result.tokens_per_second,
            itl_p50_seconds=result.gap(50),
            itl_p99_seconds=result.gap(99),
            judged=judged.strip(),
        )

    def judge_step(self, model: BenchModel, two: Decoded, one: Decoded, eager: Decoded | None) -> str:
        """Returns the verdicts on graphs at depth 2 (`two`): by the roofline, eager steps, depth 1 and 16 bits."""
        targets, size = model.targets, two.num_reqs
        self._steps[model.name, size] = model, two.step_seconds
        faster_than_dense = self._over_dense(model, size)
        if targets is None:
            return faster_than_dense
        share = self._roofline(model, two) / two.step_seconds
        judged = self._verdict("roofline", share, targets.must.get(size), targets.stretch.get(size))
        if eager is not None and size == 1:
            judged += self._verdict("over eager", eager.step_seconds / two.step_seconds, targets.graphs_over_eager)
        faster = one.step_seconds / two.step_seconds
        return judged + self._verdict("over depth 1", faster, targets.depth_2_over_1.get(size)) + faster_than_dense

    def _over_dense(self, model: BenchModel, size: int) -> str:
        """Of a quantized model and the same in 16 bits, once both are measured: how much faster the first one is."""
        measured = [found for (_, other_size), found in self._steps.items() if other_size == size]
        judged = ""
        for quantized, seconds in measured:
            dense = self._steps.get((quantized.dense or "", size))
            if dense is None or model.name not in (quantized.name, dense[0].name):
                continue
            asked = quantized.targets.over_dense if quantized.targets is not None and size == 1 else None
            name, faster = f"{quantized.name} over 16 bits", dense[1] / seconds
            judged += (self._verdict(name, faster, *asked) if asked else "") or f"  {name} {faster:.2f}"
        return judged

    def idle(self, model: BenchModel, result: Decoded, idle_seconds: float, longest_gap_seconds: float) -> None:
        allowed = max(MAX_IDLE_SECONDS, MAX_IDLE_SHARE * result.step_seconds)
        judged = self._verdict("idle", allowed / max(longest_gap_seconds, 1e-9), 1.0)
        self._report.row(
            f"{model.name:18}{result.num_reqs:>6} profile: device idle {idle_seconds * 1e6:.0f} µs a step, longest gap "
            f"{longest_gap_seconds * 1e6:.0f} µs (at most {allowed * 1e6:.0f}){judged}",
            model=model.name,
            mode="idle",
            batch=result.num_reqs,
            idle_seconds=idle_seconds,
            longest_gap_seconds=longest_gap_seconds,
        )

    def line(
        self, model: BenchModel, client: str, arrivals: Arrivals, context_len: float, alone_step_seconds: float
    ) -> None:
        size, rate = len(arrivals.streams), arrivals.tokens_per_second
        ratio = rate * alone_step_seconds / size
        judged = self._verdict("of the executor alone", ratio, LINE_TARGET)
        p50, p99 = arrivals.gap(50), arrivals.gap(99)
        self._report.row(
            f"{model.name:18}{size:>6} {'whole line, ' + client:22}{size / rate * 1e3:>9.3f}{'':>16}{rate:>9.0f}"
            f"{p50 * 1e3:>9.2f}{p99 * 1e3:>8.2f}{judged or f'  {ratio:.2f} of the executor alone'}",
            model=model.name,
            mode=f"line, {client}",
            batch=size,
            context_len=context_len,
            tokens_per_second=rate,
            of_executor_alone=ratio,
            itl_p50_seconds=p50,
            itl_p99_seconds=p99,
            window_seconds=arrivals.window_seconds,
        )

    def summary(self) -> list[str]:
        counts = ", ".join(f"{count} {text}" for text, count in sorted(self._verdicts.items()))
        return [f"targets: {counts or 'none'}"]

    def _roofline(self, model: BenchModel, result: Decoded, kv_itemsize: int | None = None) -> float:
        return model.roofline_seconds(
            self._ceilings, result.num_reqs, result.context_len, self._itemsize, kv_itemsize or self._itemsize
        )

    def _verdict(self, name: str, value: float, must: float | None, stretch: float | None = None) -> str:
        if not self._judge or must is None:
            return ""
        text = verdict(value, must, stretch)
        self._verdicts[text] += 1
        return f"  {name} {value:.2f}:{text}"
