"""The scheduler service with all its features: the one place where they join the core, through its seams."""

from collections.abc import Callable

from pagewire.config import SchedulerConfig
from pagewire.services.scheduler.adapters.adapters import Adapters
from pagewire.services.scheduler.adapters.slots import AdapterSlots
from pagewire.services.scheduler.admission.entrance import Entrance
from pagewire.services.scheduler.core.scheduler import Scheduler
from pagewire.services.scheduler.core.seams import Drafts, Features
from pagewire.services.scheduler.costs.output_lengths import OutputLengths
from pagewire.services.scheduler.fairness.ledger import Ledger
from pagewire.services.scheduler.grammars.compiling import compile_grammar
from pagewire.services.scheduler.kv_events.prefix_caches import PrefixCaches
from pagewire.services.scheduler.memory.kv_cache import KVCacheManager
from pagewire.services.scheduler.observed.replica_stats import REPLICAS
from pagewire.services.scheduler.placement.placement import PLACEMENTS
from pagewire.services.scheduler.placement.prefix_index import IndexedBlocks
from pagewire.services.scheduler.roles.roles import Roles
from pagewire.services.scheduler.roles.transfers import Transfers
from pagewire.services.scheduler.service.engine import Engine
from pagewire.services.scheduler.service.executors import Connect
from pagewire.services.scheduler.service.held_outputs import HeldOutputs
from pagewire.services.scheduler.sleep.model_sleep import ModelSleep
from pagewire.services.scheduler.speculation.acceptance import Acceptances
from pagewire.services.scheduler.speculation.no_drafts import NO_DRAFTS
from pagewire.services.scheduler.speculation.speculation import Speculation
from pagewire.services.scheduler.suspicion.suspects import Suspects
from pagewire.services.scheduler.tiers.tiers import Tiers
from pagewire.services.scheduler.values.executor_info import ExecutorInfo
from pagewire.services.scheduler.weights.rollout import Rollout
from pagewire.wire.discovery.listed import Discovery


def make_scheduler(
    config: SchedulerConfig,
    num_replicas: int = 1,
    on_memory: Callable[[int, ExecutorInfo | None, KVCacheManager], None] = lambda *_: None,
    tiers: Tiers | None = None,
) -> Scheduler:
    """Returns a scheduler with all features. on_memory: see `Features`. tiers: make the calls to the executors."""
    suspects, acceptances, output_lengths = Suspects(), Acceptances(), OutputLengths()

    def drafts(info: ExecutorInfo | None) -> Drafts:
        return NO_DRAFTS if info is None or not info.max_draft_tokens else Speculation(info, acceptances)

    def slots(info: ExecutorInfo | None) -> AdapterSlots:
        return (
            AdapterSlots(0) if info is None else AdapterSlots(info.max_adapters, (one.digest for one in info.adapters))
        )

    tiers = tiers or Tiers()

    def on_new_memory(replica_id: int, info: ExecutorInfo | None, kv: KVCacheManager) -> None:
        tiers.on_memory(replica_id, info, kv)
        on_memory(replica_id, info, kv)

    features = Features(Ledger(), suspects, drafts, slots, on_new_memory)
    transfers = Transfers(tiers) if config.enable_prefix_caching else None
    placement = PLACEMENTS[config.placement](suspects.is_suspect, output_lengths, Roles(transfers))
    tiers.index_of = lambda replica_id: IndexedBlocks(placement.tier_index, replica_id)
    placement.load_seconds = tiers.load_seconds
    scheduler = Scheduler(config, num_replicas, features, placement, output_lengths)
    tiers.follow(scheduler)
    return scheduler


def make_engine(
    config: SchedulerConfig, discovery: Discovery, connect: Connect, caches: PrefixCaches | None = None
) -> Engine:
    """Returns the service with all features. connect: makes channels to executors that are listed. caches: follows its
    prefix caches."""
    caches = caches or PrefixCaches()
    tiers = Tiers()
    scheduler = make_scheduler(config, 0, caches.on_memory, tiers)
    REPLICAS.scheduler = scheduler
    admission = Entrance(scheduler, config.max_queue_time)

    def weights(engine: Engine) -> Rollout:
        timeout = config.recovery_timeout
        drivers, wake = engine.executors.drivers, engine.wake_all
        return Rollout(scheduler, drivers, wake, engine.end_request, timeout, lambda: engine.sleep.check_awake())

    def adapters(engine: Engine) -> Adapters:
        changed = engine.availability.greet_again
        drivers, wake = engine.executors.drivers, engine.wake_all
        return Adapters(drivers, wake, changed, engine.end_request, lambda: engine.sleep.check_awake())

    def sleep(engine: Engine) -> ModelSleep:
        return ModelSleep(engine, config.recovery_timeout, config.idle_timeout)

    engine = Engine(
        config, discovery, connect, scheduler, admission, compile_grammar, weights, adapters, sleep, HeldOutputs
    )
    tiers.follow(scheduler, engine.executors.drivers, engine.live)
    caches.follow(scheduler, engine.executors.drivers, engine.adapters, tiers)
    return engine
