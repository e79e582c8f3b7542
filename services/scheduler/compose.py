"""The features that join the core (`core/seams.py`), handed in at one place."""

from pagewire.config import SchedulerConfig
from pagewire.services.scheduler.core.scheduler import Scheduler
from pagewire.services.scheduler.core.seams import NO_DRAFTS, Drafts, Features
from pagewire.services.scheduler.fairness.ledger import Ledger
from pagewire.services.scheduler.placement.placement import PLACEMENTS
from pagewire.services.scheduler.speculation.acceptance import Acceptances
from pagewire.services.scheduler.speculation.speculation import Speculation
from pagewire.services.scheduler.suspicion.suspects import Suspects
from pagewire.services.scheduler.values.executor_info import ExecutorInfo


def make_scheduler(config: SchedulerConfig, num_replicas: int = 1) -> Scheduler:
    """Returns a scheduler with all features."""
    suspects, acceptances = Suspects(), Acceptances()

    def drafts(info: ExecutorInfo) -> Drafts:
        return Speculation(info, acceptances) if info.max_draft_tokens else NO_DRAFTS

    features = Features(Ledger(), suspects, drafts)
    return Scheduler(config, num_replicas, features, PLACEMENTS[config.placement](suspects.is_suspect))
