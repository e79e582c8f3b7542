"""Which replica takes a waiting request.

Requests wait at the scheduler, never at a replica: each is placed when some replica can admit it at once.
"""

from collections.abc import Sequence

from pagewire.services.scheduler.replica import Replica
from pagewire.services.scheduler.request import Request


def is_placed_on(replica: Replica, request: Request, replicas: Sequence[Replica]) -> bool:
    """Whether this replica, which decides its next step, is to take the first of the waiting requests.

    The one with the fewest running requests is, among those with room for it; the first named among equals. Where none
    has room, any may make some.
    """
    if len(replicas) == 1:
        return True
    able = [other for other in replicas if other.has_room_for(request)]
    return not able or min(able, key=lambda other: (other.num_running, other.replica_id)) is replica
